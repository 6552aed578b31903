"""The CPU target. Nothing here is active for another target."""

from hidet_dist.compile.cpu import blas as blas  # registers its rules
from hidet_dist.compile.cpu import conv as conv
from hidet_dist.compile.cpu.active import cpu_kernels
from hidet_dist.compile.cpu.tiled import TiledOp

__all__ = ["TiledOp", "cpu_kernels"]
