"""Decoder language models over ragged tokens: one module whose attention reads and writes pools of rows.

All tokens of a step, of all sequences, are one row of T tokens (see :mod:`hidet_dist.llm.step`). transformers finds the
function of attention by a name in the configuration, so one function that is registered there serves every model that
asks for it. It writes the keys and values of the step's tokens to pools, which are buffers of the module, and lets each
token attend to the rows of its sequence.

What attention does beside that arrives as keyword arguments, and which tokens see which as a mask. Both are checked: a
keyword that is not known, or a mask that is not causal, raises an error with its name, since a model without it would
be another one.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from hidet_dist.checks import shown
from hidet_dist.compat.replacing import replaced
from hidet_dist.errors import HidetDistError, TraceError
from hidet_dist.frontends.pytorch.experts import experts_by_products
from hidet_dist.frontends.pytorch.export import quiet_logs
from hidet_dist.frontends.pytorch.row_attention import attention_over_rows

NAME = "hidet_dist_rows"
"""The name of this attention in transformers' configurations."""

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_HARMLESS = {
    *("position_ids", "cache_position", "position_embeddings", "past_key_values", "past_key_value", "use_cache"),
    *("output_attentions", "output_hidden_states", "return_dict", "layer_idx", "output_router_logits"),
}
"""Keywords of attention that change nothing of what is computed here: others say the same, or they are for training."""
_POSITIONS = (0, 1, 2, 3, 5, 8, 15, 31, 63, 127, 128, 255, 511, 1023, 4095, 8191)
_FARTHEST = 2**24  # a position beyond any context


@dataclass(frozen=True)
class Pool:
    """The rows of a layer: the number of groups of heads, and the sizes of a key and of a value."""

    groups: int
    key_size: int
    value_size: int


@dataclass
class _RaggedStep:
    """What the layers of one step share."""

    model: RaggedModel | None
    slots: Any = None
    sequences: Any = None
    lengths: Any = None
    table: Any = None
    seen: dict[int, Pool] = field(default_factory=dict)


@dataclass(frozen=True)
class _Mask:
    """What a token sees: the last ``window`` tokens up to itself, or all of them if it is 0."""

    window: int


_STEP: contextvars.ContextVar[_RaggedStep] = contextvars.ContextVar("step")


class RaggedModel(torch.nn.Module):
    """A causal language model of transformers over ragged tokens.

    Its buffers ``keys_0``, ``values_0``, ... are the pools of its layers, [rows, groups, size]. A call writes to them.

    Parameters
    ----------
    module: transformers.PreTrainedModel
        The model, made with :func:`prepare`. Its parameters may be on the meta device.
    rows: int
        The rows of the pools.
    page: int
        The rows of a page, which divide ``rows``.
    dtype: torch.dtype, optional
        The dtype of the pools; by default that of the model.
    device: str
        The device of the pools: ``"meta"`` for pools without memory, which suffice to trace.

    Raises
    ------
    TraceError
        When the model has states beside keys and values, layers without attention by name, or attention that uses
        what is not supported; the message names it.
    """

    def __init__(self, module: Any, rows: int, page: int, dtype: torch.dtype | None = None, device: str = "cpu"):
        super().__init__()
        self.module = module
        self.page = page
        self.training = module.training
        self.pools = _pools_of(module)
        kind = module.dtype if dtype is None else dtype
        for layer, pool in self.pools.items():
            for name, size in (("keys", pool.key_size), ("values", pool.value_size)):
                self.register_buffer(f"{name}_{layer}", torch.zeros(rows, pool.groups, size, dtype=kind, device=device))

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        sequences: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one step, and return the logits of the tokens that are wanted, float32 [R, vocabulary].

        Parameters
        ----------
        tokens, positions: integers [T]
            The tokens, and the position of each in its sequence.
        slots: integers [T]
            The row of the pools that each token's keys and values are written to.
        sequences: integers [T]
            The sequence of each token: a row of ``table``.
        lengths: integers [T]
            The number of rows of its sequence that each token attends to, itself included.
        table: integers [S, P]
            The pages of each sequence, in order.
        wanted: integers [R]
            The tokens whose logits are wanted, by their index.
        """
        step = _RaggedStep(self, slots, sequences, lengths, table)
        logits: torch.Tensor = _run(self.module, step, tokens, positions, wanted)
        return logits.float()

    def inputs(self, tokens: int = 4, sequences: int = 2, pages: int = 2, wanted: int = 2) -> dict[str, torch.Tensor]:
        """Make arguments of these sizes, to trace a call with."""
        number = torch.zeros(tokens, dtype=torch.int64)
        table = torch.zeros(sequences, pages, dtype=torch.int64)
        names = ("tokens", "positions", "slots", "sequences", "lengths")
        return {**dict.fromkeys(names, number), "table": table, "wanted": torch.zeros(wanted, dtype=torch.int64)}


def dynamic_shapes() -> dict[str, dict[int, Any]]:
    """Return the symbolic dims of a step: its tokens, sequences, pages of a sequence, and logits that are wanted."""
    names = ("tokens", "sequences", "pages", "wanted")
    tokens, sequences, pages, wanted = (torch.export.Dim(name, min=1) for name in names)
    per_token = ("tokens", "positions", "slots", "sequences", "lengths")
    return {**{name: {0: tokens} for name in per_token}, "table": {0: sequences, 1: pages}, "wanted": {0: wanted}}


def prepare(config: Any, context: int | None = None) -> None:
    """Have a model that is made of a configuration attend to rows.

    Parameters
    ----------
    config: transformers.PreTrainedConfig
        The configuration, which is changed.
    context: int, optional
        The tokens that a sequence may have. It decides which factors LongRoPE has: those for long sequences if some
        may be longer than the model was first trained with, whatever the length of one sequence is.

    Raises
    ------
    TraceError
        When the configuration has layers of other kinds than attention, or frequencies that depend on the longest
        sequence of a step.
    """
    register(NAME, _attention, _mask)
    text = config.get_text_config()
    if others := sorted(set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES):
        raise TraceError(
            f"{config.model_type} has layers of the types {', '.join(map(str, others))}: only "
            f"{' and '.join(sorted(_LAYER_TYPES))} are served."
        )
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", None):
        raise TraceError(f"{config.model_type} attends in both directions, and is no model that generates text.")
    for kind in _rope_types(text):
        if kind == "dynamic":
            raise TraceError(
                f"{config.model_type} has the rotary scaling 'dynamic', by which a token's result depends on the "
                "longest sequence of the step: use a static one, such as 'yarn'."
            )
    config._attn_implementation = NAME
    text._hidet_dist_context = context


def settle(module: Any) -> None:
    """Choose LongRoPE's factors once and for all, for the context given to :func:`prepare`."""
    context = getattr(module.config.get_text_config(), "_hidet_dist_context", None)
    rope = importlib.import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        if kinds is None or not hasattr(part, "config"):
            continue
        if isinstance(kinds, Mapping):
            if "longrope" in kinds.values():
                raise TraceError(f"{type(module).__name__} has LongRoPE in some of its layers, which is not supported.")
        elif kinds == "longrope":
            original = part.config.rope_parameters["original_max_position_embeddings"]
            longest = context or part.config.max_position_embeddings
            frequencies, part.attention_scaling = rope["longrope"](
                part.config, torch.device("cpu"), seq_len=original + 1 if longest > original else original
            )
            part.register_buffer("inv_freq", frequencies, persistent=False)
            part.rope_type = "default"  # so that a call does not choose


def _rope_types(text: Any) -> list[Any]:
    """List the kinds of rotary scaling of a configuration."""
    parameters = getattr(text, "rope_parameters", None) or {}
    per_layer = [x for x in parameters.values() if isinstance(x, Mapping)]
    return [x.get("rope_type", "default") for x in per_layer or [parameters]]


def _run(module: Any, step: _RaggedStep, tokens: Any, positions: Any, wanted: Any) -> Any:
    """Call a model for the tokens of a step."""
    token = _STEP.set(step)
    try:
        return module(
            input_ids=tokens[None],
            position_ids=positions[None],
            past_key_values=_cache(),
            use_cache=True,
            logits_to_keep=wanted,
        ).logits[0]
    finally:
        _STEP.reset(token)


def _pools_of(module: Any) -> dict[int, Pool]:
    """Find the sizes of keys and values of each layer, by a call that computes nothing. Raises TraceError."""
    kind = type(module).__name__
    names = importlib.import_module("inspect").signature(module.forward).parameters
    for name in ("input_ids", "position_ids", "past_key_values", "logits_to_keep"):
        if name not in names:
            raise TraceError(f"{kind} takes no {name}, without which its tokens cannot be of several sequences.")
    step = _RaggedStep(None)
    try:
        with quiet_logs(), _without_data(module) as mode, experts_by_products(), torch.no_grad():
            number = mode.from_tensor(torch.zeros(2, dtype=torch.int64))
            _run(module, step, number, number, number)
    except HidetDistError:
        raise
    except Exception as error:  # whatever a model's code raises
        raise TraceError(f"{kind} cannot be called for ragged tokens: {shown(str(error))}.") from error
    count = module.config.get_text_config().num_hidden_layers
    if missing := sorted(set(range(count)) - set(step.seen)):
        raise TraceError(
            f"{kind} has layers that do not ask for attention by name, such as number {missing[0]} of {count}: only "
            "models all of whose layers do are served."
        )
    return dict(sorted(step.seen.items()))


@contextlib.contextmanager
def _without_data(module: torch.nn.Module) -> Iterator[FakeTensorMode]:
    """Replace a module's parameters and buffers by tensors that have shapes alone, for a while."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    changed: list[tuple[dict[str, Any], str, Any]] = []
    with mode:
        for part in module.modules():
            both: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
            for tensors in both:
                for name, x in list(tensors.items()):
                    if x is not None:
                        changed.append((tensors, name, x))
                        tensors[name] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    try:
        # Some models choose what can be exported where PyTorch says that it is compiling.
        with mode, replaced(torch.compiler, {"_is_compiling_flag": True}):
            yield mode
    finally:
        for tensors, name, x in changed:
            tensors[name] = x


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to rows, as transformers calls a function of attention: [1, heads, T, size] in, [1, T, heads, size] out.

    Raises
    ------
    TraceError
        When it is asked for what it does not know.
    """
    layer, step = _layer_of(module), _STEP.get()
    where = named_attention(module, mask, _Mask, dropout, others)
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise TraceError(f"{where} is not causal: a token would see those behind it.")
    if sliding_window is not None and mask.window != sliding_window:
        raise TraceError(f"{where} has a window of {sliding_window} tokens, and its mask one of {mask.window}.")
    if layer in step.seen:
        raise TraceError(f"{where} is called twice in layer {layer}.")
    heads, groups = query.shape[1], key.shape[1]
    if not groups or heads % groups:
        raise TraceError(f"{where} has {heads} heads of queries, and {groups} of keys, which do not divide them.")
    step.seen[layer] = Pool(groups, key.shape[3], value.shape[3])
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if step.model is None:
        return q.new_empty(1, q.shape[0], q.shape[1], v.shape[2]), None
    keys, values = getattr(step.model, f"keys_{layer}"), getattr(step.model, f"values_{layer}")
    keys[step.slots] = k.to(keys.dtype)
    values[step.slots] = v.to(values.dtype)
    y = attention_over_rows(
        *(q, keys, values, step.table, step.sequences, step.lengths),
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        page=step.model.page,
        window=mask.window,
        softcap=float(softcap or 0.0),
        sinks=s_aux,
    )
    return y[None], None


def named_attention(module: Any, mask: Any, kind: type, dropout: float, others: Mapping[str, Any]) -> str:
    """Return what errors call an attention. Raises TraceError for arguments that none over rows can have.

    ``kind`` is that of the masks that it is given, and ``others`` are the arguments that it does not use.
    """
    where = f"The attention of {type(module).__name__}"
    if unknown := sorted(name for name, x in others.items() if x is not None and name not in _HARMLESS):
        raise TraceError(f"{where} has the argument {unknown[0]!r}, which attention over rows does not know.")
    if dropout:
        raise TraceError(f"{where} drops weights with a probability of {dropout}: call module.eval() first.")
    if not isinstance(mask, kind):
        raise TraceError(f"{where} has a mask of its own, {shown(type(mask).__name__)}, which is not supported.")
    return where


def _layer_of(module: Any) -> int:
    """Return the number of the layer of an attention. Raises TraceError."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise TraceError(f"{type(module).__name__} does not know the number of its layer, by which pools are found.")
    return layer


def _mask(*args: Any, mask_function: Callable[..., Any], attention_mask: Any = None, **others: Any) -> _Mask:
    """Describe a mask, as transformers calls a function that makes one. Raises TraceError for one that is not causal.

    The function says of two positions whether one sees the other. It is asked at positions near and far.
    """
    if attention_mask is not None:
        raise TraceError("A mask of padding has no meaning for ragged tokens.")
    with _disable_current_modes():

        def sees(query: int, key: int) -> bool:
            numbers = (torch.tensor(x) for x in (0, 0, query, key))
            return bool(mask_function(*numbers))

        # The first position that the farthest one sees: where it sees one, it sees those behind it.
        low, high = 0, _FARTHEST
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if sees(_FARTHEST, middle) else (middle + 1, high)
        window = 0 if low == 0 else _FARTHEST - low + 1
        near = sorted({x for p in _POSITIONS for x in (p, p + 1, p + window, p + window + 1, max(p - window, 0))})
        queries, keys = torch.tensor(near)[:, None], torch.tensor(near)[None, :]
        expected = keys <= queries
        if window:
            expected &= keys > queries - window
        if not _says(mask_function, queries, keys, expected):
            for query, key in itertools.product(near, near):
                if sees(query, key) != (key <= query and (not window or key > query - window)):
                    raise TraceError(
                        f"The model's mask says {sees(query, key)} of position {query} seeing {key}: only causal masks "
                        "and sliding windows are supported."
                    )
    return _Mask(window)


def _says(mask_function: Callable[..., Any], queries: torch.Tensor, keys: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a function of a mask, asked for all pairs of positions in one call, answers as expected.

    False where it does not broadcast: asking pair by pair costs hundreds of calls, and decides.
    """
    zero = torch.zeros(1, 1, dtype=torch.int64)
    try:
        seen = mask_function(zero, zero, queries, keys)
    except Exception:  # whatever a model's code raises
        return False
    return isinstance(seen, torch.Tensor) and seen.dtype == torch.bool and torch.equal(seen, expected)


def register(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Register functions of attention and of its masks in transformers under a name, once."""
    known = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    if name not in known.valid_keys():
        known.register(name, attention)
        importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)


def _cache() -> Any:
    """Make the cache that a model is given: attention keeps keys and values by itself."""
    base = importlib.import_module("transformers.cache_utils").Cache

    class Rows(base):  # type: ignore[misc, valid-type]
        """A cache that keeps nothing."""

        is_compileable = property(lambda self: False)
        is_sliding = property(lambda self: [False] * (_FARTHEST.bit_length() ** 2))

        def __init__(self) -> None:
            self.layers: list[Any] = []
            self.layer_class_to_replicate = None
            self.offloading = False

        def update(self, key: Any, value: Any, layer: int, *args: Any, **others: Any) -> tuple[Any, Any]:
            return key, value

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 0

        def get_query_offset(self, layer_idx: int = 0) -> int:
            return 0

        def get_mask_sizes(self, queries: Any, *args: Any, **others: Any) -> tuple[Any, int]:
            return (queries.shape[0] if isinstance(queries, torch.Tensor) else queries), 0

        def _refuse(self, *args: Any, **others: Any) -> Any:
            raise TraceError("The model keeps states of a convolution or a recurrence, which are not supported.")

        update_conv_state = update_recurrent_state = update_indexer = _refuse

    return Rows()
