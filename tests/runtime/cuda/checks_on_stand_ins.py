"""The checks of GPUs on the stand-ins for CUDA and NCCL: ``checks_on_stand_ins.py ARGUMENTS OF tests/gpu/check.py``.

The kernels of the programs are the CPU's, which has none in half precision, and nothing to choose from; PyTorch is on
the CPU. With ``WRONG`` in the environment its answers are other ones. With ``ENDS`` (``plain=crash,graph=hang``)
nothing is built, the rank of what is named ends so, and that of what is not named ends well; one that hangs writes its
number to the file ``STARTED``. The processes that it starts are this program again: to build with the name of a model,
to serve as a rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from hidet_dist.files import write_text

HERE = Path(__file__)


def end(artifacts: str) -> None:
    """As a rank whose kernel faults, or never returns."""
    how = dict(pair.split("=") for pair in os.environ["ENDS"].split(",")).get(artifacts.rsplit("-", 1)[1])
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hang":
        if "STARTED" in os.environ:
            write_text(Path(os.environ["STARTED"]), str(os.getpid()))
        time.sleep(600)


if "ENDS" in os.environ and sys.argv[1] in ("gpt2", "serve"):
    if sys.argv[1] == "serve":
        end(sys.argv[2])
    sys.exit()

sys.path[:0] = [str(HERE.parents[2] / "gpu"), str(HERE.parent)]

import build  # noqa: E402
import rank  # noqa: E402

SMALL = {
    "gpt2": lambda out: build.language_model(out, build.shapes.GPTConfig(1, 32, 4, 48, 2, 8, "float32")),
    "llama": lambda out: build.language_model(out, build.shapes.LlamaConfig(1, 32, 4, 2, 48, 40, 1, 8, "float32")),
}


def build_for_the_cpu(*arguments: str) -> None:
    from stand_in_artifacts import as_cuda, on_stream, weights_in_rows

    from hidet_dist.runtime.cuda import nccl

    parallel = build.auto_parallel

    def auto_parallel(graph: Any, machine: Any, config: dict[str, Any], out: Path) -> Any:
        kept = ("mem_budget", "weights", "objective", "stages", "micro_batches")
        ours = {key: config[key] for key in kept if key in config}
        with weights_in_rows():
            result = parallel(graph, machine, ours, out)
        on_stream(out, Path(os.environ[nccl.DRIVER_VARIABLE]).parent)
        as_cuda(out, cuda_graph="cuda_graph" in config.get("cuda", {}))
        return result

    if "WRONG" in os.environ:
        right = build.reference
        build.reference = lambda *case: {**(found := right(*case)), "expected": 1.01 * found["expected"]}
    build.auto_parallel = auto_parallel
    build.CASES.update(SMALL)
    build.main(*arguments)


def serve(artifacts: str) -> None:
    from hidet_dist.runtime.cuda.memory import CudaMemory

    CudaMemory.number = 0  # the kernels are the host's
    rank.serve(artifacts, "cpu")


if sys.argv[1] in SMALL:
    build_for_the_cpu(*sys.argv[1:])
elif sys.argv[1] == "serve":
    serve(sys.argv[2])
elif sys.argv[1] == "collectives":
    rank.collectives("cpu")
else:
    import check

    check.BUILD = check.RANK = HERE
    if "ENDS" in os.environ:
        check.LAUNCH_SECONDS = 8.0
    sys.exit(check.main())
