"""Pages: whatever sequences do, none is lost, none is given twice, and what is shared is what was kept."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from hidet_dist.llm.engine.pages import START, Pages, page_key


class Users(RuleBasedStateMachine):
    """Users that take pages, keep some under keys, share what is kept, and release all."""

    users = Bundle("users")

    @initialize(count=st.integers(1, 8))
    def make(self, count: int) -> None:
        self.pages = Pages(count)
        self.held: list[list[int]] = []
        self.keys: dict[int, bytes] = {}  # of pages that are used or kept

    @rule(target=users, count=st.integers(0, 4))
    def take(self, count: int):
        available = self.pages.available
        taken = self.pages.take(count)
        if count > available:
            assert taken is None
            assert self.pages.available == available
            return multiple()
        assert taken is not None and len(set(taken)) == count
        for page in taken:
            assert not any(page in pages for pages in self.held)
            self.keys.pop(page, None)
        self.held.append(taken)
        return taken

    @rule(user=users, number=st.integers(0, 3))
    def keep(self, user: list[int], number: int) -> None:
        key = page_key(START, [number])
        for page in user[:1]:
            known = self.keys.values()
            self.pages.keep(page, key)
            if key not in known and page not in self.keys:
                self.keys[page] = key

    @rule(target=users, number=st.integers(0, 3))
    def share(self, number: int):
        key = page_key(START, [number])
        found = self.pages.find([key])
        assert found == [page for page, kept in self.keys.items() if kept == key]
        if not found:
            return multiple()
        available = self.pages.available
        unused = self.pages.unused(found)
        self.pages.share(found)
        assert self.pages.available == available - unused
        self.held.append(found)
        return found

    @rule(user=consumes(users))
    def release(self, user: list[int]) -> None:
        self.pages.release(user)
        self.held = [pages for pages in self.held if pages is not user]

    @rule()
    def forget(self) -> None:
        self.pages.forget()
        self.keys.clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        used = {page for pages in self.held for page in pages}
        assert self.pages.used == len(used)
        assert self.pages.available == self.pages.count - len(used)
        assert self.pages.kept == len(set(self.keys) - used)


TestUsers = Users.TestCase
TestUsers.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_the_pages_that_were_released_first_go_first():
    pages = Pages(4)
    first, second = pages.take(2), pages.take(2)
    for number, page in enumerate((*first, *second)):
        pages.keep(page, page_key(START, [number]))
    pages.release(second[::-1])
    pages.release(first[::-1])
    assert pages.take(1) == [second[1]]
    assert pages.take(1) == [second[0]]
    assert pages.find([page_key(START, [0])]) == first[:1]
    assert pages.find([page_key(START, [2])]) == []


def test_a_key_names_all_tokens_before_it():
    one, other = page_key(START, [1, 2]), page_key(START, [1, 3])
    assert page_key(one, [4, 5]) != page_key(other, [4, 5])
    assert page_key(one, [4, 5]) == page_key(page_key(START, [1, 2]), [4, 5])


def test_a_page_is_released_as_often_as_it_was_taken():
    pages = Pages(2)
    (page,) = pages.take(1)
    pages.release([page])
    with pytest.raises(ValueError, match="more often"):
        pages.release([page])
    with pytest.raises(ValueError, match="does not use"):
        pages.keep(page, page_key(START, [1]))
