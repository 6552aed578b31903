"""Equal weights of several graphs: constants of equal elements, and the same parts of stored tensors."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from hidet.graph import Tensor

from hidet_dist.weights.named import InMemory, mark_of
from hidet_dist.weights.sources import BLOCK_BYTES, source_of


def equal_weights(graphs: Sequence[Sequence[Tensor]]) -> list[dict[Tensor, Tensor]]:
    """Find the weights that several graphs have in common, though as different tensors.

    Rewriting a graph makes new tensors of weights (parts of them, other dtypes), for each graph its own.

    Parameters
    ----------
    graphs: sequence of sequences of Tensor
        The weights of each graph.

    Returns
    -------
    list of dicts
        For each graph, its weights that equal a weight of an earlier graph, with that weight. Each weight of the
        earlier graphs stands for at most one weight of a graph.
    """
    first: dict[Hashable, list[Tensor]] = {}  # distinct weights of earlier graphs, by what they have
    result: list[dict[Tensor, Tensor]] = []
    common = set[Tensor].intersection(*map(set, graphs))  # they need no equal, and are not read
    own = [[x for x in weights if x not in common] for weights in graphs]
    several = _layouts_of_several(own)
    for weights in own:
        here = dict.fromkeys(weights)
        same: dict[Tensor, Tensor] = {}
        taken = {x for known in first.values() for x in known if x in here}
        for x in here:
            if x in taken or _layout(x) not in several:
                continue
            known = first.setdefault(_content(x), [])
            equal = next((y for y in known if y not in taken), None)
            if equal is None:
                known.append(x)
                taken.add(x)
            else:
                same[x] = equal
                taken.add(equal)
        result.append(same)
    return result


def _layout(x: Tensor) -> Hashable:
    return x.dtype.name, tuple(int(size) for size in x.shape)


def _layouts_of_several(graphs: Sequence[Sequence[Tensor]]) -> set[Hashable]:
    """Find the dtypes and shapes that weights of several graphs have; other weights have no equal, and are not read."""
    per_graph = [{_layout(x) for x in weights} for weights in graphs]
    return {layout for layout, graphs_with in Counter(itertools.chain(*per_graph)).items() if graphs_with > 1}


def _content(x: Tensor) -> Hashable:
    """Make a key of what a weight has: its part of a stored tensor, or the digest of its elements."""
    mark = mark_of(x)
    if mark is not None and not isinstance(mark.stored, InMemory):
        part = tuple((bounds.start, bounds.stop, bounds.step) for bounds in mark.part)
        return mark.name, mark.stored, part, mark.dtype, _layout(x)
    digest = hashlib.sha256(repr(_layout(x)).encode())
    source, shape = source_of(x), [int(size) for size in x.shape]
    rest = [slice(0, size) for size in shape[1:]]
    rows = max(1, BLOCK_BYTES // max(1, math.prod(shape[1:]) * x.dtype.nbytes))
    for row in range(0, shape[0], rows) if shape else (0,):
        region = [slice(row, min(row + rows, shape[0])), *rest] if shape else []
        digest.update(source.read(region).reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
