"""Artifacts of several stages on disjoint ranks: each is served as if it were alone."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import hidet
import numpy as np
import pytest

import hidet_dist
from hidet_dist.artifacts import Manifest
from hidet_dist.compile import compile_program
from hidet_dist.errors import ArtifactError, ConfigError, PlanError
from hidet_dist.export.write import write_artifacts
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh, Plan
from hidet_dist.view import GraphView

from .conftest import Rank, Start, X, load_all, weights

PINS = {"w0": "(R, S0)", "w1": "(S0, R)"}


def _graph(seed: int) -> hidet.FlowGraph:
    x = hidet.symbol([4, 8], "float32", "cpu")
    first, second = map(hidet.asarray, weights(seed))
    return normalize(hidet.trace_from(hidet.ops.matmul(hidet.ops.relu(hidet.ops.matmul(x, first)), second), [x]))


def _whole(seed: int) -> np.ndarray:
    first, second = weights(seed)
    return np.maximum(X @ first, 0) @ second


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, one rank and two ranks, with a graph each."""
    folder = tmp_path_factory.mktemp("stages") / "artifacts"
    folder.mkdir()
    plans, programs = [], []
    for seed, ranks in enumerate((2, 1, 2)):
        graph = _graph(seed)
        plan = search(graph, builtin("cpu", DeviceMesh((ranks,))), pins=PINS if ranks > 1 else {})
        program = partition_graph(graph, plan.stages[0])
        plans.append(plan)
        programs.append((program, compile_program(program)))
    whole = Plan(tuple(stage for plan in plans for stage in plan.stages))
    assert Plan.from_json(whole.to_json()) == whole
    with pytest.raises(PlanError, match="Give the program of each stage"):
        write_artifacts(folder, whole, programs[:2])
    write_artifacts(folder, whole, programs)
    return folder


def test_parts_of_a_graph_are_stages(start: Start, tmp_path: Path) -> None:
    """A graph cut in two, each part planned by itself: the second is given what the first one answers."""
    graph = _graph(seed=7)
    view = GraphView(graph)
    count = len(view.operators)
    parts = [view.subgraph(range(2)), view.subgraph(range(2, count))]
    assert [len(part.graph.nodes) for part in parts] == [2, count - 2]
    assert parts[0].outputs == parts[1].inputs and parts[1].outputs == tuple(view.graph.outputs)
    with pytest.raises(ConfigError, match=f"operators 0 to {count - 1}"):
        view.subgraph(range(count + 1))
    programs, plans = [], []
    for part, pin in zip(parts, ("(R, S0)", "(S0, R)"), strict=True):
        plans.append(search(part.graph, builtin("cpu", DeviceMesh((2,))), pins={"w0": pin}))
        program = partition_graph(part.graph, plans[-1].stages[0])
        programs.append((program, compile_program(program)))
    folder = tmp_path / "parts"
    folder.mkdir()
    write_artifacts(folder, Plan(tuple(plan.stages[0] for plan in plans)), programs)
    ranks = start(4)
    load_all(ranks, folder)
    x = X.tolist()
    for numbers in (range(2), range(2, 4)):
        for number in numbers:
            ranks[number].send("call", inputs=[x])
        answers = [ranks[number].answer() for number in numbers]
        assert not any("error" in answer for answer in answers), answers
        x = answers[0]["result"]
        assert x == answers[1]["result"]
    np.testing.assert_allclose(x, _whole(7), atol=1e-4)


def _call_all(ranks: list[Rank], numbers: range) -> None:
    """Call the partition on ranks, each of which must answer as the whole graph of its stage does."""
    for number in numbers:
        ranks[number].send("call", inputs=[X.tolist()])
    for number in numbers:
        answer = ranks[number].answer()
        assert "error" not in answer, answer
        np.testing.assert_allclose(answer["result"], _whole((0, 0, 1, 2, 2)[number]), atol=1e-4)


def test_a_rank_is_a_stage_and_a_place_in_its_mesh(stages: Path) -> None:
    manifest = Manifest.load(stages)
    assert [stage.folder for stage in manifest.stages] == ["stage0", "stage1", "stage2"]
    assert [stage.size for stage in manifest.stages] == [2, 1, 2] and manifest.world_size == 5
    assert [manifest.ranks_of(number) for number in range(3)] == [range(2), range(2, 3), range(3, 5)]
    assert [manifest.stage_of(rank) for rank in range(5)] == [0, 0, 1, 2, 2]
    with pytest.raises(ValueError, match="no rank 5"):
        manifest.stage_of(5)
    assert [bool(stage.communications) for stage in manifest.stages] == [True, False, True]


def test_each_stage_is_served_as_if_it_were_alone(start: Start, stages: Path) -> None:
    ranks = start(5)
    load_all(ranks, stages)
    _call_all(ranks, range(5))
    for numbers in (range(3, 5), range(3, 5), range(2), range(2, 3)):  # in any order, and not as often
        _call_all(ranks, numbers)
    ranks[4].kill()
    ranks[3].send("call", inputs=[X.tolist()])
    answer = ranks[3].answer()
    assert answer["error"] == "CommunicationError" and answer["ranks"] == [4], answer
    assert answer["message"].startswith("rank 3: ") and "rank 4 stopped responding" in answer["message"], answer
    _call_all(ranks, range(3))
    for rank in ranks[:4]:
        rank.do("close")


def test_files_of_other_stages_are_not_read(start: Start, stages: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(stages, tmp_path / "copy"))
    (copy / "stage2" / "launcher.so").unlink()
    ranks = start(5)
    for rank in ranks:
        rank.send("load", folder=str(copy), timeout_seconds=5.0)
    answers = [rank.answer() for rank in ranks]
    assert [answer["error"] for answer in answers] == ["RendezvousError"] * 3 + ["ArtifactError"] * 2
    assert all("stage2/launcher.so is missing" in answer["message"] for answer in answers)


def test_stages_are_not_exchanged(stages: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(stages, tmp_path / "copy"))
    manifest = Manifest.load(copy)
    for others in (manifest.stages[::-1], manifest.stages[:2], (*manifest.stages, manifest.stages[0])):
        dataclasses.replace(manifest, stages=others).save(copy)
        with pytest.raises(ArtifactError, match="contradicts itself"):
            hidet_dist.load_partition(copy, 0)
