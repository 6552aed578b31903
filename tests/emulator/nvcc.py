"""Takes nvcc's place in a build: ``nvcc.py REAL_NVCC PRECOMPILED ARGUMENTS OF nvcc``. Kernels become the host's.

PRECOMPILED is the folder of the precompiled header.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from translate import translate

HERE = Path(__file__).parent
SHARED_BYTES = {"80": 166912, "86": 101376, "89": 101376, "90": 232448}  # that a block may opt in to
FLAGS = ["-std=c++20", "-O1", "-mavx2", "-mf16c", "-mfma", "-fPIC", "-w", "-fno-strict-aliasing", "-fwrapv"]
# Each library is for itself, and what was not written is not 0.
FLAGS += ["-fvisibility=hidden", "-fno-gnu-unique", "-ftrivial-auto-var-init=pattern"]
_KERNEL_HEADER = re.compile(r'^#include [<"](hidet_dist/kernels/cuda/[\w/]+\.h)[>"]$', re.MULTILINE)
WATCHED = ["-fsanitize=thread"]  # each access to memory calls a function of races.cpp


def install(nvcc: str, home: Path, headers: Iterable[Path]) -> Path:
    """Make a folder that can be CUDA_HOME; returns it. ``headers`` are the folders with those of kernels."""
    precompiled = home / "precompiled"
    for folder in (home / "bin", precompiled):
        folder.mkdir(parents=True)
    script = home / "bin" / "nvcc"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "{nvcc}" "{precompiled}" "$@"\n')
    script.chmod(0o755)
    header = ["-x", "c++-header", str(HERE / "emulated.hpp"), "-o", str(precompiled / "emulated.hpp.gch")]
    include = [*(f"-I{folder}" for folder in headers), f"-I{HERE}", "-isystem", str(include_folder(nvcc))]
    subprocess.run(["g++", *FLAGS, *WATCHED, *include, *header], check=True, timeout=1000)
    races = ["-O2", "-c", str(HERE / "races.cpp"), "-o", str(precompiled / "races.o")]
    subprocess.run(["g++", *FLAGS, *include, *races], check=True, timeout=1000)
    return home


def include_folder(nvcc: str) -> Path:
    """The folder of the CUDA headers."""
    plan = _said(nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null", "-o", "/dev/null")
    found = re.search(r"#\$ TOP=(.+)", plan)
    assert found is not None, plan
    top = Path(found[1].strip()).resolve()
    return next(folder for folder in (top / "include", top / "targets/x86_64-linux/include") if folder.is_dir())


def compile_on_host(nvcc: str, precompiled: str, arguments: list[str]) -> int:
    """Compile as the arguments say; the exit status."""
    taken = iter(arguments)
    passed: list[str] = []
    include = [f"-I{precompiled}", f"-I{HERE}", "-isystem", str(include_folder(nvcc))]
    source = out = arch = None
    for argument in taken:
        if argument == "-o":
            out = Path(next(taken))
        elif argument == "-gencode":
            arch = re.search(r"code=sm_(\d+)", next(taken))
        elif argument in ("-Xlinker", "-Xcompiler", "--cudart", "--diag-suppress"):
            next(taken)
        elif argument.startswith("-I"):
            include.append(argument)
        elif re.match(r"-L|-l(hidet|cu)", argument) or argument.endswith(".o"):
            passed.append(argument)
        elif argument.endswith((".cu", ".cpp")):
            source = Path(argument)
    assert source is not None and out is not None and arch is not None, arguments
    translated = out.with_suffix(".host.cpp")
    limit = f"__attribute__((weak)) size_t emulated::shared_bytes_of_arch = {SHARED_BYTES[arch[1]]};\n"
    folders = [Path(argument[2:]) for argument in include if argument.startswith("-I")]
    translated.write_text(translate(with_headers(source.read_text(), folders)) + limit)
    # Each candidate of a kernel is an object, with what it is emulated by.
    built = out if out.suffix == ".o" else out.with_suffix(".host.o")
    command = ["g++", *FLAGS, *WATCHED, "-c", *include, str(translated), "-o", str(built)]
    done = subprocess.run(command, check=False)
    if done.returncode != 0 or built == out:
        return done.returncode
    link = ["g++", "-shared", "-Wl,--as-needed", str(built), f"{precompiled}/races.o", "-o", str(out), *passed, "-ldl"]
    return subprocess.run(link, check=False).returncode


def with_headers(source: str, folders: list[Path]) -> str:
    """The source with those headers written out, once each, that have kernels themselves."""
    seen: set[str] = set()

    def content(found: re.Match[str]) -> str:
        name = found[1]
        if name in seen:
            return ""
        seen.add(name)
        header = next(folder / name for folder in folders if (folder / name).is_file())
        return _KERNEL_HEADER.sub(content, header.read_text().replace("#pragma once", ""))

    return _KERNEL_HEADER.sub(content, source)


def _said(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True, text=True).stdout


def main() -> int:
    """Compile, or say what nvcc says; the version is that of what is here, since kernels are cached by it."""
    nvcc, precompiled, *arguments = sys.argv[1:]
    if "--version" in arguments:
        sources = b"".join(
            (HERE / name).read_bytes() for name in ("emulated.hpp", "races.cpp", "nvcc.py", "translate.py")
        )
        own = int(hashlib.sha256(sources).hexdigest()[:8], 16)
        print(re.sub(r"(release [\d.]+, V[\d.]+)", rf"\1.{own}", _said(nvcc, "--version")))
        return 0
    if "--dryrun" in arguments:
        print(_said(nvcc, *arguments))
        return 0
    return compile_on_host(nvcc, precompiled, arguments)


if __name__ == "__main__":
    sys.exit(main())
