"""Ranks that were given different things: each says so before any answer is computed, and can go on."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import hidet
import numpy as np
import pytest

import hidet_dist
from hidet_dist.artifacts import Manifest
from hidet_dist.launch import free_port

from .conftest import SHORT_SECONDS, TIMEOUT_SECONDS, Rank, Start, X, assert_blames, build, call_all, load_all, weights


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return build(tmp_path_factory.mktemp("faults") / "other", 2, seed=1)


@pytest.fixture
def loaded(start: Start, artifacts: Path) -> Iterator[list[Rank]]:
    """Two ranks that answer, and still do after the test."""
    ranks = start(2)
    load_all(ranks, artifacts)
    yield ranks
    call_all(ranks)


def test_another_program(start: Start, tmp_path: Path) -> None:
    """Each rank's input fits its program; the sums of one are never added to those of the other."""
    rows, graphs = {"prefill": 4, "decode": 1}, {}
    first, second = map(hidet.asarray, weights(0))
    for name, count in rows.items():
        x = hidet.symbol([count, 8], "float32", "cpu")
        graphs[name] = hidet.trace_from(hidet.ops.matmul(hidet.ops.relu(hidet.ops.matmul(x, first)), second), [x])
    pins = {"prefill": {"pins": {"w0": "(R, S0)", "w1": "(S0, R)"}}}
    hidet_dist.build_family(graphs, {"mesh_shape": [2]}, {}, tmp_path / "both", pins)
    ranks = start(2)
    load_all(ranks, tmp_path / "both")
    for names in (("prefill", "decode"), ("decode", "prefill"), ("decode", "decode"), ("prefill", "prefill")):
        for rank, name in zip(ranks, names, strict=True):
            rank.send("call_program", name=name, inputs=[X[: rows[name]].tolist()])
        for number, rank in enumerate(ranks):
            answer = rank.answer()
            if len(set(names)) > 1:
                assert answer["error"] == "InputError", answer
                assert f"rank {number} is in the program {names[number]}, but rank" in answer["message"]
            else:
                whole = np.maximum(X[: rows[names[0]]] @ weights(0)[0], 0) @ weights(0)[1]
                np.testing.assert_allclose(answer["result"], whole, atol=1e-4)


def test_another_build(start: Start, artifacts: Path, other: Path) -> None:
    ranks = start(2)
    for rank, folder in zip(ranks, (artifacts, other), strict=True):
        rank.send("load", folder=str(folder), timeout_seconds=TIMEOUT_SECONDS)
    for number, rank in enumerate(ranks):
        assert_blames(rank.answer(), 1 - number, "ArtifactError", "other artifacts", "same build")
    load_all(ranks, other)
    call_all(ranks, seed=1)


def test_a_build_for_another_version(start: Start, artifacts: Path, tmp_path: Path) -> None:
    old = Path(shutil.copytree(artifacts, tmp_path / "old"))
    dataclasses.replace(Manifest.load(old), hidet_version="0.5.0").save(old)
    ranks = start(2)
    for rank, folder in zip(ranks, (artifacts, old), strict=True):
        rank.send("load", folder=str(folder), timeout_seconds=SHORT_SECONDS)
    answer = ranks[1].answer()
    assert answer["error"] == "ArtifactError" and "built with hidet 0.5.0" in answer["message"]
    assert_blames(ranks[0].answer(), 1, "RendezvousError", "did not come")
    load_all(ranks, artifacts)
    call_all(ranks)


@pytest.mark.usefixtures("next_run_works")
def test_another_world_size(start: Start, artifacts: Path) -> None:
    ranks = start(2, environment=[{}, {"WORLD_SIZE": "3"}])
    for rank in ranks:
        rank.send("load", folder=str(artifacts), timeout_seconds=SHORT_SECONDS)
    answer = ranks[1].answer()
    assert answer["error"] == "ConfigError"
    assert "was built for 2 ranks, but the world size is 3" in answer["message"]
    assert_blames(ranks[0].answer(), 1, "RendezvousError", "did not come")


def test_inputs_of_another_shape(loaded: list[Rank]) -> None:
    for rank, x in zip(loaded, (X, X[:3]), strict=True):
        rank.send("call", inputs=[x.tolist()])
    right, wrong = (rank.answer() for rank in loaded)
    assert wrong["error"] == "InputError" and "must have the shape [4, 8]" in wrong["message"]
    assert right["error"] == "InputError", right
    assert "Rank 1 refused this call: Input 0 must have the shape [4, 8]" in right["message"]


def test_another_number_of_inputs(loaded: list[Rank]) -> None:
    for rank, inputs in zip(loaded, ([], [X.tolist()]), strict=True):
        rank.send("call", inputs=inputs)
    wrong, right = (rank.answer() for rank in loaded)
    assert wrong["error"] == right["error"] == "InputError"
    assert "Rank 0 refused this call: The program takes 1 inputs; 0" in right["message"]


def test_a_refused_call_is_not_answered_with_the_next_ones_data(loaded: list[Rank]) -> None:
    """One rank is refused its call and goes on; the other one has made a call that it could have been taken for."""
    first, second = X, X + 1
    for rank, inputs in zip(loaded, ([first, second], [first[:2], second]), strict=True):
        for x in inputs:
            rank.send("call", inputs=[x.tolist()])
    for rank in loaded:
        assert rank.answer()["error"] == "InputError"
        assert "error" not in rank.answer()


def test_symbolic_sizes_that_differ(start: Start, symbolic: Path) -> None:
    ranks = start(2)
    load_all(ranks, symbolic)
    for rank, batch in zip(ranks, (4, 5), strict=True):
        rank.send("call", inputs=[np.ones((batch, 8)).tolist()])
    for rank in ranks:
        answer = rank.answer()
        assert answer["error"] == "InputError"
        assert "batch must be the same on all ranks" in answer["message"]
    for batch in (5, 1):
        call_all(ranks, np.full((batch, 8), 0.5, np.float32))


def test_two_jobs_at_once(start: Start, artifacts: Path, other: Path) -> None:
    jobs = [(start(2), folder, seed) for seed, folder in enumerate((artifacts, other))]
    for ranks, folder, _ in jobs:
        load_all(ranks, folder)
    for _ in range(3):
        for ranks, _, _ in jobs:
            for rank in ranks:
                rank.send("call", inputs=[X.tolist()])
    for _ in range(3):
        answers = [[rank.answer()["result"] for rank in ranks] for ranks, _, _ in jobs]
        assert np.array_equal(*answers[0]) and np.array_equal(*answers[1])
    for ranks, _, seed in jobs:
        call_all(ranks, seed=seed)


@pytest.mark.parametrize("secrets", [("first" * 8, "second" * 8), ("", "")])
def test_two_jobs_on_one_port(start: Start, artifacts: Path, secrets: tuple[str, str]) -> None:
    port = free_port()
    first = start(2, port, [{"HIDET_DIST_SECRET": secrets[0]}] * 2)
    load_all(first, artifacts)
    second = start(2, port, [{"HIDET_DIST_SECRET": secrets[1]}] * 2)
    for rank in second:
        rank.send("load", folder=str(artifacts), timeout_seconds=SHORT_SECONDS)
    host, other = (rank.answer() for rank in second)
    assert_blames(host, 0, "RendezvousError", f"127.0.0.1:{port}", "using the port")
    says = "different secrets" if secrets[0] else "two processes are rank 1"
    assert_blames(other, 1, "RendezvousError", says)
    call_all(first)
