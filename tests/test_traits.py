"""The traits of operator classes: complete, and true of random instances."""

from __future__ import annotations

import importlib
import re

import numpy as np
import pytest
from hidet.graph import Operator

from hidet_dist.machine.kernels import KERNEL_CLASSES
from hidet_dist.rules.declared import UNIMPORTABLE, definition_of
from hidet_dist.soundness import catalog
from hidet_dist.soundness.check import random_inputs
from hidet_dist.soundness.instances import MAKERS, Instance, instance
from hidet_dist.soundness.oracle import evaluate
from hidet_dist.spec.extents import extents_of
from hidet_dist.traits import Moves, Traits, traits_of

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
