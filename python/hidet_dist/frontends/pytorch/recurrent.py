"""Recurrent layers: LSTM and GRU, unrolled over the steps of the traced call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hidet.graph import Tensor

from hidet_dist.frontends.pytorch.calls import Call, Refused, lowers
from hidet_dist.frontends.pytorch.shapes import permuted
from hidet_dist.operators import shaping
from hidet_dist.operators.recurrent import Biases, gru, lstm

Direction = Callable[[Tensor, Sequence[Tensor], Biases | None, int, bool], tuple[Tensor, ...]]
"""One direction of a layer: its outputs and its last states, from the inputs, the weights, the biases, its number among
all states, and whether it begins with the last step."""


def _layers(
    x: Tensor,
    params: Sequence[Tensor],
    weights: int,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    direction: Direction,
) -> tuple[Tensor, ...]:
    """The outputs and the last states of all layers; each direction has so many ``weights`` among ``params``."""
    x = permuted(x, [1, 0, 2]) if batch_first else x
    states: list[tuple[Tensor, ...]] = []
    own = weights + 2 * has_biases
    for layer in range(num_layers):
        outputs = []
        for number in range(1 + bidirectional):
            place = layer * (1 + bidirectional) + number
            given = list(params[place * own : (place + 1) * own])
            biases = (given[2], given[3]) if has_biases else None
            matrices = given[:2] + given[2 + 2 * has_biases :]
            y, *last = direction(x, matrices, biases, place, number == 1)
            outputs.append(y)
            states.append(tuple(last))
        x = shaping.concat(outputs, 2)
    x = permuted(x, [1, 0, 2]) if batch_first else x
    return x, *(shaping.stack(own, 0) for own in zip(*states, strict=True))


def _refuse_dropout(dropout: float, train: bool, num_layers: int) -> None:
    if train and dropout > 0 and num_layers > 1:
        raise Refused("dropout is on: call module.eval() first")


@lowers("lstm.input")
def _lstm(
    call: Call,
    x: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    _refuse_dropout(dropout, train, num_layers)
    hidden, cells = hx
    is_projected = len(params) > num_layers * (1 + bidirectional) * (2 + 2 * has_biases)

    def direction(
        x: Tensor, matrices: Sequence[Tensor], biases: Biases | None, place: int, reverse: bool
    ) -> tuple[Tensor, ...]:
        weight, recurrence, *projection = matrices
        states = shaping.select(hidden, 0, place), shaping.select(cells, 0, place)
        own = projection[0] if projection else None
        return lstm(x, weight, recurrence, biases, *states, order="ifgo", projection=own, reverse=reverse)

    return _layers(x, params, 2 + is_projected, has_biases, num_layers, bidirectional, batch_first, direction)


@lowers("gru.input")
def _gru(
    call: Call,
    x: Tensor,
    hx: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    _refuse_dropout(dropout, train, num_layers)

    def direction(
        x: Tensor, matrices: Sequence[Tensor], biases: Biases | None, place: int, reverse: bool
    ) -> tuple[Tensor, ...]:
        weight, recurrence = matrices
        return gru(x, weight, recurrence, biases, shaping.select(hx, 0, place), order="rzn", reverse=reverse)

    return _layers(x, params, 2, has_biases, num_layers, bidirectional, batch_first, direction)
