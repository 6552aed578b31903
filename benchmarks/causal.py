"""Which causal language models of transformers are computed right: a table, and as last line JSON.

Each type of ``AutoModelForCausalLM`` gets a tiny configuration by rules (``hidet_dist.testing.tiny_configurations``)
and random weights. Its steps:

bfloat16     the model in bfloat16 is traced and planned on two devices.
2, 3, 2x2    the model in float32 is traced, planned on the mesh with too little memory for all weights on each device,
             compiled, and computed by all ranks in the simulator. With ``--no-kernels`` nothing is compiled: the
             programs of all ranks are evaluated by the definitions of their operators, which takes a fraction of the
             time.
processes    two processes compute the plan on two devices from artifacts.
files        transformers saves the model, and loads the folder. The weights that are read from the folder's files, as
             ``from_transformers(folder, weights="files")`` reads them, are those of the loaded model, bit by bit.

Results are compared with those of transformers. A step is ``right``, ``refused`` (with the reason), ``wrong`` (other
results), a ``crash`` (an error that is no refusal, too much time or memory), or ``outside``: transformers itself cannot
make or call the tiny model. The exit status is 1 if any is wrong or crashes.

Each type has a process of its own, forked from one that has imported the libraries, with a limit of time and memory.
Outcomes are appended to a file of JSON lines, one a step, so that a run that was broken off goes on: steps that the
file has are left out, unless ``--again`` names their verdicts.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import hidet_dist
from benchmarks.models import PRELOADED, Model, planned, served
from hidet_dist.compile.build import optimize_program
from hidet_dist.cost.work import local_nbytes
from hidet_dist.errors import ConfigError, TraceError, WeightsError
from hidet_dist.frontends.checkpoint import stored_weights
from hidet_dist.frontends.pretrained import made_module
from hidet_dist.partitioning.program import Program, communication_operators
from hidet_dist.simulate import assemble, simulate
from hidet_dist.soundness.plans import evaluate_program
from hidet_dist.spec.collectives import COLLECTIVES
from hidet_dist.spec.interface import interface_of
from hidet_dist.testing.tiny_configurations import causal_types, tiny_causal_model
from hidet_dist.weights.named import weights_from_safetensors
from hidet_dist.weights.sources import source_of

# What most types need, imported once.
SHARED = [
    "networkx",
    "hidet_dist.soundness.plans",
    "hidet_dist.frontends.pytorch.module",
    "hidet_dist.phases",
    "hidet_dist.search.one_graph",
    "hidet_dist.testing.tiny_configurations",
    "torch._export",
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
]
MESHES = {"2": (2,), "3": (3,), "2x2": (2, 2)}
STEPS = ("2", "bfloat16", "3", "2x2", "files", "processes")
VERDICTS = ("right", "refused", "wrong", "crash", "outside")
TOLERANCE = 1e-4  # of the largest value of an output, or of 1
SECONDS = 900  # of a type, CPU time and the compilers' not counted
BYTES = 12 * 2**30  # of a process's addresses
# The collective of a forward pass that each style of transformers' tensor-parallel plans runs on a module's output
# (transformers/distributed/tensor_parallel.py). Other styles shard parameters alone.
COLLECTIVES_BY_HAND = {
    "rowwise": "all_reduce",
    "rowwise_rep": "all_reduce",
    "rowwise_split_input": "all_reduce",
    "embedding_rowwise": "all_reduce",
    "moe_tp_experts": "all_reduce",
    "all_reduce": "all_reduce",
    "colwise_rep": "all_gather",
    "colwise_gather_output": "all_gather",
    "embedding_colwise": "all_gather",
}
COMPARED = "3"  # the mesh on which collectives and bytes are compared with those of plans by hand


@dataclass
class Outcome:
    """What became of a step of a type.

    Attributes
    ----------
    name: the type.
    step: one of ``STEPS``.
    verdict: one of ``VERDICTS``.
    reason: why it is not right, or nothing.
    difference: the largest one from transformers, relative to the largest value of the output, or to 1.
    operators: of the graph as it is planned.
    collectives: of the program.
    sent_bytes: that a rank sends in a call, by ring algorithms.
    kernels: whether compiled kernels computed it.
    by_hand: the collectives of transformers' tensor-parallel plan; None where it has none.
    by_hand_bytes: that a rank sends in a call by that plan on ``COMPARED``.
    cpu_seconds: of all processes, compilers included.
    """

    name: str
    step: str
    verdict: str
    reason: str = ""
    difference: float | None = None
    operators: int = 0
    collectives: int | None = None
    sent_bytes: int | None = None
    kernels: bool = False
    by_hand: int | None = None
    by_hand_bytes: int | None = None
    cpu_seconds: float = 0.0


class _Outside(Exception):
    """Transformers cannot make or call the model."""


def styles_by_hand(module: Any) -> list[tuple[Any, str]] | None:
    """List the parts of a model on whose outputs transformers' tensor-parallel plan runs collectives, and their styles.

    Returns None where the model has no plan, or one for the head at most.
    """
    plan: Mapping[str, str] = getattr(module, "tp_plan", None) or {}
    if not any(name.startswith(("model.", "transformer.", "layers.")) or "layers" in name for name in plan):
        return None
    patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in plan.items()}
    return [
        (part, style)
        for name, part in module.named_modules()
        for pattern, style in patterns.items()
        if style in COLLECTIVES_BY_HAND and pattern.fullmatch(name)
    ]


def ring_bytes(kind: str, whole: int, ranks: int) -> int:
    """The bytes that a rank sends in a ring collective on a tensor of ``whole`` bytes within a group of ``ranks``."""
    collective = COLLECTIVES[kind]
    return round(collective.ring_passes * (ranks - 1) / ranks * collective.ring_nbytes(whole, ranks))


def sent_bytes(program: Program) -> int:
    """The bytes that a rank sends in a call of a program; where parts differ, as if all were the largest."""
    sizes = program.planned_sizes()
    return sum(
        ring_bytes(op.kind, op.collective.whole(local_nbytes(op.inputs[0], sizes), op.group_size), op.group_size)
        for op in communication_operators(program.graph)
    )


def called(module: Any, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, int | None, int | None]:
    """Call a model: its results, and the collectives of transformers' plan with the bytes that a rank sends by it."""
    styles = styles_by_hand(module)
    sizes: list[int] = []
    ranks = math.prod(MESHES[COMPARED])

    def note(kind: str, y: Any) -> None:
        y = y[0] if isinstance(y, tuple) else y
        sizes.append(ring_bytes(kind, y.numel() * y.element_size(), ranks))

    hooks = [
        part.register_forward_hook(lambda _, __, y, kind=COLLECTIVES_BY_HAND[style]: note(kind, y))
        for part, style in styles or ()
    ]
    with torch.no_grad():
        results = module(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    return (results, None, None) if styles is None else (results, len(sizes), sum(sizes))


@dataclass
class _Known:
    """A tiny model as a graph, and the collectives and bytes of transformers' plan for it."""

    model: Model
    by_hand: int | None
    by_hand_bytes: int | None


def known(name: str, dtype: torch.dtype) -> _Known:
    """Make a tiny model, call it, and trace it. Raises _Outside, and what tracing raises."""
    try:
        module, inputs = tiny_causal_model(name, dtype)
        want, by_hand, by_hand_bytes = called(module, inputs) if dtype is torch.float32 else (None, None, None)
    except Exception as error:
        raise _Outside(f"{type(error).__name__}: {_line(error)}") from error
    graph = hidet_dist.from_torch(module, inputs)
    interface = interface_of(graph)
    assert interface is not None
    arrays = [x.numpy() for x in interface.flatten(**inputs)]
    return _Known(Model(graph, interface, arrays, want), by_hand, by_hand_bytes)


def computed(model: Model, plan: hidet_dist.Plan, kernels: bool) -> tuple[float, Program]:
    """How far all ranks' programs are off, by compiled kernels or the definitions of operators; and the program."""
    program = hidet_dist.partition(model.graph, plan)
    if kernels:
        return model.compare(simulate(program, model.inputs, optimize_program(program))), program
    shards = zip(*evaluate_program(program, model.inputs), strict=True)
    outputs = [assemble(y, program.mesh, parts) for y, parts in zip(program.outputs, shards, strict=True)]
    return model.compare(outputs), program


def stored_otherwise(name: str) -> list[str]:
    """Name the weights that are read otherwise from saved files than transformers loads them. Raises _Outside."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            module, _ = tiny_causal_model(name)
            module.save_pretrained(folder)
            want = type(module).from_pretrained(folder, dtype=torch.float32).state_dict()
        except Exception as error:
            raise _Outside(f"{type(error).__name__}: {_line(error)}") from error
        empty = made_module(type(module), module.config, torch.float32, has_data=False, seed=0)
        weights = stored_weights(empty, weights_from_safetensors(folder))
        got = {key: source_of(x).read([slice(0, int(size)) for size in x.shape]) for key, x in weights.items()}
        return sorted(key for key, x in want.items() if key not in got or not torch.equal(got[key], x))


@dataclass
class _Type:
    """One type, with what its steps share: the traced models by dtype, and the plans of the one in float32 by mesh."""

    name: str
    kernels: bool
    models: dict[torch.dtype, _Known] = field(default_factory=dict)
    plans: dict[str, hidet_dist.Plan] = field(default_factory=dict)

    def take(self, step: str, outcome: Outcome) -> None:
        """Take a step, and note what became of it. Raises _Outside, and what tracing, planning and running raise."""
        if step == "files":
            if others := stored_otherwise(self.name):
                outcome.verdict, outcome.reason = "wrong", f"other elements in {', '.join(others[:5])}"
            return
        dtype = torch.bfloat16 if step == "bfloat16" else torch.float32
        if dtype not in self.models:
            self.models[dtype] = known(self.name, dtype)
        own = self.models[dtype]
        model, outcome.by_hand, outcome.by_hand_bytes = own.model, own.by_hand, own.by_hand_bytes
        mesh = "2" if step in ("bfloat16", "processes") else step
        plan = self.plans.get(mesh) if dtype is torch.float32 else None
        if plan is None:
            plan = planned(model.graph, MESHES[mesh])
        if dtype is torch.float32:
            self.plans[mesh] = plan
        outcome.operators = len(plan.stages[0].operators)
        if step in MESHES:
            outcome.difference, program = computed(model, plan, self.kernels)
            outcome.collectives, outcome.sent_bytes = len(program.communications()), sent_bytes(program)
            outcome.kernels = self.kernels
        elif step == "processes":
            outcome.difference, outcome.kernels = served(model, plan), True
        if outcome.difference is not None and not outcome.difference <= TOLERANCE:
            outcome.verdict, outcome.reason = "wrong", f"off by {outcome.difference:.1e}"


def check(name: str, steps: Iterable[str], kernels: bool = True) -> Iterable[Outcome]:
    """Take steps of a type; yields the outcome of each."""
    own = _Type(name, kernels)
    for step in steps:
        before = _cpu_seconds()
        outcome = Outcome(name, step, "right")
        try:
            own.take(step, outcome)
        except _Outside as error:
            outcome.verdict, outcome.reason = "outside", str(error)
        except (TraceError, ConfigError, WeightsError) as error:
            outcome.verdict, outcome.reason = "refused", _line(error)
        except Exception as error:  # each is a defect
            traceback.print_exc()
            outcome.verdict, outcome.reason = "crash", f"{type(error).__name__}: {_line(error)}"
        outcome.cpu_seconds = round(_cpu_seconds() - before, 1)
        yield outcome


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(own.ru_utime + own.ru_stime for own in used)


def child(name: str, steps: list[str], kernels: bool, results: Path, log: Path) -> None:
    """Take steps of a type in this process, and append their outcomes to a file."""
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    # As in any program: hidet's compilers must know what is in force.
    multiprocessing.set_start_method("fork", force=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes that it started end too
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for outcome in check(name, steps, kernels):
        append(outcome, results)


def in_process(name: str, steps: list[str], kernels: bool, results: Path, logs: Path | None) -> None:
    """Take steps of a type in a process of its own. Where it ends early, its first step that is missing crashed."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        log = (logs or Path(folder)) / f"{name}.log"
        process = context.Process(target=child, args=(name, steps, kernels, results, log))
        process.start()
        process.join(SECONDS)
        reason = f"it took more than {SECONDS} s"
        if process.is_alive():
            process.terminate()
            process.join()
        else:
            printed = log.read_text(errors="replace") if log.exists() else ""
            reason = f"it ended with status {process.exitcode}: {' '.join(printed.split())[-300:]}"
        have = read(results).get(name, {})
        if missing := [step for step in steps if step not in have]:
            append(Outcome(name, missing[0], "crash", reason), results)


def append(outcome: Outcome, path: Path) -> None:
    """Append an outcome to a file of JSON lines."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def read(path: Path) -> dict[str, dict[str, Outcome]]:
    """Read the last outcome of each step of each type."""
    found: dict[str, dict[str, Outcome]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        outcome = Outcome(**json.loads(line))
        found.setdefault(outcome.name, {})[outcome.step] = outcome
    return found


def is_due(outcome: Outcome | None, arguments: argparse.Namespace) -> bool:
    """Whether a step is to be taken: again where it was taken without kernels, or has a verdict that is named."""
    if outcome is None or outcome.verdict in arguments.again:
        return True
    return outcome.step in MESHES and outcome.verdict == "right" and not outcome.kernels and not arguments.no_kernels


def verdict_of(outcomes: Mapping[str, Outcome]) -> Outcome:
    """The worst outcome of a type's steps."""
    order = ("wrong", "crash", "refused", "outside", "right")
    return min(outcomes.values(), key=lambda own: order.index(own.verdict))


def table_of(found: Mapping[str, Mapping[str, Outcome]], types: Mapping[str, str]) -> dict[str, Any]:
    """What is published of each type, in their order."""
    published = {}
    for name, kind in types.items():
        steps = found.get(name, {})
        if not steps:
            continue
        worst = verdict_of(steps)
        differences = [own.difference for own in steps.values() if own.difference is not None]
        published[name] = {
            "class": kind,
            "verdict": worst.verdict,
            "reason": worst.reason and f"{worst.step}: {worst.reason}",
            "steps": [step for step in STEPS if step in steps],
            "kernels": any(own.kernels for own in steps.values()),
            "difference": max(differences, default=None),
            "collectives": {step: own.collectives for step in MESHES if (own := steps.get(step)) is not None},
            "sent_bytes": {step: own.sent_bytes for step in MESHES if (own := steps.get(step)) is not None},
            "by_hand": next((own.by_hand for own in steps.values() if own.by_hand is not None), None),
            "by_hand_bytes": next((own.by_hand_bytes for own in steps.values() if own.by_hand is not None), None),
            "cpu_seconds": round(sum(own.cpu_seconds for own in steps.values()), 1),
        }
    return published


def main() -> int:
    """Read the arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="types; all by default")
    parser.add_argument(
        "--steps", nargs="*", choices=STEPS, default=STEPS, help="steps; all by default, and none to write --out"
    )
    parser.add_argument("--no-kernels", action="store_true", help="evaluate programs, and compile nothing")
    parser.add_argument("--jobs", type=int, default=1, help="types at a time")
    parser.add_argument("--lines", type=Path, default=Path("build/causal.jsonl"), help="the file of outcomes")
    parser.add_argument("--again", nargs="+", choices=VERDICTS, default=(), help="repeat steps with these verdicts")
    parser.add_argument("--logs", type=Path, help="a folder for what each process prints")
    parser.add_argument("--out", type=Path, help="a file for the table that is published, as JSON")
    arguments = parser.parse_args()
    types = causal_types()
    if unknown := sorted(set(arguments.only or ()) - set(types)):
        parser.error(f"there is no type {unknown[0]!r}; there are {', '.join(types)}")
    chosen = {name: types[name] for name in arguments.only or types}
    arguments.lines.parent.mkdir(parents=True, exist_ok=True)
    if arguments.logs is not None:
        arguments.logs.mkdir(parents=True, exist_ok=True)
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, *SHARED])
    console = Console(stderr=True, width=200)
    found = read(arguments.lines)

    def one(name: str) -> None:
        due = [step for step in arguments.steps if is_due(found.get(name, {}).get(step), arguments)]
        if due:
            in_process(name, due, not arguments.no_kernels, arguments.lines, arguments.logs)
            own = read(arguments.lines)[name]
            for step in due:
                if step in own:
                    console.print(*_row(own[step]), markup=False, highlight=False)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(one, chosen))
    found = {name: steps for name, steps in read(arguments.lines).items() if name in chosen}
    published = table_of(found, chosen)
    table = Table("type", "verdict", "difference", "collectives", "by hand", "CPU s", "why")
    for name, own in published.items():
        off = "" if own["difference"] is None else f"{own['difference']:.1e}"
        counts = ", ".join(f"{count} on {mesh}" for mesh, count in own["collectives"].items())
        by_hand = "" if own["by_hand"] is None else str(own["by_hand"])
        table.add_row(name, own["verdict"], off, counts, by_hand, f"{own['cpu_seconds']:.0f}", own["reason"])
    console.print(table)
    if arguments.out is not None:
        report = {
            "benchmark": "benchmarks/causal.py",
            "transformers": _version(),
            "types": len(types),
            "results": published,
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    by_name: dict[str, list[str]] = {verdict: [] for verdict in VERDICTS}
    for name, own in published.items():
        by_name[own["verdict"]].append(name)
    summary: dict[str, Any] = {verdict: len(names) for verdict, names in by_name.items()}
    print(json.dumps({"types": len(published), **summary, "by_name": by_name}), flush=True)
    return 1 if by_name["wrong"] or by_name["crash"] else 0


def _row(own: Outcome) -> list[str]:
    off = "" if own.difference is None else f"{own.difference:.1e}"
    return [own.name, own.step, own.verdict, off, f"{own.cpu_seconds:.0f} s", own.reason[:200]]


def _version() -> str:
    import transformers

    return str(transformers.__version__)


if __name__ == "__main__":
    sys.exit(main())
