"""Attention over rows as an operator of PyTorch, ``torch.ops.hidet_dist.attention_over_rows``, and its lowering."""

from __future__ import annotations

from typing import Any

import torch
from hidet.graph import Tensor

from hidet_dist import operators
from hidet_dist.frontends.pytorch.calls import Call, lowers


@torch.library.custom_op("hidet_dist::attention_over_rows", mutates_args=())
def _attention_over_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    table: torch.Tensor,
    sequences: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    page: int = 1,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    value_size: int = 0,
) -> torch.Tensor:
    values = keys[..., :value_size] if values is None else values
    if keys.dim() == 4:  # pages in the order of a sequence, numbered from the first one of all parts
        parts, rows = keys.shape[:2]
        first = torch.arange(parts, device=table.device)[:, None] * (rows // page)
        table = (table + first).transpose(1, 2).flatten(1)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    places = torch.arange(table.shape[1] * page, device=table.device)
    ends = lengths[:, None]
    seen = places < ends
    if window:
        seen = seen & (places >= ends - window)
    rows_of = table[:, :, None] * page + torch.arange(page, device=table.device)
    rows_of = torch.where(seen, rows_of.flatten(1)[sequences], 0)
    tokens, heads, size = query.shape
    groups = keys.shape[1]
    grouped = query.float().reshape(tokens, groups, heads // groups, size)
    scores = torch.einsum("tgrd,tlgd->tgrl", grouped, keys[rows_of].float()) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = ~seen[:, None, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        extra = sinks.float().reshape(1, groups, heads // groups, 1).expand(tokens, -1, -1, -1)
        scores = torch.cat([scores, extra], -1)
    weights = scores.softmax(-1)[..., : places.shape[0]].masked_fill(hidden, 0.0)
    y = torch.einsum("tgrl,tlgd->tgrd", weights, values[rows_of].float())
    return y.reshape(tokens, heads, values.shape[-1]).to(query.dtype)


@_attention_over_rows.register_fake
def _shape_of_result(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    table: torch.Tensor,
    sequences: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    page: int = 1,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    value_size: int = 0,
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value_size if values is None else values.shape[-1])


def attention_over_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    table: torch.Tensor,
    sequences: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    page: int = 1,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    value_size: int = 0,
) -> torch.Tensor:
    """Attention of tokens to rows of a pool of keys and values: [tokens, heads, size_v], of the dtype of the queries.

    For models that keep keys and values in a pool, where each sequence has rows anywhere: ``torch.export`` keeps it as
    one operator, which :func:`hidet_dist.from_torch` knows. PyTorch computes it by gathering all rows of each token.

    Parameters
    ----------
    query: torch.Tensor
        [tokens, heads, size_k], of float32, float16 or bfloat16: all tokens of a step, of all sequences.
    keys, values: torch.Tensor
        The pools, [rows, groups, size_k] and [rows, groups, size_v]; their dtype may be another one of these. Head
        ``h`` reads group ``h // (heads / groups)``. Without values they are the first ``value_size`` elements of the
        keys (multi-head latent attention). With a first dim of parts, a plan can split the rows over ranks.
    table: torch.Tensor
        Integers [sequences, columns]: the pages of each sequence, in order. Page ``n`` is the rows of a pool from
        ``n * page`` on. With parts it is [sequences, parts, columns]: page ``i`` of a sequence is in part
        ``i % parts``, at column ``i // parts``, and pages are numbered from the first one of their part. What lies
        behind a sequence's end is not read.
    sequences: torch.Tensor
        Integers [tokens], the sequence of each token: a row of the table.
    lengths: torch.Tensor
        Integers [tokens]: a token sees the rows of its sequence before this one. Where it is 0, the result is 0. Write
        a step's keys and values to the pools first, and let a token's own row be the last that it sees: the order
        within a step is then causal.
    scale: float
        The factor of the scores.
    page: int
        The rows of a page.
    window: int
        Where it is not 0, a token sees the last rows only, that many.
    softcap: float
        Where it is not 0, a score x becomes ``softcap * tanh(x / softcap)``.
    sinks: torch.Tensor, optional
        [heads]: a score for each head that takes part in the softmax, with a value of 0.
    value_size: int
        The size of values that are the first elements of keys; 0 with a pool of values.
    """
    return _attention_over_rows(
        query, keys, values, table, sequences, lengths, scale, page, window, softcap, sinks, value_size
    )


@lowers("hidet_dist.attention_over_rows.default")
def _lowered(call: Call, *args: Any, **options: Any) -> Tensor:
    return operators.attention_over_rows(*args, **options, once=call.once)
