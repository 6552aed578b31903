"""A BERT sentence encoder as a graph written by hand in hidet's operators, on the CPU in float32.

It is for tests of the layers below the front ends, and for benchmarks whose figures are compared over time.
:mod:`hidet_dist.testing.minilm` is the same encoder in PyTorch, which ``from_torch`` traces: BERT, then the mean of the
tokens that are not padding, then division by the Euclidean norm. Weights have the names and layouts of the state dict
of transformers' ``BertModel``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import numpy.typing as npt
from hidet import nn, ops

from hidet_dist.errors import ConfigError
from hidet_dist.files import parse_json
from hidet_dist.testing.minilm import minilm_dir

# Added to the attention scores of padding: its exp() is exactly 0 in float32, and unlike -inf it causes no NaN.
_MASKED = -1e9
# The lower limits to which sentence-transformers clips the number of tokens and the norm before dividing by them.
_LEAST_TOKENS = 1e-9
_LEAST_NORM = 1e-12

_FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class BertConfig:
    """The sizes of a BERT encoder, with their names in a transformers ``config.json``.

    Attributes
    ----------
    vocab_size: int
        Rows of the word embedding.
    hidden_size: int
        Width of a token between layers; a multiple of ``num_attention_heads``.
    num_hidden_layers: int
        Layers of self-attention and MLP.
    num_attention_heads: int
        Heads of a layer's self-attention.
    intermediate_size: int
        Width of the MLP's inner layer.
    max_position_embeddings: int
        Rows of the position embedding: the longest sequence, in tokens.
    layer_norm_eps: float
        Added to the variance in layer norm.

    Raises
    ------
    ConfigError
        A size is not positive, or the heads do not divide the hidden size.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    layer_norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ConfigError(f"{name} must be positive, not {value}")
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @staticmethod
    def from_json(path: Path) -> BertConfig:
        """Read a transformers ``config.json``; other keys than the attributes above are ignored.

        Raises
        ------
        ConfigError
            A size is missing, or :class:`BertEncoder` does not support the described BERT.
        OSError
            The file cannot be read.
        """
        values = parse_json(path.read_text(encoding="utf-8"))
        for key, only in (("model_type", "bert"), ("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
            if values.get(key, only) != only:
                raise ConfigError(f"{path}: {key} is {values[key]!r}, and only {only!r} is supported")
        names = [field.name for field in fields(BertConfig)]
        missing = [name for name in names if name not in values]
        if missing:
            raise ConfigError(f"{path}: {', '.join(missing)} missing")
        return BertConfig(**{name: values[name] for name in names})


class _Weights:
    """Weights by name, whose shapes are checked on access."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]):
        self._arrays = arrays

    def take(self, name: str, shape: tuple[int, ...]) -> _FloatArray:
        """Return the weight ``name`` as float32. Raises ConfigError unless it has ``shape``."""
        if name not in self._arrays:
            raise ConfigError(f"There is no weight {name!r}.")
        array = self._arrays[name]
        if array.shape != shape:
            raise ConfigError(f"The weight {name!r} has the shape {array.shape}; the configuration requires {shape}.")
        return array.astype(np.float32, copy=False)


def _constant(array: _FloatArray) -> hidet.Tensor:
    return hidet.asarray(np.ascontiguousarray(array))


class _Linear(nn.LinearTransposed):
    """``x @ weight + bias``, with a weight ``[in, out]``, so that graphs do not transpose it."""

    def __init__(self, weights: _Weights, name: str, in_features: int, out_features: int):
        super().__init__(in_features, out_features)
        self.weight = _constant(weights.take(f"{name}.weight", (out_features, in_features)).T)
        self.bias = _constant(weights.take(f"{name}.bias", (out_features,)))


class _LayerNorm(nn.LayerNorm):
    """Layer norm over the last dim. hidet's module (0.6.1) ignores its epsilon."""

    def __init__(self, weights: _Weights, name: str, size: int, eps: float):
        super().__init__(size, eps)
        self.weight = _constant(weights.take(f"{name}.weight", (size,)))
        self.bias = _constant(weights.take(f"{name}.bias", (size,)))

    def forward(self, x: hidet.Tensor) -> hidet.Tensor:
        return ops.layer_norm(x, epsilon=self.eps) * self.weight + self.bias


class _Embeddings(nn.Module):
    """Words ``int32[b, s]`` to ``float32[b, s, hidden]``: word, position and token type 0, summed and normalized."""

    def __init__(self, config: BertConfig, weights: _Weights):
        super().__init__()
        hidden = config.hidden_size
        self.word = _constant(weights.take("embeddings.word_embeddings.weight", (config.vocab_size, hidden)))
        self.position = _constant(
            weights.take("embeddings.position_embeddings.weight", (config.max_position_embeddings, hidden))
        )
        # All tokens of a sentence are of type 0, so the other row is unused.
        self.token_type = _constant(weights.take("embeddings.token_type_embeddings.weight", (2, hidden))[0])
        self.norm = _LayerNorm(weights, "embeddings.LayerNorm", hidden, config.layer_norm_eps)

    def forward(self, input_ids: hidet.Tensor) -> hidet.Tensor:
        # The sequence length is known, so positions are a slice of the table, not a lookup.
        positions = _constant(self.position.numpy()[: int(input_ids.shape[1])])
        return self.norm(ops.take(self.word, input_ids) + positions + self.token_type)


class _SelfAttention(nn.Module):
    """Multi-head self-attention of ``float32[b, s, hidden]``; a mask ``float32[b, 1, 1, s]`` is added to the scores."""

    def __init__(self, config: BertConfig, weights: _Weights, name: str):
        super().__init__()
        self.heads = config.num_attention_heads
        self.head_size = config.head_size
        hidden = config.hidden_size
        self.query = _Linear(weights, f"{name}.self.query", hidden, hidden)
        self.key = _Linear(weights, f"{name}.self.key", hidden, hidden)
        self.value = _Linear(weights, f"{name}.self.value", hidden, hidden)
        self.output = _Linear(weights, f"{name}.output.dense", hidden, hidden)

    def forward(self, x: hidet.Tensor, mask: hidet.Tensor) -> hidet.Tensor:
        batch, seq, hidden = x.shape

        def split_heads(y: hidet.Tensor, axes: list[int]) -> hidet.Tensor:
            return ops.permute_dims(ops.reshape(y, [batch, seq, self.heads, self.head_size]), axes)

        query = split_heads(self.query(x), [0, 2, 1, 3])  # [b, h, s, d]
        key = split_heads(self.key(x), [0, 2, 3, 1])  # [b, h, d, s]
        value = split_heads(self.value(x), [0, 2, 1, 3])
        scores = ops.matmul(query, key) * (1.0 / math.sqrt(self.head_size)) + mask
        context = ops.matmul(ops.softmax(scores, axis=-1), value)  # [b, h, s, d]
        return self.output(ops.reshape(ops.permute_dims(context, [0, 2, 1, 3]), [batch, seq, hidden]))


class _Layer(nn.Module):
    """One layer: self-attention and MLP, each added to its input and normalized."""

    def __init__(self, config: BertConfig, weights: _Weights, name: str):
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.attention = _SelfAttention(config, weights, f"{name}.attention")
        self.attention_norm = _LayerNorm(weights, f"{name}.attention.output.LayerNorm", hidden, eps)
        self.up = _Linear(weights, f"{name}.intermediate.dense", hidden, inner)
        self.down = _Linear(weights, f"{name}.output.dense", inner, hidden)
        self.norm = _LayerNorm(weights, f"{name}.output.LayerNorm", hidden, eps)

    def forward(self, x: hidet.Tensor, mask: hidet.Tensor) -> hidet.Tensor:
        x = self.attention_norm(self.attention(x, mask) + x)
        return self.norm(self.down(ops.gelu(self.up(x))) + x)


class BertEncoder(nn.Module):
    """BERT with a sentence embedding on top: masked mean over the tokens, then L2 normalization.

    Parameters
    ----------
    config: BertConfig
        The sizes.
    weights: Mapping[str, numpy.ndarray]
        The weights, named and laid out as in the state dict of transformers' ``BertModel``. Others are ignored.

    Raises
    ------
    ConfigError
        A weight is missing, or its shape does not fit the sizes.
    """

    def __init__(self, config: BertConfig, weights: Mapping[str, npt.NDArray[Any]]):
        super().__init__()
        checked = _Weights(weights)
        self.config = config
        self.embeddings = _Embeddings(config, checked)
        self.layers = nn.ModuleList(
            [_Layer(config, checked, f"encoder.layer.{index}") for index in range(config.num_hidden_layers)]
        )

    def forward(self, input_ids: hidet.Tensor, attention_mask: hidet.Tensor) -> hidet.Tensor:
        """Compute the embeddings ``float32[b, hidden]``, each of norm 1.

        Parameters
        ----------
        input_ids: hidet.Tensor
            ``int32[b, s]``, rows of the word embedding.
        attention_mask: hidet.Tensor
            ``float32[b, s]``, 1 for a token and 0 for padding; each sentence has at least one token.

        Raises
        ------
        ConfigError
            The sequence is longer than the position embedding.
        """
        batch, seq = input_ids.shape
        if int(seq) > self.config.max_position_embeddings:
            raise ConfigError(
                f"a sequence of {seq} tokens is longer than the {self.config.max_position_embeddings} positions"
            )
        hidden = self.embeddings(input_ids)
        mask = (1.0 - ops.reshape(attention_mask, [batch, 1, 1, seq])) * _MASKED
        for layer in self.layers:
            hidden = layer(hidden, mask)

        token_mask = ops.reshape(attention_mask, [batch, seq, 1])
        tokens = ops.clip(ops.sum(attention_mask, dims=1, keep_dim=True), _LEAST_TOKENS, None)
        mean = ops.sum(hidden * token_mask, dims=1) / tokens
        # Not hidet's lp_norm: in 0.6.1 its exponent is the rank minus one, which is the L1 norm for a matrix.
        norm = ops.sqrt(ops.sum(mean * mean, dims=1, keep_dim=True))
        return mean / ops.clip(norm, _LEAST_NORM, None)


def weight_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Map the names of a :class:`BertEncoder`'s weights to shapes, in the layout of transformers' ``BertModel``."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.max_position_embeddings, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    for index in range(config.num_hidden_layers):
        layer = f"encoder.layer.{index}"
        for name, out_features, in_features in (
            ("attention.self.query", hidden, hidden),
            ("attention.self.key", hidden, hidden),
            ("attention.self.value", hidden, hidden),
            ("attention.output.dense", hidden, hidden),
            ("intermediate.dense", inner, hidden),
            ("output.dense", hidden, inner),
        ):
            shapes[f"{layer}.{name}.weight"] = (out_features, in_features)
            shapes[f"{layer}.{name}.bias"] = (out_features,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{layer}.{name}.weight"] = (hidden,)
            shapes[f"{layer}.{name}.bias"] = (hidden,)
    return shapes


def random_weights(config: BertConfig, seed: int) -> dict[str, _FloatArray]:
    """Make random weights for a :class:`BertEncoder`, the same for the same seed.

    Matrices preserve the size of activations. Biases and scales are not 0 or 1 as in a freshly initialized BERT, so
    that a missing one shows in the result.
    """
    random = np.random.default_rng(seed)
    weights: dict[str, _FloatArray] = {}
    for name, shape in weight_shapes(config).items():
        if "LayerNorm.weight" in name:
            array = random.uniform(0.5, 1.5, shape)
        elif "embeddings." in name or len(shape) == 1:
            array = random.normal(0.0, 0.5, shape)
        else:
            array = random.normal(0.0, 1.0 / math.sqrt(shape[1]), shape)
        weights[name] = array.astype(np.float32)
    return weights


def random_bert(config: BertConfig, seed: int) -> BertEncoder:
    """Make a :class:`BertEncoder` with :func:`random_weights`."""
    return BertEncoder(config, random_weights(config, seed))


def load_minilm(model_dir: Path | None = None) -> tuple[BertEncoder, BertConfig]:
    """Load all-MiniLM-L6-v2 with its trained weights.

    Parameters
    ----------
    model_dir: Path, optional
        A folder with ``config.json`` and ``model.safetensors``. None for that of the pip package.

    Raises
    ------
    ModuleNotFoundError
        ``model_dir`` is None and the pip package is not installed.
    ConfigError
        The folder describes another kind of model, or its weights do not fit its configuration.
    """
    from safetensors.numpy import load_file

    folder = minilm_dir() if model_dir is None else model_dir
    config = BertConfig.from_json(folder / "config.json")
    return BertEncoder(config, load_file(folder / "model.safetensors")), config


def trace(model: BertEncoder, batch: int, seq: int) -> hidet.FlowGraph:
    """Trace the encoder for ``batch`` sentences of ``seq`` tokens, padding included.

    Inputs are ``input_ids: int32[batch, seq]`` and ``attention_mask: float32[batch, seq]``, the output is
    ``float32[batch, hidden]``; all are on the CPU. The graph holds the first ``seq`` rows of the position embedding.

    Raises
    ------
    ConfigError
        The sequence is longer than the position embedding.
    """
    input_ids = hidet.symbol([batch, seq], dtype="int32", device="cpu")
    attention_mask = hidet.symbol([batch, seq], dtype="float32", device="cpu")
    return hidet.trace_from(model(input_ids, attention_mask), [input_ids, attention_mask])


def weight_bytes(graph: hidet.FlowGraph) -> int:
    """Sum the bytes of the graph's constants, each counted once."""
    constants = {id(x): x for node in graph.nodes for x in node.inputs if x.storage is not None}
    return sum(math.prod(int(extent) for extent in x.shape) * int(x.dtype.nbytes) for x in constants.values())
