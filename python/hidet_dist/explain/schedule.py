"""Schedule lines for applying a plan by hand, in the style of Slapo (Chen et al., ASPLOS 2024)."""

from __future__ import annotations

import re

from hidet_dist.errors import PlanError
from hidet_dist.spec import DeviceMesh, StagePlan

_STEP = re.compile(r"^(\w+)\((.*)\)$")


def schedule_lines(stage: StagePlan) -> list[str]:
    """The schedule lines of a stage, in execution order.

    ``shard("fc1.weight", dim=1)`` splits a weight, a graph input or a state; ``axes`` names the mesh axes if
    there are several. ``sync("fc2", "all_reduce")`` reduces an operator's output, and
    ``sync("fc2", "all_gather", dim=1, of="t4.0", when="before")`` converts an operator's input. An operator without a
    user's name is written ``op:7``.

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
                lines.append(f'shard("{labels[tensor.name]}", dim={dim}{_axes(axes, mesh)})')
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


def _step(text: str, mesh: DeviceMesh) -> str:
    """A conversion step or a reduce function as the arguments of ``sync``: its kind, then its fields."""
    match = _STEP.match(text)
    if match is None:
        raise PlanError(f"The plan has the step {text!r}; write it as all_gather(axes=0, dim=1).")
    kind, rest = match.groups()
    written = [f'"{kind}"']
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            if key != "sum":
                written.append(f'op="{key}"')
        elif key.endswith("axes"):
            if not value.isdecimal() or max(map(int, value)) >= mesh.ndim:
                raise PlanError(f"The plan has the step {text!r}, but the mesh {mesh} has no such axes.")
            if mesh.ndim > 1:
                written.append(f"{key}={tuple(mesh.axis_names[int(axis)] for axis in value)}")
        else:
            written.append(f"{key}={value}")
    return ", ".join(written)
