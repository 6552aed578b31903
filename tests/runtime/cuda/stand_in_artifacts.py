"""Artifacts for the CPU, now for CUDA: their kernels run where the stand-in has its device memory; and serving them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from unittest.mock import patch

from tests.forked import Forks

from hidet_dist.artifacts.manifest import Manifest
from hidet_dist.compile.cpu.target import CpuTarget
from hidet_dist.files import sha256
from hidet_dist.launch import free_port
from hidet_dist.runtime.cuda import cublas, nccl
from hidet_dist.testing.processes import Programs

SERVE = Path(__file__).with_name("serve_on_stand_ins.py")
NATIVE = Path(__file__).parents[2] / "native"
# They put their work on the stream themselves.
COMMUNICATION = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Start", "Wait")
_PLACE = b"@LIBRARY@"
_DESCRIPTION = b'{"abi_version":'


def compile_against(stand_ins: Path, source: str, library: Path) -> None:
    """Compile what stands in for a kernel."""
    include = [f"-I{NATIVE.parents[1] / 'hidet_dist' / 'include'}", f"-L{stand_ins}"]
    command = ["g++", "-std=c++17", "-shared", "-fPIC", str(NATIVE / source), *include]
    link = ["-l:libcuda.so.1", f"-Wl,-rpath,{stand_ins}", "-ldl"]
    subprocess.run([*command, *link, "-o", str(library)], check=True, timeout=1000)


@contextmanager
def weights_in_rows() -> Iterator[None]:
    """Build for CPUs with weights in rows, and shards that collectives do not place, as programs for CUDA have them."""
    pack = CpuTarget.pack

    def in_rows(self: CpuTarget, graph: Any, weights: Mapping[str, Any], _: object, precisions: Any) -> Any:
        return pack(self, graph, weights, weights.keys(), precisions)

    places_none = patch("hidet_dist.compile.cpu.target.place_shards", lambda graph: graph)
    with patch.object(CpuTarget, "pack", in_rows), places_none:
        yield


def as_cuda(folder: Path, arch: str = "sm_90", **stage: Any) -> Path:
    """Rewrite a manifest, with other values of its stages, and what the launchers say of themselves."""
    manifest = Manifest.load(folder)
    target = {"target": "cuda", "arch": arch, "gpu": "H100-SXM5-80GB", "cpu_features": ()}
    program = manifest.program()
    for own in program.stages:
        _redescribe(folder / own.launcher_file, target, stage)
    files = {name: ((folder / name).stat().st_size, sha256(folder / name)) for name in manifest.files}
    stages = tuple(replace(own, **stage) for own in program.stages)
    replace(manifest, **target, files=files, programs=(replace(program, stages=stages),)).save(folder)
    return folder


def _redescribe(launcher: Path, target: dict[str, Any], stage: dict[str, Any]) -> None:
    """Change the text of a launcher, in the room that it has: spaces after JSON are no part of it."""
    content = launcher.read_bytes()
    begin = content.index(_DESCRIPTION)
    end = content.index(b"\0", begin)
    body = {**json.loads(content[begin:end]), **target}
    body["stage"].update(stage)
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode().ljust(end - begin)
    assert len(text) == end - begin
    launcher.write_bytes(content[:begin] + text + content[end:])


def on_stream(folder: Path, stand_ins: Path) -> Path:
    """Have the kernels that compute run on the stream, as a device's do; their own libraries lie beside the folder."""
    aside = folder.with_name(f"{folder.name}-kernels")
    aside.mkdir()
    compile_against(stand_ins, "on_stream.cpp", aside / "any.so")
    stand_in = (aside / "any.so").read_bytes()
    assert stand_in.count(_PLACE) == 1
    kernels = {
        folder / stage.kernel_file(number)
        for stage in Manifest.load(folder).program().stages
        for number, name in enumerate(stage.kernels)
        if not name.startswith(COMMUNICATION)
    }
    for number, kernel in enumerate(sorted(kernels)):
        own = aside / f"{number}.so"
        shutil.move(kernel, own)
        path = os.fsencode(own.resolve()) + b"\0"
        at = stand_in.index(_PLACE)
        kernel.write_bytes(stand_in[:at] + path + stand_in[at + len(path) :])
    return folder


def doubles(stand_ins: Path, exchange: Path) -> dict[str, str]:
    """The environment in which the stand-ins are the driver, NCCL and cuBLAS, of ranks that meet in a folder."""
    return {
        cublas.LIBRARY_VARIABLE: str(stand_ins / "libcublas.so.13"),
        nccl.LIBRARY_VARIABLE: str(stand_ins / "libnccl.so.2"),
        nccl.DRIVER_VARIABLE: str(stand_ins / "libcuda.so.1"),
        "FAKE_NCCL_DIR": str(exchange),
    }


def on_one_gpu(
    stand_ins: Path, exchange: Path, program: Path, *arguments: str, **more: str
) -> tuple[list[str], dict[str, str]]:
    """The command that runs a program on one device, and its environment: the stand-ins and ``more``."""
    one = {"FAKE_CUDA_DEVICES": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return [sys.executable, str(program), *arguments], {**os.environ, **doubles(stand_ins, exchange), **one, **more}


def run_on_one_gpu(
    stand_ins: Path, exchange: Path, program: Path, *arguments: str, seconds: float = 1000, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a program as :func:`on_one_gpu` says; it and all that it started end after ``seconds`` at the latest."""
    command, environment = on_one_gpu(stand_ins, exchange, program, *arguments, **more)
    done = Programs().run(command, seconds, environment=environment)
    assert done.status is not None, f"{program} did not end within {seconds} s:\n{done.output}\n{done.errors}"
    return subprocess.CompletedProcess(command, done.status, done.output, done.errors)


@lru_cache(None)
def _forks() -> Forks:
    """The process that ranks are forked from; it ends with this one."""
    return Forks(SERVE, dict(os.environ))


def serve(
    stand_ins: Path, mode: str, folder: Path, ranks: int = 1, each: Sequence[Mapping[str, str]] = (), **more: str
) -> list[Any]:
    """The output of each rank, or its error; ``each`` are variables of one rank's environment, ``more`` of all."""
    exchange = folder.parent / "exchange"
    exchange.mkdir(exist_ok=True)
    port = str(free_port())
    running = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = each[rank] if each else {}
        environment = {**os.environ, **place, **doubles(stand_ins, exchange), **more, **own}
        said = TemporaryFile()  # noqa: SIM115 - closed below, once its rank has ended
        running.append((_forks().fork(environment, [mode, str(folder)], said.fileno()), said))
    results = []
    for process, said in running:
        process.stdin.close()
        with process.stdout, said:
            out = process.stdout.read()
            status = process.wait(1000)
            said.seek(0)
            results.append(json.loads(out)["result"] if status == 0 else said.read().decode())
    return results
