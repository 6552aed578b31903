"""Plan models of transformers, from the start of a process to the plan; the last line is JSON.

    python -m benchmarks.planning [--cases NAME ...] [--least-memory] [--without STEP ...]

Each case is a process of its own: it imports what it needs, traces the model without weights, and plans it. Time is CPU
time, so that other work on the machine does not matter. ``--without`` leaves out steps of the search, which are listed
in hidet_dist/search/steps.py. Of each:

seconds          CPU seconds from the start of the process to the plan; ``imports``, ``tracing`` and ``planning`` are
                 its parts.
peak_rss_bytes   of the process.
predicted_seconds, roofline_seconds
                 Of the plan, and of its products and weights alone: the operations of products over the peak of all
                 devices, or the bytes of weights that are read over all bandwidths, whichever is longer. Of experts,
                 those count that are chosen.
collectives      of the plan, by kind; ``exchanges_a_layer``: their number over that of the layers.
ring_passes      of the plan's collectives: 2 of an all-reduce, 1 of each other kind. ``megatron_ring_passes``, for
                 models without experts, are those of Megatron's plan: two all-reduces a layer and one for the
                 embedding, and a gather of the logits.
least_over_even  with ``--least-memory``: the least budget for which there is a plan, over an even share of the weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from benchmarks.without import add_without, passed_on
from hidet_dist.frugal import collect_rarely

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model by its configuration, and what differs from it, the mesh and the machine, and the goals."""

    config: str
    mesh: tuple[int, ...]
    machine: str
    goal_seconds: float
    changes: dict[str, int] = field(default_factory=dict)
    batch: int = 8
    seq: int = 512
    logits: str = "last"
    experts: str = "apart"
    goal_bytes: int = 2 * GIB


LLAMA3_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
CASES: dict[str, Case] = {
    "llama3_8b_8": Case("llama-3-8b", (8,), "dgx-h100", 8.0, logits="all"),
    "llama3_8b_8_cpu": Case("llama-3-8b", (8,), "cpu", 8.0, batch=1, seq=128, logits="all"),
    "llama3_8b_2x4": Case("llama-3-8b", (2, 4), "dgx-h100", 10.0, logits="all"),
    "llama3_70b_2x8": Case("llama-3-8b", (2, 8), "dgx-h100-pod", 20.0, LLAMA3_70B, logits="all"),
    "llama31_405b_2x8": Case("llama-3.1-405b", (2, 8), "dgx-h100-pod", 25.0, batch=16, seq=2048),
    "llama31_405b_4x8": Case("llama-3.1-405b", (4, 8), "dgx-h100-pod", 30.0, batch=16, seq=2048),
    "llama31_405b_16x8": Case("llama-3.1-405b", (16, 8), "dgx-h100-pod", 40.0, batch=16, seq=2048),
    "mixtral_8": Case("mixtral-8x7b", (8,), "dgx-h100", 20.0, batch=16, seq=1024),
    "mixtral_8_joined": Case("mixtral-8x7b", (8,), "dgx-h100", 50.0, batch=16, seq=1024, experts="joined"),
    "qwen3_30b_8": Case("qwen3-30b-a3b", (8,), "dgx-h100", 20.0, seq=1024),
    "qwen3_235b_2x8": Case("qwen3-235b-a22b", (2, 8), "dgx-h100-pod", 30.0, batch=16, seq=1024),
    "qwen3_235b_4x8": Case("qwen3-235b-a22b", (4, 8), "dgx-h100-pod", 30.0, batch=32),
    "deepseek_v3_2x8": Case("deepseek-v3", (2, 8), "hgx-h200-pod", 40.0, batch=16, seq=1024),
    "llama4_maverick_2x8": Case("llama-4-maverick", (2, 8), "hgx-h200-pod", 40.0, batch=16, seq=1024),
    "gpt_oss_120b_2x8": Case("gpt-oss-120b", (2, 8), "dgx-h100-pod", 30.0, batch=16, seq=1024),
    "gpt_oss_120b_2x8_joined": Case("gpt-oss-120b", (2, 8), "dgx-h100-pod", 30.0, batch=16, seq=1024, experts="joined"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--least-memory", action="store_true", help="search for the least budget of each, too")
    add_without(parser)
    parser.add_argument("--one", choices=list(CASES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        collect_rarely()  # as the commands of hidet-dist do, before they import anything
        from benchmarks.planning_case import measure

        print(json.dumps(measure(CASES[given.one], given.least_memory, given.without)))
        return
    results: dict[str, Any] = {}
    for name in given.cases:
        command = [sys.executable, "-m", "benchmarks.planning", "--one", name, *["--least-memory"] * given.least_memory]
        command += passed_on(given.without)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
        own = results[name]
        print(
            f"{name}: {own['seconds']} CPU s ({own['imports']} + {own['tracing']} + {own['planning']}), "
            f"{own['peak_rss_bytes'] / GIB:.2f} GiB, {own['predicted_seconds'] * 1e3:.1f} ms (roofline "
            f"{own['roofline_seconds'] * 1e3:.1f}), {own['collectives']}",
            file=sys.stderr,
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
