"""Initializers of ONNX files as weights whose data stays in the files.

External data is read from its file. Other data is read from the model file, at an offset that is found before the file
is parsed (:mod:`hidet_dist.frontends.onnx.wire`).
"""

from __future__ import annotations

import errno
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import torch
from hidet.graph import Tensor

from hidet_dist.checks import shown
from hidet_dist.errors import TraceError, WeightsError
from hidet_dist.files import open_regular, state
from hidet_dist.frontends.onnx.wire import read_text
from hidet_dist.limits import MOST_BYTES, MOST_PROTOBUF_BYTES
from hidet_dist.weights.header import ITEMSIZE
from hidet_dist.weights.named import held_weight, stored_weight
from hidet_dist.weights.safetensors_file import StoredTensor

_DATA_FIELDS = ("raw_data", *(f"{kind}_data" for kind in ("float", "double", "int32", "int64", "uint64", "string")))
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
    """An ONNX file: its model without the raw data of its graph's initializers, and the places of that data.

    Raises
    ------
    TraceError
        When the file cannot be read or is not an ONNX model.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                status = os.fstat(file.fileno())
                self.state = state(status)
                if status.st_size > MOST_PROTOBUF_BYTES:
                    raise ValueError(f"it has {status.st_size} bytes, and at most {MOST_PROTOBUF_BYTES} are read")
                text = read_text(file.fileno(), status.st_size)
            self.model = onnx.ModelProto.FromString(text.message)
            self._places = text.places
        except (OSError, ValueError) as error:
            raise TraceError(f"{path} cannot be read: {error}.") from error
        except Exception as error:
            # The class of protobuf's errors depends on its build.
            if type(error).__name__ != "DecodeError":
                raise
            raise TraceError(f"{path} is not an ONNX model: {error}.") from error

    def weight(self, proto: onnx.TensorProto, name: str) -> Tensor:
        """Make a weight from an initializer; its data stays in the file where that is possible.

        Parameters
        ----------
        proto: TensorProto
            The initializer. The data of one of a subgraph is held in memory, unless it is external.
        name: str
            The name of the weight.

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
        if (place := self._places.get(proto.raw_data)) is None:
            return held_weight(name, tensor_of(self.values(proto)))
        begin, length = place
        if length != nbytes:
            raise WeightsError(
                f"The data of the initializer {proto.name!r} in {self.path} is malformed: {dtype}{shown(list(shape))} "
                f"has {nbytes} bytes, not {length}."
            )
        return stored_weight(StoredTensor(self.path, name, dtype, shape, begin, self.state))

    def values(self, proto: onnx.TensorProto) -> np.ndarray:
        """Read the values of an initializer. Raises WeightsError if they are not where the model says."""
        self._check_fields(proto)
        if proto.data_location == onnx.TensorProto.EXTERNAL:
            stored = self._external(proto, *self._layout(proto))
            return _array(stored.read([slice(0, size) for size in stored.shape]))
        whole = proto
        if (place := self._places.get(proto.raw_data)) is not None:
            begin, length = place
            data = StoredTensor(self.path, proto.name, "uint8", (length,), begin, self.state).read([slice(0, length)])
            whole = onnx.TensorProto(
                name=proto.name, data_type=proto.data_type, dims=proto.dims, raw_data=data.numpy().tobytes()
            )
        try:
            return np.array(onnx.numpy_helper.to_array(whole))
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
        if len(entries) < len(proto.external_data):
            keys = [entry.key for entry in proto.external_data]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise WeightsError(f"{where} names the {shown(twice)} of its data twice.")
        # The standard has paths relative to the model's folder, and within it.
        is_path = 0 < len(location) <= _MOST_PATH and "\0" not in location
        if not is_path or not Path(location).name or Path(location).is_absolute() or ".." in Path(location).parts:
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
