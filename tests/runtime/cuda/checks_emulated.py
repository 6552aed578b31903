"""The checks of GPUs on emulated kernels: ``checks_emulated.py ARGUMENTS OF tests/gpu/check.py``.

What is built is what is built for a GPU, but that nvcc is the emulator's (``CUDA_HOME``); the driver and NCCL are the
stand-ins. Models are small unless ``FULL_SIZE`` is in the environment. PyTorch is on the CPU. The processes that it
starts are this program again: to build with the name of a model, to serve as a rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__)
sys.path.insert(0, str(HERE.parents[2] / "gpu"))


def build_small(*arguments: str) -> None:
    import build  # and with it hidet, which processes that serve do without

    def gpt2(out: Path) -> build.Case:
        return build.language_model(out, build.shapes.GPTConfig(1, 128, 2, 201, 2, 16, "float32"))

    def llama(out: Path) -> build.Case:
        return build.language_model(out, build.shapes.LlamaConfig(1, 128, 4, 2, 192, 104, 2, 16, "float32"))

    def resnet18(out: Path) -> build.Case:
        return build.resnet18(out, batch=2, pixels=32)

    if "FULL_SIZE" not in os.environ:
        build.CASES.update(gpt2=gpt2, llama=llama, resnet18=resnet18)
    build.main(*arguments)


if sys.argv[1] == "decoder" and len(sys.argv) == 3:
    import decoder

    decoder.serve(sys.argv[2])
elif sys.argv[1] in ("serve", "collectives"):
    import rank

    if sys.argv[1] == "serve":
        rank.serve(sys.argv[2], "cpu")
    else:
        rank.collectives("cpu")
elif sys.argv[1].startswith("--"):
    import check

    check.BUILD = check.RANK = HERE
    sys.exit(check.main())
else:
    build_small(*sys.argv[1:])
