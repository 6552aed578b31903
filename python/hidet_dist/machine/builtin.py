"""Machines that can be named. Figures from the vendors' data sheets, peak and dense (without sparsity).

A100: NVIDIA A100 Tensor Core GPU data sheet (SXM4 80 GB; NVLink 600 GB/s is both directions together).
H100: NVIDIA H100 Tensor Core GPU data sheet (SXM5; NVLink 900 GB/s is both directions together; dense is half of the
sparse figures printed there).
H200: NVIDIA H200 Tensor Core GPU data sheet.
PCIe: 16 GT/s x 16 lanes with 128b/130b coding (PCI Express Base Specification 4.0).
DGX A100 and DGX H100 pods: eight NICs a node, one a GPU, of 200 Gb/s (HDR) and 400 Gb/s (NDR) InfiniBand (NVIDIA DGX
A100 and DGX H100 user guides).
Latency of one ring step over NVLink, PCIe, InfiniBand: NCCL 2.x, src/graph/tuning, the hardware latencies of
the Simple protocol.
Launch of one kernel: NVIDIA's "CUDA Graphs" posts measure 2 to 3 microseconds.
"""

from __future__ import annotations

from hidet_dist.errors import ConfigError
from hidet_dist.machine.cluster import Cluster, Device, Link
from hidet_dist.spec import DeviceMesh

_GB = 1e9

_A100 = Device(
    "A100-SXM4-80GB",
    {"default": 19.5e12, "float32": 19.5e12, "float64": 9.7e12, "float16": 312e12, "bfloat16": 312e12, "int8": 624e12},
    2039 * _GB,
    80 * 10**9,
    2.5e-6,
)
_H100 = Device(
    "H100-SXM5-80GB",
    {"default": 67e12, "float32": 67e12, "float64": 34e12, "float16": 989e12, "bfloat16": 989e12, "int8": 1979e12},
    3350 * _GB,
    80 * 10**9,
    2.5e-6,
)
_H200 = Device("H200-SXM5-141GB", _H100.flops_per_second, 4800 * _GB, 141 * 10**9, 2.5e-6)
# A rank of one core, as measured on a 2-core x86-64 (AVX2) virtual machine: OpenBLAS's sgemm of 768 x 768 matrices,
# hidet's generic CPU kernel of a float64 product, and the rate at which its element-wise kernels go through memory (the
# memory itself copies at 34 GB/s).
_CPU = Device("cpu", {"default": 1.7e9, "float32": 1.1e11}, 10 * _GB, 8 * 2**30, 2e-6)

_NVLINK3 = Link(3.4e-6, 300 * _GB)
_NVLINK4 = Link(3.4e-6, 450 * _GB)
_PCIE4 = Link(5.7e-6, 31.5 * _GB)
# Gloo between two processes of that machine, all-gathers of 256 bytes and of 4 MiB.
_LOOPBACK = Link(1.5e-4, 1.5 * _GB)

_HDR = Link(14e-6, 25 * _GB)
_NDR = Link(14e-6, 50 * _GB)

MACHINES: dict[str, tuple[Device, Link]] = {
    "cpu": (_CPU, _LOOPBACK),
    "dgx-a100": (_A100, _NVLINK3),
    "dgx-h100": (_H100, _NVLINK4),
    "hgx-h200": (_H200, _NVLINK4),
    "pcie-a100": (_A100, _PCIE4),
}
# Several nodes: the last mesh axis is within a node, the others go over this link.
PODS: dict[str, tuple[str, Link]] = {
    "dgx-a100-pod": ("dgx-a100", _HDR),
    "dgx-h100-pod": ("dgx-h100", _NDR),
}


def builtin(name: str, mesh: DeviceMesh) -> Cluster:
    """The named machine with ``mesh`` on it.

    Every axis goes over the same link, but in a pod all axes other than the last go over the network between nodes.

    Raises
    ------
    ConfigError
        For an unknown name.
    """
    node, across = PODS.get(name, (name, None))
    if node not in MACHINES:
        raise ConfigError(f"Unknown machine {name!r}; the built-in ones are {', '.join(sorted({*MACHINES, *PODS}))}.")
    device, link = MACHINES[node]
    return Cluster(mesh, (across or link,) * (mesh.ndim - 1) + (link,), device)
