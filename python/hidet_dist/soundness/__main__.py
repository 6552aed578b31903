"""``python -m hidet_dist.soundness``: the harness at full size; the last line of its output is JSON."""

from __future__ import annotations

import argparse
import json
import os
from functools import partial

from hidet_dist.soundness.catalog import replicate_only
from hidet_dist.soundness.graphs import MODELS, PATTERNS
from hidet_dist.soundness.instances import MAKERS
from hidet_dist.soundness.states import STATEFUL
from hidet_dist.soundness.work import (
    FAMILY_MESHES,
    STATE_MESHES,
    check_class,
    check_cuts,
    check_families,
    check_graph,
    check_states,
)
from hidet_dist.soundness.workers import Unit, results


def main(arguments: list[str] | None = None) -> int:
    """Run the harness; the exit status is 1 when a choice or a plan is wrong."""
    parser = argparse.ArgumentParser(prog="python -m hidet_dist.soundness", description=__doc__)
    parser.add_argument("--instances", type=int, default=10, help="random instances of each operator class")
    parser.add_argument("--plans", type=int, default=200, help="random plans of each model, over all meshes")
    parser.add_argument("--cuts", type=int, default=200, help="random cuts of each model into stages")
    parser.add_argument(
        "--served", type=int, default=len(STATE_MESHES), help="plans of each graph with states that real ranks serve"
    )
    parser.add_argument("--seed", type=int, default=0, help="the seed of all random instances")
    parser.add_argument("--only", default="", help="only operator classes and graphs with this in their name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that share the work")
    options = parser.parse_args(arguments)
    # The models take longest, so they come first. Patterns are smaller and need fewer plans.
    work: list[Unit] = [
        (check_graph, name, options.plans if name in MODELS else max(options.plans // 4, 1))
        for name in (*MODELS, *PATTERNS)
        if options.only in name
    ]
    plans = partial(check_states, served=options.served)
    pairs = partial(check_families, served=min(options.served, len(FAMILY_MESHES)))
    for check in (plans, pairs):
        work += [(check, name, max(options.plans // 4, 1)) for name in STATEFUL if options.only in name]
    work += [(check_cuts, name, options.cuts) for name in MODELS if options.only in name and options.cuts]
    work += [(check_class, n, options.instances) for n, cls in enumerate(MAKERS) if options.only in cls.__name__]
    counted = ("operators", "replicate_only", "instances", "choices", "plans", "families", "cuts", "failures")
    counts = dict.fromkeys(counted, 0)
    counts["replicate_only"] = len(replicate_only())
    for result in results(work, options.seed, options.jobs):
        for failure in result.failures:
            print(f"FAILURE {failure}")
        print(result.line, flush=True)
        for key, count in result.counts.items():
            counts[key] += count
        counts["failures"] += len(result.failures)
    if counts["failures"]:
        print(f"--seed {options.seed} repeats the random instances of this run.")
    print(json.dumps(counts))
    return 1 if counts["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
