"""Models over ragged tokens: logits are those of transformers, and what attention does not know is refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.llm.gguf_made import model_of

from hidet_dist.errors import TraceError
from hidet_dist.llm.ragged import RaggedModel, _mask, dynamic_shapes, prepare, settle
from hidet_dist.llm.step import StepInputs

PAGE, PAGES = 4, 16
RARER = (
    "llama",
    "gpt_oss",
    "mistral",
    "qwen3",
    "gemma3_text",
    "phi3",
    "olmo2",
    "mixtral",
    "qwen3_moe",
    "smollm3",
    "gpt2",
    "granite",
)
KINDS = ("gemma2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in RARER))
WINDOWED = {"gemma2", "gemma3_text", "mistral", "gpt_oss", "phi3"}


def ragged(model: Any, context: int | None = None) -> RaggedModel:
    """The same model over ragged tokens."""
    config = copy.deepcopy(model.config)
    prepare(config, context)
    module = type(model)(config).eval().float()
    module.load_state_dict(model.state_dict())
    settle(module)
    result = RaggedModel(module, PAGES * PAGE, PAGE)
    for name, x in result.named_buffers():
        if name.startswith(("keys", "values")):
            x.fill_(1e18)  # what nobody wrote must not be read
    return result


class Sequences:
    """Sequences of tokens with pages anywhere, of which steps take as many tokens as are named."""

    def __init__(self, *tokens: list[int]):
        pages = np.random.default_rng(0).permutation(PAGES)
        self.tables = [pages[number * 6 : number * 6 + 6] for number in range(len(tokens))]
        self.tokens = [list(x) for x in tokens]
        self.done = [0] * len(tokens)

    def step(self, counts: dict[int, int], wanted: list[int] | None = None) -> dict[str, torch.Tensor]:
        """The next tokens of some sequences, by number; by default the last logits of each are wanted."""
        tokens, positions, slots, rows = [], [], [], []
        ends = []
        for row, (number, count) in enumerate(counts.items()):
            for position in range(self.done[number], self.done[number] + count):
                tokens.append(self.tokens[number][position])
                positions.append(position)
                slots.append(self.tables[number][position // PAGE] * PAGE + position % PAGE)
                rows.append(row)
            self.done[number] += count
            ends.append(len(tokens) - 1)
        inputs = StepInputs(
            *(np.array(x, np.int64) for x in (tokens, positions, slots, rows)),
            lengths=np.array(positions, np.int64) + 1,
            tables=np.array([self.tables[number] for number in counts], np.int64),
            states=np.arange(len(counts)),
            wanted=np.array(ends if wanted is None else wanted, np.int64),
            page=PAGE,
        )
        names = ("tokens", "positions", "slots", "sequences", "lengths", "wanted")
        return {
            **{name: torch.from_numpy(getattr(inputs, name)) for name in names},
            "table": torch.from_numpy(inputs.tables),
        }


@functools.cache
def made(kind: str) -> Any:
    return model_of(kind, **({"sliding_window": 5} if kind in WINDOWED else {}))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_whatever_shares_a_step(kind: str):
    model = made(kind)
    assert kind not in WINDOWED or model.config.sliding_window == 5
    with torch.no_grad():
        step = ragged(model)
        generator = np.random.default_rng(1)
        sequences = Sequences(*(list(map(int, generator.integers(3, 90, 20))) for _ in range(2)))
        got: dict[tuple[int, int], torch.Tensor] = {}
        # A prompt, another one's first chunk beside it, its rest beside decoding, then decoding of both and of one.
        for counts in ({0: 9, 1: 4}, {1: 7, 0: 1}, {0: 1, 1: 1}, {1: 1, 0: 1}, {0: 1}, {1: 3}):
            logits = step(**sequences.step(counts))
            for row, number in enumerate(counts):
                got[number, sequences.done[number]] = logits[row]
        for number, tokens in enumerate(sequences.tokens):
            expected = model(input_ids=torch.tensor([tokens])).logits[0]
            for (of, count), logits in got.items():
                if of == number:
                    assert (logits - expected[count - 1]).abs().max() < 2e-6 * expected.abs().max().clamp_min(1)


def test_logits_are_computed_where_they_are_wanted_alone():
    with torch.no_grad():
        expected = made("llama")(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0]
        logits = ragged(made("llama"))(**Sequences([5, 6, 7, 8]).step({0: 4}, [1, 3]))
    torch.testing.assert_close(logits, expected[[1, 3]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("context", "length"), [(32, 20), (64, 40)])
def test_long_rope_takes_the_factors_of_the_context(context: int, length: int):
    factors = {"short_factor": [1.0] * 8, "long_factor": [float(x) for x in range(1, 9)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32, **factors}
    model = model_of("phi3", rope_parameters=rope, max_position_embeddings=64)
    tokens = list(range(3, 3 + length))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
        sequence = Sequences(tokens)
        sequence.tables[0] = np.arange(16)
        logits = ragged(model, context)(**sequence.step({0: length}, list(range(length))))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("llama", {"rope_type": "linear", "factor": 2.0}),
        ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
        (
            "qwen3",
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        ("phi3", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("gpt_neox", {"rope_type": "default", "partial_rotary_factor": 0.25}),
        ("stablelm", {"rope_type": "default", "partial_rotary_factor": 0.25}),
    ],
)
def test_rotary_scalings_are_those_of_the_configuration(kind: str, rope: dict[str, Any]):
    model = model_of(kind, rope_parameters={"rope_theta": 10000.0, **rope})
    tokens = list(range(3, 53))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
        sequence = Sequences(tokens)
        sequence.tables[0] = np.arange(16)
        step = ragged(model)
        logits = torch.cat([step(**sequence.step({0: count}, list(range(count)))) for count in (30, 1, 19)])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    plain = model_of(kind, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})
    with torch.no_grad():
        other = plain(input_ids=torch.tensor([tokens])).logits[0]
    assert (other - expected).abs().max() > 1e-3 or kind in ("gpt_neox", "stablelm")  # these have it by default


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "gemma2", "qwen3_moe")]
)
def test_a_model_is_exported_with_all_sizes_of_a_step_symbolic(kind: str):
    step = ragged(made(kind))
    program = torch.export.export(step, (), step.inputs(), dynamic_shapes=dynamic_shapes(), strict=False)
    exported = program.run_decompositions({})
    written = {spec.target for spec in exported.graph_signature.output_specs if spec.kind.name == "BUFFER_MUTATION"}
    assert written == {f"{name}_{layer}" for name in ("keys", "values") for layer in range(2)}
    calls = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert calls.count("hidet_dist.attention_over_rows.default") == 2


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of the types conv"),
        ("llama4_text", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "both directions"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
        ("mamba", {}, "layers of the types linear_attention"),
        ("bloom", {}, "takes no position_ids|layers that do not ask"),
    ],
)
def test_models_with_more_than_attention_are_refused_by_name(kind: str, changes: dict[str, Any], said: str):
    with pytest.raises(TraceError, match=said):
        ragged(model_of(kind, **changes))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": torch.ones(1)}, "the argument 'temperature'"),
        ({"is_causal": False}, "not causal"),
        ({"dropout": 0.5}, "multiple values|drops weights"),
        ({"sliding_window": 3}, "mask|window"),
    ],
)
def test_what_attention_does_not_know_is_refused_by_name(options: dict[str, Any], said: str):
    config = copy.deepcopy(made("llama").config)
    prepare(config)
    module = type(made("llama"))(config).eval()
    attention = module.model.layers[1].self_attn
    attention.forward = functools.partial(attention.forward, **options)
    with pytest.raises(TraceError, match=said):
        RaggedModel(module, 16, 4)


@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize("ahead", [0, 1])
def test_masks_are_the_same_whether_their_functions_take_all_pairs_of_positions_or_one(window: int, ahead: int):
    def sees(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        return (key <= query + ahead) & (key > query - (window or query + 1))

    def sees_one(*indices: torch.Tensor) -> torch.Tensor:
        return torch.tensor(bool(sees(*indices)))

    def found(function: Callable[..., Any]) -> str:
        try:
            return f"a window of {_mask(mask_function=function).window}"
        except TraceError as error:
            return str(error)

    assert found(sees) == found(sees_one)
    said = "The model's mask says True of position 0 seeing 1: only" if ahead else f"a window of {window}"
    assert found(sees).startswith(said)
