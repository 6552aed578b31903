"""The server: OpenAI's forms and errors, in process; what is wrong never reaches the model."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.llm.models import History, Letters, logits_after, sizes_for

from hidet_dist.errors import ConfigError
from hidet_dist.limits import MOST_BODY_BYTES
from hidet_dist.llm.engine import Engine, EngineOptions

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

from hidet_dist.llm.server.app import create_app  # noqa: E402 - after what it needs
from hidet_dist.llm.server.run import ServerOptions  # noqa: E402
from hidet_dist.llm.server.service import Service  # noqa: E402

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
    "{% if tools %}tools={{ tools | length }};{% endif %}{% if add_generation_prompt %}A:{% endif %}"
)
LETTERS = Letters()
LETTERS.chat_template = TEMPLATE
SAYS = "héllo €!"


def scripted(history: list[int]) -> np.ndarray | None:
    """After a prompt that ends with ":", say a text and end."""
    text = bytes(token for token in history if token < 256).rpartition(b":")[2]
    if 58 not in history:
        return None
    said = SAYS.encode()
    logits = np.zeros(LETTERS.vocabulary, np.float32)
    logits[said[len(text)] if said.startswith(text) and len(text) < len(said) else Letters.END] = 30
    return logits


class Served:
    """A model behind the application, called in process."""

    def __init__(self, api_key: str | None = None, **sizes: int):
        self.model = History(sizes_for(LETTERS, **({"pages": 60} | sizes)), scripted)
        self.engine = Engine(self.model, LETTERS, EngineOptions(queue=4))
        self.service = Service("tiny", api_key)
        self.app = create_app(self.service)
        self.service.start(self.engine)

    def call(self, method: str, path: str, host: str = "localhost", **given: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}", timeout=60) as client:
                return await client.request(method, path, **given)

        return asyncio.run(send())

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.call("POST", path, json={"model": "tiny", **body})

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        answer = self.post(path, stream=True, **body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served()
    yield made
    statistics = made.engine.statistics()
    assert (statistics.running, statistics.waiting, statistics.pages_used) == (0, 0, 0)
    made.engine.close()


def greedy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(tokens, LETTERS.vocabulary).argmax()))
    return tokens[len(prompt) :]


def test_a_completion_is_the_models(served: Served):
    answer = served.post("/v1/completions", prompt=[5, 6], max_tokens=4, temperature=0, ignore_eos=True)
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    (choice,) = body["choices"]
    expected = b"".join(LETTERS.piece(token) for token in greedy([5, 6], 4) if token not in LETTERS.special)
    assert choice == {
        "index": 0,
        "text": expected.decode("utf-8", "replace"),
        "logprobs": None,
        "finish_reason": "length",
    }
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 4, 6)


def test_completions_of_several_prompts_with_echo_and_log_probabilities(served: Served):
    prompts = [[100, 101, 102], [103, 104]]
    given = {
        "prompt": prompts,
        "echo": True,
        "logprobs": 2,
        "max_tokens": 1,
        "temperature": 0,
        "n": 2,
        "ignore_eos": True,
    }
    body = served.post("/v1/completions", **given).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    for choice in body["choices"]:
        prompt = prompts[choice["index"] // 2]
        told = choice["logprobs"]
        tokens = [*prompt, *greedy(prompt, 1)]
        assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["top_logprobs"]) == len(tokens)
        assert choice["text"].startswith(bytes(prompt).decode())
        assert told["tokens"][: len(prompt)] == [chr(token) for token in prompt]
        assert told["text_offset"][: len(prompt) + 1] == list(range(len(prompt) + 1))
        if choice["index"] % 2:
            continue
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        for place in range(1, len(tokens)):
            logits = logits_after(tokens[:place], LETTERS.vocabulary).astype(float)
            logprob = logits[tokens[place]] - np.log(np.exp(logits).sum())
            assert told["token_logprobs"][place] == pytest.approx(logprob)
            assert max(told["top_logprobs"][place].values()) == pytest.approx(
                logits.max() - np.log(np.exp(logits).sum())
            )

    alone = served.post("/v1/completions", prompt="abc", echo=True, logprobs=1, max_tokens=0).json()["choices"][0]
    assert alone["text"] == "abc"
    assert alone["logprobs"]["tokens"] == ["<s>", "a", "b", "c"]


def test_a_stream_of_completions_is_the_completion_in_parts(served: Served):
    given = {"prompt": ["say:", "do:"], "temperature": 0, "logprobs": 1, "echo": True}
    whole = served.post("/v1/completions", **given).json()
    events = served.events("/v1/completions", stream_options={"include_usage": True}, **given)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {
        **whole["usage"],
        "prompt_tokens_details": events[-1]["usage"]["prompt_tokens_details"],
    }
    for choice in whole["choices"]:
        parts = [each for event in events[:-1] for each in event["choices"] if each["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for key, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][key]] == values
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["stop"]
    assert all(event["usage"] is None for event in events[:-1])
    always = served.events("/v1/completions", stream_options={"continuous_usage_stats": True}, **given)
    counts = [event["usage"]["completion_tokens"] for event in always]
    assert counts == sorted(counts) and counts[-1] == whole["usage"]["completion_tokens"]
    assert {event["usage"]["prompt_tokens"] for event in always} == {whole["usage"]["prompt_tokens"]}


def test_a_chat_is_made_by_the_template_and_answered(served: Served):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    body = served.post("/v1/chat/completions", messages=messages, temperature=0, logprobs=True, top_logprobs=1).json()
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": SAYS, "refusal": None}
    assert choice["finish_reason"] == "stop"
    content = choice["logprobs"]["content"]
    assert bytes(byte for each in content[:-1] for byte in each["bytes"]).decode() == SAYS
    assert content[0]["top_logprobs"][0]["token"] == "h"
    prompt = "<s>system:be;user:hi;A:"
    tokens = served.post("/tokenize", messages=messages).json()
    assert tokens["tokens"] == LETTERS.encode(prompt, special=False)
    assert tokens["max_model_len"] == 200
    assert body["usage"]["prompt_tokens"] == len(tokens["tokens"])
    with_tools = served.post("/tokenize", messages=messages, tools=[{"type": "function"}]).json()
    assert served.post("/detokenize", tokens=with_tools["tokens"]).json() == {
        "prompt": prompt.replace("A:", "tools=1;A:")
    }


def test_a_stream_of_a_chat_has_whole_characters(served: Served):
    given = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "temperature": 0}
    events = served.events("/v1/chat/completions", stop="!", stream_options={"include_usage": True}, **given)
    for number in range(2):
        choices = [each for event in events for each in event["choices"] if each["index"] == number]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == SAYS[:-1]
        assert choices[-1]["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] == 2 * len(SAYS.encode())


def test_an_answer_follows_its_response_format(served: Served):
    pytest.importorskip("llguidance")
    given = {"prompt": [1], "max_tokens": 50, "seed": 1}
    choice = served.post("/v1/completions", response_format={"type": "regex", "regex": "(yes|no)"}, **given).json()[
        "choices"
    ][0]
    assert choice["text"] in {"yes", "no"} and choice["finish_reason"] == "stop"
    schema = {"name": "x", "schema": {"enum": [17, "a"]}, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    choice = served.post("/v1/completions", response_format=form, **given).json()["choices"][0]
    assert json.loads(choice["text"]) in (17, "a")


CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "parameter"),
    [
        (COMPLETE, {"prompt": "a", "model": "other"}, 404, "model"),
        (COMPLETE, {}, 400, "prompt"),
        (COMPLETE, {"prompt": "a", "best_of": 3}, 400, "best_of"),
        (COMPLETE, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        (COMPLETE, {"prompt": "a", "wrong": 1}, 400, "wrong"),
        (COMPLETE, {"prompt": "a", "\ud800": 1}, 400, None),
        (COMPLETE, {"prompt": "\ud800"}, 400, "prompt"),
        (COMPLETE, {"prompt": ["a", "\ud800"]}, 400, "prompt"),
        (COMPLETE, {"prompt": []}, 400, None),
        (COMPLETE, {"prompt": [[1], [9999]]}, 400, "prompt"),
        (COMPLETE, {"prompt": [10**30]}, 400, "prompt"),
        (COMPLETE, {"prompt": "a" * 300}, 400, "prompt"),
        (COMPLETE, {"prompt": "a", "max_tokens": 1000}, 400, "max_tokens"),
        (COMPLETE, {"prompt": "a", "n": 0}, 400, "n"),
        (COMPLETE, {"prompt": "a", "temperature": -1}, 400, "temperature"),
        (COMPLETE, {"prompt": "a", "top_p": 0}, 400, "top_p"),
        (COMPLETE, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        (COMPLETE, {"prompt": "a", "logit_bias": {"9999": 1}}, 400, "logit_bias"),
        (COMPLETE, {"prompt": "a", "stop": ["x"] * 100}, 400, "stop"),
        (COMPLETE, {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
        (COMPLETE, {"prompt": "a", "response_format": {"type": "regex", "regex": "("}}, 400, "response_format"),
        (COMPLETE, {"prompt": "a", "response_format": {"type": "regex"}}, 400, "response_format.regex"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"role": "king", "content": "a"}]}, 400, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": 1}]}, 400, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content"),
        (CHAT, {"messages": USER, "top_logprobs": 2}, 400, "top_logprobs"),
        (CHAT, {"messages": USER, "tool_choice": "required"}, 400, "tool_choice"),
        (CHAT, {"messages": USER, "max_tokens": 2, "max_completion_tokens": 3}, 400, "max_tokens"),
        ("/tokenize", {}, 400, "prompt"),
        ("/detokenize", {"tokens": [9999]}, 400, "tokens"),
    ],
)
def test_a_wrong_request_is_refused_by_name_and_never_reaches_the_model(
    served: Served, path: str, body: dict, status: int, parameter: str | None
):
    steps = len(served.model.steps)
    content = json.dumps({"model": "tiny", **body})
    answer = served.call("POST", path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if parameter is not None:
        assert error["param"].split(".")[0] == parameter.split(".")[0]
    assert len(served.model.steps) == steps


@pytest.mark.parametrize(
    ("body", "parameter", "says"),
    [
        ({"prompt": "a", "stop": ["x"] * 100}, "stop", "List should have at most"),
        ({"prompt": [1, "a"]}, "prompt.1", "valid integer"),
        ({"prompt": None}, "prompt", "valid string"),
    ],
)
def test_of_fields_with_several_kinds_of_value_the_one_that_was_meant_is_named(
    served: Served, body: dict, parameter: str, says: str
):
    error = served.call("POST", COMPLETE, json={"model": "tiny", **body}).json()["error"]
    assert error["param"] == parameter and says in error["message"]


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"{", 400), (b"[" * 100_000, 400), (b"\xff", 400), (b"[1]", 400), (b'{"a": NaN}', 400), (b"", 400)],
)
def test_a_malformed_body_is_refused(served: Served, content: bytes, status: int):
    answer = served.call("POST", COMPLETE, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


MANY = 100_000


@pytest.mark.parametrize(
    ("path", "field", "entries", "parameter"),
    [
        (COMPLETE, "prompt", "null", "prompt"),
        (COMPLETE, "prompt", "[]", "prompt"),
        (COMPLETE, "prompt", '[""]', "prompt"),
        (COMPLETE, "stop", "0", "stop"),
        (COMPLETE, "stop", '"a"', "stop"),
        (COMPLETE, "stop_token_ids", "-1", "stop_token_ids"),
        (COMPLETE, "logit_bias", '"%d": ""', "logit_bias"),
        (COMPLETE, "", '"%d": 0', "0"),
        (CHAT, "metadata", '"%d": 0', "metadata"),
        (CHAT, "messages", "0", "messages"),
        (CHAT, "messages", "{}", "messages"),
        (CHAT, "tools", "0", "tools"),
        ("/detokenize", "tokens", '""', "tokens"),
    ],
)
def test_many_wrong_entries_make_one_error_and_take_little_memory(
    served: Served, path: str, field: str, entries: str, parameter: str
):
    many = ",".join(entries % i if "%" in entries else entries for i in range(MANY))
    rest = {"prompt": "a"} if path == COMPLETE else {"messages": USER} if path == CHAT else {}
    rest.pop(field, None)
    given = f'"{field}": {{{many}}}' if "%" in entries else f'"{field}": [{many}]'
    content = json.dumps({"model": "tiny", **rest})[:-1] + f", {given if field else many}}}"
    tracemalloc.start()
    try:
        answer = served.call("POST", path, content=content, headers={"content-type": "application/json"})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split(".")[0] == parameter
    assert len(answer.content) < 1000
    assert peak < 50 * 2**20


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETE, {"model": "x" * 10**6, "prompt": "a"}, 404),
        (COMPLETE, {"model": "tiny", "prompt": "a", "y" * 10**6: 1}, 400),
        (CHAT, {"model": "tiny", "messages": [{"role": "z" * 10**6, "content": "a"}]}, 400),
        (CHAT, {"model": "tiny", "messages": [{"role": ["user"], "content": "a"}]}, 400),
        (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, 400),
        (COMPLETE, {"model": "tiny", "prompt": "a", "seed": 2**64}, 400),
        (COMPLETE, {"model": "tiny", "prompt": "a", "temperature": 10**400}, 400),
        (COMPLETE, {"model": "tiny", "prompt": "a", "logit_bias": {"1": 10**400}}, 400),
        (COMPLETE, {"model": "tiny", "prompt": "a", "logit_bias": {"9" * 5000: 1}}, 400),
        (COMPLETE, {"model": "tiny", "prompt": "a", "n": 2**63}, 400),
        (COMPLETE, {"model": "tiny", "prompt": "a", "max_tokens": -(2**63)}, 400),
        (COMPLETE, {"model": "tiny", "prompt": [2**70]}, 400),
        (COMPLETE, {"model": "tiny", "prompt": "\ud800"}, 400),
        (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "\ud800"}]}, 400),
    ],
)
def test_an_odd_value_is_refused_and_not_repeated_at_length(served: Served, path: str, body: dict, status: int):
    answer = served.call("POST", path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert len(answer.content) < 2000


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e308", "true", '"1"', "[]"])
def test_no_number_of_a_wrong_kind_or_size_is_taken(served: Served, field: str, number: str):
    content = f'{{"model": "tiny", "prompt": "a", "{field}": {number}}}'
    answer = served.call("POST", COMPLETE, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_a_large_body_is_refused(served: Served):
    content = b'{"model": "tiny", "prompt": "' + b"a" * MOST_BODY_BYTES + b'"}'
    answer = served.call("POST", COMPLETE, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert "bytes" in answer.json()["error"]["message"]


def test_models_health_metrics_and_what_is_not_there(served: Served):
    assert served.call("GET", "/health").json() == {"status": "ready"}
    (model,) = served.call("GET", "/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert served.call("GET", "/v1/models/tiny").json() == model
    assert served.call("GET", "/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert served.call("GET", "/nothing").json()["error"]["type"] == "invalid_request_error"
    assert served.call("GET", COMPLETE).status_code == 405
    served.post(COMPLETE, prompt=[77, 78], max_tokens=3, ignore_eos=True)
    text = served.call("GET", "/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["hidet_dist_ready"]) == 1
    assert float(values["hidet_dist_generated_tokens_total"]) >= 3
    assert float(values["hidet_dist_pages_used"]) == 0
    assert float(values["hidet_dist_first_token_seconds_count"]) >= 1
    assert float(values['hidet_dist_responses_total{path="/v1/completions",status="200"}']) >= 1
    assert served.call("GET", "/openapi.json").json()["paths"].keys() >= {COMPLETE, CHAT}


def test_without_a_key_other_hosts_are_refused_and_with_one_those_that_lack_it(served: Served):
    assert served.call("GET", "/v1/models", host="evil.example").status_code == 403
    for host in ("127.0.0.1:8000", "[::1]:8000", "localhost"):
        assert served.call("GET", "/v1/models", host=host).status_code == 200
    guarded = Served(api_key="secret")
    try:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            answer = guarded.call("GET", "/v1/models", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        given = {"headers": {"authorization": "Bearer secret"}, "host": "example.com"}
        assert guarded.call("GET", "/v1/models", **given).status_code == 200
        assert guarded.call("GET", "/health").status_code == 200
    finally:
        guarded.engine.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ServerOptions(host="0.0.0.0"), "give an API key"),
        (ServerOptions(host="example.com"), "give an API key"),
        (ServerOptions(port=70000), "port is 70000"),
        (ServerOptions(api_key=" "), "empty"),
        (ServerOptions(drain_seconds=-1), "drain_seconds"),
    ],
)
def test_options_that_would_open_the_server_or_are_wrong_are_refused(options: ServerOptions, said: str):
    with pytest.raises(ConfigError, match=said):
        options.check()


def test_a_model_that_loads_drains_or_failed_says_so():
    service = Service("tiny")
    made = Served()
    loading = made.app, made.service
    made.app, made.service = create_app(service), service
    assert made.call("GET", "/health").status_code == 503
    answer = made.post(COMPLETE, prompt="a")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
    assert "retry-after" in answer.headers
    made.app, made.service = loading
    assert made.engine.drain(10)
    assert made.call("GET", "/health").json() == {"status": "draining"}
    assert made.post(COMPLETE, prompt="a").json()["error"]["code"] == "draining"
    made.engine.close()


def test_a_full_queue_and_a_failed_model_give_errors():
    made = Served(states=1)
    made.model.gate.clear()
    made.engine.submit(_request(0))
    assert made.model.entered.acquire(timeout=60)  # it runs, and does not wait any more
    waiting = [made.engine.submit(_request(start)) for start in range(1, 5)]
    answer = made.post(COMPLETE, prompt="a")
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    several = made.post(COMPLETE, prompt=["a", "b"])
    assert several.status_code == 429
    assert made.engine.statistics().waiting == 4
    for stream in waiting:
        stream.cancel()

    async def fails() -> list[Any]:
        transport = httpx.ASGITransport(made.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            body = {"model": "tiny", "prompt": "a"}
            calls = [client.post(COMPLETE, json={**body, "stream": stream}) for stream in (False, True)]
            tasks = [asyncio.ensure_future(call) for call in calls]
            while made.engine.statistics().waiting < 2:
                await asyncio.sleep(0.005)
            made.model.fails = RuntimeError("rank 1 died")
            made.model.gate.set()
            return await asyncio.gather(*tasks)

    whole, stream = asyncio.run(fails())
    assert whole.status_code == 503
    assert "rank 1 died" in whole.json()["error"]["message"]
    assert "rank 1 died" in json.loads(stream.text.removeprefix("data: "))["error"]["message"]
    assert made.call("GET", "/health").json() == {"status": "failed"}
    made.engine.close()


def _request(start: int) -> Any:
    from hidet_dist.llm.engine import Request

    return Request((start,), max_tokens=5)


@pytest.mark.parametrize("stream", [False, True])
def test_the_request_of_a_client_that_is_gone_is_cancelled(stream: bool):
    made = Served(states=1)
    body = json.dumps(
        {"model": "tiny", "prompt": [3], "max_tokens": 150, "ignore_eos": True, "stream": stream}
    ).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": COMPLETE,
        "raw_path": COMPLETE.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }

    async def leave() -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            pass

        made.model.gate.clear()
        call = asyncio.ensure_future(made.app(scope, receive, send))
        while made.engine.statistics().pages_used == 0:
            await asyncio.sleep(0.002)
        gone.set()
        while made.engine.statistics().pages_used:
            await asyncio.sleep(0.002)
        made.model.gate.set()
        await asyncio.wait_for(call, 30)

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert len(made.model.steps) <= 1
    made.engine.close()
