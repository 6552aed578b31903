"""``load_model``: a model in any of the forms that the front ends read, by its path."""

from __future__ import annotations

from pathlib import Path

from hidet.graph import FlowGraph

from hidet_dist.errors import ConfigError

_FORMS = "a folder of transformers, or the config.json of one"


def load_model(
    path: str | Path,
    *,
    dtype: str | None = None,
    batch: int = 1,
    seq: int = 128,
    weights: str | None = None,
) -> FlowGraph:
    """Read a model as a graph.

    Parameters
    ----------
    path: str or Path
        A folder of transformers, or its ``config.json``.
    dtype: str, optional
        The dtype of a model of transformers; by default what its configuration says.
    batch, seq: int
        The sizes of the inputs: sequences or images, and tokens in each.
    weights: str, optional
        ``"files"``, ``"random"``, or None for none, which is enough to plan; as
        :func:`hidet_dist.frontends.pretrained.from_transformers` takes it.

    Raises
    ------
    ConfigError
        When the path is no model, or an argument does not fit it.
    TraceError, UnsupportedModelError, WeightsError
        As the front end of that form.
    """
    place = Path(path)
    if not place.exists():
        raise ConfigError(
            f"There is no model at {place}; name a folder of transformers, a config.json or a .onnx file."
        )
    if place.is_dir() or place.suffix == ".json":
        from hidet_dist.frontends.pretrained import from_transformers

        return from_transformers(place, weights=weights, batch=batch, seq=seq, dtype=dtype)
    raise ConfigError(f"{place} is of no known form; name {_FORMS}.")
