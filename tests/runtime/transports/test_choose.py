"""The choice of a transport, where no other rank is needed for it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from hidet_dist.errors import ConfigError
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.transports import Failures, Setup, open_transport
from hidet_dist.runtime.transports.choose import VARIABLE


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = cast(Any, None)  # the choice is looked at before the ranks meet
    setup = Setup(nowhere, "c0", (2,), 1.0, Failures(lambda _: None, lambda: False))
    monkeypatch.setenv(VARIABLE, "tcp")
    with pytest.raises(ConfigError, match=f"{VARIABLE} must be 'auto' or 'gloo', not 'tcp'"):
        open_transport("cpu", setup)


def test_a_target_without_a_transport_is_refused() -> None:
    with pytest.raises(ConfigError, match="target must be 'cpu' or 'cuda', not 'tpu'"):
        Communicator(0, 1, (1,), target="tpu")


def test_failures_are_recorded_by_who_is_to_blame() -> None:
    messages: list[str] = []
    failures = Failures(messages.append, lambda: bool(messages))

    def raises(error: BaseException) -> None:
        raise error

    assert failures.record(lambda: None) == 0
    assert not failures.failed()
    assert failures.record(lambda: raises(ValueError("3"))) != 0
    assert (failures.by_peer, failures.interrupt, messages) == (False, None, ["ValueError: 3"])
    assert failures.record(lambda: raises(ConfigError("set it")), raised_as_is=ConfigError) != 0
    assert isinstance(failures.interrupt, ConfigError)
    assert failures.record(lambda: raises(KeyboardInterrupt())) != 0
    assert isinstance(failures.interrupt, KeyboardInterrupt)
    assert not failures.by_peer
    assert failures.record(lambda: raises(RuntimeError("rank 1 is gone"))) != 0
    assert failures.by_peer
    assert messages[-1] == "rank 1 is gone"
