"""The wheel of ``make wheel``, installed in an empty environment."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import requires, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what ``make wheel`` made."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(["make", "wheel", f"DIST={folder}"], cwd=ROOT, timeout=1200, check=True)
    return folder


@pytest.mark.slow
def test_the_wheel_serves_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert "-manylinux_" in wheel.name
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], timeout=1000, check=True)
    python = tmp_path / "venv" / "bin" / "python"
    (torch,) = (name for name in requires("hidet_dist") or () if name.startswith("torch=="))
    for requirement in (torch, str(wheel)):
        subprocess.run([python, "-m", "pip", "install", "--quiet", requirement], timeout=1200, check=True)

    # Nothing of the checkout may help.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    example = tmp_path / "first.py"
    example.write_bytes((ROOT / "examples" / "first.py").read_bytes())
    where = "import hidet_dist; print(hidet_dist.__file__)"
    for command in ([python, "-c", where], [python, example], [python.with_name("hidet-dist"), "--version"]):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr
        if where in command:
            assert done.stdout.startswith(str(tmp_path))
        elif example in command:
            assert done.stdout.count("the largest difference from NumPy is") == 2
        else:
            assert done.stdout.strip() == version("hidet_dist")

    # A type checker finds the types of the installed package.
    snippet = tmp_path / "typed.py"
    snippet.write_text("import hidet_dist\n\nreveal_type(hidet_dist.load_partition)\n", encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--python-executable", str(python), "--no-incremental", str(snippet)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert "-> hidet_dist.runtime.partition.LoadedPartition" in done.stdout, done.stdout


@pytest.mark.slow
def test_distributions_have_the_licence_the_types_and_the_headers(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for name in ("py.typed", "lib/libhidet_dist.so", "lib/libhidet_dist_search.so", "include/hidet_dist/collectives.h"):
        assert f"hidet_dist/{name}" in names
    # What tests and benchmarks share stays in the repository, but for the model of the demo.
    assert not any(name.startswith("hidet_dist/soundness/") for name in names)
    shared = {name for name in names if name.startswith("hidet_dist/testing/")}
    assert shared == {"hidet_dist/testing/__init__.py", "hidet_dist/testing/minilm.py"}
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        kept = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "CMakeLists.txt", "examples/first.py"} <= kept
    assert not any(name.startswith(("tests", "benchmarks", ".")) for name in kept)
