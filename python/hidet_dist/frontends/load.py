"""``load_model``: conversion of a model to a graph, by the form of its path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hidet.graph import FlowGraph

from hidet_dist.errors import ConfigError
from hidet_dist.view import graph_symbols

_FORMS = "a transformers folder, its config.json, or a .onnx file"


def load_model(
    path: str | Path,
    *,
    dtype: str | None = None,
    batch: int = 1,
    seq: int = 128,
    dims: Mapping[str, int] | None = None,
    weights: str | None = None,
    architecture: str | None = None,
    logits: str | None = None,
    dynamic: Sequence[str] = (),
) -> FlowGraph:
    """Convert a model to a graph.

    Parameters
    ----------
    path: str or Path
        A transformers folder, its ``config.json``, or a ``.onnx`` file.
    dtype: str, optional
        The dtype of a transformers model; by default its configuration's.
    batch, seq: int
        The input sizes of a transformers model: sequences or images, and tokens in each.
    dims: mapping, optional
        The sizes of the symbolic dims of a ``.onnx`` file, by name. All of them must be given.
    weights: str, optional
        The weights of a transformers model: ``"files"``, ``"random"``, or None for none, which is enough to plan. See
        :func:`hidet_dist.frontends.pretrained.from_transformers`. A ``.onnx`` file contains its weights.
    architecture: str, optional
        The class of a transformers model; by default its configuration's.
    logits: str, optional
        The positions whose logits a causal transformers model returns: ``"last"``, ``"all"`` or ``"none"``; by default
        the last.
    dynamic: sequence of str
        The dims of a transformers model that are symbolic: ``"batch"``, ``"seq"`` or both.

    Returns
    -------
    FlowGraph
        The graph, on the CPU.

    Raises
    ------
    ConfigError
        When there is no such model, or an argument does not fit its form.
    TraceError, UnsupportedModelError, WeightsError
        As the front end of that form.
    """
    model = Path(path)
    if not model.exists():
        raise ConfigError(f"There is no model at {model}; name {_FORMS}.")
    if model.is_dir() or model.suffix == ".json":
        from hidet_dist.frontends.pretrained import from_transformers

        return from_transformers(
            model,
            weights=weights,
            batch=batch,
            seq=seq,
            dtype=dtype,
            architecture=architecture,
            logits=logits,
            dynamic=dynamic,
        )
    if model.suffix == ".onnx":
        from hidet_dist.frontends.onnx.model import from_onnx

        graph = from_onnx(model, dims)
        if symbols := graph_symbols(graph):
            options = " ".join(f"--dim {name}=1" for name in symbols)
            raise ConfigError(
                f"{model} has dims without a size: {', '.join(symbols)}. Give each one, as `{options}` on the command "
                "line."
            )
        return graph
    raise ConfigError(f"{model} is of no known form; name {_FORMS}.")
