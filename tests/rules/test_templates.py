"""Patterns of extents: operators that are proven by them have the choices that proofs for all shapes give."""

from __future__ import annotations

from typing import Any

import hidet
import pytest
from hidet import ops
from hidet.graph import Operator
from hidet.graph.ops.arithmetic import UnaryElementwiseOp
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.rules import rule as rules
from hidet_dist.rules import templates
from hidet_dist.rules.rule import OfferedParts, derive
from hidet_dist.rules.templates import pattern
from hidet_dist.spec import DeviceMesh
from hidet_dist.traits import traits_of

EXTENTS = st.sampled_from([1, 2, 4, 6, 8])


def tensor(*shape: int) -> hidet.Tensor:
    return hidet.symbol(list(shape), "float32", "cpu")


def _operator(kind: str, a: int, b: int, c: int, d: int) -> Operator:
    x = tensor(a, b, c)
    results: dict[str, Any] = {
        "unary": lambda: ops.exp(x),
        "scalar": lambda: x * 3.0,
        "binary": lambda: x + tensor(a, b, c),
        "broadcast operand": lambda: x * tensor(b, 1),
        "transposed": lambda: ops.transpose(x, [2, 0, 1]),
        "sum": lambda: ops.sum(x, [1], keep_dim=bool(d % 4)),
        "mean": lambda: ops.mean(x, [0, 2], keep_dim=False),
        "product": lambda: ops.matmul(x, tensor(c, d)),
        "products": lambda: ops.matmul(x, tensor(a, c, d)),
        "broadcast": lambda: ops.broadcast(tensor(b, 1), [a, b, c]),
        "slice": lambda: x[:, :, c // 2 :],
        "stride": lambda: x[:, ::2],
        "concatenation": lambda: ops.concat([x, tensor(a, d, c)], 1),
        "look-up": lambda: ops.take(tensor(a, b), hidet.symbol([c, d], "int32", "cpu"), 1),
        "convolution": lambda: ops.conv2d(tensor(a, b, 11, 9), tensor(c, b, 3, 2), stride=(2, 1), padding=(1, 0)),
        "convolution of sequences": lambda: ops.conv1d(tensor(a, b, 37), tensor(c, b, 5), dilations=2),
    }
    op: Operator = results[kind]().op
    return op


KINDS = (
    *("unary", "scalar", "binary", "broadcast operand", "transposed", "sum", "mean", "product", "products"),
    *("broadcast", "slice", "stride", "concatenation", "look-up"),
    *("convolution", "convolution of sequences"),
)
SIZES = 64, 96, 160, 256
# The extents that the definitions or the attributes of operators contain as numbers.
NUMBERS = {"broadcast": "abc", "slice": "abc", "stride": "abc", "concatenation": "bd", "look-up": "b"}


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(KINDS), EXTENTS, EXTENTS, EXTENTS, EXTENTS, st.sampled_from([(2,), (4,), (2, 2), (2, 4)]))
def test_a_proof_by_patterns_finds_what_proofs_for_all_shapes_find(
    kind: str, a: int, b: int, c: int, d: int, mesh: tuple[int, ...]
) -> None:
    op = _operator(kind, a, b, c, d)
    assert traits_of(op).counted_dims is not None
    by_patterns, by_shapes = derive(op), derive(op)
    vars(by_shapes)["_counted"] = None  # operators of earlier examples have proven patterns, too
    assert by_patterns.choices(DeviceMesh(mesh)) == by_shapes.choices(DeviceMesh(mesh))


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_one_pattern_are_built_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are those of another operator with the same pattern of extents."""
    built: list[Any] = []
    rebuild = rules.rebuild
    monkeypatch.setattr(rules, "rebuild", lambda *of: (built.append(of), rebuild(*of))[1])
    monkeypatch.setattr(templates, "_proofs", {})
    mesh = DeviceMesh((2, 4))
    assert len(derive(_operator(kind, *SIZES)).choices(mesh)) > 3
    assert 0 < len(built) <= 2, "all extents of shards are distinct and above 1"
    count = len(built)
    larger = [size if name in NUMBERS.get(kind, "") else 2 * size for name, size in zip("abcd", SIZES, strict=True)]
    derive(_operator(kind, *larger)).choices(mesh)
    assert len(built) == count


UNEQUAL = OfferedParts(((0, (3, 2, 1)), (0, (3, 2, 2))), (None, None))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "convolution" not in kind])  # their groups are numbers
def test_operators_with_symbols_for_unequal_parts_are_built_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One proof serves all parts, and all operators of a pattern; it is that of each of them alone."""
    built: list[Any] = []
    localize = rules.localize
    monkeypatch.setattr(rules, "localize", lambda *of: (built.append(of), localize(*of))[1])
    monkeypatch.setattr(templates, "_proofs", {})
    sizes = {"a": 84, "b": 168, "c": 252, "d": 336}
    alone = derive(_operator(kind, *sizes.values()))
    vars(alone)["_counted"] = None
    choices = alone.choices(DeviceMesh((3,)), UNEQUAL)
    assert sum(bool(choice.devices) for choice in choices) > 1
    count = len(built)
    built.clear()
    assert derive(_operator(kind, *sizes.values())).choices(DeviceMesh((3,)), UNEQUAL) == choices
    assert 0 < len(built) < count
    built.clear()
    derive(_operator(kind, *sizes.values())).choices(DeviceMesh((3,), ("other",)), UNEQUAL)
    assert all(rules.row_axes(op, in_specs) for op, _, in_specs, *_ in built), "look-ups in sharded rows are others"


def test_extents_with_symbols_are_other_patterns() -> None:
    def key(*shape: Any) -> Any:
        return pattern(((), ()), ((), ()), {}, (), frozenset(), ([shape], [shape]))

    p, q = ("p",), ("q",)
    assert key((4, p), (6, p), 8) == key((6, q), (4, p), 9)
    keys = {key((4, p), (6, p)), key((4, p), (4, p)), key((4, p), (1, p)), key((4, p), 6), key((4, p), (4, ("p", "q")))}
    assert len(keys) == 5


def test_equal_extents_and_ones_are_other_patterns() -> None:
    def key(*shape: int) -> Any:
        return pattern(((), ()), ([shape], [shape]), {}, (), frozenset())

    assert key(2, 3, 2) == key(4, 8, 4)
    assert len({key(2, 3, 2), key(2, 3, 3), key(2, 2, 2), key(2, 1, 2), key(2, 3, 5)}) == 5
    counted = frozenset({(0, 1)})

    def of_counted(*shape: int) -> Any:
        return pattern(((), ()), ([shape], []), {}, (), counted)

    assert of_counted(2, 3) != of_counted(2, 5)
    assert of_counted(2, 3) == of_counted(4, 3)


def test_a_pattern_is_that_of_the_whole_operator_too() -> None:
    def key(whole: tuple[int, ...], local: tuple[int, ...]) -> Any:
        return pattern(([whole], [whole]), ([local], [local]), {}, (), frozenset())

    assert key((4, 6), (2, 6)) == key((8, 10), (8, 5))
    assert len({key((4, 6), (2, 6)), key((4, 4), (2, 6)), key((4, 6), (2, 2)), key((1, 6), (2, 6))}) == 4


def test_a_class_that_is_not_hidets_is_no_template() -> None:
    class Own(UnaryElementwiseOp):
        def __init__(self, x: hidet.Tensor):
            super().__init__(x, op=lambda e: e * x.shape[0], name="own")

    assert traits_of(Own(tensor(4, 6))).counted_dims is None
    assert traits_of(ops.reshape(tensor(4, 6), [24]).op).counted_dims is None
