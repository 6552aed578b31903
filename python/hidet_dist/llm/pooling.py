"""How a text's token vectors become one vector: what the files of sentence-transformers say of an encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hidet_dist.checks import is_whole, shown
from hidet_dist.codec import Positive
from hidet_dist.errors import ConfigError
from hidet_dist.files import parse_json, read_text
from hidet_dist.limits import MOST_CONFIGURATION_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MODULES = "modules.json"
"""The file of sentence-transformers that lists what follows on an encoder."""

MODES = ("mean", "cls", "max", "mean_sqrt_len_tokens", "lasttoken")
"""The poolings that are supported, by the names that sentence-transformers has for them."""

_OLD_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""The keys of older files, each of which is true or false."""


@dataclass(frozen=True)
class Pooling:
    """How a text's token vectors become one vector.

    Attributes
    ----------
    mode: str
        One of :data:`MODES`: the mean of the vectors, the first one, the largest of each element, the sum over the
        root of their number, or the last one.
    normalized: bool
        Whether the vector is divided by its Euclidean norm.
    size: int
        The elements of a vector.
    """

    mode: str
    normalized: bool
    size: Positive

    def check(self) -> None:
        """Raise ValueError for an unknown mode."""
        if self.mode not in MODES:
            raise ValueError(f"its pooling has the mode {shown(self.mode)}")

    @classmethod
    def of_folder(cls, folder: Path, size: int) -> Pooling:
        """Read the pooling of an encoder's folder, for vectors of ``size`` elements.

        Raises
        ------
        ConfigError
            When a file is missing or malformed, or asks for what is not supported; the message names it.
        """
        file = folder / MODULES
        modules = _json(file)
        if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
            raise ConfigError(f"{file} must be a list of modules; got {shown(modules)}.")
        kinds = [str(each.get("type")).rpartition(".")[2] for each in modules]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise ConfigError(
                f"{file} has the modules {', '.join(kinds)}; only Transformer, Pooling and Normalize, in this order, "
                "are supported."
            )
        where = folder / _inside(modules[1].get("path"), file) / "config.json"
        return cls(_mode(_fields(where), where), kinds[-1] == "Normalize", size)

    def __call__(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the vector of one text [H] from those of its tokens [T, H], special tokens included.

        Sums are in double precision. A vector of zeros stays one.
        """
        import numpy as np  # a model's description, pooling included, is read before NumPy is imported

        if self.mode == "cls":
            pooled = vectors[0].astype(np.float64)
        elif self.mode == "lasttoken":
            pooled = vectors[-1].astype(np.float64)
        elif self.mode == "max":
            pooled = vectors.max(0).astype(np.float64)
        else:
            count = len(vectors) ** (0.5 if self.mode == "mean_sqrt_len_tokens" else 1.0)
            pooled = vectors.sum(0, dtype=np.float64) / count
        norm = float(np.sqrt((pooled * pooled).sum()))
        if self.normalized and norm:
            pooled = pooled / norm
        return pooled.astype(np.float32)


def longest_text(folder: Path) -> int | None:
    """Return the most tokens of a text that an encoder's files name, if they do.

    Raises
    ------
    ConfigError
        When the file is malformed, or asks for lower case, which the tokenizer's own file has to say.
    """
    file = folder / "sentence_bert_config.json"
    if not file.is_file():
        return None
    fields = _fields(file)
    if fields.get("do_lower_case"):
        raise ConfigError(f"{file} has do_lower_case, which is supported in tokenizer.json alone: write it anew.")
    longest = fields.get("max_seq_length")
    if longest is not None and not is_whole(longest, 1):
        raise ConfigError(f"{file} has the max_seq_length {shown(longest)}; it must be a whole number from 1 on.")
    return longest


def _mode(fields: Mapping[str, Any], where: Path) -> str:
    mode = fields.get("pooling_mode")
    if mode is None:
        modes = [name for key, name in _OLD_MODES.items() if fields.get(key)]
    else:
        modes = list(mode) if isinstance(mode, list) else [mode]
    if len(modes) != 1 or modes[0] not in MODES:
        raise ConfigError(f"{where} asks for the pooling {shown(modes)}; one of {', '.join(MODES)} is supported.")
    return str(modes[0])


def _inside(path: Any, file: Path) -> str:
    """Check the folder of a module. Raises ConfigError for one elsewhere."""
    if not isinstance(path, str) or not path or Path(path).is_absolute() or ".." in Path(path).parts:
        raise ConfigError(f"{file} names the folder {shown(path)}, which is none inside its own.")
    return path


def _json(file: Path) -> Any:
    try:
        return parse_json(read_text(file, MOST_CONFIGURATION_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.") from error


def _fields(file: Path) -> dict[str, Any]:
    fields = _json(file)
    if not isinstance(fields, dict):
        raise ConfigError(f"{file} must be a JSON object; got {shown(fields)}.")
    return fields
