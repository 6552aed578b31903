"""Which test cases of the ONNX project ``from_onnx`` reads right: a table, and as last line JSON.

The package ``onnx`` has test cases for backends: a model, inputs and outputs. Each is read, planned on two devices by
the search and by random choices of every operator, partitioned, and computed for both ranks in the simulator. A case is
``right``, ``refused`` (with the reason), or ``wrong``: other values, shapes or dtypes, or an error that is not a
refusal. The exit status is 1 if any is wrong. By default the simulator evaluates the definitions of the local
operators in double precision, and compiles and runs their kernels only where that differs; with ``--kernels`` it does
so for all cases, which takes hours. Each case has a process of its own, forked from this one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
from onnx.backend.test.case.node import collect_testcases
from onnx.backend.test.loader import load_model_tests

import hidet_dist
from hidet_dist.errors import TraceError, UnsupportedModelError
from hidet_dist.frontends.onnx.model import NEWEST_OPSET, OLDEST_OPSET
from hidet_dist.normalize import NormalGraph, normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.rules.rule import RuleTable
from hidet_dist.simulate import assemble, simulate
from hidet_dist.soundness.oracle import numpy_dtype
from hidet_dist.soundness.plans import evaluate_graph, evaluate_program, random_stage
from hidet_dist.spec import DeviceMesh, StagePlan
from hidet_dist.view import GraphView

MESH = DeviceMesh((2,))
RANDOM_PLANS = 2
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}  # of what is computed in double precision; 1e-3 for other dtypes
KINDS = ("simple", "pytorch-converted", "pytorch-operator")  # models that the package has as files
SECONDS = 300.0  # of a case; only what hangs takes as long
MOST_MEMORY = 2**34
VERDICTS = ("right", "refused", "wrong")


@dataclass(frozen=True)
class Case:
    """A test case: what it tests, a model, and lists of inputs and outputs."""

    name: str
    subject: str
    model: onnx.ModelProto
    inputs: Sequence[Any]
    outputs: Sequence[Any]


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    subject: str
    verdict: str
    reason: str = ""


@cache
def cases() -> dict[str, Case]:
    """All cases by name: those of operators, then models that the package has as files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is tested overflows
        found = of_operators(collect_testcases(None))
    for kind in KINDS:
        for case in load_model_tests(kind=kind):
            assert case.model_dir is not None  # these are files
            folder = Path(case.model_dir)
            model = onnx.load(folder / "model.onnx")
            values = [
                [
                    _value(folder / "test_data_set_0" / f"{side}_{number}.pb", own)
                    for number, own in enumerate(described)
                ]
                for side, described in (("input", _inputs(model)), ("output", model.graph.output))
            ]
            found[case.name] = Case(case.name, f"models of the kind {kind}", model, *values)
    return found


def of_operators(collected: Sequence[Any]) -> dict[str, Case]:
    """Cases of operators, as the package collects them, by name."""
    found = {own.name: Case(own.name, "", own.model, *own.data_sets[0]) for own in collected}
    for name, case in found.items():
        # The expansion of a function is a case of the operator that is expanded.
        whole = found.get(re.sub(r"_expanded.*", "", name), case)
        subject = whole.model.graph.node[0].op_type if len(whole.model.graph.node) == 1 else "several operators"
        domain = whole.model.graph.node[0].domain
        found[name] = replace(case, subject=f"{domain}.{subject}" if domain else subject)
    return found


def _inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The inputs that a caller gives."""
    known = {own.name for own in model.graph.initializer}
    return [own for own in model.graph.input if own.name not in known]


def _value(path: Path, described: onnx.ValueInfoProto) -> Any:
    """A value of a test, which lies in a file: a tensor's proto, or None for any other kind."""
    if not described.type.HasField("tensor_type"):
        return None
    return onnx.TensorProto.FromString(path.read_bytes())


def _array(value: Any) -> np.ndarray | None:
    """An array of a value of a test; None if the value is no tensor."""
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.ndarray | np.generic | int | float | bool) else None


def prepared(case: Case, known: bool) -> tuple[onnx.ModelProto, list[np.ndarray]]:
    """The model of a case, in the nearest opset that is read, and its inputs.

    With ``known``, inputs of at most one dim, but the first, become initializers: what must be known while a model is
    read, such as the sizes of Reshape, is given by callers in the cases.
    """
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for entry in model.opset_import:
        if entry.domain == "":
            target = min(entry.version, NEWEST_OPSET)
            if all(onnx.defs.has(node.op_type, max_inclusive_version=target) for node in model.graph.node):
                entry.version = target
            if entry.version < OLDEST_OPSET:
                model = _converted(model)
    described = _inputs(model)
    given = {}
    for own, value in zip(described, case.inputs, strict=False):
        array = _array(value)
        given[own.name] = np.zeros(1) if array is None else array
    if known:
        chosen = [own.name for own in described[1:] if given[own.name].ndim <= 1]
        model.graph.initializer.extend(onnx.numpy_helper.from_array(given.pop(name), name) for name in chosen)
        kept = [own for own in model.graph.input if own.name not in chosen]
        del model.graph.input[:]
        model.graph.input.extend(kept)
    return model, list(given.values())


def _converted(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in the oldest opset that is read, or itself if there is no conversion."""
    try:
        return onnx.version_converter.convert_version(model, OLDEST_OPSET)
    except RuntimeError:
        return model


def check(case: Case, kernels: bool = False) -> Outcome:
    """Read the model of a case, plan it, and compute it for all ranks."""
    reason = ""
    for known in (False, True):
        model, inputs = prepared(case, known)
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.onnx"
                path.write_bytes(model.SerializeToString())
                outputs = [_array(value) for value in case.outputs]
                differences = list(_differences(path, inputs, outputs, kernels))
                if differences and not kernels:
                    # In double precision a number may be rounded to another integer than in that of the dtype.
                    differences = list(_differences(path, inputs, outputs, True))
        except TraceError as error:
            reason = reason or _reason(error)
            if "must be known while it is traced" in str(error):
                continue
            return Outcome(case.subject, "refused", reason)
        except Exception as error:  # whatever it is, it is the outcome
            return Outcome(case.subject, "wrong", f"{type(error).__name__}: {_line(error)}")
        return Outcome(case.subject, "wrong" if differences else "right", " ".join(differences))
    return Outcome(case.subject, "refused", reason)


def _differences(
    path: Path, inputs: Sequence[np.ndarray], wanted: Sequence[np.ndarray | None], kernels: bool
) -> Iterator[str]:
    """Describe what differs from the outputs of a case, by plan."""
    graph = hidet_dist.from_onnx(path)
    dtypes = [y.dtype.name for y in graph.outputs]
    exact = [np.asarray(x).astype(numpy_dtype(own.dtype)) for x, own in zip(inputs, graph.inputs, strict=True)]
    if not kernels:
        yield from _compared("the graph", evaluate_graph(graph, exact), wanted, dtypes)
    normal = normalize(graph)
    view, rng, table = GraphView(normal), np.random.default_rng(0), RuleTable(MESH)
    plans = {f"the random plan {number}": random_stage(view, MESH, table, rng) for number in range(RANDOM_PLANS)}
    plans["the plan"] = hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {}).stages[0]
    for what, stage in plans.items():
        yield from _compared(what, _simulated(normal, stage, exact, inputs if kernels else None), wanted, dtypes)


def _simulated(
    graph: NormalGraph, stage: StagePlan, exact: Sequence[np.ndarray], inputs: Sequence[np.ndarray] | None
) -> list[np.ndarray]:
    """Compute a plan for all ranks: by the definitions of its operators, or by their kernels if there are inputs."""
    program = partition_graph(graph, stage)
    if inputs is not None:
        return simulate(program, inputs)
    shards = zip(*evaluate_program(program, exact), strict=True)
    return [assemble(plan, MESH, parts) for plan, parts in zip(stage.outputs, shards, strict=True)]


def _compared(
    what: str, outputs: Sequence[np.ndarray], wanted: Sequence[np.ndarray | None], dtypes: Sequence[str]
) -> Iterator[str]:
    for number, (own, want, dtype) in enumerate(zip(outputs, wanted, dtypes, strict=True)):
        if want is None or own.shape != want.shape or dtype != want.dtype.name:
            expected = "no tensor" if want is None else f"{want.dtype}{list(want.shape)}"
            yield f"Output {number} of {what} is {dtype}{list(own.shape)}, not {expected}."
            continue
        tolerance = TOLERANCE.get(dtype, 1e-3)
        wide = want.astype(numpy_dtype_of(want))
        if not np.allclose(own, wide, rtol=tolerance, atol=tolerance / 100, equal_nan=True):
            yield f"Output {number} of {what} differs."


def numpy_dtype_of(x: np.ndarray) -> np.dtype[Any]:
    """The dtype in which an array is compared: double precision for floating point."""
    return x.dtype if x.dtype.kind in "biuc" else np.dtype(np.float64)


def _reason(error: TraceError) -> str:
    """Why a model is refused: of operators that are not supported their names and the reasons."""
    if isinstance(error, UnsupportedModelError):
        return "; ".join(dict.fromkeys(f"{call.operator}: {call.reason}" for call in error.missing))
    return _line(error)


def _line(error: Exception) -> str:
    return " ".join(re.sub(r"/\S*/model\.onnx", "The model", str(error)).split())[:300]


def in_processes(chosen: Sequence[Case], kernels: bool, jobs: int) -> Iterator[tuple[str, Outcome]]:
    """Check cases in processes of their own, ``jobs`` at a time; yield the name and the outcome of each.

    One thread forks them all: another thread may hold a lock while a process is forked, which then waits for ever.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(chosen))
    running: dict[int, tuple[ForkProcess, Case, Path, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                case = waiting.pop()
                result = Path(folder) / f"{case.name}.json"
                process = context.Process(target=child, args=(case.name, kernels, result))
                process.start()
                running[process.sentinel] = process, case, result, time.monotonic() + SECONDS
            first = min(end for *_, end in running.values())
            connection.wait(list(running), max(0.0, first - time.monotonic()))
            for sentinel, (process, case, result, end) in list(running.items()):
                if process.is_alive() and time.monotonic() < end:
                    continue
                del running[sentinel]
                yield case.name, _outcome(process, case.subject, result)


def _outcome(process: ForkProcess, subject: str, result: Path) -> Outcome:
    """Return the outcome of a process that has ended, or whose time is up."""
    if process.is_alive():
        process.kill()
        process.join()
        return Outcome(subject, "wrong", f"it took more than {SECONDS:g} s")
    process.join()
    if not result.exists():
        return Outcome(subject, "wrong", f"it ended with status {process.exitcode}")
    return Outcome(**json.loads(result.read_text()))


def child(name: str, kernels: bool, result: Path) -> None:
    """Check a case in this process, and write the outcome to a file."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    warnings.simplefilter("ignore")
    result.write_text(json.dumps(asdict(check(cases()[name], kernels))))


def by_subject(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, Any]]:
    """Count the verdicts of each subject, and the reasons of those that are not right."""
    rows: dict[str, dict[str, Any]] = {}
    for own in outcomes.values():
        row = rows.setdefault(own.subject, {**dict.fromkeys(VERDICTS, 0), "why": {}})
        row[own.verdict] += 1
        if own.verdict != "right":
            row["why"][own.reason] = row["why"].get(own.reason, 0) + 1
    return rows


def write(outcomes: Mapping[str, Outcome], path: Path) -> None:
    """Write the counts of subjects all cases of which were checked to a file, in which those of others stay."""
    rows = json.loads(path.read_text())["results"] if path.exists() else {}
    left = {case.subject for name, case in cases().items() if name not in outcomes}
    rows |= {subject: row for subject, row in by_subject(outcomes).items() if subject not in left}
    rows = dict(sorted(rows.items(), key=lambda row: (row[0].startswith("models"), row[0])))
    path.write_text(json.dumps({"benchmark": "benchmarks/onnx_cases.py", "results": rows}, indent=1) + "\n")


def main() -> int:
    """Read the arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", help="names of cases and of operators; all cases by default")
    parser.add_argument("--kernels", action="store_true", help="compile and run the kernels of the local operators")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--out", type=Path, help="a file for the outcomes of all operators, as JSON")
    arguments = parser.parse_args()
    chosen = [
        case
        for case in cases().values()
        if not arguments.patterns or any(pattern in (case.name, case.subject) for pattern in arguments.patterns)
    ]
    check(cases()["test_relu"])  # which imports what the processes of the cases need
    outcomes: dict[str, Outcome] = {}
    for name, own in in_processes(chosen, arguments.kernels, arguments.jobs):
        outcomes[name] = own
        if own.verdict != "right":
            print(f"{name}: {own.verdict}: {own.reason}", file=sys.stderr, flush=True)
    outcomes = {own.name: outcomes[own.name] for own in chosen}
    if arguments.out is not None:
        write(outcomes, arguments.out)
    counts = {verdict: sum(own.verdict == verdict for own in outcomes.values()) for verdict in VERDICTS}
    wrong = [name for name, own in outcomes.items() if own.verdict == "wrong"]
    print(json.dumps({"cases": len(outcomes), **counts, "names_of_wrong": wrong}), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
