"""Elements by index, and products, beside PyTorch's."""

from __future__ import annotations

from collections.abc import Callable

import hidet
import pytest
import torch
from hidet.graph import Tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.against_torch import booleans, compare, floats, integers
from torch.nn import functional

from hidet_dist import operators
from hidet_dist.rules.rule import derive
from hidet_dist.spec import DeviceMesh


def test_lookups():
    x = floats(4, 5, 6)
    compare(lambda v, i: operators.index(v, [None, i]), lambda v, i: v[:, i], x, integers(-5, 5, 2, 3))
    compare(lambda v, i: operators.gather(v, 1, i), lambda v, i: v.gather(1, i), x, integers(0, 5, 3, 2, 4))
    compare(lambda v, i: operators.index_select(v, -1, i), lambda v, i: v.index_select(-1, i), x, integers(0, 6, 4))
    compare(operators.embedding, lambda w, i: functional.embedding(i, w), floats(7, 3), integers(0, 7, 2, 3))
    compare(lambda i: operators.one_hot(i, 5), lambda i: functional.one_hot(i, 5), integers(0, 5, 3, 2))


@pytest.mark.parametrize(
    "places", [(0, 1), (1, 2), (0, 2), (0, 1, 2)], ids=["front", "back", "apart", "all"]
)  # fmt: skip
def test_several_index_tensors(places):
    x, shapes = floats(4, 5, 6), ((3,), (2, 1), (1, 1))
    sizes = x.shape
    given_ = [integers(-sizes[d], sizes[d], *shape) for d, shape in zip(places, shapes, strict=False)]

    def spread(indices):
        full = [None, None, None]
        for d, own in zip(places, indices, strict=True):
            full[d] = own
        return full

    compare(lambda v, *i: operators.index(v, spread(i)), lambda v, *i: torch.ops.aten.index(v, spread(i)), x, *given_)


def test_elements_at_indices_are_replaced_or_increased():
    x = floats(4, 5, 6)
    rows, columns = torch.tensor([2, 0, 1]), torch.tensor([3, -1, 0])
    put = torch.ops.aten.index_put
    for values in (floats(3, 5, 6), floats(1), floats(5, 6)):
        compare(lambda v, i, w: operators.index_put(v, [i], w), lambda v, i, w: put(v, [i], w), x, rows - 1, values)
    for place in ([None, 0, 1], [0, None, 1], [0, 1, None]):
        values = floats(*torch.ops.aten.index(x, [None if p is None else (rows, columns)[p] for p in place]).shape)
        compare(
            lambda v, i, j, w, p=place: operators.index_put(v, [None if q is None else (i, j)[q] for q in p], w),
            lambda v, i, j, w, p=place: put(v, [None if q is None else (i, j)[q] for q in p], w),
            x, rows, columns, values,
        )  # fmt: skip
    again = torch.tensor([2, 0, 2])
    compare(
        lambda v, i, w: operators.index_put(v, [i], w, True),
        lambda v, i, w: put(v, [i], w, True),
        x,
        again,
        floats(3, 5, 6),
    )
    compare(
        lambda v, i, w: operators.index_add(v, 1, i, w, 2),
        lambda v, i, w: v.index_add(1, i, w, alpha=2),
        x,
        again,
        floats(4, 3, 6),
    )
    compare(
        lambda p, v: operators.index_put(p, [p], v), lambda p, v: torch.argsort(p), torch.randperm(9), torch.arange(9)
    )


def test_a_mask_sets_one_value_and_no_more():
    x, mask = floats(4, 5, 6), booleans(4, 5)
    put = torch.ops.aten.index_put
    compare(lambda v, m, w: operators.index_put(v, [m], w), lambda v, m, w: put(v, [m], w), x, mask, torch.tensor(3.0))
    symbols = [hidet.symbol(list(t.shape), str(t.dtype)[6:], "cpu") for t in (x, mask, floats(7, 6))]
    with pytest.raises(ValueError, match="depends on data"):
        operators.index_put(symbols[0], [symbols[1]], symbols[2])
    with pytest.raises(ValueError, match="depends on data"):
        operators.index(symbols[0], [symbols[1]])


def test_scattered_elements():
    x = floats(4, 5, 6)
    places = torch.stack([torch.randperm(5)[:3] for _ in range(4)])[:, :, None].expand(4, 3, 4).contiguous()
    compare(
        lambda v, i, s: operators.scatter(v, 1, i, s), lambda v, i, s: v.scatter(1, i, s), x, places, floats(4, 4, 5)
    )
    compare(lambda v, i: operators.scatter(v, 1, i, 2.5), lambda v, i: v.scatter(1, i, 2.5), x, integers(0, 5, 4, 3, 6))
    for kind in ("add", "multiply"):
        compare(
            lambda v, i, s, k=kind: operators.scatter(v, 1, i, s, k),
            lambda v, i, s, k=kind: v.scatter(1, i, s, reduce=k),
            x, integers(0, 5, 4, 3, 6), floats(4, 3, 6),
        )  # fmt: skip
    compare(
        lambda v, i, s: operators.scatter_add(v, 0, i, s), lambda v, i, s: v.scatter_add(0, i, s),
        x, integers(0, 4, 7, 2, 6), floats(7, 5, 6),
    )  # fmt: skip
    for kind in ("sum", "prod", "amax", "amin"):
        compare(
            lambda v, i, s, k=kind: operators.scatter_reduce(v, 1, i, s, k),
            lambda v, i, s, k=kind: v.scatter_reduce(1, i, s, k),
            x, integers(0, 5, 4, 3, 6), floats(4, 3, 6),
        )  # fmt: skip


def test_slices_replaced():
    x = floats(4, 5, 6)
    compare(
        lambda v, s: operators.select_scatter(v, s, 1, -2),
        lambda v, s: torch.select_scatter(v, s, 1, -2),
        x,
        floats(4, 6),
    )
    for start, end, step in ((1, 4, 1), (None, None, 1), (0, 5, 2), (-2, None, 1)):
        size = len(range(*slice(start, end, step).indices(5)))
        compare(
            lambda v, s, a=start, b=end, c=step: operators.slice_scatter(v, s, 1, a, b, c),
            lambda v, s, a=start, b=end, c=step: torch.slice_scatter(v, s, 1, a, b, c),
            x, floats(4, size, 6),
        )  # fmt: skip


@settings(max_examples=20, derandomize=True)
@given(values=st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=20), bins=st.integers(1, 9))
def test_histograms(values, bins):
    x = torch.tensor(values, dtype=torch.float64)
    compare(lambda v: operators.histc(v, bins, -2, 3), lambda v: torch.histc(v, bins, -2, 3), x)


def test_counts():
    compare(lambda i: operators.histc(i, 8, 0, 7), lambda i: torch.histc(i, 8, 0, 7), integers(0, 8, 40).float())
    compare(lambda i: operators.bincount(i, length=9), lambda i: torch.bincount(i, minlength=9), integers(0, 9, 30))
    compare(
        lambda i, w: operators.bincount(i, w, length=9),
        lambda i, w: torch.bincount(i, w, minlength=9).float(),
        integers(0, 9, 30),
        floats(30),
    )
    with pytest.raises(ValueError, match="min < max"):
        operators.histc(hidet.symbol([3], "float32", "cpu"), 4)


# Products


@pytest.mark.parametrize(
    "shapes", [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((3, 4), (4,)), ((4,), (2, 4, 3)), ((4,), (4,))], ids=str
)
def test_products(shapes):
    compare(operators.matmul, torch.matmul, *(floats(*shape) for shape in shapes))
    compare(operators.matmul, torch.matmul, *(integers(-9, 9, *shape) for shape in shapes))


def test_products_with_what_is_added():
    compare(
        lambda v, a, b: operators.addmm(v, a, b, 2, 3),
        lambda v, a, b: torch.addmm(v, a, b, beta=2, alpha=3),
        floats(5), floats(3, 4), floats(4, 5),
    )  # fmt: skip
    compare(operators.linear, functional.linear, floats(2, 3, 4), floats(5, 4), floats(5))


def test_attention():
    q, k, v = floats(2, 4, 5, 8), floats(2, 4, 6, 8), floats(2, 4, 6, 8) + 1
    own, peer = operators.scaled_dot_product_attention, functional.scaled_dot_product_attention
    compare(own, peer, q, k, v)
    mask = booleans(2, 1, 5, 6)
    mask[0, 0, 2] = False  # a query that sees no key
    compare(own, peer, q, k, v, mask)
    compare(own, peer, q, k, v, floats(2, 1, 5, 6))
    compare(lambda *x: own(*x, is_causal=True), lambda *x: peer(*x, is_causal=True), q, k, v)
    grouped = q, k[:, :2].contiguous(), v[:, :2].contiguous()
    compare(lambda *x: own(*x, enable_gqa=True, scale=0.3), lambda *x: peer(*x, enable_gqa=True, scale=0.3), *grouped)


def by_experts(x, weight, ends):
    out, start = torch.zeros(x.shape[0], weight.shape[2]), 0
    for expert, end in enumerate(ends.tolist()):
        out[start:end] = x[start:end] @ weight[expert]
        start = end
    return out


@pytest.mark.parametrize("ends", [[2, 2, 5, 8], [0, 0, 0, 8], [8, 8, 8, 8], [1, 2, 3, 4]], ids=str)
def test_products_by_experts(ends):
    rows = floats(8, 3)
    rows[0] = float("inf")  # must not reach the rows of other experts
    offsets = torch.tensor(ends, dtype=torch.int32)
    compare(lambda *x: operators.grouped_product(*x, once=unshared), by_experts, rows, floats(4, 3, 5), offsets)


def unshared(_: object, make: Callable[[], Tensor]) -> Tensor:
    return make()


def test_products_by_experts_shard_by_experts_rows_columns_and_inner_dims():
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        x, weight = hidet.symbol([8, 4], "float32", "cpu"), hidet.symbol([4, 4, 6], "float32", "cpu")
        chosen, scales = hidet.symbol([8, 2], "int32", "cpu"), hidet.symbol([8, 2], "float32", "cpu")
        plain = operators.expert_product(x, weight, chosen)
        summed = operators.expert_product(x, weight, chosen, scales)
    for y in (plain, summed):
        choices = [own.spec for own in derive(y.op).choices(DeviceMesh((2,)))]
        split = {spec.in_specs[1].mesh_axes_per_dim for spec in choices}
        assert split == {((), (), ()), ((0,), (), ()), ((), (0,), ()), ((), (), (0,))}
        assert any(spec.in_specs[0].mesh_axes_per_dim[0] == (0,) for spec in choices)
        for spec in choices:
            experts, inner, _ = spec.in_specs[1].mesh_axes_per_dim
            if experts or inner:
                assert [fn.op for fn in spec.reduce_fns[0]] == ["sum"]


def test_products_by_experts_that_do_not_fit_are_refused():
    x, weight, chosen = floats(8, 4), floats(3, 4, 5), torch.zeros(8, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="do not fit"):
        operators.expert_product(*map(hidet.from_torch, (x[:, :3].contiguous(), weight, chosen)))
    with pytest.raises(ValueError, match="numbers of dims"):
        operators.expert_product(*map(hidet.from_torch, (x, weight[0], chosen)))
    with pytest.raises(ValueError, match="float32, float16, bfloat16"):
        operators.expert_product(*map(hidet.from_torch, (x.int(), weight, chosen)))
