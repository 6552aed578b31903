"""Manifests whose checksums are right and whose content is not.

Each field is changed in turn, in every way that its type allows. What then loads serves the right answer; all else is
refused by the name of the field.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest

import hidet_dist
from hidet_dist.artifacts import Manifest, manifest
from hidet_dist.errors import ArtifactError, HidetDistError
from hidet_dist.spec.interface import Interface, attach
from hidet_dist.weights import header

INPUTS = [np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32) for _ in range(2)]


def _fixed() -> hidet.FlowGraph:
    """Two inputs and two outputs of a shape, and three weights of a shape: whatever is exchanged, it fits."""
    rng = np.random.default_rng(0)
    x, z = (hidet.symbol([4, 8], "float32", "cpu") for _ in range(2))
    w = [hidet.asarray(rng.standard_normal((8, 8)).astype(np.float32)) for _ in range(3)]
    y = hidet.ops.matmul(hidet.ops.tanh(hidet.ops.matmul(x, w[0])), w[1])
    return hidet.trace_from([y, hidet.ops.softmax(hidet.ops.matmul(z, w[2]), axis=1)], [x, z])


def _symbolic() -> hidet.FlowGraph:
    x, z = (hidet.symbol(["n", 8], "float32", "cpu") for _ in range(2))
    w = hidet.asarray(np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32))
    return hidet.trace_from([hidet.ops.matmul(x, w), hidet.ops.exp(z)], [x, z])


def _lookup() -> hidet.FlowGraph:
    """A lookup with names: of a model whose result is nested."""
    ids = hidet.symbol([4], "int64", "cpu")
    table = hidet.asarray(np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32))
    rows = hidet.ops.take(table, ids, axis=0)
    graph = hidet.trace_from([rows, hidet.ops.exp(rows)], [ids])
    fields = [["rows", {"tensor": 0}], ["more", {"list": [{"tensor": 1}, {"value": 3}]}]]
    parameters = (("ids", {"tensor": 0}), ("scale", {"value": 2}))
    attach(graph, Interface(parameters, ("ids",), ("rows", "more.0"), {"record": "Output", "fields": fields}))
    return graph


GRAPHS: dict[str, tuple[Callable[[], hidet.FlowGraph], dict[str, Any], list[np.ndarray]]] = {
    "fixed": (_fixed, {}, INPUTS),
    "symbolic": (_symbolic, {"symbols": {"n": {"expected": 8, "multiple_of": 2}}}, INPUTS),
    "lookup": (_lookup, {}, [np.array([0, 15, -16, 3])]),
}


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[np.ndarray]]]:
    """Artifacts for one rank, and what they answer."""
    folder, made = tmp_path_factory.mktemp("coherence"), {}
    for name, (graph, config, inputs) in GRAPHS.items():
        hidet.distributed.auto_parallel(graph(), {"mesh_shape": [1]}, config, folder / name)
        with hidet_dist.load_partition(folder / name, 0) as model:
            made[name] = folder / name, model.run(inputs)
    return made


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each value in JSON, the value itself left out."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*place, key)
            yield from _places(inner, (*place, key))


def _kinds(body: dict[str, Any]) -> dict[tuple[Any, ...], list[tuple[Any, ...]]]:
    """The places of each kind: those of values of one type, whose keys differ only in numbers within lists."""
    kinds: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for place in _places(body):
        value = body
        for key in place:
            value = value[key]
        fields = (None if isinstance(key, int) else key for key in place)
        kinds.setdefault((*fields, type(value)), []).append(place)
    return kinds


def _others(value: Any) -> Iterator[Any]:
    """Other values of the same type, near and far; of lists and mappings, with entries lost, doubled and exchanged."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1, 0, -1, 2 * value, 2**31, 10**30)
    elif isinstance(value, str):
        yield from ("", value + "x", value[:-1], value.upper(), "float16", "(S0, R)", "../x", "\0")
    elif value is None:
        yield from ("H100-SXM5-80GB", {}, {"cpu": 64})
    elif isinstance(value, list):
        yield from ([], value[1:], value[:-1], value[::-1], value + value[-1:], [*value[1:2], *value[:1], *value[2:]])
    else:
        keys = list(value)
        yield {}
        yield {**value, "extra": value[keys[0]]} if keys else {"cpu": 1}
        for a, b in itertools.pairwise(keys):
            yield {**value, a: value[b], b: value[a]}
            yield {key: own for key, own in value.items() if key != a}


def _write(folder: Path, body: dict[str, Any]) -> None:
    """A manifest with the checksum that fits it."""
    body.pop("checksum", None)
    body["checksum"] = manifest._checksum(body)
    (folder / "manifest.json").write_text(json.dumps(body), encoding="utf-8")


@pytest.mark.parametrize("name", GRAPHS)
def test_every_change_of_every_field(name: str, builds: Any, tmp_path: Path) -> None:
    folder, expected = builds[name]
    folder = Path(shutil.copytree(folder, tmp_path / "copy"))
    good = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    kinds = _kinds(good)
    if name != "fixed":  # which has most of them
        of_fixed = _kinds(json.loads((builds["fixed"][0] / "manifest.json").read_text(encoding="utf-8")))
        kinds = {kind: places for kind, places in kinds.items() if kind not in of_fixed}
    refused = served = 0
    for place in [place for places in kinds.values() for place in dict.fromkeys((places[0], places[-1]))]:
        if place[0] in ("checksum", "format"):
            continue
        *path, last = place
        before = good
        for key in place:
            before = before[key]
        for other in _others(before):
            if other == before:
                continue
            body = inner = copy.deepcopy(good)
            for key in path:
                inner = inner[key]
            inner[last] = other
            _write(folder, body)
            field = [key for key in place if isinstance(key, str)][-1]
            try:
                with hidet_dist.load_partition(folder, 0) as model:
                    answer = model.run(GRAPHS[name][2])
            except ArtifactError as error:
                named = field in str(error) or any(str(key) in str(error) for key in _keys(other))
                assert named, f"{place} = {other!r}: {error}"
                refused += 1
            except HidetDistError as error:
                raise AssertionError(f"{place} = {other!r}: {type(error).__name__}: {error}") from error
            else:
                served += 1
                for y, z in zip(answer, expected, strict=True):
                    np.testing.assert_array_equal(y, z, err_msg=f"{place} = {other!r}")
    assert refused > 30
    assert served > 0 or name != "fixed"  # such as the version of the builder, and hashes of what nobody reads


def _keys(value: Any) -> list[Any]:
    return list(value) if isinstance(value, dict) else []


def test_a_mesh_of_many_devices_takes_no_time(builds: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(builds["fixed"][0], tmp_path / "copy"))
    body = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    body["programs"][0]["stages"][0]["mesh_shape"], body["world_size"] = [10**12], 10**12
    _write(folder, body)
    with pytest.raises(ArtifactError, match=r"mesh_shape .* at most"):
        hidet_dist.load_partition(folder, 0)


def _resign(folder: Path, name: str) -> None:
    """The manifest's entry of a file, made to fit what is in it."""
    body = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    content = (folder / name).read_bytes()
    body["files"][name] = [len(content), hashlib.sha256(content).hexdigest()]
    _write(folder, body)


def _split(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    end = header.LENGTH_BYTES + int.from_bytes(content[: header.LENGTH_BYTES], "little")
    return json.loads(content[header.LENGTH_BYTES : end]), content[end:]


def _exchange(entries: dict[str, Any], what: str) -> None:
    first, second, *_ = (name for name in entries if name.startswith("w"))
    if what == "tensors":
        entries[first], entries[second] = entries[second], entries[first]
    elif what == "dtype":
        entries[first]["dtype"] = "I32"
    elif what == "shape":
        entries[first]["shape"] = [4, 16]
    elif what == "lost":
        del entries[first]
    elif what == "renamed":
        entries["other"] = entries.pop(first)
    elif what == "more":
        entries["more"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}


@pytest.mark.parametrize("what", ["tensors", "dtype", "shape", "lost", "renamed", "more", "nested", "long", "short"])
def test_files_of_weights_are_those_of_the_program(what: str, builds: Any, tmp_path: Path) -> None:
    """With checksums that fit them."""
    folder = Path(shutil.copytree(builds["fixed"][0], tmp_path / "copy"))
    path = folder / "weights/rank0.safetensors"
    entries, data = _split(path)
    size = path.stat().st_size - len(data)
    _exchange(entries, what)
    text = json.dumps(entries, separators=(",", ":")).encode()
    if what == "nested":
        text = b"[" * (size - 8)
    text = text.ljust(size - 8)
    data = {"long": data + b"\0", "short": data[:-1]}.get(what, data)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    _resign(folder, "weights/rank0.safetensors")
    with pytest.raises(ArtifactError, match=r"rank0.safetensors does not fit the program"):
        hidet_dist.load_partition(folder, 0)


def _kernel(folder: Path) -> str:
    """The path of the first kernel's library within a folder of artifacts."""
    return Manifest.load(folder).program().stages[0].kernel_file(0)


def test_a_launcher_without_a_description_is_refused(builds: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(builds["fixed"][0], tmp_path / "copy"))
    for name in (_kernel(folder), "weights/rank0.safetensors"):
        shutil.copyfile(folder / name, folder / "stage0/launcher.so")
        _resign(folder, "stage0/launcher.so")
        with pytest.raises(ArtifactError, match=r"launcher.so is no launcher"):
            hidet_dist.load_partition(folder, 0)


def test_files_that_are_not_kernels_are_refused(builds: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(builds["fixed"][0], tmp_path / "copy"))
    for name in ("stage0/launcher.so", "weights/rank0.safetensors"):
        shutil.copyfile(builds["fixed"][0] / name, folder / _kernel(folder))
        _resign(folder, _kernel(folder))
        with pytest.raises(ArtifactError, match=rf"{_kernel(folder)} is not a library with 1 candidates"):
            hidet_dist.load_partition(folder, 0)


def test_built_artifacts_are_coherent(builds: Any) -> None:
    for folder, _ in builds.values():
        assert Manifest.load(folder).program().stages[0].size == 1
