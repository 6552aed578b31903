"""Initializers of ONNX files as weights whose data stays in the files.

External data is read from its file. Other data is read from the model file, at an offset. A message of protocol buffers
is a sequence of fields, each with a number, a wire type and a value (https://protobuf.dev/programming-guides/encoding).
A scan of the outer messages therefore finds the offset without decoding the rest.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import torch
from hidet.graph import Tensor

from hidet_dist.checks import shown
from hidet_dist.errors import TraceError, WeightsError
from hidet_dist.files import open_regular, read_up_to, state
from hidet_dist.limits import MOST_BYTES, MOST_PROTOBUF_BYTES
from hidet_dist.weights.header import ITEMSIZE
from hidet_dist.weights.named import held_weight, stored_weight
from hidet_dist.weights.safetensors_file import StoredTensor

# Field numbers of onnx.proto (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
_GRAPH, _INITIALIZER, _NAME, _RAW_DATA = 7, 5, 8, 9
_DATA_FIELDS = ("raw_data", *(f"{kind}_data" for kind in ("float", "double", "int32", "int64", "uint64", "string")))
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_VARINT_BYTES = 10
_MOST_PATH = 4096  # PATH_MAX of Linux

_BFLOAT16 = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)

DTYPES: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.DOUBLE: "float64",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.INT16: "int16",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.UINT8: "uint8",
    onnx.TensorProto.UINT16: "uint16",
    onnx.TensorProto.UINT32: "uint32",
    onnx.TensorProto.UINT64: "uint64",
    onnx.TensorProto.BOOL: "bool",
}
"""hidet's names of ONNX's element types."""

KNOWN_ELEMENTS = 1024
"""The most elements of an initializer that is known while a model is traced. A larger one is a weight; its values are
read only if a lowering needs them."""


def dtype_name(element_type: int) -> str:
    """Return hidet's name of an element type. Raises TraceError for one that hidet lacks."""
    if element_type not in DTYPES:
        known = (
            onnx.TensorProto.DataType.Name(element_type) if element_type in onnx.TensorProto.DataType.values() else ""
        )
        raise TraceError(f"The ONNX element type {element_type} {known} is not supported.")
    return DTYPES[element_type]


class ModelFile:
    """An ONNX file: its model, and the offsets of its initializers' data.

    Raises
    ------
    TraceError
        When the file cannot be read or is not an ONNX model.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                self.state = state(os.fstat(file.fileno()))
                data = read_up_to(file, MOST_PROTOBUF_BYTES)
            self.model = onnx.ModelProto.FromString(data)
            self._offsets = dict(_raw_data_offsets(data)) if self.model.graph.initializer else {}
        except (OSError, ValueError) as error:
            raise TraceError(f"{path} cannot be read: {error}.") from error
        except Exception as error:
            # The class of protobuf's errors depends on its build.
            if type(error).__name__ != "DecodeError":
                raise
            raise TraceError(f"{path} is not an ONNX model: {error}.") from error

    def weight(self, proto: onnx.TensorProto, name: str, is_outermost: bool) -> Tensor:
        """Make a weight from an initializer; its data stays in the file where that is possible.

        Parameters
        ----------
        proto: TensorProto
            The initializer.
        name: str
            The name of the weight.
        is_outermost: bool
            Whether the initializer is of the model's graph, not of a subgraph. The data of a subgraph's initializer is
            held in memory, unless it is external.

        Raises
        ------
        TraceError
            When it has a dtype or shape that weights cannot have.
        WeightsError
            When its data is not where the model says.
        """
        self._check_fields(proto)
        dtype, shape, nbytes = self._layout(proto)
        if proto.data_location == onnx.TensorProto.EXTERNAL:
            return stored_weight(replace(self._external(proto, dtype, shape, nbytes), name=name))
        offset = self._offsets.get(proto.name) if is_outermost else None
        if offset is not None and len(proto.raw_data) == nbytes:
            return stored_weight(StoredTensor(self.path, name, dtype, shape, offset, self.state))
        return held_weight(name, tensor_of(self.values(proto)))

    def values(self, proto: onnx.TensorProto) -> np.ndarray:
        """Read the values of an initializer. Raises WeightsError if they are not where the model says."""
        self._check_fields(proto)
        if proto.data_location == onnx.TensorProto.EXTERNAL:
            stored = self._external(proto, *self._layout(proto))
            return _array(stored.read([slice(0, size) for size in stored.shape]))
        try:
            return np.array(onnx.numpy_helper.to_array(proto))
        except (TypeError, ValueError) as error:
            raise WeightsError(
                f"The data of the initializer {proto.name!r} in {self.path} is malformed: {error}."
            ) from None

    def _check_fields(self, proto: onnx.TensorProto) -> None:
        """Refuse a tensor whose data is given in several ways. Raises WeightsError."""
        given = [field.name for field, value in proto.ListFields() if field.name in _DATA_FIELDS and len(value)]
        given += ["external_data"] * (proto.data_location == onnx.TensorProto.EXTERNAL)
        if len(given) > 1:
            raise WeightsError(
                f"The tensor {proto.name!r} of {self.path} has its data in several fields: {', '.join(given)}."
            )

    def _layout(self, proto: onnx.TensorProto) -> tuple[str, tuple[int, ...], int]:
        """Return the dtype, shape and bytes of a tensor's data. Raises TraceError for a shape that no tensor has."""
        dtype, shape = dtype_name(proto.data_type), tuple(proto.dims)
        nbytes = math.prod(shape) * ITEMSIZE[dtype]
        if any(size < 0 for size in shape) or nbytes > MOST_BYTES:
            raise TraceError(f"The tensor {proto.name!r} of {self.path} has the shape {list(shape)}.")
        return dtype, shape, nbytes

    def _external(self, proto: onnx.TensorProto, dtype: str, shape: tuple[int, ...], nbytes: int) -> StoredTensor:
        """Locate the external data of a tensor. Raises WeightsError."""
        entries = {entry.key: entry.value for entry in proto.external_data}
        location = entries.get("location", "")
        where = f"The tensor {proto.name!r} of {self.path}"
        # The standard has paths relative to the model's folder, and within it.
        is_path = 0 < len(location) <= _MOST_PATH and "\0" not in location
        if not is_path or Path(location).is_absolute() or ".." in Path(location).parts:
            raise WeightsError(
                f"{where} has its data in {shown(location)}, which is not a file in or below the model's folder."
            )
        try:
            offset, length = int(entries.get("offset", 0)), int(entries.get("length", nbytes))
        except ValueError:
            raise WeightsError(f"{where} has an offset or a length that is not a number.") from None
        path = self.path.parent / location
        try:
            file_status = _status_within(self.path.parent, location)
        except (OSError, ValueError) as error:
            raise WeightsError(f"{where} has its data in {path}, which cannot be read: {error}.") from error
        if length != nbytes or offset < 0 or offset + nbytes > file_status.st_size:
            raise WeightsError(
                f"{where} is {dtype}{list(shape)} of {nbytes} bytes, but the model names {length} bytes at {offset} of "
                f"{path}, which has {file_status.st_size}."
            )
        return StoredTensor(path, proto.name, dtype, shape, offset, state(file_status))


def _status_within(folder: Path, location: str) -> os.stat_result:
    """Return the status of a regular file in or below a folder.

    Raises OSError if it cannot be opened, or if it or a folder on the way is a link, since a link may lead out of the
    folder. A second name of the file (a hard link) is refused, too: ``onnx`` reads neither.
    """
    *parents, name = Path(location).parts
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for parent in parents:
            inner = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
            os.close(directory)
            directory = inner
        file = open_regular(name, directory, os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise OSError(error.errno, "it, or a folder on the way to it, is a symbolic link or no folder") from error
        raise
    finally:
        os.close(directory)
    try:
        file_status = os.fstat(file)
    finally:
        os.close(file)
    if file_status.st_nlink > 1:
        raise OSError(errno.EMLINK, "the file has several names (hard links)")
    return file_status


def tensor_of(values: np.ndarray) -> torch.Tensor:
    """Convert an array to a tensor of PyTorch, which does not know NumPy's bfloat16."""
    if values.dtype == _BFLOAT16:
        return torch.from_numpy(values.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def _array(x: torch.Tensor) -> np.ndarray:
    """Convert a tensor of PyTorch to an array; the inverse of :func:`tensor_of`."""
    is_bfloat16 = x.dtype == torch.bfloat16
    values: np.ndarray = x.view(torch.uint16).numpy() if is_bfloat16 else x.numpy()
    return values.view(_BFLOAT16) if is_bfloat16 else values


def _fields(data: bytes, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the number and wire type of each field of the message in ``data[begin:end]``, and its value's offsets.

    Raises
    ------
    ValueError
        When the message is malformed.
    """
    offset = begin
    while offset < end:
        key, offset = _varint(data, offset, end)
        wire_type = key & 7
        if wire_type == _VARINT:
            value, (_, stop) = offset, _varint(data, offset, end)
        elif wire_type == _BYTES:
            length, value = _varint(data, offset, end)
            stop = value + length
        elif wire_type in (_FIXED64, _FIXED32):
            value, stop = offset, offset + (8 if wire_type == _FIXED64 else 4)
        else:
            raise ValueError(f"a field at byte {offset} has the wire type {wire_type}")
        if stop > end:
            raise ValueError(f"a field at byte {offset} is longer than its message")
        yield key >> 3, wire_type, value, stop
        offset = stop


def _varint(data: bytes, offset: int, end: int) -> tuple[int, int]:
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


def _raw_data_offsets(data: bytes) -> Iterator[tuple[str, int]]:
    """Yield the name of each initializer of a model's graph that has raw data, and the offset of the data."""
    for field, kind, begin, end in _fields(data, 0, len(data)):
        if (field, kind) != (_GRAPH, _BYTES):
            continue
        for number, wire_type, value_begin, value_end in _fields(data, begin, end):
            if (number, wire_type) != (_INITIALIZER, _BYTES):
                continue
            name, offset = "", None
            for part, _, first, last in _fields(data, value_begin, value_end):
                if part == _NAME:
                    name = data[first:last].decode()
                elif part == _RAW_DATA:
                    offset = first
            if offset is not None:
                yield name, offset
