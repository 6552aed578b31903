"""The targets, by name."""

from hidet_dist.compile.backend import Backend
from hidet_dist.compile.cpu.target import CpuTarget
from hidet_dist.compile.cuda.target import CudaTarget

TARGETS: dict[str, type[Backend]] = {target.name: target for target in (CpuTarget, CudaTarget)}
