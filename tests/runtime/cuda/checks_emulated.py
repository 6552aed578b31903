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

import build  # noqa: E402
import rank  # noqa: E402


def resnet(folder: Path) -> build.Case:
    """A stage less, of few pixels."""
    return build.resnet18(folder, batch=2, pixels=32)


SMALL = {
    "minilm": build.minilm,
    "gpt2": lambda out: build.language_model(out, build.shapes.GPTConfig(1, 128, 2, 200, 2, 16, "float32")),
    "llama": lambda out: build.language_model(out, build.shapes.LlamaConfig(1, 128, 4, 2, 192, 104, 2, 16, "float32")),
    "resnet18": resnet,
}

if sys.argv[1] in SMALL:
    if "FULL_SIZE" not in os.environ:
        build.CASES.update(SMALL)
    build.main(*sys.argv[1:])
elif sys.argv[1] == "serve":
    rank.serve(sys.argv[2], "cpu")
elif sys.argv[1] == "collectives":
    rank.collectives("cpu")
else:
    import check

    check.BUILD = check.RANK = HERE
    sys.exit(check.main())
