"""The benchmark of GPUs on the stand-ins for CUDA and NCCL: ``benchmark_on_stand_ins.py OUT``.

It measures small models; PyTorch is on the CPU, and the kernels of the programs are the CPU's. The processes that it
starts are this program again: to build with arguments, to serve without. ``CASES`` in the environment are the models,
and with ``EAGER`` PyTorch compiles nothing, which takes long. ``ENDS`` (``gpt-1-graph=crash,eager=hang``) has variants
of artifacts or of PyTorch's modes crash or hang when they are called.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__)
ROOT = HERE.parents[3]
sys.path[:0] = [str(ROOT), str(HERE.parent)]

from benchmarks.gpu import cases as gpu_cases  # noqa: E402
from hidet_dist.testing.sizes import GPTConfig, LlamaConfig  # noqa: E402

SMALL = {
    "gpt": GPTConfig(1, 32, 4, 48, 2, 8, "float32"),
    "llama": LlamaConfig(1, 32, 4, 2, 48, 40, 1, 8, "float32"),
}


def cases() -> dict[str, gpu_cases.Case]:
    return {name: gpu_cases.Case(f"small {name}", name, config, "float32") for name, config in SMALL.items()}


def build(*arguments: str) -> None:
    from stand_in_artifacts import as_cuda, on_stream, weights_in_rows

    from benchmarks.gpu import build as gpu_build
    from hidet_dist.runtime.cuda import nccl

    built = gpu_build.build

    def with_graph(out: Path, *_: Any) -> None:
        on_stream(out, Path(os.environ[nccl.DRIVER_VARIABLE]).parent)
        other = shutil.copytree(out, out.with_name(f"{out.name}-graph"))
        as_cuda(out)
        as_cuda(other, cuda_graph=True)

    def for_the_cpu(name: str, ranks: int, weights: Path, arch: str, target: Any, out: Path) -> dict[str, Any]:
        with weights_in_rows():
            return built(name, ranks, weights, arch, {}, out)

    gpu_build.build, gpu_build.as_graph = for_the_cpu, with_graph
    gpu_build.main(*arguments)


def work() -> None:
    from benchmarks.gpu import worker as gpu_worker
    from hidet_dist.runtime.cuda.memory import CudaMemory

    CudaMemory.number = 0  # the kernels are the host's
    ends = dict(pair.split("=") for pair in os.environ.get("ENDS", "").split(",") if pair)

    def load(settings: dict[str, Any]) -> gpu_worker.Loaded:
        call, profiled = gpu_worker.load(settings)
        own = ends.get(Path(settings["artifacts"]).name if "artifacts" in settings else settings["how"])
        if own == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        return (lambda: time.sleep(600)) if own == "hang" else call, profiled

    gpu_worker.worker.main(load)


def measure(out: str) -> None:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", ROOT / "benchmarks" / "gpu" / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    if "EAGER" in os.environ:
        benchmark.PEERS = dict.fromkeys(benchmark.PEERS, "eager")
    if "ENDS" in os.environ:
        benchmark.LOAD_SECONDS = 60.0
    benchmark.GpuBenchmark = partial(benchmark.GpuBenchmark, device="cpu", builder=[str(HERE)], worker=[str(HERE)])
    sys.exit(benchmark.main(["--quick", "--kernels", "--cases", os.environ["CASES"], "--out", out]))


gpu_cases.CASES.clear()
gpu_cases.CASES.update(cases())
if len(sys.argv) == 1:
    work()
elif sys.argv[1] in ("weights", "build"):
    build(*sys.argv[1:])
else:
    measure(sys.argv[1])
