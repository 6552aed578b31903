"""The user's names of tensors and operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import hidet

from hidet_dist.errors import ConfigError
from hidet_dist.spec import StagePlan, TensorPlan
from hidet_dist.view import GraphView
from hidet_dist.weights.named import mark_of
from hidet_dist.weights.states import state_mark_of


def parse_names(given: Any) -> dict[str, hidet.Tensor]:
    """Read the user's names of tensors from a hidet Module (its parameters' names) or a mapping. Raises ConfigError."""
    if given is None:
        return {}
    if isinstance(given, hidet.nn.Module):
        return dict(given.named_parameters())
    if isinstance(given, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, hidet.Tensor) for name, tensor in given.items()
    ):
        return dict(given)
    raise ConfigError(f"names must be a hidet Module, or map names to hidet tensors; got {type(given).__name__}.")


def tensor_labels(view: GraphView, names: Mapping[str, hidet.Tensor]) -> dict[str, str]:
    """Map the names of tensors in the view to the user's names, as far as there are any.

    The first of several names wins. A weight of ``hidet.distributed.weight`` has the name that it was made with, and so
    has a state.
    """
    labels: dict[str, str] = {}
    for label, tensor in names.items():
        if tensor in view.names:
            labels.setdefault(view.names[tensor], label)
    for name in view.weights:
        mark = mark_of(view.tensors[name])
        if mark is not None:
            labels.setdefault(name, str(mark))
    for name in view.states:
        state = state_mark_of(view.tensors[name])
        if state is not None:
            labels.setdefault(name, state.name)
    return labels


def operator_labels(view: GraphView, labels: Mapping[str, str]) -> list[str]:
    """Name each operator after the weight that it reads; empty if it reads none, or several operators get the name.

    The reader of ``fc1.weight``, a matrix, is ``fc1``; that of ``fc1.bias``, a vector, is ``fc1.bias``.
    """
    weights = set(view.weights)
    result = []
    for op in view.operators:
        read = [view.names[x] for x in op.inputs if view.names[x] in weights and view.names[x] in labels]
        name = max(read, key=lambda weight: len(view.shape(weight)), default="")
        label = labels.get(name, "")
        result.append(label.rpartition(".")[0] or label if name and len(view.shape(name)) > 1 else label)
    readers = Counter(result)
    return [label if readers[label] == 1 else "" for label in result]


def label_stage(view: GraphView, stage: StagePlan, names: Mapping[str, hidet.Tensor]) -> StagePlan:
    """Label the tensors of a stage with the user's names, and its operators with names derived from them."""
    labels = tensor_labels(view, names)

    def named(tensors: tuple[TensorPlan, ...]) -> tuple[TensorPlan, ...]:
        return tuple(replace(tensor, label=labels.get(tensor.name, "")) for tensor in tensors)

    labelled = zip(stage.operators, operator_labels(view, labels), strict=True)
    return replace(
        stage,
        operators=tuple(replace(op, label=label) for op, label in labelled),
        weights=named(stage.weights),
        inputs=named(stage.inputs),
        outputs=named(stage.outputs),
        states=named(stage.states),
    )
