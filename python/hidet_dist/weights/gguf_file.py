"""GGUF files: their metadata, and their tensors, which are read and dequantized by rows when they are needed.

The format is a header of pairs of keys and values, a table of tensors, and the tensors' bytes
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The ``gguf`` package has the reference of dequantization.
Its reader makes an array of each element of a list, which takes seconds for a vocabulary, and trusts the counts of a
file; so headers are read here.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hidet_dist.checks import is_whole, shown
from hidet_dist.errors import WeightsError
from hidet_dist.files import open_regular, state
from hidet_dist.limits import MOST_GGUF_ENTRIES, MOST_GGUF_HEADER_BYTES
from hidet_dist.weights.panels import StoredPrecision
from hidet_dist.weights.stored_groups import Groups

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # 1 counted in 32 bits
_ALIGNMENT = 32  # of tensors, unless general.alignment says otherwise
_MOST_ALIGNMENT = 2**20
_MOST_DIMS = 4  # of the library that reads such files
_READ_BYTES = 2**22  # of a header at once

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The codes of values of fixed size, as characters of :mod:`struct`."""
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Encoding:
    """How the elements of a tensor are stored: in blocks of ``elements`` along its last dim, each of ``nbytes``.

    ``dtype`` is hidet's name of the dtype of the elements after they are read.
    """

    name: str
    elements: int
    nbytes: int
    dtype: str = "float32"


ENCODINGS: Mapping[int, Encoding] = {
    0: Encoding("F32", 1, 4),
    1: Encoding("F16", 1, 2, "float16"),
    30: Encoding("BF16", 1, 2, "bfloat16"),
    2: Encoding("Q4_0", 32, 18),
    3: Encoding("Q4_1", 32, 20),
    6: Encoding("Q5_0", 32, 22),
    7: Encoding("Q5_1", 32, 24),
    8: Encoding("Q8_0", 32, 34),
    12: Encoding("Q4_K", 256, 144),
    13: Encoding("Q5_K", 256, 176),
    14: Encoding("Q6_K", 256, 210),
}
"""The encodings that are read, by their codes in the format."""


_GROUP = 32  # elements of each scale of most encodings that are taken as they are
_SMALL_GROUP = 16  # of Q6_K


def _halves(blocks: torch.Tensor, number: int) -> torch.Tensor:
    """Read the float16 number of each block as float32[rows, blocks]."""
    return blocks[..., 2 * number : 2 * number + 2].contiguous().view(torch.float16).float()[..., 0]


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpack elements of 4 bits: first the low halves of all bytes of the last dim, then the high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _q8_0(blocks: torch.Tensor) -> Groups:
    return Groups(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _halves(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> Groups:
    return Groups(_nibbles(blocks[..., 2:]).flatten(1), _halves(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> Groups:
    return Groups(_nibbles(blocks[..., 4:]).flatten(1), _halves(blocks, 0), _halves(blocks, 1))


def _q4_k(blocks: torch.Tensor) -> Groups:
    """Read blocks of eight groups, whose scales and minimums are multiples, of 6 bits, of two float16 numbers."""
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6) << 4], -1)
    minimums = torch.cat([middle & 63, (high >> 4) | (middle >> 6) << 4], -1)
    elements = _nibbles(blocks[..., 16:].unflatten(-1, (4, _GROUP)))
    return Groups(
        elements.flatten(1),
        (_halves(blocks, 0)[..., None] * scales.float()).flatten(1),
        -(_halves(blocks, 1)[..., None] * minimums.float()).flatten(1),
    )


def _q6_k(blocks: torch.Tensor) -> Groups:
    """Read blocks of sixteen groups, whose scales are multiples, of 8 bits, of a float16 number.

    Each half of a block has 64 bytes with the low four bits of its elements, and 32 with the high two bits.
    """
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    high = torch.cat([blocks[..., 128:192].unflatten(-1, (2, 32)) >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    elements = (low | high << 4).to(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return Groups(elements.flatten(1), (_halves(blocks, 104)[..., None] * scales).flatten(1))


_GROUPS_OF: Mapping[int, Callable[[torch.Tensor], Groups]] = {8: _q8_0, 2: _q4_0, 3: _q4_1, 12: _q4_k, 14: _q6_k}
"""What reads the groups of uint8[rows, blocks, bytes], by the code of an encoding."""

_PRECISION_OF: Mapping[int, StoredPrecision] = {
    8: StoredPrecision("int8", _GROUP, exact=True),
    2: StoredPrecision("int4", _GROUP, exact=True),
    3: StoredPrecision("uint4", _GROUP, exact=True),
    12: StoredPrecision("wide_uint4", _GROUP, exact=True),
    14: StoredPrecision("wide_int8", _SMALL_GROUP, exact=True),
}
"""The precision that holds such groups without rounding."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a GGUF file.

    Attributes
    ----------
    file: the file.
    name: its name in the file.
    code: the code of its encoding, one of :data:`ENCODINGS`.
    shape: its extents in elements, the slowest first.
    begin: the byte of the file at which it begins.
    state: the state of the file when its header was read (:func:`hidet_dist.files.state`).
    """

    file: Path
    name: str
    code: int
    shape: tuple[int, ...]
    begin: int
    state: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """hidet's name of the dtype of the elements that are read."""
        return ENCODINGS[self.code].dtype

    @property
    def nbytes(self) -> int:
        """Its size in the file in bytes."""
        encoding = ENCODINGS[self.code]
        return math.prod(self.shape) // encoding.elements * encoding.nbytes

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Read rows ``begin`` to ``end`` of the matrix ``[*, shape[-1]]``, dequantized.

        Raises
        ------
        WeightsError
            When the file cannot be read, or has changed since its header was read.
        """
        encoding = ENCODINGS[self.code]
        data = self._bytes_of(begin, end)
        shape = (end - begin, self.shape[-1])
        if encoding.elements == 1:
            return torch.frombuffer(data, dtype=getattr(torch, encoding.dtype)).reshape(shape)
        packed = torch.frombuffer(data, dtype=torch.uint8).reshape(shape[0], -1).numpy()
        dequantize = importlib.import_module("gguf.quants").dequantize
        kinds = importlib.import_module("gguf.constants").GGMLQuantizationType
        return torch.from_numpy(dequantize(packed, kinds(self.code))).reshape(shape)

    def _bytes_of(self, begin: int, end: int) -> bytearray:
        """Read the bytes of rows ``begin`` to ``end``. Raises WeightsError."""
        encoding = ENCODINGS[self.code]
        row_bytes = self.shape[-1] // encoding.elements * encoding.nbytes
        data = bytearray((end - begin) * row_bytes)
        try:
            with os.fdopen(open_regular(self.file), "rb", buffering=0) as file:
                self._check(file)
                file.seek(self.begin + begin * row_bytes)
                rest = memoryview(data)
                while rest:
                    got = file.readinto(rest)
                    if not got:
                        raise WeightsError(f"{self.file} ends within the tensor {self.name!r}.")
                    rest = rest[got:]
                self._check(file)
        except (OSError, ValueError) as error:
            if isinstance(error, WeightsError):
                raise
            raise WeightsError(f"The weights file {self.file} cannot be read: {error}.") from error
        return data

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """Read the elements of ``region``, a slice with integer bounds and step 1 for each dim; contiguous.

        Raises WeightsError as :meth:`rows` does.
        """
        counts = [part.stop - part.start for part in region]
        if not math.prod(counts):
            return torch.empty(counts, dtype=getattr(torch, self.dtype))
        last = region[-1]
        parts = [self.rows(begin, end)[:, last.start : last.stop] for begin, end in self._runs(region)]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.reshape(counts).contiguous()

    def _runs(self, region: Sequence[slice]) -> list[list[int]]:
        """List the rows of a region, from the first to behind the last of neighbours, which are read at once."""
        starts = [0]
        step = 1
        for dim in range(len(self.shape) - 2, -1, -1):
            part = region[dim]
            starts = [start + index * step for index in range(part.start, part.stop) for start in starts]
            step *= self.shape[dim]
        runs: list[list[int]] = []
        for start in starts:
            if runs and runs[-1][1] == start:
                runs[-1][1] = start + 1
            else:
                runs.append([start, start + 1])
        return runs

    @property
    def stored_precision(self) -> StoredPrecision | None:
        """The precision that holds the elements without rounding; None if there is none."""
        return _PRECISION_OF.get(self.code)

    def groups(self, region: Sequence[slice]) -> Groups:
        """Read the groups of ``region``, whose last dim is of whole groups, without rounding.

        Raises WeightsError as :meth:`rows` does.
        """
        counts, last = [part.stop - part.start for part in region], region[-1]
        group = _PRECISION_OF[self.code].group
        elements, scales, minimums = [], [], []
        for begin, end in self._runs(region):
            rows = torch.frombuffer(self._bytes_of(begin, end), dtype=torch.uint8)
            blocks = rows.reshape(end - begin, -1, ENCODINGS[self.code].nbytes)
            found = _GROUPS_OF[self.code](blocks)
            elements.append(found.elements[:, last.start : last.stop])
            wanted = slice(last.start // group, last.stop // group)
            scales.append(found.scales[:, wanted])
            if found.minimums is not None:
                minimums.append(found.minimums[:, wanted])
        per_group = [*counts[:-1], counts[-1] // group]
        return Groups(
            torch.cat(elements).reshape(counts),
            torch.cat(scales).reshape(per_group),
            torch.cat(minimums).reshape(per_group) if minimums else None,
        )

    def _check(self, file: Any) -> None:
        if state(os.fstat(file.fileno())) != self.state:
            raise WeightsError(
                f"{self.file} has changed since its header was read, so {self.name!r} is unknown. Open the file again."
            )


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file: its metadata by key, with lists as lists, and its tensors by name. No tensor is read."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Read the header of a file.

        Raises
        ------
        WeightsError
            When the file is missing, is no GGUF file of version 2 or 3 and little endian, is truncated, has counts,
            sizes or offsets that lead out of it, has a key or a tensor twice, two tensors in the same bytes, or a
            tensor in an encoding that is not one of :data:`ENCODINGS`.
        """
        path = Path(path)
        try:
            with os.fdopen(open_regular(path), "rb", buffering=0) as file:
                return _opened(path, file)
        except (OSError, ValueError) as error:
            if isinstance(error, WeightsError):
                raise
            raise WeightsError(f"{path} cannot be read as a GGUF file: {error}.") from error

    def value(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a value of the metadata, or ``default`` if there is none.

        Raises
        ------
        WeightsError
            When it is of another type.
        """
        value = self.metadata.get(key)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(x.__name__ for x in kinds)
            raise WeightsError(f"{self.path}: {key} must be of type {names}; it is {shown(value)}.")
        return value


class _Header:
    """The bytes at the beginning of a file, read as far as they are asked for."""

    def __init__(self, file: BinaryIO, size: int):
        self.file = file
        self.size = size
        self.data = bytearray()
        self.position = 0
        self.entries = 0

    def take(self, count: int) -> int:
        """Make the next ``count`` bytes available, and return where they begin in ``data``. Raises ValueError."""
        begin, end = self.position, self.position + count
        if end > self.size:
            raise ValueError(f"it ends after {self.size} bytes, and its header goes on to byte {end} or further")
        if end > MOST_GGUF_HEADER_BYTES:
            raise ValueError(f"its header has more than {MOST_GGUF_HEADER_BYTES} bytes, the most that are read")
        while len(self.data) < end:
            got = self.file.read(max(_READ_BYTES, end - len(self.data)))
            if not got:
                raise ValueError(f"it ends after {len(self.data)} bytes, within its header")
            self.data += got
        self.position = end
        return begin

    def numbers(self, layout: str) -> tuple[Any, ...]:
        """Read numbers, as :mod:`struct` describes them."""
        layout = f"<{layout}"
        begin = self.take(struct.calcsize(layout))
        return struct.unpack_from(layout, self.data, begin)

    def text(self) -> str:
        """Read a string."""
        (length,) = self.numbers("Q")
        begin = self.take(length)
        return self.data[begin : begin + length].decode("utf-8")

    def count(self, what: str, least_bytes: int) -> int:
        """Read a number of entries, each of which has at least so many bytes."""
        (count,) = self.numbers("Q")
        if count > (self.size - self.position) // least_bytes:
            raise ValueError(f"it counts {count} {what}, more than its {self.size} bytes hold")
        self.entries += count
        if self.entries > MOST_GGUF_ENTRIES:
            raise ValueError(
                f"it counts {count} {what}, which makes {self.entries} entries of its header; at most "
                f"{MOST_GGUF_ENTRIES} are read"
            )
        return int(count)

    def value(self, key: str) -> Any:
        """Read a value and its type."""
        (code,) = self.numbers("I")
        if code in _SCALARS:
            return self.numbers(_SCALARS[code])[0]
        if code == _STRING:
            return self.text()
        if code != _ARRAY:
            raise ValueError(f"{shown(key)} has the unknown type {code}")
        (of,) = self.numbers("I")
        if of in _SCALARS:
            count = self.count(f"elements of {shown(key)}", struct.calcsize(f"<{_SCALARS[of]}"))
            return list(self.numbers(f"{count}{_SCALARS[of]}"))
        if of != _STRING:
            raise ValueError(f"{shown(key)} is a list of the type {of}, which is not read")
        return [self.text() for _ in range(self.count(f"texts of {shown(key)}", 8))]


def _opened(path: Path, file: Any) -> GgufFile:
    """Read the header of an open file. Raises ValueError."""
    status = os.fstat(file.fileno())
    header = _Header(file, status.st_size)
    begin = header.take(len(_MAGIC))
    if bytes(header.data[begin : begin + len(_MAGIC)]) != _MAGIC:
        raise ValueError(f"it does not begin with {_MAGIC.decode()}")
    (version,) = header.numbers("I")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}, and versions {_VERSIONS[0]} and {_VERSIONS[1]} are read")
    tensor_count = header.count("tensors", 8 + 4 + 8 + 4 + 8)
    metadata: dict[str, Any] = {}
    for _ in range(header.count("keys", 8 + 4 + 1)):
        key = header.text()
        _once(metadata, key, "key")
        metadata[key] = header.value(key)
    found: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for _ in range(tensor_count):
        name = header.text()
        _once(found, name, "tensor")
        found[name] = _entry(header, name)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not is_whole(alignment, 1, _MOST_ALIGNMENT) or alignment & (alignment - 1):
        raise ValueError(
            f"general.alignment must be a power of two from 1 to {_MOST_ALIGNMENT}; it is {shown(alignment)}"
        )
    data = -(-header.position // alignment) * alignment
    tensors = {}
    for name, (code, shape, offset) in found.items():
        tensor = GgufTensor(path, name, code, shape, data + offset, state(status))
        if tensor.begin + tensor.nbytes > status.st_size:
            raise ValueError(
                f"the tensor {shown(name)} is at the bytes {tensor.begin} to {tensor.begin + tensor.nbytes}, and the "
                f"file has {status.st_size}"
            )
        if offset % alignment:
            raise ValueError(
                f"the tensor {shown(name)} is at {offset} bytes behind the header, which is no multiple of the "
                f"alignment, {alignment}"
            )
        tensors[name] = tensor
    _check_apart(tensors.values())
    return GgufFile(path, metadata, tensors)


def _check_apart(tensors: Iterable[GgufTensor]) -> None:
    """Raise ValueError if two tensors share bytes."""
    ordered = sorted(tensors, key=lambda tensor: tensor.begin)
    for before, tensor in itertools.pairwise(ordered):
        if tensor.begin < before.begin + before.nbytes:
            raise ValueError(
                f"the tensors {shown(before.name)} and {shown(tensor.name)} share bytes: the first one ends at byte "
                f"{before.begin + before.nbytes}, and the second one begins at byte {tensor.begin}"
            )


def _entry(header: _Header, name: str) -> tuple[int, tuple[int, ...], int]:
    """Read the code, the shape and the offset of a tensor. Raises ValueError."""
    (dims,) = header.numbers("I")
    if not 1 <= dims <= _MOST_DIMS:
        raise ValueError(f"the tensor {shown(name)} has {dims} dims, and must have 1 to {_MOST_DIMS}")
    shape = tuple(reversed(header.numbers(f"{dims}Q")))  # the format has the fastest dim first
    code, offset = header.numbers("IQ")
    if code not in ENCODINGS:
        known = ", ".join(encoding.name for encoding in ENCODINGS.values())
        raise ValueError(
            f"the tensor {shown(name)} has the encoding of code {code}, and {known} are read: convert the model to one "
            "of these"
        )
    block = ENCODINGS[code].elements
    if not all(shape) or shape[-1] % block:
        raise ValueError(
            f"the tensor {shown(name)} has the shape {shown(list(shape))}, and no dim may be 0, and its rows must be "
            f"of blocks of {block} elements"
        )
    return int(code), shape, int(offset)


def _once(known: Mapping[str, Any], name: str, kind: str) -> None:
    if name in known:
        raise ValueError(f"it has the {kind} {shown(name)} twice")


@dataclass(frozen=True)
class Reordered:
    """Another tensor with its slowest dim in another order: element ``i`` of it is element ``order[i]`` there."""

    tensor: GgufTensor
    order: torch.Tensor

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """Read the elements of ``region``; contiguous. Raises WeightsError as :meth:`GgufTensor.rows` does."""
        order = self.order[region[0]]
        if not len(order):
            return self.tensor.read(region)
        begin = int(order.min())
        return self.tensor.read([slice(begin, int(order.max()) + 1), *region[1:]])[order - begin]

    @property
    def stored_precision(self) -> StoredPrecision | None:
        """The precision that holds the elements without rounding; None if there is none."""
        return self.tensor.stored_precision

    def groups(self, region: Sequence[slice]) -> Groups:
        """Read the groups of ``region``, whose last dim is of whole groups; see :meth:`GgufTensor.groups`."""
        order = self.order[region[0]]
        begin = int(order.min())
        read = self.tensor.groups([slice(begin, int(order.max()) + 1), *region[1:]])
        return read.select(order - begin)


@dataclass(frozen=True)
class Shifted:
    """Another tensor with a number added to each element, in float32."""

    tensor: GgufTensor
    offset: float

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """Read the elements of ``region``; contiguous. Raises WeightsError as :meth:`GgufTensor.rows` does."""
        return self.tensor.read(region).float() + self.offset
