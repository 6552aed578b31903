"""The traits of operator classes: complete, and true of random instances."""

from __future__ import annotations

import importlib
import re

import hidet
import numpy as np
import pytest
from hidet.graph import Operator

from hidet_dist.compile.cpu.relaid import channels_last_axes, relaid
from hidet_dist.machine.kernels import KERNEL_CLASSES
from hidet_dist.rules.declared import UNIMPORTABLE, definition_of
from hidet_dist.rules.local import rebuild
from hidet_dist.soundness import catalog
from hidet_dist.soundness.check import random_inputs
from hidet_dist.soundness.instances import MAKERS, Instance, instance
from hidet_dist.soundness.oracle import evaluate
from hidet_dist.spec.extents import extents_of
from hidet_dist.traits import Indices, Moves, Traits, traits_of

# What hidet's passes make of operators after planning, and what communicates.
LOWERED = re.compile(
    r"hidet\.graph\.ops\.(.*_gemm|.*_winograd|matmul\.(?!matmul\.).*|quant\.matmul.*|fusion|distributed)\."
)


def instances(cls: type[Operator]) -> list[Instance]:
    return [instance(cls, np.random.default_rng(seed)) for seed in range(3)]


def stated(select: str) -> list[type[Operator]]:
    """Classes with instances, and with a true value of this field of their traits."""
    return [cls for cls in MAKERS if getattr(traits_of(object.__new__(cls)), select)]


def test_every_class_of_operators_in_graphs_has_a_class_of_kernels():
    missing = []
    for name in catalog.operator_classes():
        module, _, cls = name.rpartition(".")
        if module in UNIMPORTABLE or LOWERED.match(f"{name}."):
            continue
        traits = traits_of(object.__new__(getattr(importlib.import_module(module), cls)))
        if traits.kernel not in KERNEL_CLASSES:
            missing.append(name)
    assert missing == []


def test_a_class_that_is_not_known_is_classified_by_its_definition():
    class Unknown(Operator):
        pass

    assert traits_of(object.__new__(Unknown)) == Traits()


def test_a_template_is_not_inherited_by_classes_that_are_not_hidets():
    from hidet.graph.ops.arithmetic import AddOp

    class Mine(AddOp):
        pass

    assert traits_of(object.__new__(AddOp)).counted_dims is not None
    assert traits_of(object.__new__(Mine)).counted_dims is None
    assert traits_of(object.__new__(Mine)).elementwise


@pytest.mark.parametrize("cls", stated("kernel"), ids=lambda cls: cls.__name__)
def test_kernels_that_reduce_nothing_are_of_injective_definitions(cls):
    for each in instances(cls):
        kernel = traits_of(each.op).kernel
        if kernel != "lookup":  # a look-up may sum rows
            assert definition_of(each.op).is_injective() == (kernel in ("elementwise", "copy")), each.op


@pytest.mark.parametrize("cls", stated("elementwise"), ids=lambda cls: cls.__name__)
def test_elements_of_elementwise_operators_depend_on_their_index_alone(cls):
    """A change of one element of an input changes only the elements of the output with its (broadcast) index."""
    for seed, each in enumerate(instances(cls)):
        op = each.op
        shape = tuple(int(n) for n in extents_of(op.outputs[0]))
        for x in op.inputs:
            own = (1,) * (len(shape) - len(x.shape)) + tuple(int(n) for n in extents_of(x))
            assert all(n in (1, whole) for n, whole in zip(own, shape, strict=True)), op
        inputs = random_inputs(op, np.random.default_rng(seed), each.ranges)
        if not inputs or not inputs[0].size:
            continue
        first, *_ = evaluate(definition_of(op), inputs)
        changed = [inputs[0].copy(), *inputs[1:]]
        changed[0].flat[0] = changed[0].flat[-1]
        second, *_ = evaluate(definition_of(op), changed)
        touched = np.zeros(inputs[0].shape, bool)
        touched.flat[0] = True
        same = ~np.broadcast_to(touched, shape)
        np.testing.assert_array_equal(first[same], second[same])


@pytest.mark.parametrize("cls", stated("moves"), ids=lambda cls: cls.__name__)
def test_operators_that_move_elements_keep_them(cls):
    for seed, each in enumerate(instances(cls)):
        traits = traits_of(each.op)
        inputs = random_inputs(each.op, np.random.default_rng(seed), each.ranges)
        (output,) = evaluate(definition_of(each.op), inputs)
        # The other inputs of a look-up are indices.
        sources = inputs[:1] if traits.moves is Moves.SELECT else inputs
        elements = np.concatenate([x.reshape(-1) for x in sources])
        if traits.renames:
            np.testing.assert_array_equal(np.sort(output, axis=None), np.sort(elements))
        elif traits.keeps_all:
            np.testing.assert_array_equal(np.setdiff1d(np.unique(output), [0]), np.setdiff1d(np.unique(elements), [0]))
        else:
            assert np.isin(output, elements).all()


def symbols(op: Operator, arrays: list[np.ndarray]) -> list[hidet.Tensor]:
    """Inputs of an operator with the shapes of these arrays."""
    return [hidet.symbol(list(a.shape), x.dtype.name, "cpu") for x, a in zip(op.inputs, arrays, strict=True)]


@pytest.mark.parametrize("cls", stated("input_dims"), ids=lambda cls: cls.__name__)
def test_a_part_of_an_output_is_computed_from_parts_of_inputs(cls):
    for seed, each in enumerate(instances(cls)):
        op, dims_of = each.op, traits_of(each.op).input_dims
        inputs = random_inputs(op, np.random.default_rng(seed), each.ranges)
        (output,) = evaluate(definition_of(op), inputs)
        for dim, extent in enumerate(output.shape):
            dims = dims_of(op, dim)
            if dims is None:
                continue
            kept = range(extent // 2, extent)
            parts = [x if own is None else x.take(kept, own) for x, own in zip(inputs, dims, strict=True)]
            expected = output.take(kept, dim)
            local = rebuild(op, symbols(op, parts), [expected.shape])[0].op
            np.testing.assert_array_equal(evaluate(definition_of(local), parts)[0], expected)


def test_all_pools_and_padding_hold_in_any_layout():
    pools = [cls for cls in MAKERS if traits_of(object.__new__(cls)).kernel == "pooling"]
    lacking = [cls for cls in {*pools, *stated("pads")} if not traits_of(object.__new__(cls)).in_any_layout]
    assert pools and lacking == []


@pytest.mark.parametrize("cls", stated("in_any_layout"), ids=lambda cls: cls.__name__)
def test_operators_in_any_layout_compute_the_same_with_channels_last(cls):
    checked = 0
    for seed in range(12):
        each = instance(cls, np.random.default_rng(seed))
        op, rank = each.op, len(each.op.inputs[0].shape)
        if rank < 3:
            continue
        (x,) = random_inputs(op, np.random.default_rng(seed), each.ranges)
        (expected,) = evaluate(definition_of(op), [x])
        axes = channels_last_axes(rank)
        moved = x.transpose(axes)
        (output,) = evaluate(relaid(op, symbols(op, [moved]), [0], rank).task, [moved])
        np.testing.assert_allclose(output, expected.transpose(axes) if expected.ndim == rank else expected, rtol=1e-6)
        checked += 1
    assert checked


def test_all_lookups_that_move_elements_say_how():
    lookups = [cls for cls in MAKERS if traits_of(object.__new__(cls)).moves is Moves.SELECT]
    assert lookups and [cls for cls in lookups if traits_of(object.__new__(cls)).lookup is None] == []


@pytest.mark.parametrize("cls", stated("lookup"), ids=lambda cls: cls.__name__)
def test_lookups_select_from_the_dim_that_they_state(cls):
    for seed, each in enumerate(instances(cls)):
        op, lookup = each.op, traits_of(each.op).lookup
        table, indices = random_inputs(op, np.random.default_rng(seed), each.ranges)
        look_up = np.take_along_axis if lookup.indices is Indices.GATHER else np.take
        (output,) = evaluate(definition_of(op), [table, indices])
        if lookup.indices is Indices.GATHER:
            dim = lookup.dim_of(op)
            table = table[tuple(slice(None) if d == dim else slice(n) for d, n in enumerate(indices.shape))]
        np.testing.assert_array_equal(output, look_up(table, indices, axis=lookup.dim_of(op)))
