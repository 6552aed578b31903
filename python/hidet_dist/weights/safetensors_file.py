"""Safetensors files that are larger than memory: read slice by slice, and written block by block.

The safetensors library reads through a memory map, whose pages count as the process's memory until the file is closed,
and writes only tensors in memory. Here a slice only takes the memory of its elements.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from hidet_dist.checks import shown
from hidet_dist.errors import WeightsError
from hidet_dist.files import open_regular, parse_json, read_text, state
from hidet_dist.limits import MOST_HEADER_BYTES, MOST_HEADER_VALUES, MOST_INDEX_BYTES
from hidet_dist.weights.header import ITEMSIZE, LENGTH_BYTES, LIBRARY_ALIGNMENT, StoredLayout, arrange, parse

_TORCH = {name: getattr(torch, "float8_e4m3fn" if name == "float8_e4m3" else name) for name in ITEMSIZE}

_SHORT_RUN_BYTES = 4096  # a page: reading a shorter gap between two runs costs less than another call
_MOST_FILE_NAME = 255  # characters: the most bytes of one in Linux's file systems
_SPAN_BYTES = 2**24  # bytes that are read at once, gaps between runs included


def own_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate memory that returns to the system with the tensor; a heap that grows block by block would keep it."""
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).reshape(tuple(shape))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """View the memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: hidet's name of its dtype, its shape (elements), and the byte at which it begins.

    ``state`` is the state of the file when its header was read (:func:`hidet_dist.files.state`).
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    state: tuple[int, ...]

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """Read the elements of ``region``, a slice with integer bounds and step 1 for each dim; contiguous.

        Raises
        ------
        WeightsError
            When the file cannot be read, or has changed since its header was read.
        """
        dtype = _TORCH[self.dtype]
        shape = [part.stop - part.start for part in region]
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        result = own_memory(shape, dtype)
        with self._opened() as file:
            self._check(file)  # the header may belong to other data
            self._fill(file, result, region)
            self._check(file)
        return result

    def _check(self, file: int) -> None:
        if state(os.fstat(file)) != self.state:
            raise WeightsError(
                f"{self.file} has changed since its header was read, so {self.name!r} is unknown. Open the file again."
            )

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            file = open_regular(self.file)
        except (OSError, ValueError) as error:
            raise WeightsError(f"The weights file {self.file} cannot be read: {error}.") from error
        try:
            yield file
        finally:
            os.close(file)

    def _fill(self, file: int, result: torch.Tensor, region: Sequence[slice]) -> None:
        steps = [math.prod(self.shape[dim + 1 :]) * result.element_size() for dim in range(len(self.shape))]
        counts = [part.stop - part.start for part in region]
        # A run of rows along ``dim`` is contiguous: the dims after it are whole.
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
                span = own_memory([many, *self.shape[dim + 1 :]], result.dtype)
                self._fill_bytes(file, _bytes_of(span), begin)
                place.copy_(span[(slice(None), *inner)])

    def _fill_bytes(self, file: int, memory: memoryview, begin: int) -> None:
        """Fill memory with the bytes from ``begin`` on."""
        done = 0
        while done < len(memory):
            got = os.preadv(file, [memory[done:]], begin + done)
            if not got:
                raise WeightsError(
                    f"{self.file} ends within the tensor {self.name!r}: it was truncated after it was opened."
                )
            done += got


@dataclass(frozen=True)
class SafetensorsFiles:
    """The tensors of one or several safetensors files, by name. Their data is not read."""

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
        paths = [Path(files)] if isinstance(files, str | Path) else [Path(file) for file in files]
        if not paths:
            raise WeightsError("No weights file is given.")
        tensors: dict[str, StoredTensor] = {}
        for path in paths:
            for name, tensor in _open(path).items():
                if name in tensors:
                    raise WeightsError(f"Both {tensors[name].file} and {tensor.file} have the tensor {shown(name)}.")
                tensors[name] = tensor
        return cls(tensors, ", ".join(map(str, paths)))

    def find(self, name: str, dtype: str, shape: Sequence[int]) -> StoredTensor:
        """Find a tensor by name; it must have the dtype (hidet's name) and the shape (elements).

        Raises
        ------
        WeightsError
            When there is none, or it has another dtype or shape; the message names the tensor and the file.
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
    try:
        indices = sorted(path.glob("*.safetensors.index.json")) if path.is_dir() else []
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
        is_folder = path.is_dir()
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}.") from error
    if is_folder:
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
    """Open the files of an index: its ``weight_map`` maps tensors to files in the same folder."""
    try:
        index = parse_json(read_text(path, MOST_INDEX_BYTES), MOST_HEADER_VALUES, unique=True)
        found = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(found, dict):
            raise ValueError("it has no 'weight_map' with the file of each tensor")
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} is not an index of safetensors files: {error}.") from error
    opened: dict[str, dict[str, StoredTensor]] = {}
    owner: dict[str, str] = {}
    tensors = {}
    for name, file in found.items():
        is_inside = isinstance(file, str) and "\0" not in file and Path(file).name == file
        if not is_inside or len(file) > _MOST_FILE_NAME:
            raise WeightsError(
                f"{path} puts the tensor {shown(name)} in {shown(file)}, which is not a file in its folder."
            )
        if file not in opened:
            opened[file] = _open_file(path.parent / file)
            for own in opened[file]:
                if owner.setdefault(own, file) != file:
                    raise WeightsError(
                        f"Of the files that {path} names, both {owner[own]} and {file} have the tensor {shown(own)}."
                    )
        if name not in opened[file]:
            raise WeightsError(f"{path} puts the tensor {shown(name)} in {file}, which lacks it.")
        tensors[name] = opened[file][name]
    return tensors


def _open_file(path: Path) -> dict[str, StoredTensor]:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            before = os.fstat(file.fileno())
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if not 0 < length <= min(MOST_HEADER_BYTES, before.st_size):
                raise WeightsError(
                    f"its header has {length} of {before.st_size} bytes; at most {MOST_HEADER_BYTES} are read"
                )
            places = parse(file.read(length), before.st_size)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read as a safetensors file: {str(error).rstrip('.')}.") from error
    file_state = state(before)
    return {name: StoredTensor(path, name, p.dtype, p.shape, p.begin, file_state) for name, p in places.items()}


def write_safetensors(
    path: Path,
    tensors: Mapping[str, StoredLayout],
    blocks: Callable[[str], Iterable[torch.Tensor]],
    alignment: int = LIBRARY_ALIGNMENT,
) -> None:
    """Write a safetensors file without holding its tensors.

    Parameters
    ----------
    path: Path
        The file.
    tensors: mapping
        The tensors to write, by name.
    blocks: callable
        Returns the elements of a tensor by name, row-major, in contiguous tensors of any size.
    alignment: int
        A multiple of 8. Each tensor begins at a multiple of this many bytes, so that it can be used in a memory map;
        with 8 the file is byte for byte the one that the safetensors library would write.

    Raises
    ------
    WeightsError
        When the format does not have a dtype.
    """
    head, places = arrange(tensors, alignment)
    with path.open("wb") as file:
        file.write(head)
        for name, place in places.items():
            assert file.tell() == place.begin
            if name not in tensors:
                file.write(bytes(place.nbytes))
                continue
            for block in blocks(name):
                file.write(_bytes_of(block))
                del block  # before the next one is made
            assert file.tell() == place.begin + place.nbytes
