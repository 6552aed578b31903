"""The cost of a dispatch: the exchange of tokens with the ranks that have experts which tokens chose."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from hidet.graph import Operator

from hidet_dist.machine import Cluster
from hidet_dist.rules.routing import expected_load
from hidet_dist.spec import DeviceMesh, OpShardSpec
from hidet_dist.spec.collectives import ALL_GATHER, REDUCE_SCATTER, Collective
from hidet_dist.traits import routed_of


@dataclass(frozen=True)
class TokenExchange:
    """One collective of a dispatch.

    Attributes
    ----------
    input: the position of the input whose tokens it gathers; None for that of the results, which it adds up.
    kind: the collective that it would be if all tokens went to all ranks.
    mesh_axes: the axes of its group.
    nbytes: the bytes that it moves of the tensor within the group.
    is_partial: whether these are the bytes of wanted tokens, which are packed before and unpacked after it.
    """

    input: int | None
    kind: Collective
    mesh_axes: tuple[int, ...]
    nbytes: int
    is_partial: bool

    def seconds(self, cluster: Cluster) -> float:
        """Predict its seconds, with those of packing and unpacking where collectives do not place shards."""
        copied = 2 if self.is_partial and not cluster.device.places_shards else 0
        return cluster.collective_seconds(self.kind, self.nbytes, self.mesh_axes) + copied * cluster.copy_seconds(
            self.nbytes
        )


def exchanges(op: Operator, spec: OpShardSpec, mesh: DeviceMesh) -> tuple[TokenExchange, ...]:
    """List the collectives of an operator's dispatch, those before the operator first.

    The choices of tokens, and their scales, go to all ranks. Of the tokens, and of the results, only what a rank has an
    expert for is moved: the share that is expected for uniform choices (:func:`wanted_share`).
    """
    dispatch, routed = spec.dispatch, routed_of(op)
    assert dispatch is not None and routed is not None
    shapes = spec.local_shapes([[int(size) for size in x.shape] for x in op.inputs], mesh)
    tokens, choices = shapes[routed.chosen]
    share = wanted_share(tokens, choices, shapes[routed.labels][0], int(op.attrs["count"]))
    found = []
    for number in dispatch.inputs:
        nbytes, is_partial = math.prod(shapes[number]) * int(op.inputs[number].dtype.nbytes), number in routed.rows
        moved = math.ceil(share * nbytes) if is_partial else nbytes
        found.append(TokenExchange(number, ALL_GATHER, dispatch.mesh_axes, moved, is_partial))
    y = op.outputs[0]
    nbytes = spec.partial_spec(0).local_nbytes([int(size) for size in y.shape], int(y.dtype.nbytes), mesh)
    return (*found, TokenExchange(None, REDUCE_SCATTER, dispatch.mesh_axes, math.ceil(share * nbytes), True))


def dispatch_seconds(op: Operator, spec: OpShardSpec, cluster: Cluster) -> float:
    """Predict the seconds of an operator's dispatch: of its exchanges, and of the mask of the tokens that ranks want.

    The mask has a byte for each rank and token. It is computed from the choices of all tokens.
    """
    each = exchanges(op, spec, cluster.mesh)
    choices = sum(one.nbytes for one in each if one.input is not None and not one.is_partial)
    return cluster.device.operator_seconds(0, choices, "default") + sum(one.seconds(cluster) for one in each)


@functools.lru_cache(maxsize=4096)
def wanted_share(tokens: int, choices: int, experts: int, count: int) -> float:
    """Expect the share of ``tokens`` that a device with ``experts`` of ``count`` experts wants.

    A token chooses different experts, and misses all of a device's with the chance that the hypergeometric distribution
    gives. The share is that of the device with the most rows (:func:`hidet_dist.rules.routing.expected_load`).
    """
    missed = math.comb(max(0, count - experts), choices) / math.comb(count, choices)
    mean = tokens * choices * experts / count
    rows, _ = expected_load(tokens, choices, experts, count)
    return min(1.0, (1 - missed) * (rows / mean if mean else 1.0))
