"""The engine: one thread that steps a model for all requests together.

Requests come from any thread. Between two steps the thread chooses what to compute next; after a step it chooses
tokens, and gives each request what is new of its answers.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hidet_dist.errors import ConfigError, EngineError
from hidet_dist.llm.engine.detokenize import TextStream
from hidet_dist.llm.engine.request import Request
from hidet_dist.llm.engine.sampling import Sampler, Scored, scored
from hidet_dist.llm.engine.scheduler import EngineStep, Scheduler, SequencePart
from hidet_dist.llm.engine.sequence import Sequence
from hidet_dist.llm.engine.stepping import Stepping
from hidet_dist.llm.engine.stream import Event, Stream
from hidet_dist.llm.engine.structured import Grammars, Matcher
from hidet_dist.llm.step import StepInputs, StepModel
from hidet_dist.llm.text import Tokenizer


@dataclass(frozen=True)
class EngineOptions:
    """How an engine schedules.

    Attributes
    ----------
    step_tokens: int, optional
        Tokens of a step, at most. More of them compute long prompts in fewer steps; fewer let running answers go on
        sooner. By default as many as the model takes.
    queue: int
        Answers that wait for the model, at most. Requests past it are refused.
    prompt_logits: int
        Tokens of prompts whose log-probabilities one step gives, at most. It bounds the memory of their logits.
    """

    step_tokens: int | None = None
    queue: int = 256
    prompt_logits: int = 128

    def check(self) -> None:
        """Check the values.

        Raises
        ------
        ConfigError
            When one is not positive.
        """
        for name in ("step_tokens", "queue", "prompt_logits"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} of the engine is {value}; give 1 or more.")


@dataclass(frozen=True)
class Statistics:
    """What an engine does, and did since it started.

    Attributes
    ----------
    running, waiting: int
        Answers that the model computes, and that wait for it.
    pages, pages_used, pages_kept: int
        Pages of the model; those that answers use; those that are kept for prompts to come.
    steps, prompt_tokens, shared_tokens, generated_tokens, preempted: int
        Steps; tokens of prompts that were computed, and that were found in the pages; tokens that were generated;
        answers that gave back their pages for a while.
    model_seconds, other_seconds: float
        Seconds in the model, and beside it: scheduling, choosing tokens, and giving them out.
    """

    running: int
    waiting: int
    pages: int
    pages_used: int
    pages_kept: int
    steps: int
    prompt_tokens: int
    shared_tokens: int
    generated_tokens: int
    preempted: int
    model_seconds: float
    other_seconds: float


@dataclass(eq=False)
class _Answer:
    """An answer that is being generated."""

    stream: Stream
    choice: int
    sequence: Sequence
    sampler: Sampler
    text: TextStream
    matcher: Matcher | None
    ends: frozenset[int]
    limit: int
    prompt: list[Scored] | None = None

    @property
    def generated(self) -> int:
        return len(self.sequence.tokens) - self.sequence.prompt


class Engine(Stepping[EngineStep]):
    """Generates tokens for many requests with one model.

    Parameters
    ----------
    model: StepModel
        The model. The engine's thread is the only one that calls it, until the engine is closed.
    tokenizer: Tokenizer
        The model's tokenizer.
    options: EngineOptions
        How to schedule.
    on_failure: function, optional
        What the engine's thread calls when the model failed, after every open request has its error.

    Raises
    ------
    ConfigError
        When an option is wrong.
    """

    def __init__(
        self,
        model: StepModel,
        tokenizer: Tokenizer,
        options: EngineOptions | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ):
        options = options or EngineOptions()
        options.check()
        step_tokens = min(options.step_tokens or model.sizes.tokens, model.sizes.tokens)
        self._scheduler = Scheduler(model.sizes, step_tokens, options.prompt_logits, options.queue)
        self._grammars = Grammars(tokenizer, model.sizes.vocabulary)
        self._answers: dict[Sequence, _Answer] = {}
        self._steps = self._prompt_tokens = self._generated = 0
        super().__init__(model, tokenizer, on_failure)

    def submit(self, request: Request) -> Stream:
        """Start a request, and return its events.

        Raises
        ------
        RequestError
            When the request is wrong.
        BusyError
            When too many answers wait.
        EngineError
            When the engine takes no requests: it drains, was closed, or its model failed.
        """
        request.check(self.sizes)
        matcher = self._grammars.matcher(request.grammar) if request.grammar is not None else None
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(63)
        ends = request.stop_tokens if request.ignore_end else request.stop_tokens | self.tokenizer.end
        stream = Stream(request, self._cancel)
        answers: list[_Answer] = []
        for choice in range(request.choices):
            first = answers[0].sequence if answers else None
            scores = request.prompt_logprobs is not None and first is None
            sequence = Sequence(list(request.prompt), scores_prompt=scores, follows=first)
            answer = _Answer(
                stream,
                choice,
                sequence,
                Sampler(request.sampling, seed, choice, request.prompt),
                TextStream(request.stop),
                matcher.copy() if matcher is not None else None,
                ends,
                request.limit(self.sizes),
                [Scored(request.prompt[0])] if scores else None,
            )
            answers.append(answer)
        with self._changed:
            self._check_ready()
            self._scheduler.check_room(len(answers))
            for answer in answers:
                self._answers[answer.sequence] = answer
                self._scheduler.add(answer.sequence)
            self._changed.notify_all()
        return stream

    def statistics(self) -> Statistics:
        """Return what the engine does, and did."""
        with self._changed:
            pages = self._scheduler.pages
            return Statistics(
                self._scheduler.running,
                self._scheduler.waiting,
                pages.count,
                pages.used,
                pages.kept,
                self._steps,
                self._prompt_tokens,
                self._scheduler.shared_tokens,
                self._generated,
                self._scheduler.preempted,
                self._model_seconds,
                self._other_seconds,
            )

    def _cancel(self, stream: Stream) -> None:
        with self._changed:
            self._remove([answer for answer in self._answers.values() if answer.stream is stream])
        stream.end("cancelled")

    def _remove(self, answers: Iterable[_Answer]) -> None:
        """End answers; the caller holds the lock."""
        for answer in answers:
            if self._answers.pop(answer.sequence, None) is not None:
                self._scheduler.remove(answer.sequence)
        if not self._answers:
            self._changed.notify_all()

    def _abandon(self, error: BaseException) -> None:
        """End all answers with an error; the caller holds the lock."""
        answers = tuple(self._answers.values())
        self._remove(answers)
        for stream in {answer.stream for answer in answers}:
            stream.fail(error)

    def _is_busy(self) -> bool:
        return bool(self._answers)

    def _plan(self) -> EngineStep | None:
        return self._scheduler.plan()

    def _inputs(self, work: EngineStep) -> StepInputs:
        return work.inputs

    def _refuse(self, work: EngineStep, error: EngineError) -> None:
        with self._changed:
            streams = {self._answers[part.sequence].stream for part in work.parts if part.sequence in self._answers}
            self._remove([answer for answer in self._answers.values() if answer.stream in streams])
        for stream in streams:
            stream.fail(error)

    def _note(self, work: EngineStep, results: NDArray[np.float32]) -> None:
        """Take the logits of a step: choose tokens, give them out, and end the answers that are complete."""
        step, logits = work, results
        if logits.shape != (len(step.inputs.wanted), self.sizes.vocabulary):
            raise EngineError(
                f"The model gave logits {list(logits.shape)} where {len(step.inputs.wanted)} rows of "
                f"{self.sizes.vocabulary} were wanted."
            )
        with self._changed:
            self._scheduler.commit(step)
            answers = [self._answers.get(part.sequence) for part in step.parts]
        row = 0
        computed = len(step.inputs.tokens)
        events: dict[_Answer, Event] = {}
        failed: dict[Stream, EngineError] = {}
        for part, answer in zip(step.parts, answers, strict=True):
            rows = logits[row : row + part.scores + part.gives]
            row += len(rows)
            if answer is None or answer.stream in failed:  # it was cancelled, or failed with another answer
                continue
            if part.gives and answer.generated:
                computed -= 1
            try:
                event = self._event(answer, part, rows)
            except EngineError as error:
                failed[answer.stream] = error
                continue
            if event is not None:
                events[answer] = event
        # An answer's pages are free before its request hears that it ended.
        with self._changed:
            self._steps += 1
            self._generated += sum(event.token is not None for event in events.values())
            self._prompt_tokens += computed
            self._remove([answer for answer, event in events.items() if event.finish is not None])
            self._remove([answer for answer in self._answers.values() if answer.stream in failed])
        for answer, event in events.items():
            if not answer.stream.first:
                answer.stream.first = time.monotonic()
                answer.stream.shared = answer.sequence.shared or 0
            answer.stream.put([event])
        for stream, failure in failed.items():
            stream.fail(failure)

    def _event(self, answer: _Answer, part: SequencePart, rows: NDArray[np.float32]) -> Event | None:
        """Take an answer's rows of logits, and return what is new of it."""
        request, sequence = answer.stream.request, answer.sequence
        if answer.prompt is not None and request.prompt_logprobs is not None:
            for logits in rows[: part.scores]:
                token = sequence.tokens[len(answer.prompt)]
                answer.prompt.append(scored(logits, token, request.prompt_logprobs))
            if len(answer.prompt) == sequence.prompt:
                answer.stream.prompt, answer.prompt = tuple(answer.prompt), None
        if not part.gives:
            return None
        if answer.generated >= answer.limit:  # nothing but the prompt was wanted
            return Event(answer.choice, finish="length")
        logits = rows[-1]
        token = answer.sampler.choose(logits, answer.matcher.allowed() if answer.matcher is not None else None)
        sequence.tokens.append(token)
        told = scored(logits, token, request.logprobs) if request.logprobs is not None else Scored(token)
        finish: str | None = None
        text = ""
        if token in answer.ends:
            finish = "stop"
        else:
            if answer.matcher is not None:
                answer.matcher.consume(token)
            text = answer.text.push(self._piece(token, request))
            if answer.text.stopped or (answer.matcher is not None and answer.matcher.complete):
                finish = "stop"
            elif answer.generated >= answer.limit:
                finish = "length"
        if finish is not None:
            text += answer.text.finish()
        return Event(answer.choice, text, told, finish)

    def _piece(self, token: int, request: Request) -> bytes:
        hidden = token >= self.tokenizer.vocabulary or (token in self.tokenizer.special and not request.special)
        return b"" if hidden else self.tokenizer.piece(token)
