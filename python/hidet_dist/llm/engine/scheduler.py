"""The schedule: which tokens of which sequences the next step computes.

A step takes first the sequences that have one token left, each of which gives another token; then parts of the prompts
of those that run; then it admits those that wait, in the order in which they came. The bound on a step's tokens is thus
shared by all prompts together, and decoding goes on whatever arrives.

A sequence is admitted once the pages for all its tokens are available, and one more for each sequence that runs. Where
a running sequence finds no page for its next token, the one that was admitted last gives its pages back and waits in
front of all others. Its tokens are kept: it is computed again from its beginning, as a prompt, and goes on from there.
The sequence that was admitted first always goes on, since one sequence alone has room.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from hidet_dist.errors import BusyError
from hidet_dist.llm.engine.pages import Pages
from hidet_dist.llm.engine.sequence import Sequence
from hidet_dist.llm.sizes import StepSizes
from hidet_dist.llm.step import StepInputs


@dataclass(frozen=True)
class SequencePart:
    """What a step computes of one sequence: its tokens ``begin`` to ``end``.

    ``scores`` counts the tokens of the prompt whose logits the step gives, the first ones of the sequence's rows of
    logits. Where ``gives`` is set, the last of its rows tells the next token.
    """

    sequence: Sequence
    begin: int
    end: int
    scores: int
    gives: bool


@dataclass(frozen=True)
class EngineStep:
    """The next step: its parts, each of one sequence, and its inputs. Rows of logits are in the order of the parts."""

    parts: tuple[SequencePart, ...]
    inputs: StepInputs


class Scheduler:
    """The sequences that run and that wait.

    Parameters
    ----------
    sizes: StepSizes
        The sizes of the model.
    step_tokens: int
        Tokens of a step, at most.
    prompt_logits: int
        Tokens of prompts whose logits one step gives, at most.
    queue: int
        Sequences that wait, at most.
    """

    def __init__(self, sizes: StepSizes, step_tokens: int, prompt_logits: int, queue: int):
        self.sizes = sizes
        self.pages = Pages(sizes.pages)
        self.preempted = 0
        self.shared_tokens = 0
        self._step_tokens = step_tokens
        self._prompt_logits = prompt_logits
        self._queue = queue
        self._running: list[Sequence] = []  # in the order in which they were admitted
        self._waiting: deque[Sequence] = deque()
        # One that runs has one token in each step, at least: all of them fit.
        self._states = list(range(min(sizes.states, step_tokens) - 1, -1, -1))

    @property
    def running(self) -> int:
        """Sequences that run."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait."""
        return len(self._waiting)

    def check_room(self, count: int) -> None:
        """Check that so many more sequences may wait.

        Raises
        ------
        BusyError
            When they may not.
        """
        if len(self._waiting) + count > self._queue:
            raise BusyError(
                f"{len(self._waiting)} sequences wait already, and {self._queue} may; make the request again later, "
                "or raise the length of the queue."
            )

    def add(self, sequence: Sequence) -> None:
        """Have a sequence wait. Its tokens must fit the context and the pools."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """End a sequence that runs or waits, and give its pages back at once."""
        sequence.ended = True
        if sequence.state is not None:
            self._running.remove(sequence)
            self._give_back(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def plan(self) -> EngineStep | None:
        """Choose what the next step computes; None where there is nothing to compute."""
        parts: list[SequencePart] = []
        for sequence in tuple(self._running):
            if sequence.state is not None and sequence.remaining == 1 and self._has_page_for_next(sequence):
                parts.append(self._part(sequence, 1))
        left = self._step_tokens - len(parts)
        scores = self._prompt_logits
        for sequence in self._running:
            if sequence.remaining > 1:
                left, scores = self._take(sequence, left, scores, parts)
        while left and self._states and (admitted := self._admit()) is not None:
            left, scores = self._take(admitted, left, scores, parts)
        return EngineStep(tuple(parts), self._inputs(parts)) if parts else None

    def commit(self, step: EngineStep) -> None:
        """Note that a step was computed: its tokens are in the pages now, which other sequences may share once full."""
        page = self.sizes.page
        for part in step.parts:
            sequence = part.sequence
            if sequence.ended:
                continue
            sequence.computed = part.end
            sequence.scored += part.scores
            if self.sizes.shares_prefixes:
                keys = sequence.keys(page, part.end // page)
                for index in range(part.begin // page, part.end // page):
                    self.pages.keep(sequence.pages[index], keys[index])

    def _take(self, sequence: Sequence, left: int, scores: int, parts: list[SequencePart]) -> tuple[int, int]:
        """Add as many tokens of a prompt to a step as fit; return how many tokens, and logits of prompts, are left."""
        count = min(sequence.remaining, left)
        if sequence.scores_prompt:
            end = max(sequence.computed, sequence.scored) + scores
            if end < sequence.prompt - 1:
                count = min(count, end - sequence.computed)
        if count:
            part = self._part(sequence, count)
            parts.append(part)
            left, scores = left - count, scores - part.scores
        return left, scores

    def _part(self, sequence: Sequence, count: int) -> SequencePart:
        begin, end = sequence.computed, sequence.computed + count
        scores = 0
        if sequence.scores_prompt:
            # The last token of the prompt tells the first one that is generated, and none of the prompt.
            scores = max(0, min(end, sequence.prompt - 1) - max(begin, sequence.scored))
        return SequencePart(sequence, begin, end, scores, gives=end == len(sequence.tokens))

    def _has_page_for_next(self, sequence: Sequence) -> bool:
        """Whether a running sequence has a page for its next token, which the last ones give up where pages lack."""
        while len(sequence.pages) * self.sizes.page < len(sequence.tokens):
            taken = self.pages.take(1)
            if taken is not None:
                sequence.give(taken)
                continue
            last = self._running.pop()
            self._give_back(last)
            self._waiting.appendleft(last)
            self.preempted += 1
            if last is sequence:
                return False
        return True

    def _give_back(self, sequence: Sequence) -> None:
        assert sequence.state is not None
        self._states.append(sequence.state)
        self.pages.release(sequence.leave())

    def _admit(self) -> Sequence | None:
        """Let the first sequence run that waits for nothing but pages, if these are available."""
        for sequence in self._waiting:
            leader = sequence.follows
            if leader is None or leader.ended or leader.computed >= leader.prompt or not self.sizes.shares_prefixes:
                break
        else:
            return None
        page = self.sizes.page
        found: list[int] = []
        if self.sizes.shares_prefixes:
            found = self.pages.find(sequence.keys(page, sequence.shareable // page))
        missing = -(-len(sequence.tokens) // page) - len(found)
        if missing + self.pages.unused(found) + len(self._running) > self.pages.available:
            return None
        self._waiting.remove(sequence)
        self.pages.share(found)
        taken = self.pages.take(missing)
        assert taken is not None
        sequence.give([*found, *taken])
        sequence.computed = len(found) * page
        self.shared_tokens += sequence.computed
        if sequence.shared is None:
            sequence.shared = sequence.computed
        sequence.state = self._states.pop()
        self._running.append(sequence)
        return sequence

    def _inputs(self, parts: list[SequencePart]) -> StepInputs:
        page = self.sizes.page
        held = [-(-part.end // page) for part in parts]
        tables = np.empty((len(parts), max(held)), np.int64)
        tokens: list[int] = []
        wanted: list[int] = []
        for index, (part, pages) in enumerate(zip(parts, held, strict=True)):
            table = part.sequence.table()
            tables[index, :pages] = table[:pages]
            tables[index, pages:] = table[0]
            first = len(tokens)
            tokens.extend(part.sequence.tokens[part.begin : part.end])
            if part.scores:
                begin = first + max(0, part.sequence.scored - part.begin)
                wanted.extend(range(begin, begin + part.scores))
            if part.gives:
                wanted.append(len(tokens) - 1)
        counts = np.array([part.end - part.begin for part in parts], np.int64)
        begins = np.array([part.begin for part in parts], np.int64)
        sequences = np.repeat(np.arange(len(parts), dtype=np.int64), counts)
        firsts = np.cumsum(counts) - counts
        positions = np.arange(len(tokens), dtype=np.int64) + (begins - firsts)[sequences]
        return StepInputs(
            tokens=np.array(tokens, np.int64),
            positions=positions,
            slots=tables[sequences, positions // page] * page + positions % page,
            sequences=sequences,
            lengths=positions + 1,
            tables=tables,
            states=np.array([part.sequence.state for part in parts], np.int64),
            wanted=np.array(wanted, np.int64),
            page=page,
        )
