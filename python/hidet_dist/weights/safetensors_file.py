"""Safetensors files too large to hold: read slice by slice, and written block by block.

The format is eight bytes with the length of a header (little endian), the header in JSON, and the tensors' bytes, row
by row (https://huggingface.co/docs/safetensors). The safetensors library reads through a memory map, whose pages count
as the process's memory until the file is closed, and writes only what is in memory; here a slice costs its own bytes.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch

from hidet_dist.errors import WeightsError

# The format's dtypes, in the order in which the library writes them, with their names in hidet and torch.
_CODES = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float8_e4m3": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES = {code: name for name, code in _CODES.items()}
_ORDER = {code: number for number, code in enumerate(_NAMES)}
_TORCH = {name: getattr(torch, "float8_e4m3fn" if name == "float8_e4m3" else name) for name in _CODES}

_LENGTH_BYTES = 8
_HEADER_ALIGNMENT = 8
_SHORT_RUN_BYTES = 4096  # a page: below it, reading what lies between two runs costs less than another call
_SPAN_BYTES = 2**24  # what is read at once where what lies between runs is read along


def _memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory that goes back to the system with the tensor: a heap that grew by block after block would keep it."""
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).reshape(tuple(shape))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: hidet's name of its dtype, its shape (elements), and the byte at which it begins."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.shape) * int(_TORCH[self.dtype].itemsize)

    def read_bytes(self, memory: memoryview) -> None:
        """Fill memory of ``nbytes`` bytes with the tensor, row by row. Raises WeightsError as :meth:`read` does."""
        with self._opened() as file:
            self._fill_bytes(file, memory, self.begin)

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """The elements of ``region``, a slice with whole bounds and step 1 for each dim; contiguous.

        Raises
        ------
        WeightsError
            When the file cannot be read, or is shorter than it was.
        """
        dtype = _TORCH[self.dtype]
        shape = [part.stop - part.start for part in region]
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        result = _memory(shape, dtype)
        with self._opened() as file:
            self._fill(file, result, region)
        return result

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            file = os.open(self.file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise WeightsError(f"The weights file {self.file} cannot be read: {error}.") from error
        try:
            yield file
        finally:
            os.close(file)

    def _fill(self, file: int, result: torch.Tensor, region: Sequence[slice]) -> None:
        steps = [math.prod(self.shape[dim + 1 :]) * result.element_size() for dim in range(len(self.shape))]
        counts = [part.stop - part.start for part in region]
        # Along ``dim`` a run of rows lies in one piece; the dims after it are whole.
        dim = len(region) - 1
        while dim > 0 and counts[dim] == self.shape[dim]:
            dim -= 1
        exact = dim
        while dim > 0 and counts[dim] * steps[dim] < _SHORT_RUN_BYTES:
            dim -= 1
        if not region:
            self._fill_bytes(file, _bytes_of(result), self.begin)
            return
        inner = tuple(slice(part.start, part.stop) for part in region[dim + 1 :])
        rows = counts[dim] if dim == exact else max(1, _SPAN_BYTES // steps[dim])
        outer = (range(part.start, part.stop) for part in region[:dim])
        for index, row in itertools.product(itertools.product(*outer), range(0, counts[dim], rows)):
            many = min(rows, counts[dim] - row)
            begin = self.begin + sum(i * step for i, step in zip(index, steps, strict=False))
            begin += (region[dim].start + row) * steps[dim]
            place = result[tuple(i - part.start for i, part in zip(index, region, strict=False))][row : row + many]
            if dim == exact:
                self._fill_bytes(file, _bytes_of(place), begin)
            else:
                span = _memory([many, *self.shape[dim + 1 :]], result.dtype)
                self._fill_bytes(file, _bytes_of(span), begin)
                place.copy_(span[(slice(None), *inner)])

    def _fill_bytes(self, file: int, memory: memoryview, begin: int) -> None:
        """Fill memory with the bytes from ``begin`` on."""
        done = 0
        while done < len(memory):
            got = os.preadv(file, [memory[done:]], begin + done)
            if not got:
                raise WeightsError(f"{self.file} ends within the tensor {self.name!r}: it was cut since it was opened.")
            done += got


@dataclass(frozen=True)
class SafetensorsFiles:
    """The tensors of one or several safetensors files, by name. Their data stays where it is."""

    tensors: Mapping[str, StoredTensor]
    where: str

    @classmethod
    def open(cls, files: str | Path | Sequence[str | Path]) -> SafetensorsFiles:
        """Read the headers of safetensors files, of those an index names, or of those in a folder.

        Raises
        ------
        WeightsError
            When a file is missing or malformed, an index names a tensor that its file lacks, or two files have a
            tensor of the same name.
        """
        given = [Path(files)] if isinstance(files, str | Path) else [Path(file) for file in files]
        if not given:
            raise WeightsError("No weights file is given.")
        tensors: dict[str, StoredTensor] = {}
        for path in given:
            for name, tensor in _open(path).items():
                if name in tensors:
                    raise WeightsError(f"Both {tensors[name].file} and {tensor.file} have the tensor {name!r}.")
                tensors[name] = tensor
        return cls(tensors, ", ".join(map(str, given)))

    def find(self, name: str, dtype: str, shape: Sequence[int]) -> StoredTensor:
        """The tensor of a name, which must have the dtype (hidet's name) and the shape (elements).

        Raises
        ------
        WeightsError
            When there is none, or it has another dtype or shape; it names the tensor and the file.
        """
        stored = self.tensors.get(name)
        if stored is None:
            raise WeightsError(f"There is no tensor {name!r} in {self.where}, which has {len(self.tensors)} tensors.")
        if (stored.dtype, stored.shape) != (dtype, tuple(shape)):
            raise WeightsError(
                f"The tensor {name!r} of {stored.file} is {stored.dtype}{list(stored.shape)}; "
                f"the graph has it as {dtype}{list(shape)}."
            )
        return stored


def _open(path: Path) -> dict[str, StoredTensor]:
    if path.is_dir():
        indices = sorted(path.glob("*.safetensors.index.json"))
        files = sorted(path.glob("*.safetensors"))
        if len(indices) == 1:
            return _open_index(indices[0])
        if len(files) != 1:
            raise WeightsError(
                f"The folder {path} has {len(files)} safetensors files and {len(indices)} indices of them; it must "
                "have one file or one index, or else name the files."
            )
        return _open_file(files[0])
    return _open_index(path) if path.suffix == ".json" else _open_file(path)


def _open_index(path: Path) -> dict[str, StoredTensor]:
    """``weight_map`` says in which file, beside the index, each tensor is."""
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} is no index of safetensors files: {type(error).__name__}: {error}.") from error
    opened: dict[str, dict[str, StoredTensor]] = {}
    tensors = {}
    for name, file in places:
        if not isinstance(file, str) or Path(file).name != file:
            raise WeightsError(f"{path} puts the tensor {name!r} in {file!r}, which is no file beside it.")
        if file not in opened:
            opened[file] = _open_file(path.parent / file)
        if name not in opened[file]:
            raise WeightsError(f"{path} puts the tensor {name!r} in {file}, which lacks it.")
        tensors[name] = opened[file][name]
    return tensors


def _open_file(path: Path) -> dict[str, StoredTensor]:
    try:
        with safetensors.safe_open(path, framework="pt"):
            pass  # refuses whatever is not as it must be: offsets, sizes, names
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise WeightsError(f"{path} cannot be read as a safetensors file: {error}.") from error
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _NAMES:
            raise WeightsError(f"The tensor {name!r} of {path} has the dtype {entry['dtype']}, which hidet has not.")
        begin = _LENGTH_BYTES + length + entry["data_offsets"][0]
        tensors[name] = StoredTensor(path, name, _NAMES[entry["dtype"]], tuple(entry["shape"]), begin)
    return tensors


@dataclass(frozen=True)
class Layout:
    """A tensor to be written: hidet's name of its dtype, and its shape in elements."""

    dtype: str
    shape: tuple[int, ...]


def write_safetensors(
    path: Path, tensors: Mapping[str, Layout], blocks: Callable[[str], Iterable[torch.Tensor]]
) -> None:
    """Write a safetensors file, byte for byte as the safetensors library would, without holding its tensors.

    Parameters
    ----------
    path: Path
        The file.
    tensors: mapping
        What it is to hold.
    blocks: callable
        Gives the elements of a tensor by its name, row by row, in contiguous tensors of any size.

    Raises
    ------
    WeightsError
        When a dtype is not one that the format has.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES:
            raise WeightsError(f"The tensor {name} has the dtype {tensor.dtype}, which safetensors files cannot hold.")
    ordered = sorted(tensors, key=lambda name: (_ORDER[_CODES[tensors[name].dtype]], name.encode()))
    header = {}
    begin = 0
    for name in ordered:
        code = _CODES[tensors[name].dtype]
        end = begin + math.prod(tensors[name].shape) * _TORCH[tensors[name].dtype].itemsize
        header[name] = {"dtype": code, "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for name in ordered:
            for block in blocks(name):
                file.write(_bytes_of(block))
            _, end = header[name]["data_offsets"]
            assert file.tell() == _LENGTH_BYTES + len(text) + end
