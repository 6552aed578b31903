"""ONNX files before they are parsed: their bounds, and where the data of initializers lies.

A message of protocol buffers is a sequence of fields, each with a number, a wire type and a value
(https://protobuf.dev/programming-guides/encoding). A parsed message takes some hundred times the memory of an empty one
in a file, and its texts come back in errors; so a scan counts what is to be parsed first. The data of initializers,
which is nearly all of a file, is not read: :class:`ModelText` has its places.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import onnx

from hidet_dist.checks import shown
from hidet_dist.limits import (
    MOST_DIMS,
    MOST_NODES,
    MOST_ONNX_ENTRIES,
    MOST_ONNX_FIELDS,
    MOST_ONNX_MESSAGES,
    MOST_ONNX_NAME_BYTES,
    MOST_ONNX_NUMBERS,
)

# Field numbers of onnx.proto (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
_GRAPH, _INITIALIZER, _DIMS, _RAW_DATA, _TENSOR_NAME = 7, 5, 1, 9, 8
_FIXED_DATA = {4: 4, 10: 8}
"""The fields of a tensor whose packed numbers have this many bytes each: float_data and double_data."""
_VARINT_DATA = (5, 7, 11)
"""Those with numbers of 7 bits a byte, each of 4 or 8 bytes when parsed: int32_data, int64_data and uint64_data."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_VARINT_BYTES = 10
_WINDOW_BYTES = 2**16
_LONG_TEXTS = ("doc_string", "value")  # texts of any length: descriptions, and values of the model's properties


class _Bytes(Protocol):
    """Bytes in memory, or of a file."""

    def __getitem__(self, offset: int, /) -> int: ...


class _Windows:
    """The bytes of an open file, of which a window is in memory."""

    def __init__(self, file: int):
        self._file = file
        self._window, self._begin = b"", 0

    def __getitem__(self, offset: int) -> int:
        place = offset - self._begin
        if not 0 <= place < len(self._window):
            self._window, self._begin, place = self.read(offset, offset + _WINDOW_BYTES, True), offset, 0
        return self._window[place]

    def read(self, begin: int, end: int, ends: bool = False) -> bytes:
        """Read the bytes in ``[begin, end)``, or with ``ends`` those of them before the end of the file."""
        parts, offset = [], begin
        while offset < end and (part := os.pread(self._file, end - offset, offset)):
            parts.append(part)
            offset += len(part)
        if offset < end and not (ends and parts):
            raise ValueError(f"it ends at byte {offset}: it was truncated while it was read")
        return b"".join(parts)


@dataclass(frozen=True)
class ModelText:
    """The message of a model file without the raw data of the initializers of its graph.

    Attributes
    ----------
    message: bytes
        The message. In place of the data of an initializer it has a key that no one can foresee.
    places: dict
        The first byte in the file, and the number of bytes, of the data of each key.
    """

    message: bytes
    places: dict[bytes, tuple[int, int]]


def read_text(file: int, nbytes: int) -> ModelText:
    """Read an open model file of ``nbytes`` bytes, without the data of its initializers.

    Raises
    ------
    ValueError
        When it is malformed, or has more messages, fields or nodes, or longer names, than are read.
    OSError
        When it cannot be read.
    """
    reader = _Reader(file)
    message = reader.message(0, nbytes)
    _check_bounds(message)
    return ModelText(message, reader.places)


class _Reader:
    """Reads the message of a model file, with keys in place of the data of its initializers."""

    def __init__(self, file: int):
        self.places: dict[bytes, tuple[int, int]] = {}
        self._data = _Windows(file)
        self._secret = secrets.token_bytes(16)
        self._entries = self._fields = 0

    def message(self, begin: int, end: int) -> bytes:
        return self._replaced(begin, end, _GRAPH, self._graph)

    def _graph(self, begin: int, end: int) -> bytes:
        return self._replaced(begin, end, _INITIALIZER, self._initializer)

    def _initializer(self, begin: int, end: int) -> bytes:
        others, kept, place = [], begin, None
        for number, wire_type, field, value, stop in _fields(self._data, begin, end):
            self._fields += 1
            if self._fields > MOST_ONNX_FIELDS:
                raise ValueError(f"its initializers have more than {MOST_ONNX_FIELDS} fields")
            if (number, wire_type) == (_RAW_DATA, _BYTES):
                others.append(self._data.read(kept, field))
                kept, place = stop, (value, stop - value)  # of several, the last one counts
        others.append(self._data.read(kept, end))
        if place is not None and place[1]:
            key = self._secret + len(self.places).to_bytes(4, "little")
            self.places[key] = place
            others.append(_field(_RAW_DATA, key))
        return b"".join(others)

    def _replaced(self, begin: int, end: int, number: int, read: Callable[[int, int], bytes]) -> bytes:
        """Read a message in which the messages of a field are what ``read`` makes of them."""
        parts, kept = [], begin
        for own, wire_type, field, value, stop in _fields(self._data, begin, end):
            self._entries += 1
            if self._entries > MOST_ONNX_ENTRIES:
                raise ValueError(f"it has more than {MOST_ONNX_ENTRIES} entries in lists of the model and of its graph")
            if (own, wire_type) == (number, _BYTES):
                parts += [self._data.read(kept, field), _field(number, read(value, stop))]
                kept = stop
        return b"".join([*parts, self._data.read(kept, end)])


@dataclass(frozen=True)
class _Field:
    """What a scan needs to know of a field: its message, whether it is a name, and whether it has packed numbers."""

    message: Any = None
    is_name: bool = False
    is_packed: bool = False


@cache
def _schema(descriptor: Any) -> dict[int, _Field]:
    """Return the fields of a kind of message that count, by their numbers."""
    fields = {}
    for field in descriptor.fields:
        if field.type == field.TYPE_MESSAGE:
            fields[field.number] = _Field(message=field.message_type)
        elif field.type == field.TYPE_STRING:
            fields[field.number] = _Field(is_name=field.name not in _LONG_TEXTS)
        elif field.type != field.TYPE_BYTES and not field.name.endswith("_data"):  # which may be that of weights
            fields[field.number] = _Field(is_packed=True)
    return fields


def _check_bounds(data: bytes) -> None:
    """Count the messages, fields and nodes of a model at all depths. Raises ValueError for too many."""
    messages = fields = nodes = numbers = 0
    node, tensor = onnx.NodeProto.DESCRIPTOR, onnx.TensorProto.DESCRIPTOR
    pending = [(0, len(data), onnx.ModelProto.DESCRIPTOR)]
    while pending:
        begin, end, descriptor = pending.pop()
        schema = _schema(descriptor)
        if descriptor is tensor:
            numbers += _numbers_of(data, begin, end)
            if numbers > MOST_ONNX_NUMBERS:
                raise ValueError(f"its tensors have more than {MOST_ONNX_NUMBERS} numbers that are not raw data")
        for number, wire_type, _, value, stop in _fields(data, begin, end):
            fields += 1
            known = schema.get(number) if wire_type == _BYTES else None
            if known is not None and known.message is not None:
                messages += 1
                nodes += known.message is node
                pending.append((value, stop, known.message))
            elif known is not None and known.is_packed:
                fields += stop - value
            elif known is not None and known.is_name and stop - value > MOST_ONNX_NAME_BYTES:
                raise ValueError(f"a name in it has {stop - value} bytes; at most {MOST_ONNX_NAME_BYTES} are read")
            if nodes > MOST_NODES:
                raise ValueError(f"it has more than {MOST_NODES} nodes, which is the most that is read")
            if messages > MOST_ONNX_MESSAGES or fields > MOST_ONNX_FIELDS:
                raise ValueError(
                    f"it has more than {MOST_ONNX_MESSAGES} messages or {MOST_ONNX_FIELDS} fields, which are the most "
                    "that are read"
                )


def _numbers_of(data: bytes, begin: int, end: int) -> int:
    """Count the packed numbers of a tensor that take more memory than in a file.

    Raises
    ------
    ValueError
        When it has more numbers than elements, or too many dims.
    """
    dims: list[int] = []
    fixed = varying = 0
    name = b""
    for number, wire_type, _, value, stop in _fields(data, begin, end):
        if number == _DIMS:
            offset = value
            while offset < stop and len(dims) <= MOST_DIMS:
                size, offset = _varint(data, offset, stop)
                dims.append(size)
        elif number == _TENSOR_NAME:
            name = data[value : min(stop, value + MOST_ONNX_NAME_BYTES)]
        elif wire_type == _BYTES and number in _VARINT_DATA:
            # The last byte of each number is below 128.
            varying += int(np.count_nonzero(np.frombuffer(data, np.int8, stop - value, value) >= 0))
        elif wire_type == _BYTES and number in _FIXED_DATA:
            fixed += (stop - value) // _FIXED_DATA[number]
    where = f"its tensor {shown(name.decode(errors='replace'))}"
    if len(dims) > MOST_DIMS:
        raise ValueError(f"{where} has more than {MOST_DIMS} dims")
    if fixed + varying > 2 * math.prod(dims):  # complex elements have two
        raise ValueError(f"{where} has {fixed + varying} numbers, and the shape {dims}")
    return varying


def _field(number: int, value: bytes) -> bytes:
    """Write a field of bytes."""
    return bytes([number << 3 | _BYTES]) + _number(len(value)) + value


def _number(value: int) -> bytes:
    """Write a number of 7 bits a byte, the lowest first."""
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*result, value])


def _fields(data: _Bytes, begin: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield each field of the message in ``data[begin:end]``: its number, its wire type, the offset of the field, and
    those of its value's begin and end.

    Raises
    ------
    ValueError
        When the message is malformed.
    """
    offset = begin
    while offset < end:
        field = offset
        key, offset = data[offset], offset + 1
        if key >= 0x80:
            key, offset = _varint(data, field, end)
        wire_type, value = key & 7, offset
        if key < 8:
            raise ValueError(f"a field at byte {field} has the number 0")
        if wire_type == _BYTES:
            if offset < end and (length := data[offset]) < 0x80:
                value += 1
            else:
                length, value = _varint(data, offset, end)
            stop = value + length
        elif wire_type == _VARINT:
            stop = _varint(data, offset, end)[1]
        elif wire_type in (_FIXED64, _FIXED32):
            stop = value + (8 if wire_type == _FIXED64 else 4)
        else:
            raise ValueError(f"a field at byte {field} has the wire type {wire_type}")
        if stop > end:
            raise ValueError(f"a field at byte {field} is longer than its message")
        yield key >> 3, wire_type, field, value, stop
        offset = stop


def _varint(data: _Bytes, offset: int, end: int) -> tuple[int, int]:
    """Decode a number of 7 bits a byte, the lowest first; return it and the offset after it. Raises ValueError."""
    value = 0
    for position in range(_MOST_VARINT_BYTES):
        if offset >= end:
            break
        byte = data[offset]
        value |= (byte & 0x7F) << (7 * position)
        offset += 1
        if byte < 0x80:
            return value, offset
    raise ValueError(f"a number at byte {offset} does not end")
