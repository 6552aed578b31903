"""Lowerings of recurrent layers: LSTM and GRU, unrolled over the steps of the traced call."""

from __future__ import annotations

from collections.abc import Sequence

from hidet.graph import Tensor

from hidet_dist.frontends.pytorch.calls import Call, lowers
from hidet_dist.frontends.refusals import Refused
from hidet_dist.operators import shaping
from hidet_dist.operators.recurrent import gru, lstm


@lowers("lstm.input", "gru.input")
def _recurrent(
    call: Call,
    x: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Lower all layers of an LSTM or a GRU; return the outputs and the last states."""
    if train and dropout > 0 and num_layers > 1:
        raise Refused("dropout is on: call module.eval() first")
    first_states = [hx] if isinstance(hx, Tensor) else list(hx)
    directions = 1 + bidirectional
    # Of each direction of a layer: weight, recurrence, both biases, and the projection of the hidden state, if any.
    params_per_direction = len(params) // (num_layers * directions)
    x = shaping.permuted(x, [1, 0, 2]) if batch_first else x
    last_states: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            begin = number * params_per_direction
            states = [shaping.select(state, 0, number) for state in first_states]
            y, *last = _direction(
                x, params[begin : begin + params_per_direction], states, has_biases, reverse=direction == 1
            )
            outputs.append(y)
            last_states.append(tuple(last))
        x = shaping.concat(outputs, 2)
    x = shaping.permuted(x, [1, 0, 2]) if batch_first else x
    return x, *(shaping.stack(states, 0) for states in zip(*last_states, strict=True))


def _direction(
    x: Tensor, params: Sequence[Tensor], states: Sequence[Tensor], has_biases: bool, reverse: bool
) -> tuple[Tensor, ...]:
    """Run one direction of a layer: an LSTM if it has two states, else a GRU."""
    weight, recurrence, *others = params
    biases = (others[0], others[1]) if has_biases else None
    if len(states) == 1:
        return gru(x, weight, recurrence, biases, *states, order="rzn", reverse=reverse)
    projection = next(iter(others[2 * has_biases :]), None)
    return lstm(x, weight, recurrence, biases, *states, order="ifgo", projection=projection, reverse=reverse)
