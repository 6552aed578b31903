"""Schedule lines for applying a plan by hand, in the style of Slapo (Chen et al., ASPLOS 2024)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hidet_dist.errors import PlanError
from hidet_dist.spec.parts import AXES, Split, parse_axes
from hidet_dist.spec.tensor import dims_of

if TYPE_CHECKING:
    from hidet_dist.spec.mesh import DeviceMesh
    from hidet_dist.spec.plan import StagePlan

_STEP = re.compile(r"^(\w+)\((.*)\)$")


def schedule_lines(stage: StagePlan) -> list[str]:
    """The schedule lines of a stage, in execution order.

    ``shard("fc1.weight", dim=1)`` splits a weight, a graph input or a state; ``axes`` names the mesh axes if
    there are several, and ``parts`` gives unequal parts. ``sync("fc2", "all_reduce")`` reduces an operator's output,
    and ``sync("fc2", "all_gather", dim=1, of="t4.0", when="before")`` converts an operator's input. An operator without
    a user's name is written ``op:7``.

    Raises
    ------
    PlanError
        For an invalid step, or one over axes that the mesh does not have.
    """
    mesh = stage.mesh
    lines = []
    labels = {}
    for tensor in stage.stored:
        labels[tensor.name] = tensor.label or tensor.name
        for dim, axes in enumerate(tensor.spec.mesh_axes_per_dim):
            if axes:
                parts = _parts(tensor.spec.split(dim, mesh), mesh)
                lines.append(f'shard("{labels[tensor.name]}", dim={dim}{_axes(axes, mesh)}{parts})')
    for op in stage.operators:
        name = op.label or f"op:{op.index}"
        for conversion in op.conversions:
            tensor_name = labels.get(conversion.tensor, conversion.tensor)
            lines += [
                f'sync("{name}", {_step(text, mesh)}, of="{tensor_name}", when="before")' for text in conversion.steps
            ]
        for number, fns in enumerate(op.spec.reduce_fns):
            of = f', of="t{op.index}.{number}"' if len(op.spec.out_specs) > 1 else ""
            lines += [f'sync("{name}", {_step(str(fn), mesh)}{of})' for fn in fns]
    for conversion in stage.output_conversions:
        tensor_name = labels.get(conversion.tensor, conversion.tensor)
        lines += [f'sync("output", {_step(text, mesh)}, of="{tensor_name}")' for text in conversion.steps]
    return lines


def _axes(axes: tuple[int, ...], mesh: DeviceMesh) -> str:
    if mesh.ndim == 1:
        return ""
    return f", axes={tuple(mesh.axis_names[axis] for axis in axes)}"


def _parts(split: Split, mesh: DeviceMesh) -> str:
    own = zip(split.mesh_axes, split.parts, strict=True)
    unequal = (f'"{mesh.axis_names[axis]}": {parts}' for axis, parts in own if len(set(parts)) > 1)
    written = ", ".join(unequal)
    return f", parts={{{written}}}" if written else ""


def _step(text: str, mesh: DeviceMesh) -> str:
    """A conversion step or a reduce function as the arguments of ``sync``: its kind, then its fields."""
    match = _STEP.match(text)
    if match is None:
        raise PlanError(f"The plan has the step {text!r}; write it as all_gather(axes=0, dim=1).")
    kind, rest = match.groups()
    written = [f'"{kind}"']
    for part in filter(None, (part.strip() for part in dims_of(rest))):
        key, equals, value = part.partition("=")
        if not equals:
            if key != "sum":
                written.append(f'op="{key}"')
        elif key.endswith("axes"):
            axes, parts = parse_axes(value)
            if not re.fullmatch(AXES, value) or max(axes) >= mesh.ndim:
                raise PlanError(f"The plan has the step {text!r}, but the mesh {mesh} has no such axes.")
            if mesh.ndim > 1:
                written.append(f"{key}={tuple(mesh.axis_names[axis] for axis in axes)}")
            given = _parts(Split(tuple(axis for axis, _ in parts), tuple(own for _, own in parts)), mesh)
            written += [given.removeprefix(", ")] if given else []
        else:
            written.append(f"{key}={value}")
    return ", ".join(written)
