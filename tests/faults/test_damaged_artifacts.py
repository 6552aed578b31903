"""Artifact folders that are not as they were built: every byte is checked before it is used, and nothing outside."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hidet_dist
from hidet_dist.artifacts import Manifest, manifest
from hidet_dist.artifacts.opened import OpenedArtifacts
from hidet_dist.errors import ArtifactError
from hidet_dist.export.write import replacing

from .conftest import SHORT_SECONDS, TIMEOUT_SECONDS, Start, X, assert_blames, build, call_all, load_all, whole


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For one rank."""
    return build(tmp_path_factory.mktemp("faults") / "alone", 1)


@pytest.fixture
def copy(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For one rank, to be damaged."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return Path(shutil.copytree(alone, tmp_path / "copy"))


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _flip_and_put_back(path: Path) -> None:
    """Other data, with the old modification time put back."""
    before = path.stat()
    time.sleep(0.05)  # the clock of file systems ticks every few milliseconds
    _flip_a_bit(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


DAMAGES: list[Callable[[Path], None]] = [_flip_a_bit, _truncate, _empty, Path.unlink]
damages = pytest.mark.parametrize("damage", DAMAGES, ids=["flipped", "truncated", "empty", "missing"])


@damages
def test_every_file_is_checked(copy: Path, damage: Callable[[Path], None]) -> None:
    names = [*Manifest.load(copy).files, "manifest.json"]
    assert {Path(name).suffix for name in names} == {".json", ".so", ".safetensors"}
    for name in names:
        content = (copy / name).read_bytes()
        damage(copy / name)
        with pytest.raises(ArtifactError, match=r"Build (the artifacts|them)|this version") as caught:
            hidet_dist.load_partition(copy, 0)
        assert Path(name).name in str(caught.value)
        (copy / name).write_bytes(content)
    with hidet_dist.load_partition(copy, 0) as model:
        np.testing.assert_allclose(model(X), whole(X), atol=1e-4)


def test_all_ranks_hear_of_damage_that_one_rank_finds(start: Start, artifacts: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(artifacts, tmp_path / "copy"))
    file = copy / "weights" / "rank1.safetensors"
    content = file.read_bytes()
    ranks = start(2)
    for damage in DAMAGES:
        damage(file)
        for rank in ranks:
            rank.send("load", folder=str(copy), timeout_seconds=TIMEOUT_SECONDS)
        other, own = (rank.answer() for rank in ranks)
        assert own["error"] == "ArtifactError" and "rank1.safetensors" in own["message"]
        assert_blames(other, 1, "RendezvousError", "ArtifactError", "rank1.safetensors")
        file.write_bytes(content)
    load_all(ranks, copy)
    call_all(ranks)


def _state(folder: Path) -> list[Any]:
    paths = [folder, *sorted(folder.rglob("*"))]
    return [(str(path), path.stat().st_mode, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def test_a_folder_that_may_only_be_read_will_do(start: Start, artifacts: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(artifacts, tmp_path / "copy"))
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = _state(copy)
    ranks = start(2)
    load_all(ranks, copy)
    call_all(ranks)
    assert _state(copy) == before
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o755)


def test_loading_while_builds_replace_the_folder(start: Start, artifacts: Path, tmp_path: Path) -> None:
    """Each time, both ranks have the one build or the other whole, or both say that they have not."""
    builds = [artifacts, build(tmp_path / "other", 2, seed=1)]
    place = Path(shutil.copytree(artifacts, tmp_path / "place"))
    stop = threading.Event()

    def rebuild() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            with replacing(place) as staging:
                shutil.copytree(builds[number % 2], staging, dirs_exist_ok=True)

    thread = threading.Thread(target=rebuild)
    thread.start()
    ranks = start(2)
    answers: list[Any] = []
    turns = 0
    try:
        while turns < 12 or (not answers and turns < 100):
            turns += 1
            for rank in ranks:
                rank.send("load", folder=str(place), timeout_seconds=SHORT_SECONDS)
            loads = [rank.answer() for rank in ranks]
            if all("error" not in load for load in loads):
                for rank in ranks:
                    rank.send("call", inputs=[X.tolist()])
                answers.append([rank.answer()["result"] for rank in ranks])
                for rank in ranks:
                    rank.do("close")
            else:
                assert all(load.get("error") in {"ArtifactError", "RendezvousError"} for load in loads), loads
    finally:
        stop.set()
        thread.join()
    assert answers
    for first, second in answers:
        assert first == second
        assert any(np.allclose(first, whole(X, seed), atol=1e-4) for seed in (0, 1))
    with replacing(place) as staging:
        shutil.copytree(artifacts, staging, dirs_exist_ok=True)
    load_all(ranks, place)
    call_all(ranks)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "place", "scratch"]


@pytest.mark.parametrize(
    ("change", "victim"),
    [
        *(
            pytest.param(change, victim, id=f"{name}-{victim}")
            for change, name, victim in (
                (_empty, "cut", 0),
                (_flip_a_bit, "written to", 1),
                (_flip_and_put_back, "put back", 0),
            )
        ),
        *(
            pytest.param(change, victim, id=f"{name}-{victim}", marks=pytest.mark.slow)
            for change, name, victim in (
                (_empty, "cut", 1),
                (_flip_a_bit, "written to", 0),
                (_flip_and_put_back, "put back", 1),
            )
        ),
    ],
)
def test_weights_that_are_changed_during_a_call(
    start: Start, artifacts: Path, tmp_path: Path, change: Callable[[Path], None], victim: int
) -> None:
    """Wherever the call is then: what is made of them, nobody gets, on no rank."""
    copy = Path(shutil.copytree(artifacts, tmp_path / "copy"))
    ranks = start(2)
    load_all(ranks, copy)
    for rank in ranks:
        rank.send("serve", inputs=[X.tolist()])
    time.sleep(0.5)
    change(copy / "weights" / f"rank{victim}.safetensors")
    says = f"rank{victim}.safetensors was changed while it was in use"
    answer = ranks[victim].answer()
    assert answer["error"] == "ArtifactError" and says in answer["message"], answer
    assert_blames(ranks[1 - victim].answer(), victim, "CommunicationError", says)
    for rank in ranks:
        rank.do("close")
    load_all(ranks, artifacts)
    call_all(ranks)


@pytest.mark.parametrize("change", [_empty, _flip_and_put_back], ids=["cut", "put back"])
def test_weights_that_are_changed_between_calls(
    start: Start, artifacts: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """The other rank hears of it at once."""
    copy = Path(shutil.copytree(artifacts, tmp_path / "copy"))
    ranks = start(2)
    load_all(ranks, copy)
    change(copy / "weights" / "rank1.safetensors")
    for rank in ranks:
        rank.send("call", inputs=[X.tolist()])
    says = "rank1.safetensors was changed while it was in use"
    answer = ranks[1].answer()
    assert answer["error"] == "ArtifactError" and says in answer["message"], answer
    assert_blames(ranks[0].answer(), 1, "CommunicationError", says)


def test_weights_whose_status_alone_is_changed_are_read_again_and_used(copy: Path) -> None:
    file = copy / "weights" / "rank0.safetensors"
    with hidet_dist.load_partition(copy, 0) as model:
        for change in (
            lambda: file.chmod(0o600),
            lambda: file.rename(file.with_name("other")),
            lambda: file.with_name("other").unlink(),
        ):
            time.sleep(0.05)
            change()
            for _ in range(2):
                np.testing.assert_allclose(model(X), whole(X), atol=1e-4)


@pytest.mark.parametrize("name", ["stage0/launcher.so", "weights/rank0.safetensors"])
def test_files_that_are_changed_between_their_check_and_their_use(
    copy: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = OpenedArtifacts.verify

    def and_change(self: OpenedArtifacts, names: Any, threads: int | None = None) -> None:
        verify(self, names, threads)
        _flip_and_put_back(copy / name)

    monkeypatch.setattr(OpenedArtifacts, "verify", and_change)
    with pytest.raises(ArtifactError, match=f"{name} was changed while it was loaded"):
        hidet_dist.load_partition(copy, 0)


def _elsewhere(copy: Path, folder: str) -> None:
    """Have the manifest put the stage somewhere else, where all of its files are, with their right checksums."""
    manifest = Manifest.load(copy)
    program = manifest.program()
    (stage,) = program.stages
    files = {name.replace("stage0", folder, 1): entry for name, entry in manifest.files.items()}
    moved = dataclasses.replace(program, stages=(dataclasses.replace(stage, folder=folder),))
    dataclasses.replace(manifest, programs=(moved,), files=files).save(copy)


@pytest.mark.parametrize("where", ["../outside", "stage0/../../outside", "{}/outside", ".//stage0", "stage0/."])
def test_names_lead_nowhere_else(copy: Path, tmp_path: Path, where: str) -> None:
    shutil.copytree(copy / "stage0", tmp_path / "outside")
    _elsewhere(copy, where.format(tmp_path))
    with pytest.raises(ArtifactError, match="as a path within the artifact folder"):
        hidet_dist.load_partition(copy, 0)


@pytest.mark.parametrize("name", ["stage0", "kernels", "stage0/launcher.so", "weights/rank0.safetensors"])
def test_links_are_not_followed(copy: Path, tmp_path: Path, name: str) -> None:
    shutil.move(copy / name, tmp_path / "outside")
    (copy / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ArtifactError, match="is a link, or lies outside the folder"):
        hidet_dist.load_partition(copy, 0)


@pytest.mark.parametrize("name", ["manifest.json", "stage0/launcher.so"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_paths_other_than_files_are_refused(copy: Path, name: str, make: Callable[[Path], None]) -> None:
    (copy / name).unlink()
    make(copy / name)
    with pytest.raises(ArtifactError, match=Path(name).name):
        hidet_dist.load_partition(copy, 0)


def test_a_folder_may_be_reached_through_a_link(copy: Path, tmp_path: Path) -> None:
    """As deployments do, which let ``current`` point to the newest version."""
    (tmp_path / "current").symlink_to(copy)
    with hidet_dist.load_partition(tmp_path / "current", 0) as model:
        np.testing.assert_allclose(model(X), whole(X), atol=1e-4)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": 3}', "null", '"text"', "1e999", "\ufeff{}"])
def test_a_manifest_that_makes_no_sense_is_refused(copy: Path, text: str) -> None:
    (copy / "manifest.json").write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError, match="manifest"):
        hidet_dist.load_partition(copy, 0)


def _places(body: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each value in JSON; of each list's elements the first."""
    for key, value in body.items() if isinstance(body, dict) else enumerate(body[:1]):
        yield (*place, key)
        if isinstance(value, dict | list):
            yield from _places(value, (*place, key))


def test_values_of_another_type_are_refused(copy: Path) -> None:
    """With the checksum that fits them."""
    path = copy / "manifest.json"
    good = json.loads(path.read_text(encoding="utf-8"))
    # What may be of more than one type is left out.
    several = {"format", "checksum", "arch", "gpu", "workspace_bytes", "shape", "whole_shape"}
    places = [place for place in _places(good) if not several & set(place)]
    assert len(places) > 50
    for place in places:
        for junk in (None, 7, -1.5, True, "text", [], [{}], {}, {"a": 1}):
            body = copied = json.loads(json.dumps(good))
            for key in place[:-1]:
                copied = copied[key]
            before, copied[place[-1]] = copied[place[-1]], junk
            if type(before) is type(junk) and not (isinstance(junk, dict) and place[-1] not in ("files", "panels")):
                continue  # another value, of the right type
            body["checksum"] = manifest._checksum(body)
            path.write_text(json.dumps(body), encoding="utf-8")
            with pytest.raises(ArtifactError, match="is not a manifest of format"):
                Manifest.load(copy)


@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_stages_is_refused(copy: Path, count: int) -> None:
    whole = Manifest.load(copy)
    program = dataclasses.replace(whole.program(), stages=whole.program().stages * count)
    dataclasses.replace(whole, programs=(program,)).save(copy)
    with pytest.raises(ArtifactError, match=r"contradicts itself: programs\[0\]\.stages"):
        hidet_dist.load_partition(copy, 0)


def test_a_kernel_that_is_not_the_manifests_is_not_loaded(copy: Path) -> None:
    """Not even its initializers run: it would end this process."""
    kernel = sorted(copy.glob("kernels/*.so"))[0]
    source = copy / "evil.c"
    source.write_text("#include <stdlib.h>\n__attribute__((constructor)) static void run(void) { _Exit(9); }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", kernel, source], check=True)
    source.unlink()
    with pytest.raises(ArtifactError, match=rf"kernels/{kernel.name} was altered"):
        hidet_dist.load_partition(copy, 0)
    assert json.loads((copy / "manifest.json").read_text())["files"][f"kernels/{kernel.name}"]
