"""Blocks within which hidet builds operators quickly."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hidet.ir import tools
from hidet.ir.functors import BaseFunctor

from hidet_dist.compat import lookups, simplest_forms
from hidet_dist.compat.quick import quick_hidet


def state() -> tuple[Any, Any]:
    return BaseFunctor.visit, tools.simplify


HIDETS = (lookups.hidet_visit, simplest_forms.hidet_simplify)


def test_hidet_has_its_own_functions_outside_of_blocks() -> None:
    assert state() == HIDETS
    with quick_hidet():
        assert BaseFunctor.visit is not lookups.hidet_visit and tools.simplify is not simplest_forms.hidet_simplify
        quick = state()
        with quick_hidet():
            assert state() == quick
        assert state() == quick
    assert state() == HIDETS


def test_a_block_that_fails_ends_as_others_do() -> None:
    with pytest.raises(ValueError, match="within"), quick_hidet():
        raise ValueError("within")
    assert state() == HIDETS


def test_a_block_goes_on_when_one_of_another_thread_ends() -> None:
    """The one that began first ends first, so that blocks are not nested."""
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with quick_hidet():
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(60)
    with quick_hidet():
        quick = state()
        leave.set()
        thread.join()
        assert state() == quick != HIDETS
    assert state() == HIDETS


def test_planning_is_within_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    import hidet
    from hidet import ops

    from hidet_dist.machine import builtin
    from hidet_dist.normalize import normalize
    from hidet_dist.rules import rule
    from hidet_dist.search import search
    from hidet_dist.spec import DeviceMesh

    seen: list[tuple[Any, Any]] = []
    derive = rule.derive
    monkeypatch.setattr(rule, "derive", lambda op: (seen.append(state()), derive(op))[1])
    x = hidet.symbol([4, 6], "float32", "cpu")
    graph = normalize(hidet.trace_from(ops.relu(x + x), [x]))
    assert state() == HIDETS
    search(graph, builtin("cpu", DeviceMesh((2,))), report=False)
    assert seen and HIDETS not in seen
    assert state() == HIDETS
