"""The native library under sanitizers: ranks are threads there, so that a race between ranks is one of threads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_collectives_over_shared_memory_are_free_of_races_and_memory_errors(sanitizer: str, tmp_path: Path) -> None:
    program = tmp_path / "stress"
    sources = [*sorted((ROOT / "hidet_dist/src").glob("*.cpp")), Path(__file__).parent / "native/stress.cpp"]
    subprocess.run(
        [
            *("g++", "-std=c++17", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-pthread"),
            *("-DHIDET_DIST_BUILD", f"-I{ROOT / 'hidet_dist/include'}", *map(str, sources), "-o", str(program)),
        ],
        check=True,
        timeout=300,
    )
    # The thread sanitizer does not know the address space layout of newer kernels; without randomization it does.
    ran = subprocess.run(["setarch", "-R", str(program)], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "passed\n"
    assert "WARNING" not in ran.stderr
