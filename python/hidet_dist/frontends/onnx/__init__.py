"""Conversion of ONNX models to graphs: nodes become operators; initializers become weights, with data in files."""

from hidet_dist.errors import ConfigError

try:
    import onnx as _onnx  # noqa: F401
except ModuleNotFoundError as error:
    raise ConfigError("ONNX models need the package onnx: pip install 'hidet_dist[onnx]'.") from error
