"""Kernels that are wanted by several at a time are built by one at a time."""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hidet
import pytest

from hidet_dist.compat import build_locks, cpu_build

build_task: Any = importlib.import_module("hidet.drivers.build_task")


def test_hidet_itself_locks_nothing() -> None:
    assert "lock" not in inspect.getsource(build_task)


@pytest.mark.parametrize(("shapes", "order"), [((8, 8), "+-+-"), ((8, 16), "++--")])
def test_the_same_kernel_is_not_built_twice_at_once(
    shapes: tuple[int, int], order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    both = threading.Barrier(2)
    tasks = [hidet.ops.relu(hidet.symbol([size], "float32", "cpu")).op.task for size in shapes]

    def build(_job: Any) -> tuple[bool, str]:
        done.append("+")
        if order == "++--":
            both.wait(60)  # both build at once
        else:
            time.sleep(0.2)  # as long as another would need to begin, too
        done.append("-")
        return True, ""

    monkeypatch.setattr(build_locks, "_build_job", build)
    with hidet.option.context():
        hidet.option.cache_dir(str(tmp_path))
        with build_locks.locked_builds():
            job = build_task._build_job
            monkeypatch.setattr(hidet.option, "get_cache_dir", lambda: str(tmp_path))
            monkeypatch.setattr(hidet.option, "get_option", lambda _: 0)
            threads = [threading.Thread(target=job, args=((task, "cpu"),)) for task in tasks]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert "".join(done) == order


def test_headers_are_not_compiled_twice_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def compile_slowly(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        time.sleep(0.2)  # as long as another would need to begin, too
        Path(command[-1]).touch()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(cpu_build.subprocess, "run", compile_slowly)
    with hidet.option.context():
        hidet.option.cache_dir(str(tmp_path))
        compiler = cpu_build.compiler_with(["-O1"], [], ["stdint.h"])()
        monkeypatch.setattr(hidet.option, "get_cache_dir", lambda: str(tmp_path))
        threads = [threading.Thread(target=compiler.precompile) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(commands) == 1
    assert len(list(tmp_path.rglob("*.gch"))) == 1


_parents = ""


def _seen(_job: Any) -> str:
    return _parents


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_build_are_forks_whatever_the_default_is(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is replaced in hidet must be replaced in them, too."""
    monkeypatch.setattr(sys.modules[__name__], "_parents", "replaced")
    default = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    try:
        with hidet.option.context(), build_locks.locked_builds():
            hidet.option.num_local_workers(2)
            assert list(build_locks._multiprocess.parallel_imap_1stlevel(_seen, [0, 1])) == ["replaced"] * 2
    finally:
        multiprocessing.set_start_method(default, force=True)
