"""Mapped files that are cut or written to while they are read: the process lives on, and knows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hidet_dist import native

PAGE = os.sysconf("SC_PAGE_SIZE")

MAP = """
import mmap, os, signal, sys, threading
import numpy as np
from hidet_dist import native

def mapped(path):
    file = os.open(path, os.O_RDONLY)
    mapping = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
    return file, np.frombuffer(mapping, np.uint8)

PAGE = os.sysconf("SC_PAGE_SIZE")
file, memory = mapped(sys.argv[1])
watched = native.MappedFile(file, memory.ctypes.data, memory.nbytes, "weights")
NONE, CONTENT, STATUS = native.Change
"""


def run(tmp_path: Path, script: str, first: str = "") -> subprocess.CompletedProcess[str]:
    path = tmp_path / "file"
    path.write_bytes(bytes([1, 2, 3, 4]) * PAGE)
    (tmp_path / "script.py").write_text(f"{first}\n{MAP}\n{script}\n")
    command = [sys.executable, str(tmp_path / "script.py"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)


def test_a_truncated_part_of_a_file_is_read_as_zeros(tmp_path: Path) -> None:
    """By several threads at once, none of which is the one that asks."""
    script = """
assert watched.change == NONE and memory.max() == 4
os.truncate(sys.argv[1], 2 * PAGE)
assert watched.change == CONTENT
seen = []
look = lambda: seen.append((memory[:2 * PAGE].max(), memory[2 * PAGE:].max()))
threads = [threading.Thread(target=look) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert seen == [(4, 0)] * 4, seen
os.truncate(sys.argv[1], 4 * PAGE)
assert watched.change == CONTENT
watched.forget()
"""
    done = run(tmp_path, script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("change", ["os.utime(sys.argv[1])", "open(sys.argv[1], 'ab').write(b'x')"])
def test_a_file_that_is_written_to_has_changed(tmp_path: Path, change: str) -> None:
    done = run(tmp_path, f"assert watched.change == NONE\n{change}\nassert watched.change == CONTENT\n")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "change",
    [
        "os.rename(sys.argv[1], sys.argv[1] + '2')",
        "os.unlink(sys.argv[1])",
        "os.chmod(sys.argv[1], 0o400)",
        # Other content, and the old modification time put back.
        """
before = os.stat(sys.argv[1])
with open(sys.argv[1], "r+b") as other: other.write(b"9")
os.utime(sys.argv[1], ns=(before.st_atime_ns, before.st_mtime_ns))
assert os.stat(sys.argv[1]).st_mtime_ns == before.st_mtime_ns
""",
    ],
    ids=["renamed", "deleted", "permissions", "put back"],
)
def test_a_change_of_status_may_be_one_of_content(tmp_path: Path, change: str) -> None:
    script = f"""
import time
time.sleep(0.05)  # the clock of file systems ticks every few milliseconds
{change}
assert watched.change == STATUS
watched.renew()
assert watched.change == NONE
watched.condemn()
assert watched.change == CONTENT
"""
    done = run(tmp_path, script)
    assert done.returncode == 0, done.stderr


ELSEWHERE = """
open(sys.argv[1] + "2", "wb").write(bytes(PAGE))
_, other = mapped(sys.argv[1] + "2")
os.truncate(sys.argv[1] + "2", 0)
"""


@pytest.mark.parametrize(
    "script",
    [
        ELSEWHERE + "other.max()",
        "os.truncate(sys.argv[1], 0)\nwatched.forget()\nmemory.max()",
        "os.kill(os.getpid(), signal.SIGBUS)",
    ],
    ids=["another file", "forgotten", "sent"],
)
def test_other_bus_errors_are_left_alone(tmp_path: Path, script: str) -> None:
    assert run(tmp_path, script).returncode == -signal.SIGBUS


def test_they_go_to_the_handler_that_there_was_before(tmp_path: Path) -> None:
    done = run(tmp_path, ELSEWHERE + "other.max()", first="import faulthandler; faulthandler.enable()")
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr


def test_only_files_can_be_watched() -> None:
    with pytest.raises(ValueError, match="weights cannot be watched: Bad file descriptor"):
        native.MappedFile(-1, 0, 0, "weights")
