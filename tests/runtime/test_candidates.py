"""Choosing among candidates, with a timer that makes its times up."""

import json
import math
import os

import pytest

from hidet_dist.errors import HidetDistError
from hidet_dist.runtime.candidates import FOLDER, Choices


class FakeTimer:
    def __init__(self, times):
        self.times = times
        self.asked = []

    def __call__(self, kernel, candidate):
        self.asked.append((kernel, candidate))
        time = self.times[kernel][candidate]
        if isinstance(time, Exception):
            raise time
        return time


TIMES = {0: [3.0, 1.0, 2.0], 2: [5.0, 5.0]}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hidet_dist" / FOLDER


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "artifacts"
    path.mkdir()
    return path


def choices(folder, artifact="abc", device="NVIDIA H100 80GB HBM3", candidates=(3, 1, 2)):
    return Choices(folder, artifact, device, candidates)


def never(kernel, candidate):
    raise AssertionError("timed again")


def test_the_fastest_is_chosen_once(folder, cache):
    timer = FakeTimer(TIMES)
    assert choices(folder).get(timer) == (1, 0, 0)
    assert timer.asked == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]  # a kernel with one candidate is not timed
    assert choices(folder).get(never) == (1, 0, 0)
    assert len(list((folder / FOLDER).iterdir())) == 1
    assert not cache.exists()


def test_a_remembered_choice_is_for_one_device_and_one_build(folder):
    choices(folder).get(FakeTimer(TIMES))
    for other in (choices(folder, artifact="abd"), choices(folder, device="NVIDIA H200")):
        assert other.remembered() is None
        assert other.get(FakeTimer({0: [1.0, 2.0, 3.0], 2: [2.0, 1.0]})) == (0, 0, 1)
    assert choices(folder).get(never) == (1, 0, 0)


def test_candidates_that_do_not_run_are_left_out(folder):
    times = {0: [RuntimeError("too much shared memory"), math.nan, 2.0], 2: [math.inf, 1.0]}
    assert choices(folder).get(FakeTimer(times)) == (2, 0, 1)
    assert choices(folder).get(never) == (2, 0, 1)


def test_a_kernel_of_which_nothing_runs_is_an_error(folder):
    with pytest.raises(HidetDistError, match=r"None of the 2 candidates of kernel 2 .* runs on NVIDIA H100"):
        choices(folder).get(FakeTimer({**TIMES, 2: [OSError(), math.inf]}))
    assert not (folder / FOLDER).exists()


def test_errors_of_the_timer_itself_are_not_hidden(folder):
    with pytest.raises(KeyError):
        choices(folder).get(FakeTimer({}))


def test_a_read_only_artifact_folder_leaves_the_users_cache(folder, cache, monkeypatch):
    from hidet_dist.runtime import candidates

    write = candidates.write_text

    def refuse(path, text):
        if folder in path.parents:
            raise PermissionError(path)  # root may write anywhere, so permissions alone would not show it
        write(path, text)

    monkeypatch.setattr(candidates, "write_text", refuse)
    assert choices(folder).get(FakeTimer(TIMES)) == (1, 0, 0)
    assert len(list(cache.iterdir())) == 1
    assert choices(folder).get(never) == (1, 0, 0)


def test_nowhere_to_write_to_is_no_error(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    own = choices(tmp_path / "file")
    assert own.get(FakeTimer(TIMES)) == (1, 0, 0)
    assert own.remembered() is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "[]",
        lambda text: text[:-5],
        lambda text: json.dumps({**json.loads(text), "chosen": [1, 0, 2]}),
        lambda text: json.dumps({**json.loads(text), "chosen": [True, 0, 0]}),
        lambda text: json.dumps({**json.loads(text), "chosen": [1, 0]}),
        lambda text: json.dumps({**json.loads(text), "device": "another"}),
    ],
)
def test_a_file_that_does_not_fit_is_chosen_anew(folder, damage):
    choices(folder).get(FakeTimer(TIMES))
    (path,) = (folder / FOLDER).iterdir()
    path.write_text(damage(path.read_text()))
    assert choices(folder).remembered() is None
    assert choices(folder).get(FakeTimer(TIMES)) == (1, 0, 0)
    assert choices(folder).remembered() == (1, 0, 0)
    assert [p.name for p in (folder / FOLDER).iterdir()] == [path.name]
    assert os.stat(path).st_mode & 0o444 == 0o444


def test_one_candidate_each_needs_no_choice(folder):
    own = choices(folder, candidates=(1, 1))
    assert not own.is_needed
    assert choices(folder).is_needed
    assert own.get(never) == (0, 0)
