"""Built-in machines. Rates are the vendors' peaks of dense arithmetic, unless they are said to be measured.

Devices (arithmetic, memory bandwidth, memory), from NVIDIA's data sheets (half of the rates for sparse matrices):

* A100 Tensor Core GPU, 80 GB, SXM4 and PCIe.
* H100 Tensor Core GPU, SXM5 and PCIe (80 GB).
* H200 Tensor Core GPU, SXM5.
* L40S; its float64 rate, not printed there, is 1/64 of the float32 rate (Ada GPU Architecture white paper).

Products of half precision do not reach these peaks, since the clock falls under their load:

* H100 SXM5: the greatest rates of cuBLAS through PyTorch, measured on one, of 768 to 14336 rows and columns: 783
  (bfloat16), 761 (float16), 51.3 (float32) TFLOP/s; a copy of 1 GiB moved 2949 GB/s.
* H200 SXM5: the same of 2048 to 28672 rows and columns, measured on one by ``make gpu-rates``: 739 (bfloat16), 743
  (float16), 50.8 (float32) TFLOP/s, and 4125 GB/s.
* A100: 271.2 (SXM4) and 252.9 (PCIe) TFLOP/s, the "maximum achievable matmul FLOPS" of S. Bekman's Machine Learning
  Engineering (compute/accelerator/benchmarks).
* H100 PCIe and L40S were not measured. Their half-precision rates are the data sheet's times the fraction that the A100
  PCIe reaches, the least of those measured.

Links, per device and direction:

* NVLink 3 and 4 (A100 and H100 data sheets): 600 and 900 GB/s, both directions together.
* PCIe 4.0 and 5.0: 16 lanes of 16 and 32 GT/s, coded 128b/130b (PCI Express Base Specification 4.0 and 5.0).
* Between nodes: eight NICs, one per GPU, of 200 Gb/s (HDR InfiniBand, DGX A100 User Guide) and 400 Gb/s (NDR, DGX
  H100 User Guide; HGX H200 machines are built with the same).

Collectives over them have the figures of NCCL 2.27 (``src/graph/tuning.cc``): base latencies, hardware latencies over
NVLink, PCIe and network, and the bandwidth of each protocol as a fraction of that of Simple, with its limits for each
generation of GPUs. Rings over the network have the latencies of trees there, which NCCL gives them where a node has one
GPU of a group. NVLink has 20.0 GB/s a link on A100 and 20.6 on H100 (``src/graph/topo.h``), 12 and 18 links. NCCL's
tables of corrections for trees are represented by their least entries: trees are chosen for sizes that have about
those. In-network reduction (NVLS, SHARP) is not modelled.

Launch of one kernel: NVIDIA's "CUDA Graphs" posts measure 2 to 3 microseconds. One that has nothing to do takes 1.2 in
a CUDA graph on an H200, and kernels that write few bytes, such as norms of one row, 3 to 5.

GPUs run collectives beside kernels, in a separate stream; that the two slow each other down is not modelled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hidet_dist.checks import shown
from hidet_dist.errors import ConfigError
from hidet_dist.machine.cluster import LIBRARY, Cluster, Device, Link
from hidet_dist.machine.gpu import GPUS
from hidet_dist.machine.kernels import KernelCost
from hidet_dist.machine.protocols import CHAIN, RING, TREE, Protocol
from hidet_dist.spec import DeviceMesh

_GB = 1e9
_LAUNCH = 2.5e-6


def _rates(half: float, float32: float, float64: float, int8: float) -> dict[str, float]:
    """Return operations per second by dtype; ``half`` is for float16 and bfloat16."""
    rates = {"float16": half, "bfloat16": half, "float32": float32, "float64": float64, "int8": int8}
    return {"default": float32, **rates}


_A100_PCIE_HALF = 252.9e12
_UNMEASURED = _A100_PCIE_HALF / 312e12  # the fraction of the peak of half precision where it was not measured


def _gpu(name: str, rates: dict[str, float], bandwidth: float, memory: int) -> Device:
    return Device(name, rates, bandwidth, memory, _LAUNCH, True, multiprocessors=GPUS[name].multiprocessors)


_A100 = _gpu("A100-SXM4-80GB", _rates(271.2e12, 19.5e12, 9.7e12, 624e12), 2039 * _GB, 80 * 10**9)
_A100_PCIE = _gpu("A100-PCIE-80GB", _rates(_A100_PCIE_HALF, 19.5e12, 9.7e12, 624e12), 1935 * _GB, 80 * 10**9)
_H100_RATES = {**_rates(783e12, 51.3e12, 34e12, 1979e12), "float16": 761e12}
_H100 = _gpu("H100-SXM5-80GB", _H100_RATES, 2949 * _GB, 80 * 10**9)
_H100_PCIE = _gpu("H100-PCIE-80GB", _rates(756e12 * _UNMEASURED, 51e12, 26e12, 1513e12), 2000 * _GB, 80 * 10**9)
_H200_RATES = {**_rates(739e12, 50.8e12, 34e12, 1979e12), "float16": 743e12}
_H200 = _gpu("H200-SXM5-141GB", _H200_RATES, 4125 * _GB, 141 * 10**9)
_L40S_RATES = _rates(362e12 * _UNMEASURED, 91.6e12, 91.6e12 / 64, 733e12)
_L40S = _gpu("L40S-48GB", _L40S_RATES, 864 * _GB, 48 * 10**9)
# The costs of a rank with one core of a 2-core x86-64 (AVX-512) virtual machine: medians of three calibrations with two
# ranks. The default rate is that of hidet's generic CPU kernel for float64 products. Those of half-precision types are
# the float32 rate over the measured ratios of CPU time, 1.07 and 1.02, of products of 1024 rows and columns. The memory
# is a choice: 8 GiB for each rank. The cache is a measurement, not the 260 MB of the host's last-level cache, which its
# other guests use too: kernels that read and write up to 16 MiB keep their rate, and those of 24 MiB have half of it.
# Products by weights of a lower precision have the cost of others over the measured ratios of rates of 32 rows, 0.92
# for half precision, 2.8 for 8 bits and 2.9 for 4. An operation of attention takes 1.25 of a product's as measured, and
# a byte as long as 18 of them: its softmax and its packing are passes over what a cache holds.
_CPU_KERNELS = {
    "matmul": KernelCost(6.9e-12, 0.0, 7.1e-6),
    "matmul_float16": KernelCost(7.5e-12, 0.0, 7.1e-6),
    "matmul_bfloat16": KernelCost(7.5e-12, 0.0, 7.1e-6),
    "matmul_int8": KernelCost(2.5e-12, 0.0, 7.1e-6),
    "matmul_int4": KernelCost(2.4e-12, 0.0, 7.1e-6),
    "matmul_uint4": KernelCost(2.4e-12, 0.0, 7.1e-6),
    "attention": KernelCost(8.6e-12, 1.6e-10),
    "convolution": KernelCost(7.1e-12, 0.0, 2.3e-4),
    "normalization": KernelCost(0.0, 2.9e-11),
    "reduction": KernelCost(0.0, 1.4e-11),
    "pooling": KernelCost(0.0, 7.9e-11),
    "lookup": KernelCost(0.0, 4.7e-11),
    "copy": KernelCost(0.0, 2.1e-11),
    "elementwise": KernelCost(1.2e-11, 1.6e-11),
    "function": KernelCost(3.2e-10, 0.0),
}
_CPU = Device(
    "cpu",
    {"default": 1.5e10, "float32": 1.5e11, "float16": 1.4e11, "bfloat16": 1.47e11},
    11 * _GB,
    8 * 2**30,
    6.7e-7,
    cache_bytes=16 * 2**20,
    kernels=_CPU_KERNELS,
    places_shards=True,
    fusion=LIBRARY,
)


@dataclass(frozen=True)
class _Tuned:
    """What NCCL's tuning tables say of a protocol, along rings or trees.

    Attributes
    ----------
    name: the algorithm and the protocol.
    start: seconds before the first step.
    ratio: its bandwidth over that of Simple on a ring. Trees have 0.92 of it, and of that LL 1/3.8 and LL128 7/9, times
        the least corrections, 0.4, 0.6 and 0.5.
    steps: the hardware latency of a step in seconds, over NVLink, PCIe and a network; None where it cannot be used.
    """

    name: str
    start: float
    ratio: float
    steps: tuple[float, float | None, float]


_TUNED = (
    _Tuned("ring-ll", 6.6e-6, 0.5, (0.6e-6, 1.0e-6, 5.0e-6)),
    _Tuned("ring-ll128", 14.0e-6, 0.92, (1.9e-6, None, 8.5e-6)),  # LL128 needs NVLink within a node
    _Tuned("ring-simple", 8.4e-6, 1.0, (3.4e-6, 5.7e-6, 14e-6)),
    _Tuned("tree-ll", 6.8e-6, 0.92 / 3.8 * 0.4, (0.6e-6, 1.0e-6, 5.0e-6)),
    _Tuned("tree-ll128", 14.0e-6, 0.92 * 7 / 9 * 0.6, (1.25e-6, None, 8.5e-6)),
    _Tuned("tree-simple", 8.4e-6, 0.92 * 0.5, (4.0e-6, 4.0e-6, 14e-6)),
)
_NVLINK, _PCIE, _NETWORK = range(3)  # the places of their latencies


def _link(latency: float, bandwidth: float, kind: int, reached: float, most_ll: float = math.inf) -> Link:
    """Describe a link by its latency and bandwidth, what Simple reaches of that on a ring, and the limit of LL."""
    tree = TREE if kind == _NETWORK else CHAIN
    protocols = [
        Protocol(
            one.name,
            RING if one.name.startswith("ring") else tree,
            one.start,
            step,
            min(one.ratio * reached, most_ll if one.name.endswith("-ll") else math.inf),
        )
        for one in _TUNED
        if (step := one.steps[kind]) is not None
    ]
    return Link(latency, bandwidth, tuple(protocols))


_NVLINK3 = _link(3.4e-6, 300 * _GB, _NVLINK, 12 * 20.0 * _GB, 87.7 * _GB)
_NVLINK4 = _link(3.4e-6, 450 * _GB, _NVLINK, 18 * 20.6 * _GB, 141 * _GB)
_PCIE4_RATE, _PCIE5_RATE = (16 * rate * 128 / 130 / 8 for rate in (16e9, 32e9))
_PCIE4 = _link(5.7e-6, _PCIE4_RATE, _PCIE, _PCIE4_RATE)
_PCIE5 = _link(5.7e-6, _PCIE5_RATE, _PCIE, _PCIE5_RATE)
# The link between two ranks of that machine, through shared memory.
_SHARED_MEMORY = Link(3.5e-6, 4.5 * _GB)

# LL reaches 20.4 GB/s between four or more nodes with CPUs by Intel, which these machines have.
_HDR = _link(14e-6, 25 * _GB, _NETWORK, 25 * _GB, 20.4 * _GB)
_NDR = _link(14e-6, 50 * _GB, _NETWORK, 50 * _GB, 20.4 * _GB)


@dataclass(frozen=True)
class Machine:
    """A machine of nodes with equal devices.

    Attributes
    ----------
    device: the device; a node has ``devices_per_node`` of them, or any number if that is None.
    link: the link between the devices of a node.
    network: the link of each device between nodes; None for a machine of one node.
    """

    device: Device
    devices_per_node: int | None
    link: Link
    network: Link | None = None


MACHINES: dict[str, Machine] = {
    "cpu": Machine(_CPU, None, _SHARED_MEMORY),
    "dgx-a100": Machine(_A100, 8, _NVLINK3),
    "dgx-h100": Machine(_H100, 8, _NVLINK4),
    "hgx-h200": Machine(_H200, 8, _NVLINK4),
    "pcie-a100": Machine(_A100_PCIE, 8, _PCIE4),
    "pcie-h100": Machine(_H100_PCIE, 8, _PCIE5),
    "pcie-l40s": Machine(_L40S, 8, _PCIE4),
    "dgx-a100-pod": Machine(_A100, 8, _NVLINK3, _HDR),
    "dgx-h100-pod": Machine(_H100, 8, _NVLINK4, _NDR),
    "hgx-h200-pod": Machine(_H200, 8, _NVLINK4, _NDR),
}


def builtin(name: str, mesh: DeviceMesh) -> Cluster:
    """Make the cluster of the named machine with ``mesh`` on it.

    Ranks fill one node after the other. So the last mesh axes are within a node, as far as its devices suffice, and the
    axes before them use the network. On one node every axis uses the same link.

    Raises
    ------
    ConfigError
        For an unknown name, and for a mesh of more devices than the machine has.
    """
    machine = MACHINES.get(name)
    if machine is None:
        raise ConfigError(f"Unknown machine {shown(name)}; the built-in ones are {', '.join(sorted(MACHINES))}.")
    per_node = machine.devices_per_node
    if per_node is None:
        return Cluster(mesh, (machine.link,) * mesh.ndim, machine.device)
    if machine.network is None and mesh.size > per_node:
        pods = [pod for pod, other in MACHINES.items() if other.network is not None and other.device == machine.device]
        raise ConfigError(
            f"The machine {name} has {per_node} devices; the mesh {mesh} needs {mesh.size}."
            + (f" {', '.join(pods)} has several nodes." if pods else "")
        )
    links = [
        machine.network if machine.network is not None and math.prod(mesh.shape[axis:]) > per_node else machine.link
        for axis in range(mesh.ndim)
    ]
    return Cluster(mesh, tuple(links), machine.device)
