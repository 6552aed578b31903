"""What every test starts from."""

import pytest

from hidet_dist.runtime import session


@pytest.fixture(autouse=True)
def no_session_left_behind():
    """A partition loaded in the test's own process enters a session; the next test must be able to enter another."""
    yield
    session.shutdown()
