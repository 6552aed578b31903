"""Artifacts of several stages: each rank reads the files of its own stage only, and stages are not exchanged."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import hidet
import pytest

import hidet_dist
from hidet_dist.artifacts import Manifest
from hidet_dist.errors import ArtifactError, ConfigError
from hidet_dist.normalize import normalize
from hidet_dist.view import GraphView

from .conftest import Start, weights


def _graph() -> hidet.FlowGraph:
    """Matmul, relu, matmul."""
    x = hidet.symbol([4, 8], "float32", "cpu")
    first, second = map(hidet.asarray, weights(0))
    return hidet.trace_from(hidet.ops.matmul(hidet.ops.relu(hidet.ops.matmul(x, first)), second), [x])


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, then one rank."""
    folder = tmp_path_factory.mktemp("stages") / "artifacts"
    given = [
        {"operators": [0, 2], "mesh_shape": [2], "pins": {"w0": "(S0, R)", "x0": "(R, S0)"}},
        {"operators": [2, 3], "mesh_shape": [1]},
    ]
    hidet_dist.auto_parallel(_graph(), {"mesh_shape": [3]}, {"stages": given}, folder)
    return folder


def test_parts_of_a_graph_are_graphs() -> None:
    view = GraphView(normalize(_graph()))
    count = len(view.operators)
    parts = [view.subgraph(range(2)), view.subgraph(range(2, count))]
    assert [len(part.graph.nodes) for part in parts] == [2, count - 2]
    assert parts[0].outputs == parts[1].inputs and parts[1].outputs == tuple(view.graph.outputs)
    with pytest.raises(ConfigError, match=f"operators 0 to {count - 1}"):
        view.subgraph(range(count + 1))


def test_a_rank_is_a_stage_and_a_place_in_its_mesh(stages: Path) -> None:
    program = Manifest.load(stages).program()
    assert [stage.folder for stage in program.stages] == ["stage0", "stage1"]
    assert [stage.size for stage in program.stages] == [2, 1] and program.world_size == 3
    assert [program.ranks_of(number) for number in range(2)] == [range(2), range(2, 3)]
    assert [program.stage_of(rank) for rank in range(3)] == [0, 0, 1]
    with pytest.raises(ValueError, match="no rank 3"):
        program.stage_of(3)


def test_files_of_other_stages_are_not_read(start: Start, stages: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(stages, tmp_path / "copy"))
    (copy / "stage1" / "launcher.so").unlink()
    ranks = start(3)
    for rank in ranks:
        rank.send("load", folder=str(copy), timeout_seconds=5.0)
    answers = [rank.answer() for rank in ranks]
    assert [answer["error"] for answer in answers] == ["RendezvousError"] * 2 + ["ArtifactError"]
    assert all("stage1/launcher.so is missing" in answer["message"] for answer in answers)


def test_stages_are_not_exchanged(stages: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(stages, tmp_path / "copy"))
    manifest = Manifest.load(copy)
    known = manifest.program()
    for others in (known.stages[::-1], known.stages[:1], (*known.stages, known.stages[0])):
        dataclasses.replace(manifest, programs=(dataclasses.replace(known, stages=others),)).save(copy)
        with pytest.raises(ArtifactError, match="contradicts itself"):
            hidet_dist.load_partition(copy, 0)
