"""Artifacts for a GPU, built on a machine with or without one."""

import math
import subprocess

import numpy as np

from hidet_dist.normalize import normalize
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.view import GraphView

from .elf import architectures, imported, needed

COLLECTIVES = {"AllReduce", "AllGather", "ReduceScatter", "AllToAll"}
STARTS = {f"Start{name}" for name in COLLECTIVES}
COMMUNICATION = {*COLLECTIVES, *STARTS, "Wait"}
# They launch nothing: what a reshape makes is the memory that it takes.
NO_KERNEL = {*COMMUNICATION, "Reshape"}
# Of a kernel library: the runtimes of hidet, of the project and of CUDA, and those of the compiler.
RUNTIMES = {"libhidet_runtime.so", "libhidet_dist.so", "libcudart.so.13"}
COMPILER = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libgomp.so.1", "ld-linux-x86-64.so.2"}


def test_each_kernel_holds_device_code_for_the_architecture(built):
    assert built.manifest.target == "cuda"
    assert built.manifest.arch == built.arch
    wanted = {int(built.arch.removeprefix("sm_"))}
    for name, library in built.kernels:
        assert architectures(library) == wanted
        # nvcc puts an empty binary even where there is no kernel; a kernel is registered with the runtime.
        assert ("__cudaRegisterFunction" in imported(library)) == (name not in NO_KERNEL), name


def test_communication_calls_the_native_interface(built):
    assert len(built.stage.communications) == len(built.result.communications) > 0
    kinds = {text.partition("(")[0] for text in built.stage.communications}
    called = set()
    for name, library in built.kernels:
        own = {function for function in imported(library) if function.startswith("hidet_dist_")}
        beside = {f"hidet_dist_{word}" for word in ("start", "started", "wait")} & own
        assert len(beside) == (2 if name in STARTS else int(name == "Wait")), name
        assert len(own - beside) == (name in COLLECTIVES | STARTS), name
        assert ("libhidet_dist.so" in needed(library)) == (name in COMMUNICATION)
        called |= own - beside
    assert called == {f"hidet_dist_{kind}" for kind in kinds}


def test_libraries_need_neither_driver_nor_nccl(built):
    libraries = [library for _, library in built.kernels] + [built.out / built.stage.launcher_file]
    for library in libraries:
        assert needed(library) <= RUNTIMES | COMPILER


def test_every_kernel_has_its_candidate(built):
    assert built.stage.candidates == (1,) * len(built.kernels)
    for _, library in built.kernels:
        text = subprocess.run(["readelf", "--dyn-syms", "-W", library], capture_output=True, text=True, check=True)
        assert "hidet_launch_0\n" in text.stdout


def test_memory_is_as_predicted(built):
    """The weights to the byte; all that is allocated on the device but for how buffers are laid out and fused away."""
    stage, plan = built.stage, built.result.plan.stages[0]
    assert stage.weight_bytes == plan.weight_bytes_per_device
    assert set(stage.workspace_bytes) == {"cuda"}
    ends = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in (*stage.inputs, *stage.outputs))
    predicted = max(live_bytes(GraphView(normalize(built.graph), (), plan.mesh), plan))
    assert 0.9 < (stage.weight_bytes + stage.workspace_bytes["cuda"] + ends) / predicted < 1.05
