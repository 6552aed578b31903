"""The problem that solvers take, as numbers, without graphs or specs; its equal parts, prices on memory, descent."""

from hidet_dist.search.problem.problem import (
    Activations,
    ConvertedTensor,
    Edge,
    LiveInterval,
    Problem,
    Solution,
    add_converted,
    each,
    evaluate,
    held_bytes,
    peaks,
    readers,
    restricted,
)

__all__ = [
    "Activations",
    "ConvertedTensor",
    "Edge",
    "LiveInterval",
    "Problem",
    "Solution",
    "add_converted",
    "each",
    "evaluate",
    "held_bytes",
    "peaks",
    "readers",
    "restricted",
]
