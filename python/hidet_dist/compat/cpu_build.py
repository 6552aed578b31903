"""hidet 0.6.1 compiles for the CPU with flags that do not suit; here it compiles with those that it is told.

While :func:`compiled_with` is active:

* The flags are the given ones. hidet's are ``-march`` of what the compiler calls the running machine, which is an older
  one where it does not know the machine, and ``-ffast-math``. That takes it that nothing is infinite or not a number,
  and linked into a library it has the thread that loads it flush all denormal numbers to zero from then on.
* hidet's headers, which take longer to compile than most kernels, are left out. Kernels include others in their place,
  which are compiled once, and not once a kernel, where :func:`precompile_headers` was called.
* Libraries have one name, and no paths of folders, so that equal graphs have equal artifacts from any folder.
* Passes for CUDA's tensor cores are left out.
* Kernels are cached apart for each compiler, choice of flags, headers, and version of the Python sources that generate
  them: the key of hidet's cache has none of these.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hidet
from hidet.backend.build import GCC

from hidet_dist.compat.build_locks import only_one
from hidet_dist.compat.passes import cpu_lowering
from hidet_dist.compat.replacing import replaced
from hidet_dist.files import write_text

_compiler: Any = importlib.import_module("hidet.backend.build")
# No call sets errno, and no floating-point operation traps, so that loops of them can be vectorized. Jumps are not
# threaded: a clamp in a vectorized loop takes eleven instructions with that, and four without.
_COMMON = (
    *("-O3", "-std=c++11", "-fno-math-errno", "-fno-trapping-math", "-fno-thread-jumps", "-ffp-contract=fast"),
    *("-fPIC", "-fopenmp"),
)
# GNU gold links a kernel in less time. Some installations lack it.
_LINKER = ("-fuse-ld=gold",) if shutil.which("ld.gold") is not None else ()
# The name that the loader knows a library by, where others need it or it is opened by a name. All kernels have the same
# one, as none of this is done with them: they are opened by paths. Where there is no name, gold writes the path of its
# output into the library, and equal kernels from two folders would differ.
_NAME = "-Wl,-soname,hidet_dist_compiled.so"
# The linker, and what kernels link to besides the libraries of the call. That of C++ is left out, which takes the
# linker longer than all of the rest: libhidet_runtime needs it, so that it is loaded with each kernel.
LIBRARIES = (
    *_LINKER,
    _NAME,
    "-nodefaultlibs",
    "-Wl,--no-as-needed",
    "-lhidet_runtime",
    "-Wl,--as-needed",
    "-lgomp",
    "-lm",
    "-lgcc_s",
    "-lgcc",
    "-lc",
)


def gcc() -> str:
    """Return the path of g++. Raises FileNotFoundError where there is none."""
    return str(GCC._resolve_gcc_path())


@functools.cache
def compiler_version(path: str) -> str:
    """Ask a GCC for its version."""
    return subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()


def without_paths(folders: Iterable[str]) -> list[str]:
    """Write the flags by which libraries lack the paths of folders with sources, which assertions have in messages."""
    return [f"-ffile-prefix-map={folder}=." for folder in folders]


def compiler_with(
    flags: Sequence[str], include_dirs: Sequence[str], headers: Sequence[str], large: Sequence[str] = ()
) -> type[GCC]:
    """Make hidet's compiler for the CPU with other ``flags``.

    Parameters
    ----------
    flags, include_dirs: sequence of str
        The flags, and the folders with the headers.
    headers: sequence of str
        The headers that all kernels include, in place of those of hidet's runtime.
    large: sequence of str
        Headers that few kernels include, and that take the compiler long. They are precompiled with the others, for the
        first kernel that has one, if the others are.
    """
    common, directories = (*_COMMON, *flags), list(include_dirs)

    class PrecompilingGcc(GCC):
        command_prefix = (gcc(), *common)

        def precompile(self) -> None:
            """Compile the headers that all kernels include."""
            _precompile(self.command_prefix, [*self.include_dirs, *directories], headers)

        def compile(
            self,
            src_path: str,
            out_lib_path: str,
            target: Any,
            include_dirs: Sequence[str] = (),
            linking_dirs: Sequence[str] = (),
            linking_libs: Sequence[str] = (),
            object_files: Sequence[str] = (),
        ) -> None:
            included = [*self.include_dirs, *directories]
            source = Path(src_path)
            text = source.read_text()
            prelude, added = _prelude(included, headers), [header for header in large if _include(header) in text]
            if added:
                precompiled, known = _compiled(prelude).exists(), [*headers, *added]
                prelude = _prelude(included, known)
                if precompiled:
                    _precompile(self.command_prefix, included, known)
            source.write_text(_without(text, headers))
            extra = [directory for directory in dict.fromkeys(include_dirs) if directory not in included]
            command = [
                *self.command_prefix,
                "-include",
                str(prelude),
                *(f"-I{directory}" for directory in [*included, *extra]),
                *without_paths([*included, *extra, str(source.parent)]),
                *(f"-L{directory}" for directory in [*self.library_dirs, *dict.fromkeys(linking_dirs)]),
                "-shared" if out_lib_path.endswith(".so") else "--compile",
                src_path,
                *object_files,
                *(f"-l{library}" for library in dict.fromkeys(linking_libs)),
                *LIBRARIES,
                "-o",
                out_lib_path,
            ]
            self.run_compile_command(" ".join(command), src_path, out_lib_path)

    return PrecompilingGcc


@contextmanager
def compiled_with(
    flags: Sequence[str],
    include_dirs: Sequence[str],
    headers: Sequence[str],
    generators: Sequence[str] = (),
    large: Sequence[str] = (),
) -> Iterator[None]:
    """Let hidet compile for the CPU while the block runs; arguments as of :func:`compiler_with`.

    ``generators`` are the folders of the Python sources that generate kernels.
    """
    version = compiler_version(gcc())
    sources = (content_of(folder, ".py") for folder in generators)
    parts = [*_COMMON, *LIBRARIES, *flags, *headers, *map(content_of, include_dirs), *sources]
    digest = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
    compiler = compiler_with(flags, include_dirs, headers, large)
    with hidet.option.context(), replaced(_compiler, {"GCC": compiler}), cpu_lowering():
        cache = Path(hidet.option.get_cache_dir()) / "cpu" / f"g++-{version}-{digest}"
        hidet.option.cache_dir(str(cache))
        hidet.option.search_space(0)  # the kernels here have one candidate
        yield


def precompile_headers() -> None:
    """Compile the headers that all kernels include, unless that is done: it pays after a few kernels."""
    _compiler.GCC().precompile()


# The beginning of every source that hidet generates. The headers of its runtime include strings and streams of the C++
# library, and only its launchers of graphs use the memory planner.
_HIDETS = (
    "stdint.h",
    "math.h",
    "hidet/runtime/symbols.h",
    "hidet/runtime/memory_planner.h",
    "hidet/runtime/cpu/context.h",
    "hidet/runtime/cpu/float32.h",
    "hidet/runtime/logging.h",
    "hidet/runtime/int_fastdiv.h",
)


def _prelude(include_dirs: Sequence[str], headers: Sequence[str]) -> Path:
    """Write a header that includes others into hidet's cache."""
    text = _text(headers)
    digest = hashlib.sha256("\n".join([text, *map(content_of, include_dirs)]).encode()).hexdigest()[:16]
    header = Path(hidet.option.get_cache_dir()) / "prelude" / digest / "prelude.h"
    if not header.exists():
        header.parent.mkdir(parents=True, exist_ok=True)
        write_text(header, text)
    return header


def _include(header: str) -> str:
    return f"#include <{header}>\n"


def _text(headers: Sequence[str]) -> str:
    return "".join(map(_include, headers))


def _compiled(header: Path) -> Path:
    return header.with_name(f"{header.name}.gch")  # the name that the compiler looks for


@functools.cache
def content_of(directory: str, suffix: str = ".h") -> str:
    """Digest the files of one kind in a folder: the headers by default."""
    digest = hashlib.sha256(directory.encode())
    for file in sorted(Path(directory).rglob(f"*{suffix}")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _precompile(compiler: Sequence[str], include_dirs: Sequence[str], headers: Sequence[str]) -> None:
    header = _prelude(include_dirs, headers)
    with only_one(header.parent):
        if _compiled(header).exists():
            os.utime(_compiled(header))  # the time of its last use
        else:
            _precompile_into(header, compiler, include_dirs)


def _precompile_into(header: Path, compiler: Sequence[str], include_dirs: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=header.parent) as scratch:
        result = Path(scratch) / "compiled"
        directories = [f"-I{directory}" for directory in include_dirs]
        command = [*compiler, *directories, "-x", "c++-header", str(header), "-o", str(result)]
        # An error here occurs with the kernels, too, and is reported there.
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            os.replace(result, _compiled(header))


def _without(source: str, headers: Sequence[str]) -> str:
    """Remove hidet's headers from a source, and the others, which the compiler is told to include."""
    known = set(map(_include, (*_HIDETS, *headers)))
    return "".join(line for line in source.splitlines(keepends=True) if line not in known)
