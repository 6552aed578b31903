"""Encoders over ragged tokens: one module that gives the vectors of the tokens of many texts at once.

All tokens of a step, of all texts, are one row of T tokens, without padding: a token attends to those of its own text,
in both directions. As in :mod:`hidet_dist.llm.ragged`, transformers finds the function of attention by a name in the
configuration, and what attention does beside that is checked: what is not known raises an error with its name.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hidet_dist.checks import shown
from hidet_dist.errors import HidetDistError, TraceError
from hidet_dist.frontends.pytorch.row_attention import attention_over_rows
from hidet_dist.llm.ragged import named_attention, register

NAME = "hidet_dist_texts"
"""The name of this attention in transformers' configurations."""

_PLACES = (0, 1, 2, 7, 63, 64, 127, 128, 129, 255, 511, 512, 4095, 8191)


@dataclass
class _EncoderStep:
    """What the layers of one step share; ``layers`` counts those that attended."""

    sequences: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    layers: int = 0


_STEP: contextvars.ContextVar[_EncoderStep] = contextvars.ContextVar("encoder step")


class _Everything:
    """A mask that hides nothing."""


class RaggedEncoder(torch.nn.Module):
    """An encoder of transformers over ragged tokens.

    Parameters
    ----------
    module: transformers.PreTrainedModel
        The encoder, made with :func:`prepare`. Its parameters may be on the meta device.

    Raises
    ------
    TraceError
        When it takes no positions, by which tokens of several texts are told apart.
    """

    def __init__(self, module: Any):
        super().__init__()
        self.module = module
        self.training = module.training
        self.first_position = first_position(module)
        names = inspect.signature(module.forward).parameters
        for name in ("input_ids", "position_ids"):
            if name not in names:
                raise TraceError(f"{type(module).__name__} takes no {name}, without which texts cannot share a step.")
        self._takes_kinds = "token_type_ids" in names

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        sequences: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
    ) -> torch.Tensor:
        """Return the last hidden vectors of the tokens, float32 [T, size].

        Parameters
        ----------
        tokens, positions: integers [T]
            The tokens, and the position of each in its text, from 0.
        sequences: integers [T]
            The text of each token: a row of ``table``.
        lengths: integers [T]
            The number of tokens of its text.
        table: integers [S, P]
            The tokens of each text, by their index in the step.
        """
        step = _EncoderStep(sequences, lengths, table)
        token = _STEP.set(step)
        try:
            kinds = {"token_type_ids": torch.zeros_like(tokens)[None]} if self._takes_kinds else {}
            vectors: torch.Tensor = self.module(
                input_ids=tokens[None], position_ids=positions[None] + self.first_position, **kinds
            ).last_hidden_state[0]
        except HidetDistError:
            raise
        except Exception as error:  # whatever a model's code raises
            kind = type(self.module).__name__
            raise TraceError(f"{kind} cannot be called for texts without padding: {shown(str(error))}.") from error
        finally:
            _STEP.reset(token)
        if step.layers != self.module.config.num_hidden_layers:
            raise TraceError(
                f"{type(self.module).__name__} has {self.module.config.num_hidden_layers} layers, {step.layers} of "
                "which ask for attention by name: only models all of whose layers do are served."
            )
        return vectors.float()

    def inputs(self, tokens: int = 4, sequences: int = 2, columns: int = 3) -> dict[str, torch.Tensor]:
        """Make arguments of these sizes, to trace a call with."""
        number = torch.zeros(tokens, dtype=torch.int64)
        names = ("tokens", "positions", "sequences", "lengths")
        return {**dict.fromkeys(names, number), "table": torch.zeros(sequences, columns, dtype=torch.int64)}


def dynamic_shapes() -> dict[str, dict[int, Any]]:
    """Return the symbolic dims of a step: its tokens, its texts, and the tokens of the longest one."""
    tokens, sequences, columns = (torch.export.Dim(name, min=1) for name in ("tokens", "sequences", "columns"))
    per_token = ("tokens", "positions", "sequences", "lengths")
    return {**{name: {0: tokens} for name in per_token}, "table": {0: sequences, 1: columns}}


def prepare(config: Any) -> None:
    """Have an encoder that is made of a configuration attend to the tokens of a text.

    Raises
    ------
    TraceError
        When the configuration is of a model that attends in one direction, or of an encoder with a decoder.
    """
    register(NAME, _attention, _mask)
    if getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False):
        raise TraceError(f"{config.model_type} is configured as a decoder: only encoders give vectors of texts.")
    config._attn_implementation = NAME


def first_position(module: Any) -> int:
    """Return the position of a text's first token: models that keep a position for padding count on from it."""
    embeddings = getattr(getattr(module, "embeddings", None), "position_embeddings", None)
    padding = getattr(embeddings, "padding_idx", None)
    return 0 if padding is None else int(padding) + 1


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to the tokens of a text, as transformers calls a function of attention. Raises TraceError."""
    where = named_attention(module, mask, _Everything, dropout, others)
    if is_causal or (is_causal is None and getattr(module, "is_causal", False)):
        raise TraceError(f"{where} is causal: a token would not see those behind it.")
    step = _STEP.get()
    step.layers += 1
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    y = attention_over_rows(
        *(q, k, v, step.table, step.sequences, step.lengths),
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
    )
    return y[None], None


def _mask(*args: Any, mask_function: Callable[..., Any], attention_mask: Any = None, **others: Any) -> _Everything:
    """Describe a mask, as transformers calls a function that makes one. Raises TraceError for one that hides tokens."""
    if attention_mask is not None:
        raise TraceError("A mask of padding has no meaning for ragged tokens.")
    with _disable_current_modes():
        for query in _PLACES:
            for key in _PLACES:
                if not bool(mask_function(*(torch.tensor(x) for x in (0, 0, query, key)))):
                    raise TraceError(
                        f"The model's mask hides position {key} from position {query}: only encoders whose tokens see "
                        "all others of their text are supported."
                    )
    return _Everything()
