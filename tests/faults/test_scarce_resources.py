"""Missing resources of the system: shared memory needs no name or folder, and Gloo works without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from . import conftest
from .conftest import Start, X, assert_blames, call_all, load_all

pytestmark = pytest.mark.usefixtures("next_run_works")


def _may_mount() -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", "/dev/shm"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _may_mount(), reason="may not mount a small /dev/shm")
def test_a_full_dev_shm_does_not_matter(start: Start, artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = "mount -t tmpfs -o size=4k,nr_inodes=2 tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/x"
    wrapper = ["unshare", "--mount", "sh", "-c", f'{fill} && exec "$@"', "sh", sys.executable]
    monkeypatch.setattr(conftest, "INTERPRETER", wrapper)
    ranks = start(2)
    load_all(ranks, artifacts)
    call_all(ranks)
    assert [rank.do("shared") for rank in ranks] == [[[0, 1]], [[0, 1]]]
    monkeypatch.undo()


def test_without_room_for_a_segment_gloo_does_it(start: Start, artifacts: Path) -> None:
    """The rank that makes the segment may make no file as large."""
    ranks = start(2)
    load_all(ranks, artifacts)
    ranks[0].do("limit", file_bytes=1 << 16)
    call_all(ranks)
    assert [rank.do("shared") for rank in ranks] == [[], []]


def test_without_descriptors_it_is_said(start: Start, artifacts: Path) -> None:
    ranks = start(2)
    load_all(ranks, artifacts)
    ranks[0].do("limit", open_files=3)  # it has more already
    for rank in ranks:
        rank.send("call", inputs=[X.tolist()])
    for rank in ranks:
        assert_blames(rank.answer(), 0, "CommunicationError", "Too many open files")
