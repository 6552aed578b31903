"""The settings of a process change only while a block runs."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from hidet_dist.frugal import collect_rarely, copies_in_one_thread, older_objects_kept


class _Circle:
    def __init__(self) -> None:
        self.itself = self


def test_only_objects_of_the_block_are_collected() -> None:
    old = weakref.ref(_Circle())
    assert old() is not None
    with older_objects_kept():
        new = weakref.ref(_Circle())
        gc.collect()
        assert old() is not None and new() is None
    gc.collect()
    assert old() is None and gc.get_freeze_count() == 0


def test_garbage_is_looked_for_less_often_and_never_more_often() -> None:
    before = gc.get_threshold()
    try:
        collect_rarely()
        assert gc.get_threshold()[0] > before[0] and gc.get_threshold()[1:] == before[1:]
        gc.set_threshold(10**6, 5, 5)
        collect_rarely()
        assert gc.get_threshold() == (10**6, 5, 5)
    finally:
        gc.set_threshold(*before)


def test_an_error_and_a_nested_block_leave_the_collector_as_it_was() -> None:
    with pytest.raises(KeyError), older_objects_kept():
        with older_objects_kept():
            pass
        assert gc.get_freeze_count() > 0, "the outer block goes on"
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_torch_has_its_threads_back_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(KeyError), copies_in_one_thread():
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
