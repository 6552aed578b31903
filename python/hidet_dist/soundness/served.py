"""Plans of graphs with states in real processes: compiled, and called several times on all ranks.

``python -m hidet_dist.soundness.served FOLDER`` is one rank: it serves the artifacts in the folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hidet_dist.compile import compile_program
from hidet_dist.errors import InputError
from hidet_dist.export.storage import different_layouts
from hidet_dist.export.write import BuiltProgram, write_artifacts
from hidet_dist.normalize import NormalGraph
from hidet_dist.partitioning import partition_graph
from hidet_dist.rules.rule import RuleTable
from hidet_dist.runtime.partition import load_partition
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.spec import DeviceMesh, Plan, StagePlan, TensorPlan
from hidet_dist.view import GraphView
from hidet_dist.weights.states import state_mark_of

Array = np.ndarray[Any, Any]

_SECONDS = 600
_TOLERANCE = 1e-4  # programs compute in float32, the oracle in float64


def check_served(
    graph: NormalGraph,
    stages: Sequence[StagePlan],
    calls: Sequence[Sequence[Array]],
    rules: RuleTable | None = None,
) -> str:
    """Describe the first wrong output or state of plans that real ranks serve; empty if all are right.

    The plans are programs over one storage: they have the same weights and states, in the same specs. They run in turn.
    ``calls`` are the inputs of each call. The functional graph is applied as often. Between the calls are some that
    must change no state: one that a rank refuses, and one to warm up.
    """
    mesh, states = stages[0].mesh, stages[0].states
    names = [graph.inputs[number].dtype.name for number in range(len(graph.inputs))]
    left: dict[str, Array] = {}
    answers = [evaluate_graph(graph, inputs, left) for inputs in calls]
    view = GraphView(graph, stages[0].symbols)
    labels = {plan.name: mark.name for plan in states if (mark := state_mark_of(view.tensors[plan.name]))}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "artifacts").mkdir()
        write_artifacts(folder / "artifacts", _built(graph, stages, rules))
        for rank in range(mesh.size):
            given = {
                f"{number}.{place}": _shard(x, plan, mesh, rank).astype(dtype)
                for number, inputs in enumerate(calls)
                for place, (x, plan, dtype) in enumerate(
                    zip(inputs, stages[number % len(stages)].inputs, names, strict=True)
                )
            }
            np.savez(folder / f"inputs{rank}.npz", allow_pickle=False, **given)
        command = [sys.executable, "-m", "hidet_dist.launch", "-n", str(mesh.size), "-m", __spec__.name, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        if done.returncode:
            return f"the ranks failed: {done.stderr.strip()}"
        for rank in range(mesh.size):
            with np.load(folder / f"results{rank}.npz") as told:
                for number, whole in enumerate(answers):
                    for place, (want, plan) in enumerate(zip(whole, stages[number % len(stages)].outputs, strict=True)):
                        if _differs(told[f"{number}.{place}"], _shard(want, plan, mesh, rank)):
                            return f"in call {number}, output {place} of rank {rank} differs"
                for plan in states:
                    if _differs(told[plan.label or plan.name], _shard(left[labels[plan.name]], plan, mesh, rank)):
                        return f"after all calls, the state {labels[plan.name]} of rank {rank} differs"
    return ""


def _built(graph: NormalGraph, stages: Sequence[StagePlan], rules: RuleTable | None) -> dict[str, BuiltProgram]:
    """Compile plans as programs over one storage, by names that tell their order."""
    programs = [partition_graph(graph, stage, rules=rules) for stage in stages]
    compiled = [compile_program(program) for program in programs]
    in_rows = different_layouts(compiled)
    if in_rows:
        compiled = [compile_program(program, in_rows=in_rows) for program in programs]
    return {
        f"plan{number}": BuiltProgram(Plan((stage,)), [(program, one)])
        for number, (stage, program, one) in enumerate(zip(stages, programs, compiled, strict=True))
    }


def _shard(whole: Array, plan: TensorPlan, mesh: DeviceMesh, rank: int) -> Array:
    return whole[plan.spec.slices(whole.shape, mesh, mesh.coordinate(rank))]


def _differs(got: Array, want: Array) -> bool:
    return got.shape != want.shape or not np.allclose(got, want, rtol=_TOLERANCE, atol=_TOLERANCE)


def _answers(calls: Mapping[str, Array], artifacts: Path) -> tuple[int, dict[str, Array]]:
    """Make the calls on this rank; return its number, the outputs of all calls, and the states after them."""
    results: dict[str, Array] = {}
    with load_partition(artifacts) as partition:
        programs = list(map(partition.program, partition.programs))
        count = len(programs[0].stage.inputs)
        for number in range(len(calls) // count):
            program = programs[number % len(programs)]
            inputs = [calls[f"{number}.{place}"] for place in range(count)]
            outputs = program.run(inputs)
            results.update({f"{number}.{place}": np.array(y) for place, y in enumerate(outputs)})
            is_last = partition.rank == partition.world_size - 1
            try:
                program.run(inputs[:-1] if is_last else inputs)
            except InputError:
                program.warm_up()
            else:
                raise AssertionError("the ranks made a call that one of them refused")
        results.update(partition.save_states())
        return partition.rank, results


def main(arguments: Sequence[str]) -> None:
    """Serve the artifacts of a folder as one rank, and write what it answered there."""
    folder = Path(arguments[0])
    with np.load(folder / f"inputs{os.environ['RANK']}.npz") as calls:
        rank, results = _answers(dict(calls), folder / "artifacts")
    np.savez(folder / f"results{rank}.npz", allow_pickle=False, **results)


if __name__ == "__main__":
    main(sys.argv[1:])
