"""The header of a safetensors file: the place of each tensor. Needs neither torch nor the safetensors library.

The format is eight bytes with the length of a header (little endian), the header in JSON, and the tensors' bytes, row
by row (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hidet_dist.checks import is_whole, shown
from hidet_dist.errors import WeightsError
from hidet_dist.files import parse_json
from hidet_dist.limits import MOST_BYTES, MOST_DIMS, MOST_HEADER_VALUES

# hidet's names of the format's dtypes, in the order in which the library writes them, and the bytes of an element.
_DTYPES = {
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float8_e4m3": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
_NAMES = {code: name for name, (code, _) in _DTYPES.items()}
_ORDER = {name: number for number, name in enumerate(_DTYPES)}

ITEMSIZE = {name: size for name, (_, size) in _DTYPES.items()}
"""The bytes per element of each dtype of the format, by hidet's name."""

_FIELDS = {"data_offsets", "dtype", "shape"}

LENGTH_BYTES = 8
"""The bytes of the length field before the header."""

LIBRARY_ALIGNMENT = 8
"""The multiple of bytes to which the safetensors library aligns the tensors' data."""


@dataclass(frozen=True)
class StoredLayout:
    """A tensor in a file: hidet's name of its dtype, and its shape in elements.

    Where the parts of devices are unequal, ``factors`` has dims, each with the name of a part by which its extent is to
    be multiplied (:mod:`hidet_dist.spec.parts`).
    """

    dtype: str
    shape: tuple[int, ...]
    factors: tuple[tuple[int, str], ...] = field(default=(), kw_only=True)

    @property
    def nbytes(self) -> int:
        """Its size in bytes, but for ``factors``."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def at(self, parts: Mapping[str, int]) -> StoredLayout:
        """Return the layout on a device with these parts. Raises KeyError for an unknown name."""
        if not self.factors:
            return self
        shape = list(self.shape)
        for dim, name in self.factors:
            shape[dim] *= parts[name]
        return StoredLayout(self.dtype, tuple(shape))


@dataclass(frozen=True)
class LocatedTensor(StoredLayout):
    """A tensor in a file, and the byte of the file at which it begins."""

    begin: int


def parse(text: bytes, file_bytes: int) -> dict[str, LocatedTensor]:
    """Locate each tensor, in the order of the header.

    Parameters
    ----------
    text: bytes
        The header, without its length.
    file_bytes: int
        The size of the whole file in bytes.

    Raises
    ------
    WeightsError
        When the header is malformed, or places a tensor outside the file; when bytes of the file are of no tensor, or
        of several.
    """
    try:
        header = parse_json(text, MOST_HEADER_VALUES, unique=True)
        if not isinstance(header, dict):
            raise WeightsError("Its header is malformed: it is no object of JSON with an entry for each tensor.")
        header.pop("__metadata__", None)
        data = LENGTH_BYTES + len(text)
        places = {}
        for name, entry in header.items():
            if not isinstance(entry, dict) or not entry.keys() >= _FIELDS:
                fields = ", ".join(sorted(_FIELDS))
                raise WeightsError(f"Its header is malformed: the tensor {shown(name)} has not the fields {fields}.")
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if not all(is_whole(extent, 0) for extent in (*shape, begin, end)) or not _is_countable(shape):
                raise WeightsError(
                    f"The tensor {shown(name)} has the invalid shape or offset {shown(entry['shape'])}, {shown(begin)}."
                )
            place = LocatedTensor(_name(name, entry["dtype"]), shape, data + begin)
            if place.nbytes != end - begin or place.begin + place.nbytes > file_bytes:
                raise WeightsError(
                    f"The size of the tensor {shown(name)} does not fit its bytes, {shown(begin)} to {shown(end)}."
                )
            places[name] = place
        _check_gaps(places, data, file_bytes)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"Its header is malformed: {type(error).__name__}: {error}.") from error
    return places


def _is_countable(shape: Sequence[int]) -> bool:
    """Whether the runtime has a number for the elements of a shape, even without its dims of no elements.

    A product of numbers without a bound would take a time quadratic in their count.
    """
    is_short = len(shape) <= MOST_DIMS and max(shape, default=0) <= MOST_BYTES
    return is_short and math.prod(extent or 1 for extent in shape) <= MOST_BYTES


def _check_gaps(places: Mapping[str, LocatedTensor], begin: int, end: int) -> None:
    """Check that tensors fill ``begin`` to ``end`` one after the other, as the format has it. Raises WeightsError."""
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if place.begin != begin:
            raise WeightsError(
                f"The tensor {shown(name)} begins at byte {place.begin}; the one before it ends at {begin}."
            )
        begin += place.nbytes
    if begin != end:
        raise WeightsError(f"The tensors end at byte {begin} of {end}.")


def _name(tensor: str, code: str) -> str:
    if not isinstance(code, str) or code not in _NAMES:
        raise WeightsError(f"The tensor {tensor!r} has the dtype {shown(code)}, which hidet lacks.")
    return _NAMES[code]


def arrange(
    tensors: Mapping[str, StoredLayout], alignment: int = LIBRARY_ALIGNMENT
) -> tuple[bytes, dict[str, LocatedTensor]]:
    """Lay out a file with these tensors: return its first bytes, with the header, and each tensor's place in order.

    With the library's alignment the bytes are those that the library writes. With a larger one, each tensor begins at a
    multiple of ``alignment`` bytes. The format allows no gaps, so tensors of bytes named ``gap0``, ... fill them.

    Raises
    ------
    WeightsError
        When the format does not have a dtype.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise WeightsError(f"The tensor {name} has the dtype {tensor.dtype}, which safetensors files cannot hold.")
    offsets: dict[str, tuple[StoredLayout, int]] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name.encode())):
        gap = -end % alignment
        if gap and alignment > LIBRARY_ALIGNMENT:
            offsets[_unused(tensors, offsets)] = (StoredLayout("uint8", (gap,)), end)
            end += gap
        offsets[name] = (tensors[name], end)
        end += tensors[name].nbytes
    header = {
        name: {
            "dtype": _DTYPES[tensor.dtype][0],
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + tensor.nbytes],
        }
        for name, (tensor, begin) in offsets.items()
    }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % alignment)
    data = LENGTH_BYTES + len(text)
    places = {
        name: LocatedTensor(tensor.dtype, tensor.shape, data + begin) for name, (tensor, begin) in offsets.items()
    }
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, places


def _unused(tensors: Mapping[str, StoredLayout], offsets: Mapping[str, object]) -> str:
    number = 0
    while (name := f"gap{number}") in tensors or name in offsets:
        number += 1
    return name
