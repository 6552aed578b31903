"""hidet 0.6.1 builds a kernel into a folder of its cache without a lock between processes.

A process could then copy the library that another one is still writing. While :func:`locked_builds` is active, a
process that needs a kernel that another one is building waits for it, and uses it.

Processes that build are forks of this one, whatever multiprocessing starts by default: a new interpreter would compile
with hidet's own options and compilers, not with those that are replaced here.
"""

from __future__ import annotations

import fcntl
import importlib
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import hidet
from hidet.ir.task import Task

from hidet_dist.compat.replacing import replaced

# Not by attribute: hidet.drivers re-exports a function of the same name.
_build_task: Any = importlib.import_module("hidet.drivers.build_task")
_build_job = _build_task._build_job
_multiprocess: Any = importlib.import_module("hidet.utils.multiprocess")


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Keep other processes from building into a folder while the block runs; waits for those that do."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, which a killed process does too
        yield


def task_folder(task: Task, target: str) -> Path:
    """Return the folder of hidet's cache for a task's kernel, with the present options."""
    cache = os.path.join(hidet.option.get_cache_dir(), "ops")
    space = hidet.option.get_option("search_space")
    return Path(_build_task.prepare_cache_paths(cache, f"{target}_space_{space}", task)[0])


def is_built(folder: Path) -> bool:
    """Whether the cache has a kernel; waits for a process that is building it."""
    if not folder.exists():
        return False
    with only_one(folder):
        return bool(_build_task.verify_disk_cache(str(folder / "version.txt"), str(folder)))


def _locked(job: tuple[Any, str]) -> Any:
    with only_one(task_folder(*job)):
        return _build_job(job)


@contextmanager
def locked_builds() -> Iterator[None]:
    """Let ``hidet.drivers.build_task_batch`` build each kernel once, in the first process that needs it.

    A pickle of the task, which hidet writes beside the kernel and does not read, is left out.
    """
    forking = partial(ProcessPoolExecutor, mp_context=multiprocessing.get_context("fork"))
    with (
        replaced(_build_task, {"_build_job": _locked}),
        replaced(hidet, {"save_task": lambda *_: None}),
        replaced(_multiprocess, {"ProcessPoolExecutor": forking}),
    ):
        yield
