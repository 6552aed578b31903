"""Symbolic sizes for which a module's code takes the branch of the example, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.export import Dim

import hidet_dist
from hidet_dist.errors import ConfigError, InputError, TraceError
from hidet_dist.soundness.plans import evaluate_program

Call = Callable[[torch.Tensor], torch.Tensor]


class Called(torch.nn.Module):
    def __init__(self, call: Call):
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def answers(call: Call, dims: dict[int, Dim], sizes: list[tuple[int, int]], symbols: dict[str, int]) -> list[bool]:
    """Whether a call of each size is answered, as the module answers it, or refused."""
    graph = hidet_dist.from_torch(Called(call).eval(), [torch.ones(8, 6)], dynamic_shapes={"x": dims})
    program = hidet_dist.partition(graph, hidet_dist.make_plan(graph, {"mesh_shape": [1]}, {"symbols": symbols}))
    answered = []
    for size in sizes:
        x = torch.arange(float(size[0] * size[1])).view(size)
        try:
            ((got,),) = evaluate_program(program, [x.numpy()])
        except InputError:
            answered.append(False)
            continue
        np.testing.assert_array_equal(got, call(x).numpy())
        answered.append(True)
    return answered


ROWS = {0: Dim("rows")}


def test_sizes_below_a_declared_minimum_are_refused() -> None:
    """Where the code takes another branch for them, the graph would answer wrongly."""

    def call(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 4 else x * 3

    assert answers(call, {0: Dim("rows", min=5)}, [(3, 6), (4, 6), (5, 6), (90, 6)], {"rows": 8}) == [
        False,
        False,
        True,
        True,
    ]


def test_a_minimum_of_two_counts_where_it_is_declared() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert answers(call, ROWS, [(1, 6), (2, 6)], {"rows": 8}) == [True, True]
    assert answers(call, {0: Dim("rows", min=2)}, [(1, 6), (2, 6)], {"rows": 8}) == [False, True]


@pytest.mark.parametrize(
    "holds",
    [
        lambda n, m: min(n, 4) <= n,
        lambda n, m: n // 4 != n,
        lambda n, m: n * min(48, 48 * n) == 48 * n,
        lambda n, m: n % 4 < 4 and 3 * n + 1 > n,
        lambda n, m: max(n, m) >= m,
    ],
)
def test_what_holds_for_all_sizes_is_proven(holds: Callable[[int, int], bool]) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if holds(*x.shape) else x

    both = {0: Dim("rows"), 1: Dim("columns")}
    sizes = [(1, 1), (3, 5), (64, 2), (1000, 3)]
    assert answers(call, both, sizes, {"rows": 8, "columns": 6}) == [True] * 4


def test_sizes_are_narrowed_to_those_of_the_branch() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] != 64 else x

    assert answers(call, ROWS, [(1, 6), (63, 6), (64, 6), (65, 6)], {"rows": 8}) == [True, True, False, False]
    # PyTorch takes a part of one element for another branch.
    assert answers(lambda x: x[1:], ROWS, [(2, 6), (3, 6), (65, 6)], {"rows": 8}) == [False, True, True]


def test_conditions_that_no_range_of_sizes_meets_are_refused() -> None:
    def even(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] % 2 == 0 else x

    def of_two(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > x.shape[1] else x

    with pytest.raises(TraceError, match=r"the module takes sizes rows with `\(rows % 2\) == 0` alone"):
        answers(even, ROWS, [], {})
    with pytest.raises(TraceError, match="alone"):
        answers(of_two, {0: Dim("rows"), 1: Dim("columns")}, [], {})


def test_assertions_of_an_exported_program_count() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] != 64 else x

    def even(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] % 2 == 0 else x

    def exported(one: Call) -> torch.export.ExportedProgram:
        return torch.export.export(
            Called(one).eval(),
            (torch.ones(8, 6),),
            dynamic_shapes={"x": ROWS},
            prefer_deferred_runtime_asserts_over_guards=True,
        )

    graph = hidet_dist.from_torch(exported(call))
    (symbol,) = {str(extent) for x in graph.inputs for extent in x.shape} - {"6"}
    with pytest.raises(ConfigError, match="'expected' = 64 is more than the greatest size, 63"):
        hidet_dist.make_plan(graph, {"mesh_shape": [1]}, {"symbols": {symbol: 64}})
    with pytest.raises(TraceError, match=r"it takes sizes with `.*` alone, where s\d+ is 8 in the example inputs"):
        hidet_dist.from_torch(exported(even))


@pytest.mark.parametrize(
    ("call", "declared", "taken"),
    [
        (lambda x: x[-x.shape[0] :] * 2, {}, (1, 70)),
        (lambda x: x[x.shape[0] - 3 :] + 1, {"min": 5}, (5, 70)),
        (lambda x: x[3 - x.shape[0] :], {"min": 5}, (5, 70)),
        (lambda x: x[-64:], {"max": 63}, (1, 63)),
        (lambda x: x.narrow(0, x.shape[0] - 4, 3), {"min": 5}, (5, 70)),
        # PyTorch takes sizes for 2 or more; what reads another element for 1 is not for 1.
        (lambda x: x[-1] + x[x.shape[0] - 2], {}, (2, 70)),
        (lambda x: torch.slice_scatter(x, x[:2], 0, x.shape[0] - 2), {}, (2, 70)),
        (lambda x: torch.slice_scatter(x, x[:2], 0, -2), {}, (2, 70)),
    ],
)
def test_slices_begin_where_symbols_say(call: Call, declared: dict[str, int], taken: tuple[int, int]) -> None:
    sizes = [1, 2, 5, 6, 8, 63, 70]
    answered = answers(call, {0: Dim("rows", **declared)}, [(size, 6) for size in sizes], {"rows": 8})
    assert answered == [taken[0] <= size <= taken[1] for size in sizes]
