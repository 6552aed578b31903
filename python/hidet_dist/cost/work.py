"""The work of an operator on a device with measured kernels: the class of its kernel, operations and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hidet.graph import Operator, Tensor

from hidet_dist.machine import HIDET, LIBRARY
from hidet_dist.machine.kernels import ATTENTION, Work, product_class
from hidet_dist.patterns.winograd import each_dim, has_winograd, winograd_operations
from hidet_dist.rules.access import UnsupportedDefinition, analyze
from hidet_dist.rules.routing import routed_work
from hidet_dist.rules.rule import Choice
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.extents import evaluate, extents_of
from hidet_dist.traits import routed_of, traits_of
from hidet_dist.weights.named import is_weight
from hidet_dist.weights.storage import shard_nbytes, storage_of

MEASURED_DTYPES = ("float32", "float16", "bfloat16")
"""The dtypes to which measured costs of kernels apply. Kernels are measured in float32. Kernels of half-precision types
compute in float32 too, and move fewer bytes."""


def kernel_class(op: Operator) -> str:
    """Return the class of an operator's kernel: that of its traits, or by its definition if its class is not known."""
    stated = traits_of(op).kernel
    return stated or ("elementwise" if op.task.is_injective() else "reduction")


def classification_note(op: Operator) -> str:
    """Tell how an operator is classified whose class states no kernel; empty for a class that states one."""
    if traits_of(op).kernel is not None:
        return ""
    cls = type(op)
    return (
        f"costed by its definition, as a kernel of the class {kernel_class(op)}: {cls.__module__}.{cls.__qualname__} "
        "has no traits"
    )


def work_of(
    op: Operator,
    choice: Choice,
    mesh: DeviceMesh,
    spared_bytes: int | None = None,
    shared: str | None = None,
    fusion: str = HIDET,
) -> Work:
    """Determine the work of a local operator.

    ``spared_bytes`` are not moved by the kernel that the operator shares with others; None if the operator has a
    separate kernel. ``shared`` is the class of a kernel of several operators; None for that of the operator by itself.
    A batched product is one call per matrix, unless all share one operand; a product by experts is one call for each
    expert that has a row. ``fusion`` is the device's: it tells what its kernels of convolutions compute.
    """
    kernel = shared or kernel_class(op)
    moved = choice.read_bytes + choice.written_bytes
    weights = 0
    if kernel != "lookup":  # a lookup reads only a few rows of its table
        for x, spec in zip(op.inputs, choice.spec.local.in_specs, strict=True):
            if x.storage is not None or is_weight(x):
                weights += shard_nbytes(x, [int(n) for n in x.shape], spec, mesh, choice.coordinate)
    calls = 1
    routed = routed_of(op)
    if routed is not None:
        shapes = [[int(n) for n in x.shape] for x in op.inputs]
        work = routed_work(op, routed, choice.spec.local_shapes(shapes, mesh, choice.coordinate))
        weights, calls = work.weight_bytes, work.calls
    if spared_bytes is not None:
        moved, calls = max(0, moved - spared_bytes), 0
    elif kernel == "matmul" and routed is None and len(op.inputs[1].shape) > 2:
        y, spec = op.outputs[0], choice.spec.out_specs[0]
        calls = math.prod(spec.local_shape([int(size) for size in y.shape], mesh, choice.coordinate)[:-2])
    functions = choice.functions if kernel in ("elementwise", ATTENTION) else 0
    operations = choice.operations
    if kernel == "convolution" and fusion == LIBRARY:
        operations = _winograd_operations(op, choice, mesh) or operations
    return Work(_with_precision(kernel, op), operations, moved, min(weights, moved), calls, functions)


def _winograd_operations(op: Operator, choice: Choice, mesh: DeviceMesh) -> int:
    """Count the operations of a convolution on a CPU that takes fewer by :mod:`hidet_dist.patterns.winograd`; or 0."""
    filters = op.inputs[1]
    in_full = storage_of(filters) is None and all(x.dtype.name == "float32" for x in op.inputs)
    if not in_full or (filters.storage is None and not is_weight(filters)):
        return 0
    tensors = (filters, choice.spec.local.in_specs[1]), (op.outputs[0], choice.spec.out_specs[0])
    local, (images, _, *out) = (
        spec.local_shape([int(n) for n in x.shape], mesh, choice.coordinate) for x, spec in tensors
    )
    if not has_winograd(local, each_dim(op, "stride"), each_dim(op, "dilations"), int(op.attrs["groups"]), out):
        return 0
    return winograd_operations(images, local, out)


def _with_precision(kernel: str, op: Operator) -> str:
    """Name the class of a product's kernel by the precision of its weight."""
    routed = routed_of(op)
    weight = 1 if routed is None else routed.matrices[-1].weight
    storage = storage_of(op.inputs[weight]) if kernel == "matmul" else None
    return kernel if storage is None else product_class(storage.precision)


def local_nbytes(x: Tensor, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a tensor of a sharded program, with a local shape, at given local symbolic sizes."""
    shape, storage = [evaluate(extent, sizes) for extent in extents_of(x)], storage_of(x)
    return math.prod(shape) * int(x.dtype.nbytes) if storage is None else storage.nbytes(shape)


def local_work(op: Operator, sizes: Mapping[str, int]) -> Work:
    """Determine the work of an operator of a sharded program, with local shapes, at given local symbolic sizes.

    Operations and functions are counted in the operator's definition, or in those of the operators fused in it. For an
    operator without a definition, only the bytes that it moves are counted.
    """
    routed = routed_of(op)
    if routed is not None:
        work = routed_work(op, routed, [[evaluate(n, sizes) for n in extents_of(x)] for x in op.inputs])
        written = sum(local_nbytes(y, sizes) for y in op.outputs)
        return Work("matmul", work.operations, work.read_bytes + written, work.weight_bytes, work.calls)
    fused = getattr(op.task, "fused_graph", None)
    operations = functions = 0
    kernel, calls = "elementwise", 1
    for one in [op] if fused is None else fused.nodes:
        kind = kernel_class(one)
        kernel = kind if kind != "elementwise" else kernel
        if kind == "matmul" and len(one.inputs[1].shape) > 2:
            calls = math.prod(evaluate(extent, sizes) for extent in extents_of(one.outputs[0])[:-2])
        try:
            definition = analyze(one.task, sizes)
        except UnsupportedDefinition:
            continue
        operations += definition.operations({})
        functions += definition.functions({})
    moved = _moved_bytes(op, sizes)
    weights = sum(local_nbytes(x, sizes) for x in op.inputs if x.storage is not None or is_weight(x))
    weights = 0 if kernel == "lookup" else min(weights, moved)
    return Work(kernel, operations, moved, weights, calls, functions if kernel == "elementwise" else 0)


def _moved_bytes(op: Operator, sizes: Mapping[str, int]) -> int:
    """Count the bytes of inputs and outputs; of an input that is read in part alone, those that are read at most."""
    moved = sum(local_nbytes(x, sizes) for x in (*op.inputs, *op.outputs))
    bounded = traits_of(op).read_elements
    if bounded is not None:
        shapes = [[evaluate(extent, sizes) for extent in extents_of(x)] for x in op.inputs]
        for number, elements in bounded(op, shapes).items():
            moved -= max(0, math.prod(shapes[number]) - elements) * int(op.inputs[number].dtype.nbytes)
    return moved
