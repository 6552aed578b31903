"""Plan models of transformers, from the start of a process to the plan; the last line is JSON.

    python benchmarks/planning.py [--cases NAME ...]

Each case is a process of its own: it imports what it needs, traces the model without weights, and plans it. Time is CPU
time, so that other work on the machine does not matter. Of each:

seconds          CPU seconds from the start of the process to the plan; ``imports``, ``tracing`` and ``planning`` are
                 its parts.
peak_rss_bytes   of the process.
collectives      of the plan, by kind.
ring_passes      of the plan's collectives: 2 of an all-reduce, 1 of each other kind. ``megatron_ring_passes`` are those
                 of Megatron's plan: two all-reduces a layer and one for the embedding, and a gather of the logits.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parents[1] / "examples" / "configs" / "llama-3-8b" / "config.json"
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model by what differs from LLaMA-3-8B's configuration, the mesh and the machine, and the goals."""

    mesh: tuple[int, ...]
    machine: str
    goal_seconds: float
    changes: dict[str, int] = field(default_factory=dict)
    batch: int = 8
    seq: int = 512
    goal_bytes: int = 3 * GIB


LLAMA3_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
CASES: dict[str, Case] = {
    "llama3_8b_8": Case((8,), "dgx-h100", 15.0),
    "llama3_8b_8_cpu": Case((8,), "cpu", 15.0, batch=1, seq=128),
    "llama3_8b_2x4": Case((2, 4), "dgx-h100", 15.0),
    "llama3_70b_2x8": Case((2, 8), "dgx-h100-pod", 40.0, LLAMA3_70B),
}


def megatron_ring_passes(layers: int) -> int:
    """Ring passes of Megatron's plan of a decoder, with the embedding and the head split over the vocabulary."""
    return 2 * (2 * layers + 1) + 1


def measure(name: str) -> dict[str, Any]:
    """Plan one case in this process, which must have been started for it."""
    from transformers import AutoConfig, LlamaForCausalLM

    from hidet_dist.api import make_plan
    from hidet_dist.frontends.pretrained import from_transformers
    from hidet_dist.spec.collectives import COLLECTIVES

    assert LlamaForCausalLM  # imported when it is first named
    case = CASES[name]
    config = AutoConfig.from_pretrained(CONFIG, **case.changes)
    imported = time.process_time()
    graph = from_transformers(config, batch=case.batch, seq=case.seq)
    traced = time.process_time()
    unhurried = {"solver_time_limit_seconds": 600}  # of the clock, which others on the machine delay
    plan = make_plan(graph, {"mesh_shape": list(case.mesh), "machine": case.machine}, unhurried)
    planned = time.process_time()
    collectives = plan.collectives()
    return {
        "seconds": round(planned, 2),
        "imports": round(imported, 2),
        "tracing": round(traced - imported, 2),
        "planning": round(planned - traced, 2),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "predicted_seconds": plan.seconds,
        "collectives": collectives,
        "ring_passes": sum(count * COLLECTIVES[kind].ring_passes for kind, count in collectives.items()),
        "megatron_ring_passes": megatron_ring_passes(config.num_hidden_layers),
        "goal_seconds": case.goal_seconds,
        "goal_bytes": case.goal_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--one", choices=list(CASES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one)))
        return
    results: dict[str, Any] = {}
    for name in given.cases:
        command = [sys.executable, __file__, "--one", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
        own = results[name]
        print(
            f"{name}: {own['seconds']} CPU s ({own['imports']} + {own['tracing']} + {own['planning']}), "
            f"{own['peak_rss_bytes'] / GIB:.2f} GiB, {own['collectives']}",
            file=sys.stderr,
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
