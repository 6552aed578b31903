"""Slices read from files are the tensors' slices, and files written by blocks are those of the library."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import hidet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from hidet_dist.errors import WeightsError
from hidet_dist.limits import MOST_HEADER_BYTES, MOST_HEADER_VALUES, MOST_INDEX_BYTES
from hidet_dist.spec import DeviceMesh, TensorPlan, TensorShardSpec
from hidet_dist.weights import SafetensorsFiles, StoredLayout, header, shard_blocks, write_safetensors
from hidet_dist.weights.sources import Constant

# hidet's names, and torch's where they differ
DTYPES = {
    name: getattr(torch, {"float8_e4m3": "float8_e4m3fn"}.get(name, name))
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    )
}


def numbered(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in which neighbours differ, whatever its dtype."""
    count = torch.Size(shape).numel() * dtype.itemsize
    data = (torch.arange(count, dtype=torch.int64) * 37 % (2 if dtype == torch.bool else 251)).to(torch.uint8)
    return data.view(dtype).reshape(shape)


@st.composite
def regions(draw: Any) -> tuple[list[int], tuple[slice, ...]]:
    shape = draw(st.lists(st.integers(1, 9), max_size=4))
    bounds = [sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2))) for size in shape]
    return shape, tuple(slice(*pair) for pair in bounds)


@settings(max_examples=60, deadline=None)
@given(regions(), st.sampled_from(sorted(DTYPES)))
def test_a_region_is_what_indexing_gives(tmp_path_factory: Any, drawn: Any, dtype: str) -> None:
    shape, region = drawn
    path = tmp_path_factory.mktemp("region") / "a.safetensors"
    tensors = {"before": numbered([3], torch.uint8), "a": numbered(shape, DTYPES[dtype])}
    save_file(tensors, path)
    got = SafetensorsFiles.open(path).find("a", dtype, shape).read(region)
    expected = tensors["a"][region]
    assert got.is_contiguous()
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert torch.equal(got.flatten().view(torch.uint8), expected.contiguous().flatten().view(torch.uint8))


@pytest.mark.parametrize(
    ("shape", "region"),
    [
        ((7, 3000), (slice(1, 6), slice(500, 2500))),  # each row a run of its own
        ((3000, 700), (slice(0, 2999), slice(350, 700))),  # short runs, and what lies between them
        ((5, 70, 9, 200), (slice(2, 5), slice(3, 69), slice(1, 9), slice(0, 100))),
        ((6, 80, 9, 200), (slice(2, 5), slice(3, 69), slice(0, 9), slice(0, 200))),  # whole behind the second dim
    ],
)
def test_large_regions_too(tmp_path: Path, shape: Any, region: Any) -> None:
    tensor = torch.randn(shape)
    save_file({"a": tensor}, tmp_path / "a.safetensors")
    got = SafetensorsFiles.open(tmp_path / "a.safetensors").find("a", "float32", shape).read(region)
    assert torch.equal(got, tensor[region])


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=4).filter(lambda name: name.isprintable()),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(1, 4), max_size=3)),
        min_size=1,
        max_size=8,
    )
)
def test_written_files_are_those_of_the_library(tmp_path_factory: Any, drawn: Any) -> None:
    path = tmp_path_factory.mktemp("written") / "a.safetensors"
    tensors = {name: numbered(shape, DTYPES[dtype]) for name, (dtype, shape) in drawn.items()}
    layouts = {name: StoredLayout(dtype, tuple(shape)) for name, (dtype, shape) in drawn.items()}
    write_safetensors(path, layouts, lambda name: tensors[name].reshape(-1).split(5))
    assert path.read_bytes() == save(tensors)


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c", "gap0", "gap1"]),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 20), max_size=3)),
        min_size=1,
    )
)
def test_aligned_files_are_files_too(tmp_path_factory: Any, drawn: Any) -> None:
    path = tmp_path_factory.mktemp("aligned") / "a.safetensors"
    tensors = {name: numbered(shape, DTYPES[dtype]) for name, (dtype, shape) in drawn.items()}
    layouts = {name: StoredLayout(dtype, tuple(shape)) for name, (dtype, shape) in drawn.items()}
    write_safetensors(path, layouts, lambda name: tensors[name].reshape(-1).split(5), 64)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    places = header.parse(content[8 : 8 + length], len(content))
    for name, tensor in load_file(path).items():
        if name in tensors:
            assert places[name].begin % 64 == 0
            assert torch.equal(tensor.flatten().view(torch.uint8), tensors[name].flatten().view(torch.uint8))
        else:
            assert name.startswith("gap")
    assert tensors.keys() <= places.keys()


ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data_offsets": [0, 20]}, "does not fit its bytes, 0 to 20"),
        ({"data_offsets": [8, 32]}, "does not fit its bytes, 8 to 32"),
        ({"data_offsets": [-24, 0]}, r"shape or offset \[2, 3\], -24"),
        ({"data_offsets": [0]}, "ValueError"),
        ({"shape": [-2, -3]}, r"shape or offset \[-2, -3\]"),
        ({"shape": [2.0, 3]}, r"shape or offset \[2.0, 3\]"),
        ({"shape": None}, "TypeError"),
        ({"dtype": "F4"}, "has the dtype 'F4'"),
        ({"dtype": []}, r"has the dtype \[\]"),
        ({"shape": [True, 6]}, r"shape or offset \[True, 6\]"),
        ({"data_offsets": [0, 10**400]}, "does not fit"),
        # Shapes of no elements, whose other dims have no number in the runtime.
        ({"shape": [0, 10**400], "data_offsets": [0, 0]}, r"'w' has the invalid shape or offset \[0, 100000"),
        ({"shape": [0, 2**40, 2**40], "data_offsets": [0, 0]}, "'w' has the invalid shape"),
        ({"shape": [1] * 65}, "'w' has the invalid shape"),
    ],
)
def test_headers_that_make_no_sense_are_refused(change: dict[str, Any], says: str) -> None:
    text = json.dumps({"w": ENTRY}).encode()
    assert header.parse(text, 8 + len(text) + 24)["w"].begin == 8 + len(text)
    text = json.dumps({"w": {**ENTRY, **change}}).encode()
    with pytest.raises(WeightsError, match=says):
        header.parse(text, 8 + len(text) + 24)
    for text in (b"[]", b"{", b"3", b'{"w": 3}', b"\xff", b"[" * 100_000, b'{"w": ' * 100_000):
        with pytest.raises(WeightsError, match="Its header is malformed"):
            header.parse(text, 100)


def test_names_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    """Readers of JSON take the first value or the last one."""
    entry = json.dumps(ENTRY)
    text = f'{{"w": {entry}, "w": {entry}}}'.encode()
    with pytest.raises(WeightsError, match="the name 'w' twice"):
        header.parse(text, 8 + len(text) + 24)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {}, "weight_map": {"a": "model.safetensors"}}')
    with pytest.raises(WeightsError, match="the name 'weight_map' twice"):
        SafetensorsFiles.open(index)


def test_what_a_header_takes_has_a_bound() -> None:
    """Products of many large extents take a time quadratic in their number, and empty lists 20 times their text."""
    huge = json.dumps({"w": {**ENTRY, "shape": [2**62] * 200_000}}).encode()
    with pytest.raises(WeightsError, match="'w' has the invalid shape"):
        header.parse(huge, 8 + len(huge) + 24)
    lists = b'{"w": [' + b"[]," * (MOST_HEADER_VALUES // 2) + b"[]]}"
    with pytest.raises(WeightsError, match=f"more than {MOST_HEADER_VALUES} values"):
        header.parse(lists, 100)
    name = json.dumps({"w" * 10**6: {**ENTRY, "shape": [2]}}).encode()
    with pytest.raises(WeightsError) as caught:
        header.parse(name, 8 + len(name) + 24)
    assert len(str(caught.value)) < 1000


def test_bytes_of_a_file_are_of_one_tensor_each(tmp_path: Path) -> None:
    """As the library has it, but without a memory map of the file, for which there may be no room."""

    def written(a: list[int], b: list[int], size: int) -> Path:
        text = json.dumps(
            {
                name: {"dtype": "U8", "shape": [at[1] - at[0]], "data_offsets": at}
                for name, at in {"a": a, "b": b}.items()
            }
        ).encode()
        path = tmp_path / "a.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
        return path

    assert sorted(SafetensorsFiles.open(written([4, 6], [0, 4], 6)).tensors) == ["a", "b"]
    for a, b, size in (([0, 4], [3, 6], 6), ([0, 3], [4, 6], 6), ([0, 4], [4, 6], 7)):
        with pytest.raises(WeightsError, match=r"begins at byte|end at byte"):
            SafetensorsFiles.open(written(a, b, size))
    zeros = tmp_path / "zeros.safetensors"
    with zeros.open("wb") as file:
        file.write((2**20).to_bytes(8, "little"))
        file.truncate(2**36)  # 64 GiB, none of which is on the disk
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**35, limits[1]))
    try:
        with pytest.raises(WeightsError, match="Its header is malformed"):
            SafetensorsFiles.open(zeros)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="float128"):
        write_safetensors(tmp_path / "a", {"w": StoredLayout("float128", (1,))}, lambda _: [])
    assert not list(tmp_path.iterdir())


def test_folders_indices_and_lists(tmp_path: Path) -> None:
    one, two = tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"
    save_file({"a": torch.ones(2)}, one, {"format": "pt"})
    save_file({"b": torch.ones(3)}, two)
    index = tmp_path / "model.safetensors.index.json"
    with pytest.raises(WeightsError, match="2 safetensors files and 0 indices"):
        SafetensorsFiles.open(tmp_path)
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": one.name, "b": two.name}}))
    for given_ in (tmp_path, index, str(index), [one, two], [str(two), one]):
        files = SafetensorsFiles.open(given_)
        assert sorted(files.tensors) == ["a", "b"]
        assert files.find("b", "float32", [3]).file == two
    assert sorted(SafetensorsFiles.open(one).tensors) == ["a"]


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("[]", "is not an index"),
        ("text", "is not an index"),
        ('{"weight_map": {"b": "model-1.safetensors"}}', "'b' in model-1.safetensors, which lacks it"),
        ('{"weight_map": {"a": "../model-1.safetensors"}}', "is not a file in its folder"),
        ('{"weight_map": {"a": "gone.safetensors"}}', r"gone.safetensors cannot be read"),
        ('{"weight_map": {"a": "\\u0000"}}', "is not a file in its folder"),
        ('{"weight_map": {"a": 1}}', "is not a file in its folder"),
        ('{"weight_map": {"a": ".."}}', "cannot be read"),
        (json.dumps({"weight_map": {"a": "x" * 10**5}}), "is not a file in its folder"),
        ('{"weight_map": {"a": "model-1.safetensors", "c": "model-2.safetensors"}}', "both model-1.* the tensor 'a'"),
        ('{"weight_map": [["a", "model-1.safetensors"]]}', "is not an index"),
        ("[" * 100_000, "nested more than"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, index: str, says: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"a": torch.ones(2), "c": torch.ones(2)}, tmp_path / "model-2.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=says) as caught:
        SafetensorsFiles.open(tmp_path)
    assert len(str(caught.value)) < 1000


def test_bad_files_are_named(tmp_path: Path) -> None:
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    save_file({"a": torch.ones(2)}, other)
    with pytest.raises(WeightsError, match=r"Both .*a.safetensors and .*b.safetensors have the tensor 'a'"):
        SafetensorsFiles.open([path, other])
    stored = SafetensorsFiles.open(path).find("a", "float32", [1000])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=r"a.safetensors has changed since its header was read, so 'a' is unknown"):
        stored.read((slice(0, 1000),))
    with pytest.raises(WeightsError, match=r"a.safetensors cannot be read as a safetensors file"):
        SafetensorsFiles.open(path)
    path.unlink()
    with pytest.raises(WeightsError, match=r"a.safetensors cannot be read"):
        stored.read((slice(0, 1000),))
    with pytest.raises(WeightsError, match=r"a.safetensors cannot be read"):
        SafetensorsFiles.open(path)
    with pytest.raises(WeightsError, match="No weights file"):
        SafetensorsFiles.open([])


def test_a_tensor_of_another_shape_or_dtype_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(2, 3, dtype=torch.bfloat16)}, path)
    files = SafetensorsFiles.open(path)
    assert files.find("a", "bfloat16", [2, 3]).shape == (2, 3)
    with pytest.raises(WeightsError, match=r"'a' of .*a.safetensors is bfloat16\[2, 3\]; the graph has it as bfloat16"):
        files.find("a", "bfloat16", [3, 2])
    with pytest.raises(WeightsError, match=r"is bfloat16\[2, 3\]; the graph has it as float32"):
        files.find("a", "float32", [2, 3])
    with pytest.raises(WeightsError, match=r"no tensor 'b' in .*a.safetensors, which has 1"):
        files.find("b", "float32", [2, 3])


def _in_place(path: Path) -> None:
    """Other data of the same size, with the old modification time put back."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _exchanged(path: Path) -> None:
    """Another file of the same size and modification time at the same path."""
    before, other = path.stat(), path.with_suffix(".other")
    save_file({"a": torch.zeros(1000)}, other)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, path)


@pytest.mark.parametrize("change", [_in_place, _exchanged])
def test_data_that_is_not_of_the_header_that_was_read_is_refused(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    stored = SafetensorsFiles.open(path).find("a", "float32", [1000])
    size, modified = path.stat().st_size, path.stat().st_mtime_ns
    change(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (size, modified)
    with pytest.raises(WeightsError, match="has changed since its header was read"):
        stored.read((slice(0, 1000),))


@pytest.mark.parametrize("suffix", [".safetensors", ".safetensors.index.json"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    os.mkfifo(path)
    for given_ in (path, tmp_path):
        with pytest.raises(WeightsError, match="not a regular file"):
            SafetensorsFiles.open(given_)


@pytest.mark.parametrize(
    ("name", "length", "says"),
    [
        ("model.safetensors", 2**33, "its header has 0 of"),
        ("model.safetensors.index.json", 2**33, f"at most {MOST_INDEX_BYTES} are read"),
    ],
)
def test_sparse_files_are_not_read_whole(tmp_path: Path, name: str, length: int, says: str) -> None:
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, length)
    with pytest.raises(WeightsError, match=says):
        SafetensorsFiles.open(tmp_path / name)


def test_the_length_of_a_header_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((MOST_HEADER_BYTES + 1).to_bytes(8, "little"))
    os.truncate(path, 2**33)
    with pytest.raises(WeightsError, match=f"at most {MOST_HEADER_BYTES} are read"):
        SafetensorsFiles.open(path)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "/proc/self/mem", "/dev/zero", "\ud800"])
def test_paths_that_lead_to_no_file(path: str) -> None:
    with pytest.raises(WeightsError, match="cannot be read"):
        SafetensorsFiles.open(path)


def test_an_empty_shard_has_no_blocks() -> None:
    weight = TensorPlan("w0", (4, 0), "float32", 0, TensorShardSpec.replicated(2))
    assert list(shard_blocks(Constant(hidet.zeros([4, 0])), weight, DeviceMesh((1,)), (0,))) == []
