"""The engine: the tokens of a request are its own, whatever else is asked for, shared, cancelled or put back."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.llm.models import History, Letters, logits_after, sizes_for

from hidet_dist.errors import BusyError, CallError, ConfigError, EngineError, RequestError
from hidet_dist.llm.engine import Engine, EngineOptions, Grammar, Request, Sampling
from hidet_dist.llm.engine.sampling import Sampler

LETTERS = Letters()
GREEDY = Sampling(temperature=0)


def expected(request: Request, vocabulary: int, limit: int, choice: int = 0) -> list[int]:
    """The tokens of an answer, by one sequence that knows of no others."""
    assert request.sampling.seed is not None or request.sampling.temperature == 0
    sampler = Sampler(request.sampling, request.sampling.seed or 0, choice, request.prompt)
    tokens = list(request.prompt)
    while len(tokens) - len(request.prompt) < limit:
        tokens.append(sampler.choose(logits_after(tokens, vocabulary)))
        if tokens[-1] == Letters.END:
            break
    return tokens[len(request.prompt) :]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def check_nothing_is_left(engine: Engine) -> None:
    statistics = engine.statistics()
    assert (statistics.running, statistics.waiting, statistics.pages_used) == (0, 0, 0)


def test_a_greedy_answer_is_the_models():
    model = History(sizes_for(LETTERS))
    with Engine(model, LETTERS) as engine:
        (answer,) = engine.submit(Request((1, 2, 3), max_tokens=12, ignore_end=True, sampling=GREEDY)).answers()
        tokens = [1, 2, 3]
        for token in answer.ids:
            assert token == logits_after(tokens, LETTERS.vocabulary).argmax()
            tokens.append(token)
        assert len(answer.ids) == 12
        assert answer.finish == "length"
        check_nothing_is_left(engine)
    assert model.closed


requests = st.builds(
    Request,
    prompt=st.integers(1, 40).flatmap(
        lambda length: st.sampled_from([7, 8]).map(lambda start: tuple((start + i) % 50 for i in range(length)))
    ),
    max_tokens=st.integers(1, 14),
    choices=st.integers(1, 3),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.7, 1.5]),
        top_k=st.sampled_from([0, 5]),
        top_p=st.sampled_from([1.0, 0.8]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        seed=st.integers(0, 3),
    ),
)


@settings(max_examples=30, deadline=None)
@given(
    asked=st.lists(st.tuples(requests, st.sampled_from([None, None, 0, 1, 5])), min_size=1, max_size=8),
    pages=st.integers(15, 40),
    step_tokens=st.integers(1, 16),
    states=st.integers(1, 6),
    shares=st.booleans(),
)
def test_tokens_do_not_depend_on_neighbours(
    asked: list[tuple[Request, int | None]], pages: int, step_tokens: int, states: int, shares: bool
):
    """Requests in any number, some of them cancelled after so many events, on a model with few pages and states."""
    sizes = sizes_for(LETTERS, pages=pages, states=states, tokens=16, shares_prefixes=shares)
    with Engine(History(sizes), LETTERS, EngineOptions(step_tokens=step_tokens)) as engine:
        streams = [(request, cancelled, engine.submit(request)) for request, cancelled in asked]
        for request, cancelled, stream in streams:
            if cancelled is not None:
                for count, _ in enumerate(stream):
                    if count >= cancelled:
                        stream.cancel()
                assert not list(stream)
                continue
            for choice, answer in enumerate(stream.answers()):
                assert answer.ids == expected(request, sizes.vocabulary, request.limit(sizes), choice)
        check_nothing_is_left(engine)


def test_a_step_has_a_bound_and_decoding_goes_on_beside_a_long_prompt():
    model = History(sizes_for(LETTERS, pages=100))
    with Engine(model, LETTERS, EngineOptions(step_tokens=8)) as engine:
        model.gate.clear()
        first = engine.submit(Request((1, 2, 3), max_tokens=30, ignore_end=True, sampling=GREEDY))
        model.entered.acquire()
        second = engine.submit(Request(tuple(range(100)), max_tokens=3, sampling=GREEDY))
        model.gate.set()
        first.answers()
        second.answers()
    assert max(len(step.tokens) for step in model.steps) == 8
    beside = [step for step in model.steps if len(step.tables) == 2]
    prefill = [step for step in beside if len(step.tokens) > 2]
    assert len(prefill) == 15  # 100 tokens by 7, beside one of the first request's in each step
    assert all(0 in step.wanted for step in prefill)


def test_equal_beginnings_share_pages():
    model = History(sizes_for(LETTERS, pages=60))
    prompt = tuple(range(30))
    with Engine(model, LETTERS) as engine:
        ask = Request(prompt, max_tokens=4, sampling=GREEDY)
        (first,) = engine.submit(ask).answers()
        before = len(model.steps)
        (second,) = engine.submit(ask).answers()
        assert first.ids == second.ids
        assert [len(step.tokens) for step in model.steps[before:]] == [2, 1, 1, 1]  # 28 tokens are in 7 full pages
        assert engine.statistics().shared_tokens == 28

        # Several answers of one request compute their prompt once.
        other = Request(prompt[::-1], max_tokens=4, choices=3, sampling=Sampling(seed=5))
        computed = engine.statistics().prompt_tokens
        for choice, answer in enumerate(engine.submit(other).answers()):
            assert answer.ids == expected(other, LETTERS.vocabulary, 4, choice)
        assert engine.statistics().prompt_tokens - computed == 30 + 2 + 2


def test_without_pages_a_sequence_is_put_back_and_goes_on_later():
    model = History(sizes_for(LETTERS, pages=12, context=48))
    with Engine(model, LETTERS) as engine:
        model.gate.clear()
        asked = [Request((start, 2, 3), max_tokens=35, ignore_end=True, sampling=GREEDY) for start in range(3)]
        streams = [engine.submit(request) for request in asked]
        model.gate.set()
        for request, stream in zip(asked, streams, strict=True):
            (answer,) = stream.answers()
            tokens = list(request.prompt)
            for token in answer.ids:
                assert token == logits_after(tokens, LETTERS.vocabulary).argmax()
                tokens.append(token)
            assert len(answer.ids) == 35
        assert engine.statistics().preempted
        check_nothing_is_left(engine)


def test_a_cancelled_request_frees_its_pages_at_once_and_the_queue_is_bounded():
    model = History(sizes_for(LETTERS, states=1))
    with Engine(model, LETTERS, EngineOptions(queue=1)) as engine:
        model.gate.clear()
        running = engine.submit(Request((1, 2, 3), sampling=GREEDY))
        model.entered.acquire()
        waiting = engine.submit(Request((4,), max_tokens=2, ignore_end=True, sampling=GREEDY))
        with pytest.raises(BusyError, match="1 sequences wait already, and 1 may"):
            engine.submit(Request((5,), max_tokens=2, ignore_end=True, sampling=GREEDY))
        assert engine.statistics().pages_used == 1
        running.cancel()
        assert engine.statistics().pages_used == 0  # while the model still computes its step
        assert [event.finish for event in running] == ["cancelled"]
        model.gate.set()
        assert len(waiting.answers()[0].ids) == 2
        check_nothing_is_left(engine)


def test_a_model_that_fails_gives_every_open_request_its_error():
    model = History(sizes_for(LETTERS, states=2))
    engine = Engine(model, LETTERS)
    model.gate.clear()
    streams = [engine.submit(Request((start,), max_tokens=9, ignore_end=True, sampling=GREEDY)) for start in range(4)]
    model.fails = RuntimeError("rank 1 died")
    model.gate.set()
    for stream in streams:
        with pytest.raises(EngineError, match="rank 1 died"):
            stream.answers()
    assert engine.status == "failed"
    assert engine.failure is model.fails
    with pytest.raises(EngineError, match="rank 1 died"):
        engine.submit(Request((1,)))
    check_nothing_is_left(engine)
    engine.close()
    assert model.closed


def test_a_step_that_the_ranks_refuse_ends_its_requests_alone():
    model = History(sizes_for(LETTERS, states=1))
    with Engine(model, LETTERS) as engine:
        model.gate.clear()
        refused = engine.submit(Request((1,), max_tokens=9, choices=2, ignore_end=True, sampling=GREEDY))
        model.entered.acquire()
        waiting = engine.submit(Request((2,), max_tokens=9, ignore_end=True, sampling=GREEDY))
        model.fails = CallError("rank 1 has no memory")
        model.gate.set()
        with pytest.raises(EngineError, match="rank 1 has no memory"):
            refused.answers()
        model.fails = None
        # Which of its steps were refused too, before the model recovered, the engine's thread decides.
        try:
            assert len(waiting.answers()[0].ids) == 9
        except EngineError as error:
            assert "rank 1 has no memory" in str(error)
        assert len(engine.submit(Request((3,), max_tokens=2, ignore_end=True, sampling=GREEDY)).answers()[0].ids) == 2
        check_nothing_is_left(engine)


def test_logits_that_are_no_numbers_end_their_request_alone():
    def scripted(history: list[int]) -> np.ndarray | None:
        return np.full(LETTERS.vocabulary, np.nan, np.float32) if history[0] == 9 else None

    with Engine(History(sizes_for(LETTERS), scripted), LETTERS) as engine:
        good = engine.submit(Request((1,), max_tokens=5, ignore_end=True, sampling=GREEDY))
        bad = engine.submit(Request((9,), max_tokens=5, choices=2, sampling=GREEDY))
        with pytest.raises(EngineError, match="no finite numbers"):
            bad.answers()
        assert len(good.answers()[0].ids) == 5
        check_nothing_is_left(engine)


def test_draining_refuses_new_requests_and_finishes_open_ones():
    model = History(sizes_for(LETTERS))
    with Engine(model, LETTERS) as engine:
        model.gate.clear()
        stream = engine.submit(Request((1,), max_tokens=9, ignore_end=True, sampling=GREEDY))
        drained: list[bool] = []
        thread = threading.Thread(target=lambda: drained.append(engine.drain(60)))
        thread.start()
        wait_for(lambda: engine.status == "draining")
        with pytest.raises(EngineError, match="takes no more requests"):
            engine.submit(Request((1,)))
        model.gate.set()
        assert len(stream.answers()[0].ids) == 9
        thread.join(60)
        assert drained == [True]


def test_what_is_not_complete_when_the_time_is_up_gets_an_error():
    model = History(sizes_for(LETTERS))
    with Engine(model, LETTERS) as engine:
        model.gate.clear()
        stream = engine.submit(Request((1,), max_tokens=9, ignore_end=True, sampling=GREEDY))
        assert not engine.drain(0.01)
        with pytest.raises(EngineError, match="not complete in time"):
            stream.answers()
        model.gate.set()


def says(text: str) -> Callable[[list[int]], np.ndarray]:
    """Have the model say a text after prompts of one token, and end."""
    tokens = [*LETTERS.encode(text, special=False), LETTERS.END]

    def scripted(history: list[int]) -> np.ndarray:
        logits = np.zeros(LETTERS.vocabulary, np.float32)
        logits[tokens[min(len(history) - 1, len(tokens) - 1)]] = 5
        return logits

    return scripted


@pytest.mark.parametrize(
    ("text", "stop", "seen", "finish"),
    [
        ("héllo €5", (), "héllo €5", "stop"),
        ("one two three", (" three", "two"), "one ", "stop"),
        ("one two three", ("twofold", "two t"), "one ", "stop"),
        ("one twofol", ("twofold",), "one twofol", "stop"),
        ("aaab", ("aab",), "a", "stop"),
    ],
)
def test_text_comes_in_whole_characters_and_without_what_stops_it(text: str, stop: tuple, seen: str, finish: str):
    with Engine(History(sizes_for(LETTERS), says(text)), LETTERS) as engine:
        stream = engine.submit(Request((LETTERS.BEGIN,), max_tokens=40, stop=stop, sampling=GREEDY))
        events = list(stream)
    assert "".join(event.text for event in events) == seen
    assert events[-1].finish == finish
    assert not any("\N{REPLACEMENT CHARACTER}" in event.text for event in events)


def test_a_part_of_a_character_at_the_end_is_marked():
    with Engine(History(sizes_for(LETTERS), says("a€")), LETTERS) as engine:
        (answer,) = engine.submit(Request((1,), max_tokens=3, sampling=GREEDY)).answers()
    assert answer.text == "a\N{REPLACEMENT CHARACTER}"
    assert answer.finish == "length"


def test_tokens_that_end_an_answer_are_the_tokenizers_and_the_requests():
    with Engine(History(sizes_for(LETTERS), says("abc")), LETTERS) as engine:
        ask = engine.submit
        assert ask(Request((1,), max_tokens=9, sampling=GREEDY)).answers()[0].ids == [97, 98, 99, LETTERS.END]
        stopped = Request((1,), max_tokens=9, stop_tokens=frozenset({98}), sampling=GREEDY)
        assert ask(stopped).answers()[0].text == "a"
        on = Request((1,), max_tokens=5, ignore_end=True, special=True, sampling=GREEDY)
        assert ask(on).answers()[0].text == "abc</s></s>"


def test_log_probabilities_of_the_prompt_and_of_tokens():
    model = History(sizes_for(LETTERS))
    prompt = tuple(range(20))
    with Engine(model, LETTERS, EngineOptions(prompt_logits=6)) as engine:
        engine.submit(Request(prompt, max_tokens=1, sampling=GREEDY)).answers()  # its pages are not shared below
        asked = Request(prompt, max_tokens=3, logprobs=2, prompt_logprobs=3, sampling=Sampling(seed=1, temperature=3))
        stream = engine.submit(asked)
        (answer,) = stream.answers()
        (alone,) = engine.submit(Request(prompt, max_tokens=0, prompt_logprobs=3)).answers()
        check_nothing_is_left(engine)
    assert max(len(step.wanted) for step in model.steps) <= 7
    assert (alone.ids, alone.finish) == ([], "length")
    assert stream.prompt is not None
    assert [each.token for each in stream.prompt] == list(prompt)
    assert stream.prompt[0].logprob is None
    for place, told in [*list(enumerate(stream.prompt))[1:], *enumerate(answer.tokens, len(prompt))]:
        tokens = [*prompt, *answer.ids][:place]
        logits = logits_after(tokens, LETTERS.vocabulary).astype(float)
        logprobs = logits - np.log(np.exp(logits).sum())
        assert told.logprob == pytest.approx(logprobs[told.token])
        assert len(told.top) == (3 if place < len(prompt) else 2)
        assert [token for token, _ in told.top] == np.argsort(-logprobs)[: len(told.top)].tolist()


def test_answers_follow_a_schema_or_an_expression():
    pytest.importorskip("llguidance")
    schema = (
        '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false}'
    )
    sampling = Sampling(seed=3)
    with Engine(History(sizes_for(LETTERS)), LETTERS) as engine:
        ask = Request((1, 2), max_tokens=60, choices=2, sampling=sampling, grammar=Grammar("regex", "(ab|cd){3}e?"))
        for answer in engine.submit(ask).answers():
            assert answer.text.rstrip("e") and not answer.text.rstrip("e").replace("ab", "").replace("cd", "")
            assert len(answer.text) in {6, 7}
            assert answer.finish == "stop"
        ask = Request((1, 2), max_tokens=150, choices=4, sampling=sampling, grammar=Grammar("json_schema", schema))
        for answer in engine.submit(ask).answers():
            assert answer.finish == "stop"
            assert json.loads(answer.text) in ({"a": True}, {"a": False})
        for wrong in (Grammar("regex", "(("), Grammar("json_schema", "{"), Grammar("json_schema", '{"type": "wrong"}')):
            with pytest.raises(RequestError) as caught:
                engine.submit(Request((1,), grammar=wrong))
            assert caught.value.parameter == "response_format"


def _rules(count: int) -> str:
    return "start: x0\n" + "\n".join(f'x{i}: "a" x{i + 1}' for i in range(count)) + f'\nx{count}: "b"'


def _references(count: int) -> str:
    forms: dict = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": {**forms, f"a{count}": {"type": "string"}}})


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar("lark", _rules(5000)), "too deeply nested"),  # they overflow llguidance's stack
        (Grammar("json_schema", _references(2500)), "too deeply nested"),
        (Grammar("json_schema", '{"$ref": "#"}'), "malformed or too complex"),
        (Grammar("json_schema", '{"$ref": "file:///etc/passwd"}'), "malformed or too complex"),
        (Grammar("json_schema", json.dumps({"enum": ["x" * 200_000]})), "characters; at most 131072"),
        (Grammar("json_schema", json.dumps({"enum": [f"value {i}" for i in range(7000)]} | {"x": 1})), ""),
        (Grammar("regex", "(" * 2000 + "a" + ")" * 2000), "malformed or too complex"),
        (Grammar("xml", "a"), "There is no grammar 'xml'"),
        pytest.param(
            Grammar("lark", "start: A\nA: " + " & ".join(f"/(.*a.{{{i % 40}}})*/" for i in range(60))),
            "more than 3 s",
            marks=pytest.mark.slow,
        ),
        pytest.param(Grammar("regex", "a?" * 30000 + "a" * 30000), "more than 3 s", marks=pytest.mark.slow),
        pytest.param(Grammar("regex", "((a{1000}){1000}){1000}"), "more than 3 s", marks=pytest.mark.slow),
    ],
)
def test_a_hostile_grammar_is_refused_or_answered_and_others_are_served(grammar: Grammar, said: str):
    pytest.importorskip("llguidance")
    with Engine(History(sizes_for(LETTERS)), LETTERS) as engine:
        try:
            list(engine.submit(Request((1, 2), max_tokens=3, grammar=grammar)))
            assert not said
        except RequestError as error:
            assert said and said in str(error)
            assert error.parameter == "response_format"
            assert len(str(error)) < 1000
        ask = Request((1, 2), max_tokens=9, grammar=Grammar("regex", "(ab){3}"))
        assert [answer.text for answer in engine.submit(ask).answers()] == ["ababab"]


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": (1, 9999)}, "prompt"),
        ({"prompt": (1,) * 200}, "prompt"),
        ({"max_tokens": 198}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"choices": 0}, "n"),
        ({"stop": ("",)}, "stop"),
        ({"logprobs": 1000}, "logprobs"),
        ({"sampling": Sampling(temperature=-1)}, "temperature"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature"),
        ({"sampling": Sampling(top_p=0)}, "top_p"),
        ({"sampling": Sampling(bias={9999: 1.0})}, "logit_bias"),
    ],
)
def test_a_wrong_request_never_reaches_the_model(changes: dict, parameter: str):
    model = History(sizes_for(LETTERS, pages=50))
    with Engine(model, LETTERS) as engine, pytest.raises(RequestError) as caught:
        engine.submit(Request(**({"prompt": (1, 2, 3)} | changes)))
    assert caught.value.parameter == parameter
    assert not model.steps


def test_a_wrong_option_is_refused():
    with pytest.raises(ConfigError, match="queue of the engine is 0"):
        Engine(History(sizes_for(LETTERS)), LETTERS, EngineOptions(queue=0))


def test_a_coroutine_takes_events_as_a_thread_does():
    async def take(engine: Engine, start: int) -> list[int]:
        stream = engine.submit(Request((start,), max_tokens=9, ignore_end=True, sampling=GREEDY))
        return [event.token.token async for event in stream if event.token is not None]

    async def all_at_once(engine: Engine) -> list[list[int]]:
        return await asyncio.gather(*(take(engine, start) for start in range(4)))

    with Engine(History(sizes_for(LETTERS)), LETTERS) as engine:
        taken = asyncio.run(all_at_once(engine))
        for start, ids in enumerate(taken):
            request = Request((start,), max_tokens=9, ignore_end=True, sampling=GREEDY)
            assert engine.submit(request).answers()[0].ids == ids
