"""The text of an answer, token by token.

What is given out never changes again: bytes wait until they are a whole character, and text waits while it may be the
beginning of one that ends the answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """The text of one answer.

    Parameters
    ----------
    stops: sequence of str
        Texts that end the answer. The first one to occur ends it, and is no part of it.
    """

    def __init__(self, stops: Sequence[str] = ()):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(stops)
        self._waiting = ""
        self.stopped = False

    def push(self, piece: bytes) -> str:
        """Add the bytes of a token, and return the text that is certain now."""
        return "" if self.stopped else self._certain(self._decoder.decode(piece), final=False)

    def finish(self) -> str:
        """Return the rest of the text, at the end of the answer. A part of a character becomes U+FFFD."""
        return "" if self.stopped else self._certain(self._decoder.decode(b"", final=True), final=True)

    def _certain(self, text: str, final: bool) -> str:
        text = self._waiting + text
        self._waiting = ""
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        if not final and self._stops:
            held = max(_overlap(text, stop) for stop in self._stops)
            if held:
                text, self._waiting = text[:-held], text[-held:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that ``stop`` begins with, short of the whole of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
