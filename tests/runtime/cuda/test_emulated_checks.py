"""The checks of GPUs with the kernels that a GPU would run, emulated: the programs' numbers, against PyTorch's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.emulator.emulated import Emulator

sys.path.insert(0, str(Path(__file__).parent))
from stand_in_artifacts import run_on_one_gpu

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROGRAM = Path(__file__).with_name("checks_emulated.py")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of hidet's kernels, which the checks share."""
    return str(tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize(
    ("only", "ranks"),
    [
        *((f"decoder, {precision}, 1 ranks", 1) for precision in ("float32", "float16", "int8", "int4", "experts")),
        ("gpt2, float16, 2 ranks, plain", 2),
        ("llama, float16, 1 ranks, graph", 1),
        ("gpt2, float32, 2 ranks, stages", 2),
        ("llama, float16, 4 ranks, stages", 4),
        *(
            (f"{model}, {precision}, 1 ranks, plain", 1)
            for model in ("minilm", "resnet18")
            for precision in ("float32", "float16")
        ),
        *((f"{model}, float32, 4 ranks, plain", 4) for model in ("gpt2", "llama", "resnet18")),
        *((f"{model}, float16, 4 ranks, graph", 4) for model in ("minilm", "gpt2", "llama", "resnet18")),
        *(
            (f"{model}, {precision}, 1 ranks, candidates", 1)
            for model in ("gpt2", "llama")
            for precision in ("float32", "float16")
        ),
    ],
)
def test_models_are_right(
    emulator: Emulator, stand_ins: Path, tmp_path: Path, cache: str, only: str, ranks: int
) -> None:
    environment = {"CUDA_HOME": str(emulator.home), "HIDET_CACHE_DIR": cache}
    what = ("--ranks", str(ranks), "--only", only, "--patience", "5")
    done = run_on_one_gpu(stand_ins, tmp_path, PROGRAM, *what, seconds=1700, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ok, 0 failed, 0 not run" in done.stdout
    assert "off by " in done.stdout
