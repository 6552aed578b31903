"""nvcc, and the libraries against which kernels are linked on a machine without a GPU.

nvcc comes with the CUDA toolkit, or from PyPI. The PyPI packages have libraries in folders where nvcc does not look,
without the file names that a linker looks for, and a machine without a GPU has no libcuda. So a folder with links, and
with a stub of libcuda, is made for the linker.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hidet_dist.errors import CompileError
from hidet_dist.files import folder_beside

HOW_TO_GET = (
    "Install the CUDA toolkit (13.0 is known to work) and put its bin folder on PATH or its root into CUDA_HOME, or "
    "`pip install hidet_dist[nvcc]`, which takes nvcc from PyPI (nvidia-cuda-nvcc and what it needs)."
)
USUAL = Path("/usr/local/cuda/bin/nvcc")
# The functions of libcuda that hidet's kernels call: tensor maps of the Hopper tensor memory accelerator.
_DRIVER_FUNCTIONS = ("cuTensorMapEncodeTiled",)


@dataclass(frozen=True)
class Toolkit:
    """nvcc's path and version, and the folder of its ``libcudart.so``, of any version."""

    nvcc: Path
    version: str
    runtime: Path

    @property
    def runtime_name(self) -> str:
        """The file name of the CUDA runtime that linked programs load, such as ``libcudart.so.13``."""
        return f"libcudart.so.{self.version.partition('.')[0]}"


def find_toolkit() -> Toolkit:
    """Find the CUDA compiler: in CUDA_HOME, on PATH, from PyPI, or in the toolkit's usual folder.

    Raises
    ------
    CompileError
        When there is none, or it does not run; the message says how to get it.
    """
    for nvcc in _places():
        if nvcc.is_file():
            return _inspect(nvcc)
    raise CompileError(f"The target 'cuda' needs nvcc, and there is none. {HOW_TO_GET}")


def _places() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    nvidia = importlib.util.find_spec("nvidia")
    for folder in nvidia.submodule_search_locations or [] if nvidia else []:
        yield Path(folder) / "cu13" / "bin" / "nvcc"
    yield USUAL


@lru_cache
def _inspect(nvcc: Path) -> Toolkit:
    try:
        version = _output(nvcc, "--version")
        # A dry run prints the root of the toolkit: nvcc may be a link, or a script that calls another nvcc.
        plan = _output(nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null", "-o", "/dev/null")
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"{nvcc} does not run: {error}. {HOW_TO_GET}") from error
    release = re.search(r"release [\d.]+, V([\d.]+)", version)
    root = re.search(r"#\$ TOP=(.+)", plan)
    if release is None or root is None:
        raise CompileError(f"{nvcc} is not NVIDIA's: it says {version!r}. {HOW_TO_GET}")
    top = Path(root[1].strip()).resolve()
    for folder in (top / "lib64", top / "lib", top / "targets" / "x86_64-linux" / "lib"):
        if next(folder.glob("libcudart.so*"), None):
            return Toolkit(nvcc, release[1], folder)
    raise CompileError(f"{nvcc} has no libcudart.so beside it, below {top}. {HOW_TO_GET}")


def _output(*command: str | Path) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True, text=True)
    return done.stdout


def link_folder(toolkit: Toolkit, folder: Path) -> Path:
    """Make the folder for the linker, once: CUDA's runtime, and a ``libcuda.so`` with the real one's soname."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = folder_beside(folder)
        try:
            (staging / "libcudart.so").symlink_to(sorted(toolkit.runtime.glob("libcudart.so*"))[0])
            (staging / "libcudadevrt.a").symlink_to(toolkit.runtime / "libcudadevrt.a")
            source = staging / "libcuda.c"
            source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in _DRIVER_FUNCTIONS))
            compiler = ["g++", "-x", "c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
            _output(*compiler, "-o", staging / "libcuda.so", source)
            os.rename(staging, folder)
        except subprocess.CalledProcessError as error:
            raise CompileError(f"g++ does not make a shared library: {error.stdout}") from error
        except OSError:
            if not folder.is_dir():  # another process may have made it
                raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return folder
