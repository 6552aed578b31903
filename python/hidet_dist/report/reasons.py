"""The reasons for collectives, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from hidet_dist.report.data import CONVERT, DELIVER, REDUCE, Operator, Tensor
from hidet_dist.spec import DeviceMesh, TensorShardSpec

_OPERATIONS = {"sum": "adds", "max": "takes the maximum of", "min": "takes the minimum of", "product": "multiplies"}
_MOST_READERS = 3


def operator_name(operator: Operator) -> str:
    """Name an operator for readers: its kind and number, and its weight or module."""
    where = operator.label or operator.module
    return f"{operator.kind} {operator.index}" + (f" ({where})" if where else "")


def tensor_name(tensor: Tensor) -> str:
    """Name a tensor for readers: by the user's name, if there is one."""
    return tensor.label or tensor.name


def axes_text(axes: Sequence[int], mesh: DeviceMesh) -> str:
    """Join the names of mesh axes, such as ``node and gpu``."""
    return " and ".join(mesh.axis_names[axis] for axis in sorted(axes))


def spec_text(spec: TensorShardSpec, mesh: DeviceMesh) -> str:
    """Write a spec in words, such as ``dim 1 split over gpu``."""
    split = [f"dim {dim} split over {axes_text(axes, mesh)}" for dim, axes in enumerate(spec.mesh_axes_per_dim) if axes]
    return ", ".join(split) or "whole on every device"


def reason(
    purpose: str,
    tensor: Tensor,
    maker: Operator | None,
    readers: Sequence[Operator],
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
    maker: Operator, optional
        The operator that makes the tensor; None for weights and inputs.
    readers: sequence of Operator
        The operators that need the result.
    source, target: TensorShardSpec
        The specs before all steps, and after them.
    axes: sequence of int
        The mesh axes of a reduction.
    """
    name, over = tensor_name(tensor), axes_text(axes, mesh)
    if purpose == REDUCE:
        assert maker is not None
        does = _OPERATIONS.get(reduce_op, "averages")
        return (
            f"{operator_name(maker)} reduces over a dim that {over} splits, so each device has a partial result of "
            f"{name}. This {does} the {mesh.group_size(axes)} partial results and leaves the tensor "
            f"{spec_text(target, mesh)}."
        )
    made = f"is made by {operator_name(maker)} with" if maker is not None else "is stored with"
    made = f"{name} {made} {spec_text(source, mesh)}".replace("with whole", "whole")
    if purpose == DELIVER:
        return f"{made}; as a graph output it is wanted {spec_text(target, mesh)}."
    assert purpose == CONVERT
    shown = ", ".join(map(operator_name, readers[:_MOST_READERS]))
    more = f" and {len(readers) - _MOST_READERS} more" if len(readers) > _MOST_READERS else ""
    need = "needs" if len(readers) == 1 else "need"
    return f"{made}; {shown}{more} {need} it {_wanted(target, mesh)}."


def _wanted(target: TensorShardSpec, mesh: DeviceMesh) -> str:
    text = spec_text(target, mesh)
    return text if text.startswith("whole") else f"with {text}"
