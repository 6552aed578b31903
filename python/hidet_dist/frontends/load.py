"""``load_model``: a model in any of the forms that the front ends read, by its path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hidet.graph import FlowGraph

from hidet_dist.errors import ConfigError
from hidet_dist.view import graph_symbols

_FORMS = "a folder of transformers, its config.json, or a .onnx file"


def load_model(
    path: str | Path,
    *,
    dtype: str | None = None,
    batch: int = 1,
    seq: int = 128,
    dims: Mapping[str, int] | None = None,
    weights: str | None = None,
) -> FlowGraph:
    """Read a model as a graph.

    Parameters
    ----------
    path: str or Path
        A folder of transformers, its ``config.json``, or a ``.onnx`` file.
    dtype: str, optional
        The dtype of a model of transformers; by default what its configuration says.
    batch, seq: int
        The sizes of the inputs of a model of transformers: sequences or images, and tokens in each.
    dims: mapping, optional
        The sizes of the named dims of a ``.onnx`` file. All of them must be given.
    weights: str, optional
        Those of a model of transformers: ``"files"``, ``"random"``, or None for none, which is enough to plan; as
        :func:`hidet_dist.frontends.pretrained.from_transformers` takes it. A ``.onnx`` file has its own.

    Raises
    ------
    ConfigError
        When the path is no model, or an argument does not fit it.
    TraceError, UnsupportedModelError, WeightsError
        As the front end of that form.
    """
    place = Path(path)
    if not place.exists():
        raise ConfigError(f"There is no model at {place}; name {_FORMS}.")
    if place.is_dir() or place.suffix == ".json":
        from hidet_dist.frontends.pretrained import from_transformers

        return from_transformers(place, weights=weights, batch=batch, seq=seq, dtype=dtype)
    if place.suffix == ".onnx":
        from hidet_dist.frontends.onnx.model import from_onnx

        graph = from_onnx(place, dims)
        if free := graph_symbols(graph):
            wanted = " ".join(f"--dim {name}=1" for name in free)
            raise ConfigError(
                f"{place} has dims without a size: {', '.join(free)}. Give each one, as `{wanted}` on the command line."
            )
        return graph
    raise ConfigError(f"{place} is of no known form; name {_FORMS}.")
