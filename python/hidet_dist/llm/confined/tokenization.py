"""The process that has the tokenizer of a checkpoint, as the ``tokenizers`` library reads it.

A tokenizer is a chain of steps, each of which may double a text, and of regular expressions that may take a time
exponential in its length. The library has bounds of neither.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hidet_dist.limits import MOST_PROMPT_CHARACTERS, MOST_PROMPT_TOKENS
from hidet_dist.llm.confined import MOST_SAID, answer_requests


class Held:
    """The tokenizer of this process, if it has read one."""

    def __init__(self) -> None:
        self._tokenizer: Any = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Read, encode or decode.

        The answer says what is ``wrong``, which library is ``missing``, or that no tokenizer was read: ``unread``.
        """
        try:
            if "read" in request:
                return self._read(request["read"])
            if self._tokenizer is None:
                return {"unread": True}
            return self._tokens(request) if "text" in request else self._text(request)
        except ImportError as error:
            return {"missing": error.name or "tokenizers"}
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # the library raises Exception, and a panic is a BaseException of its own
            return {"wrong": str(error)[:MOST_SAID]}

    def _read(self, text: str) -> dict[str, Any]:
        """Read a tokenizer of the library's JSON form, and tell its vocabulary, its tokens apart, and its decoder."""
        tokenizer = importlib.import_module("tokenizers").Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        return {  # lists, which JSON has in less time than an object with a key for each token
            "texts": list(vocabulary),
            "tokens": list(vocabulary.values()),
            "added": [[int(token), str(entry.content), bool(entry.special)] for token, entry in added.items()],
            "decoders": _kinds(tokenizer.decoder),
        }

    def _tokens(self, request: Mapping[str, Any]) -> dict[str, Any]:
        found = self._tokenizer.encode(request["text"], add_special_tokens=request["special"])
        if len(found) > MOST_PROMPT_TOKENS:
            return {"wrong": f"a text of {len(request['text'])} characters has {len(found)} tokens"}
        return {"tokens": found.ids}

    def _text(self, request: Mapping[str, Any]) -> dict[str, Any]:
        text = self._tokenizer.decode(request["tokens"], skip_special_tokens=not request["special"])
        if len(text) > MOST_PROMPT_CHARACTERS:
            return {"wrong": f"{len(request['tokens'])} tokens have a text of {len(text)} characters"}
        return {"text": text}


def _kinds(decoder: Any) -> list[str]:
    """List the types of a decoder and of its parts."""
    pending = [] if decoder is None else [json.loads(decoder.__getstate__())]  # noqa: TID251 - written by the library
    kinds = []
    for part in pending:
        kinds.append(part["type"])
        pending += part.get("decoders", ())
    return kinds


if __name__ == "__main__":
    with suppress(ImportError):  # a request says that it is missing
        importlib.import_module("tokenizers")  # before a first request comes
    answer_requests(Held().answer)
