"""Reasons for collectives, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from hidet_dist.report.data import CONVERT, DELIVER, REDUCE, Operator, Tensor
from hidet_dist.spec import DeviceMesh, TensorShardSpec

_OPERATIONS = {"sum": "adds", "max": "takes the maximum of", "min": "takes the minimum of", "product": "multiplies"}
_MOST_CONSUMERS = 3  # that a sentence names


def operator_name(operator: Operator) -> str:
    """Name an operator by its kind and number, and by its weight or module."""
    where = operator.label or operator.module
    return f"{operator.kind} {operator.index}" + (f" ({where})" if where else "")


def tensor_name(tensor: Tensor) -> str:
    """Return the user's name of a tensor, or its name in the plan if there is none."""
    return tensor.label or tensor.name


def axes_text(axes: Sequence[int], mesh: DeviceMesh) -> str:
    """Join the names of mesh axes, such as ``node and gpu``."""
    return " and ".join(mesh.axis_names[axis] for axis in sorted(axes))


def spec_text(spec: TensorShardSpec, mesh: DeviceMesh) -> str:
    """Write a spec in words, such as ``dim 1 split over gpu``."""
    given = dict(spec.parts)
    split = [
        f"dim {dim} split over {axes_text(axes, mesh)}"
        + "".join(f" in parts {':'.join(map(str, given[axis]))}" for axis in axes if axis in given)
        for dim, axes in enumerate(spec.mesh_axes_per_dim)
        if axes
    ]
    return ", ".join(split) or "whole on every device"


def reason(
    purpose: str,
    tensor: Tensor,
    producer: Operator | None,
    consumers: Sequence[Operator],
    source: TensorShardSpec,
    target: TensorShardSpec,
    axes: Sequence[int],
    reduce_op: str,
    mesh: DeviceMesh,
) -> str:
    """Write the reason for a conversion or a reduction.

    Parameters
    ----------
    purpose: str
        ``reduce``, ``convert`` or ``deliver``.
    tensor: Tensor
        The communicated tensor.
    producer: Operator, optional
        The operator that computes the tensor; None for weights and inputs.
    consumers: sequence of Operator
        The operators that need the result.
    source, target: TensorShardSpec
        The specs before all steps, and after them.
    axes: sequence of int
        The mesh axes of a reduction.
    reduce_op: str
        The operation of a reduction, such as ``sum``.
    mesh: DeviceMesh
        The mesh, for the names of its axes.
    """
    name, over = tensor_name(tensor), axes_text(axes, mesh)
    if purpose == REDUCE:
        assert producer is not None
        combines = _OPERATIONS.get(reduce_op, "averages")
        return (
            f"{operator_name(producer)} reduces over a dim that is split over {over}, so each device has a partial "
            f"result of {name}. The collective {combines} the {mesh.group_size(axes)} partial results; the tensor is "
            f"then {_state(target, mesh)}."
        )
    origin = "stored" if producer is None else f"computed by {operator_name(producer)}"
    begin = f"{name} is {origin} {_state(source, mesh)}"
    if purpose == DELIVER:
        return f"{begin}; as a graph output it must be {_state(target, mesh)}."
    assert purpose == CONVERT
    names = ", ".join(map(operator_name, consumers[:_MOST_CONSUMERS]))
    others = f" and {len(consumers) - _MOST_CONSUMERS} more" if len(consumers) > _MOST_CONSUMERS else ""
    need = "needs" if len(consumers) == 1 else "need"
    return f"{begin}; {names}{others} {need} it {_state(target, mesh)}."


def _state(spec: TensorShardSpec, mesh: DeviceMesh) -> str:
    """Write a spec so that it goes on a sentence about a tensor."""
    text = spec_text(spec, mesh)
    return text if text.startswith("whole") else f"with {text}"
