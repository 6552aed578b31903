"""Programs over one storage, attention over rows, and plans of graphs with states; the last line is JSON.

    python -m benchmarks.state [--cases NAME ...]

Each case is a process of its own. Time is CPU time, so that other work on the machine does not matter.

``programs``: a decoder of 145 million parameters is built for two CPU ranks as one program, for the tokens of a prompt,
and as two, of which the other is for one more token. Of each:

folder_bytes     of all files of the artifacts.
rank_bytes       of the memory of each rank after two calls of each program, as Linux counts it: ``private`` to its
                 process, and its fraction of all (``proportional``).

``folder_ratio`` and ``rank_ratio``, the largest of all ranks and kinds, are those of two programs over one.

``attention``: the CPU's kernel of attention over rows, on one thread, of 8 tokens that decode, each of its own
sequence, with the heads of LLaMA-3-8B. Pools, and what is copied, lie in memory as ranks reserve it for states. Of
pools of each dtype, medians of measurements in turns:

milliseconds     of a call at length 2048.
read             the bytes of keys and values that it needs, per second.
copied           bytes that a copy of as many reads and writes, per second.
ratio            of both.
capacity_ratio   the time at length 256 and tables for 8192 rows a sequence, over that of tables for 512.

``llama3_8b_8`` and ``llama3_8b_2x4``: LLaMA-3-8B with 32 layers over ragged tokens, on a DGX H100. A step for prompts
and one that decodes a token of each of 16 sequences, which is called 100 times as often, are planned together. Their
pools have 16 x 8192 rows a layer. ``llama3_8b_8_symbolic`` and ``llama3_8b_2x4_symbolic`` are one graph of symbolic
dims, planned for the same two steps. Of each:

seconds          CPU seconds from the traced graphs to the plans.
tracing          CPU seconds of importing and tracing, before that.
gap              between the weighted sum of the predicted times and the search's bound.
state_specs      of the pools; both plans have the same.
gathered         the conversions of both plans that take a state, which should be none.
predicted        seconds of each program.

``decode``: a decoder of 136 million parameters over ragged tokens, on one CPU rank. A step decodes a token of each of 4
sequences of 256 tokens, with pools for 512 and for 8192 tokens of each. Tables have the pages of the tokens there are.

weights          bytes that the step reads of them.
rows             bytes of the rows of the pools that it reads and writes.
beyond           bytes that its kernels read and write besides, over both. They are counted from the operators
                 that the program launches: all of each input and output, but of a pool only the rows where an
                 operator is an update in place or attention over rows. A copy of a pool would count whole.
seconds          of the clock, of a step, by the tokens that pools have room for: the median of steps that take turns.
capacity_ratio   the larger pools' step over the smaller ones'.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hidet_dist.compile import CompiledProgram
    from hidet_dist.partitioning import Program
    from hidet_dist.spec.plan import StagePlan

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples" / "configs" / "llama-3-8b" / "config.json"
SERVE = ROOT / "tests" / "end_to_end" / "serve_family.py"
RANKS = 2
MOST_RATIO = 1.05
SEQUENCES, CONTEXT, PAGE = 16, 8192, 16
PROMPTS, PROMPT_TOKENS = 4, 2048  # of a step that is not decoding
UPDATE = "WriteRows"
DECODING, HEADS, GROUPS, SIZE, LONG = 8, 32, 8, 128, 2048  # of the case attention
ROUNDS = 51
LEAST_OF_COPY = 0.6
DECODES = 100  # steps that decode, a step with prompts


@dataclass(frozen=True)
class Case:
    """A mesh to plan LLaMA-3-8B for, whether one graph of symbolic dims stands for both programs, and the goals."""

    mesh: tuple[int, ...]
    symbolic: bool = False
    goal_seconds: float = 15.0
    goal_gap: float = 1e-2


PLANNING = {
    "llama3_8b_8": Case((8,)),
    "llama3_8b_2x4": Case((2, 4)),
    "llama3_8b_8_symbolic": Case((8,), symbolic=True),
    "llama3_8b_2x4_symbolic": Case((2, 4), symbolic=True),
}
CASES = ["programs", "decode", "attention", *PLANNING]
DECODED, LENGTH, CAPACITIES = 4, 256, (512, 8192)  # of the case decode: sequences, and tokens of each
MOST_BEYOND = 0.02
STEPS = 31


def measure_programs() -> dict[str, Any]:
    """Build one program and two, and serve both."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import hidet_dist

    class Logits(torch.nn.Module):
        """The logits of a model's last token."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits
            return logits

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8
    )
    model = LlamaForCausalLM(config).eval()
    tokens = {"prefill": 64, "decode": 1}
    example = {name: {"input_ids": torch.zeros(1, count, dtype=torch.int64)} for name, count in tokens.items()}
    graphs = {name: hidet_dist.from_torch(Logits().eval(), x) for name, x in example.items()}
    result: dict[str, Any] = {"goal_ratio": MOST_RATIO, "one": {}, "two": {}}
    with tempfile.TemporaryDirectory() as scratch:
        given = Path(scratch) / "given.npz"
        arrays: dict[str, Any] = {name: x["input_ids"].numpy() for name, x in example.items()}
        np.savez(given, **arrays)
        for name, programs in (("one", ["prefill"]), ("two", list(tokens))):
            folder, answers = Path(scratch) / name, Path(scratch) / f"{name}-answers"
            answers.mkdir()
            budget = int(0.7 * 4 * sum(x.numel() for x in model.parameters()))  # so that weights are split
            built = {program: graphs[program] for program in programs}
            hidet_dist.build_family(built, {"mesh_shape": [RANKS]}, {"mem_budget": budget}, folder)
            command = [sys.executable, "-m", "hidet_dist.launch", "-n", str(RANKS), str(SERVE)]
            subprocess.run([*command, folder, given, answers], check=True)
            used = [json.loads((answers / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
            result[name] = {
                "folder_bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
                "rank_bytes": [
                    {"private": of["Private_Clean"] + of["Private_Dirty"], "proportional": of["Pss"]} for of in used
                ],
            }
    one, two = result["one"], result["two"]
    result["folder_ratio"] = round(two["folder_bytes"] / one["folder_bytes"], 4)
    result["rank_ratio"] = round(
        max(
            after[kind] / before[kind]
            for before, after in zip(one["rank_bytes"], two["rank_bytes"], strict=True)
            for kind in before
        ),
        4,
    )
    return result


def _step_bytes(compiled: CompiledProgram, program: Program) -> dict[str, int]:
    """Count the bytes that a decode step reads and writes, operator by operator."""
    from hidet_dist.compile.states import UpdateInPlaceOp
    from hidet_dist.cost.work import local_nbytes

    sizes = program.planned_sizes()
    given = set(compiled.graph.inputs[: len(program.inputs)])
    states = set(program.state_placeholders.values())
    read: dict[str, int] = {"weights": 0, "rows": 0, "other": 0}
    seen = set()
    for node in compiled.graph.nodes:
        writes = isinstance(node, UpdateInPlaceOp)
        attends = node.name.endswith("RowAttention")
        for x in node.inputs:
            if x in states and writes:
                continue  # what it writes are the rows that it reads
            if x in states and attends:
                row = local_nbytes(x, sizes) // int(x.shape[0])
                read["rows"] += DECODED * LENGTH * row
            elif x.op is None and x not in given and x not in states:
                is_index = any(one.dtype.is_integer() for one in node.inputs if one is not x)
                nbytes = local_nbytes(node.outputs[0] if is_index else x, sizes)
                read["weights"] += 0 if x in seen else nbytes
                seen.add(x)
            else:
                read["rows" if writes and x is node.inputs[1] else "other"] += local_nbytes(x, sizes)
        if writes:
            states.add(node.outputs[0])
            read["rows"] += local_nbytes(node.inputs[1], sizes)
        else:
            read["other"] += sum(local_nbytes(y, sizes) for y in node.outputs)
    return read


def measure_decode() -> dict[str, Any]:
    """Decode with pools of two capacities, and count what a step moves."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import hidet_dist
    from hidet_dist.llm.ragged import RaggedModel, dynamic_shapes, prepare, settle
    from hidet_dist.phases.values import Traced

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8
    )
    prepare(config, max(CAPACITIES))
    module = LlamaForCausalLM(config).eval()
    settle(module)
    pages = LENGTH // PAGE
    sizes = {"tokens": DECODED, "sequences": DECODED, "pages": pages, "wanted": DECODED}
    result: dict[str, Any] = {"goal_beyond": MOST_BEYOND, "goal_ratio": MOST_RATIO}
    times: dict[int, list[float]] = {capacity: [] for capacity in CAPACITIES}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as loaded:
        served = {}
        for capacity in CAPACITIES:
            model = RaggedModel(module, DECODED * capacity, PAGE, device="meta")
            graph = hidet_dist.from_torch(model, model.inputs(), dynamic_shapes=dynamic_shapes())
            partitioned = Traced.of(graph, {"mesh_shape": [1]}, {"symbols": sizes}).prepare().plan().partition()
            folder = Path(scratch) / str(capacity)
            folder.mkdir()
            compiled = partitioned.compile(folder)
            compiled.write(folder)
            own = _step_bytes(compiled.stages[0], partitioned.programs[0])
            result |= {"weights": own["weights"], "rows": own["rows"]}
            fraction = own["other"] / (own["weights"] + own["rows"])
            result["beyond"] = max(result.get("beyond", 0.0), round(fraction, 5))
            served[capacity] = loaded.enter_context(hidet_dist.load_partition(folder))
        sequence = np.arange(DECODED, dtype=np.int64)
        for step in range(STEPS + 2):
            for capacity, partition in served.items():
                table = sequence[:, None] * (capacity // PAGE) + np.arange(pages)
                given = {
                    "tokens": sequence + 5,
                    "positions": np.full(DECODED, LENGTH - 1),
                    "slots": sequence * capacity + LENGTH - 1,
                    "sequences": sequence,
                    "lengths": np.full(DECODED, LENGTH),
                    "table": table,
                    "wanted": sequence,
                }
                begin = time.perf_counter()
                partition(**given)
                if step >= 2:  # the first ones touch memory for the first time
                    times[capacity].append(time.perf_counter() - begin)
    result["seconds"] = {str(capacity): round(statistics.median(one), 6) for capacity, one in times.items()}
    small, large = (statistics.median(times[capacity]) for capacity in CAPACITIES)
    result["capacity_ratio"] = round(large / small, 4)
    return result


def measure_attention() -> dict[str, Any]:
    """Time the kernel of attention over rows beside copies, on one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before anything starts threads
    import torch

    torch.set_num_threads(1)
    result: dict[str, Any] = {"goal_ratio": LEAST_OF_COPY, "goal_capacity_ratio": MOST_RATIO}
    for dtype in ("float32", "bfloat16", "float16"):
        call, bytes_read = _attention(dtype, LONG, LONG)
        source, target = (_ones([bytes_read // 2], torch.uint8) for _ in range(2))
        seconds, copying = _medians(call, functools.partial(target.copy_, source))
        short, long = _medians(*(_attention(dtype, LENGTH, capacity)[0] for capacity in CAPACITIES))
        result[dtype] = {
            "milliseconds": round(seconds * 1e3, 3),
            "read": bytes_read / seconds,
            "copied": bytes_read / copying,
            "ratio": round(copying / seconds, 3),
            "capacity_ratio": round(long / short, 3),
        }
    return result


def _attention(dtype: str, length: int, capacity: int) -> tuple[Callable[[], Any], int]:
    """A call of the kernel, and the bytes of rows that it needs."""
    import hidet
    import torch
    from hidet.ffi import runtime_api

    from hidet_dist.compile import compile_program
    from hidet_dist.machine import builtin
    from hidet_dist.normalize import normalize
    from hidet_dist.operators.row_attention import RowAttentionOp
    from hidet_dist.partitioning import partition_graph
    from hidet_dist.runtime.libraries import load_needed
    from hidet_dist.search import search
    from hidet_dist.spec import DeviceMesh
    from hidet_dist.spec.symbols import SymbolSize

    sizes = {"tokens": DECODING, "sequences": DECODING, "pages": capacity // PAGE}
    pool = [DECODING * capacity, GROUPS, SIZE]
    shapes: list[tuple[list[Any], str]] = [
        (["tokens", HEADS, SIZE], "float32"),
        (pool, dtype),
        (pool, dtype),
        (["sequences", "pages"], "int32"),
        *[(["tokens"], "int32")] * 3,
    ]
    symbols = [hidet.symbol(shape, of, "cpu") for shape, of in shapes]
    y = RowAttentionOp(*symbols, scale=SIZE**-0.5, page=PAGE).outputs[0]
    graph = normalize(hidet.trace_from(y, symbols))
    declared = {name: SymbolSize(size) for name, size in sizes.items()}
    plan = search(graph, builtin("cpu", DeviceMesh((1,))), symbols=declared).plan
    compiled = compile_program(partition_graph(graph, plan.stages[0]))
    load_needed(compiled.libraries, Path())
    function = ctypes.CDLL(str(compiled.kernels[0])).hidet_launch_0
    generator = torch.Generator().manual_seed(0)
    pages = torch.randperm(DECODING * capacity // PAGE, generator=generator).to(torch.int32)
    tensors = [
        torch.randn(DECODING, HEADS, SIZE, generator=generator),
        *(_ones(pool, getattr(torch, dtype)) for _ in range(2)),
        pages.reshape(DECODING, -1),
        torch.arange(DECODING, dtype=torch.int32),
        torch.zeros(DECODING, dtype=torch.int32),
        torch.full([DECODING], length, dtype=torch.int32),
        torch.empty(DECODING, HEADS, SIZE),
    ]

    def call() -> None:
        for name, size in sizes.items():
            runtime_api.set_symbol_value(name, size)
        function(*(ctypes.c_void_p(x.data_ptr()) for x in tensors))

    return call, 2 * DECODING * length * GROUPS * SIZE * tensors[1].element_size()


def _ones(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of ones in memory as ranks reserve it for states."""
    import torch

    from hidet_dist.runtime.recycling import aligned

    memory = aligned(math.prod(shape) * dtype.itemsize, zeros=True)
    return torch.from_numpy(memory).view(dtype).view(shape).fill_(1)


def _medians(*calls: Callable[[], Any]) -> list[float]:
    """Seconds of the processor of calls, in turns."""
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS + 1):  # the first one is not counted
        for own, call in zip(samples, calls, strict=True):
            begin = time.process_time()
            call()
            own.append(time.process_time() - begin)
    return [statistics.median(own[1:]) for own in samples]


def _conversions(stage: StagePlan) -> list[str]:
    """List the conversions of a plan that take a state, before or after it is updated."""
    values = {state.name for state in stage.states}
    values |= {f"t{one.index}.0" for one in stage.operators if one.operator == UPDATE}
    known = [*(made for one in stage.operators for made in one.conversions), *stage.output_conversions]
    return [f"{one.tensor}: {', '.join(one.steps)}" for one in known if one.tensor in values and one.steps]


def measure_planning(name: str) -> dict[str, Any]:
    """Plan prompts and decoding together, in this process, which must have been started for it."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    import hidet_dist
    from hidet_dist.llm.ragged import RaggedModel, dynamic_shapes, prepare, settle
    from hidet_dist.phases.family import TracedFamily

    case = PLANNING[name]
    config = AutoConfig.from_pretrained(CONFIG)
    prepare(config, CONTEXT)
    with torch.device("meta"):
        module = LlamaForCausalLM(config).eval().to(torch.bfloat16)
        settle(module)
    model = RaggedModel(module, SEQUENCES * CONTEXT, PAGE, device="meta")
    sizes = {
        name: {"tokens": tokens, "sequences": sequences, "pages": CONTEXT // PAGE, "wanted": sequences}
        for name, (tokens, sequences) in {
            "prefill": (PROMPT_TOKENS, PROMPTS),
            "decode": (SEQUENCES, SEQUENCES),
        }.items()
    }
    own: dict[str, dict[str, Any]] = {"prefill": {}, "decode": {"frequency": DECODES}}
    if case.symbolic:
        graphs = dict.fromkeys(sizes, hidet_dist.from_torch(model, model.inputs(), dynamic_shapes=dynamic_shapes()))
        own = {name: {**own[name], "symbols": of_program} for name, of_program in sizes.items()}
    else:
        graphs = {name: hidet_dist.from_torch(model, model.inputs(**one)) for name, one in sizes.items()}
    traced = time.process_time()
    family = TracedFamily.of(
        graphs,
        {"mesh_shape": list(case.mesh), "machine": "dgx-h100"},
        {"solver_time_limit_seconds": 600},  # of the clock, which others on the machine delay
        own,
    )
    planned = family.prepare().plan()
    seconds = time.process_time() - traced
    stages = {program: one.plan.stages[0] for program, one in planned.members.items()}
    return {
        "seconds": round(seconds, 2),
        "tracing": round(traced, 2),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "gap": planned.found.gap,
        "state_specs": sorted({str(state.spec) for stage in stages.values() for state in stage.states}),
        "state_bytes_per_device": max(stage.state_bytes_per_device for stage in stages.values()),
        "gathered": [text for stage in stages.values() for text in _conversions(stage)],
        "predicted": {program: stage.makespan_seconds for program, stage in stages.items()},
        "collectives": {program: one.plan.collectives() for program, one in planned.members.items()},
        "goal_seconds": case.goal_seconds,
        "goal_gap": case.goal_gap,
    }


def _summary(name: str, own: dict[str, Any]) -> str:
    if name == "programs":
        return f"{name}: two over one: ranks {own['rank_ratio']}, folder {own['folder_ratio']} (at most {MOST_RATIO})"
    if name == "decode":
        return (
            f"{name}: {own['beyond']:.2%} beyond weights and rows (at most {MOST_BEYOND:.0%}), a step with pools for "
            f"{CAPACITIES[1]} over {CAPACITIES[0]} tokens {own['capacity_ratio']} (at most {MOST_RATIO})"
        )
    if name == "attention":
        return "\n".join(
            f"{name}, {dtype}: {of['ratio']} of what a copy moves (at least {own['goal_ratio']}), "
            f"{of['capacity_ratio']} of the time for more capacity (at most {own['goal_capacity_ratio']})"
            for dtype, of in own.items()
            if isinstance(of, dict)
        )
    return (
        f"{name}: {own['seconds']} CPU s (at most {own['goal_seconds']}) after {own['tracing']}, gap {own['gap']:.1e} "
        f"(at most {own['goal_gap']:.0e}), states {', '.join(own['state_specs'])}, gathered {len(own['gathered'])}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        own = {"programs": measure_programs, "decode": measure_decode, "attention": measure_attention}
        print(json.dumps(own[given.one]() if given.one in own else measure_planning(given.one)))
        return
    results: dict[str, Any] = {}
    for name in given.cases:
        command = [sys.executable, "-m", "benchmarks.state", "--one", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
        print(_summary(name, results[name]), file=sys.stderr)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
