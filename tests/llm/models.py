"""Models and a tokenizer that tests of the engine step: what they compute depends on every row that they read."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hidet_dist.llm.sizes import StepSizes
from hidet_dist.llm.step import StepInputs


class Letters:
    """A tokenizer of bytes, with a few longer tokens, one of them a part of a character, and two special tokens."""

    WORDS = ("the", " and", "ing", "é"[:1], "€")
    BEGIN, END = 256 + len(WORDS), 257 + len(WORDS)

    def __init__(self) -> None:
        self.pieces = [bytes([byte]) for byte in range(256)]
        self.pieces += [word.encode() for word in self.WORDS]
        self.pieces += [b"<s>", b"</s>"]
        self.vocabulary = len(self.pieces)
        self.end = frozenset({self.END})
        self.special = frozenset({self.BEGIN, self.END})
        self.chat_template: str | None = None
        self.special_texts: Mapping[str, str] = {"bos_token": "<s>", "eos_token": "</s>"}

    def encode(self, text: str, special: bool = True) -> list[int]:
        tokens = [self.BEGIN] if special else []
        for index, part in enumerate(text.split("</s>")):
            tokens += [self.END] if index else []
            for number, piece in enumerate(part.split("<s>")):
                tokens += [self.BEGIN] if number else []
                tokens += piece.encode()
        return tokens

    def decode(self, tokens: Sequence[int], special: bool = True) -> str:
        kept = (token for token in tokens if special or token not in self.special)
        return b"".join(self.pieces[token] for token in kept).decode(errors="replace")

    def piece(self, token: int) -> bytes:
        return self.pieces[token]


def logits_after(history: Sequence[int], vocabulary: int) -> np.ndarray:
    """Return logits that the whole history decides."""
    digest = hashlib.blake2b(np.array(history, np.int64).tobytes(), digest_size=8).digest()
    generator = np.random.default_rng(int.from_bytes(digest, "big"))
    return generator.standard_normal(vocabulary).astype(np.float32) * 3


class History:
    """A model whose pools keep the tokens, and whose logits are a digest of the tokens it reads there.

    Rows that nobody wrote since the model was made, or that were overwritten, change what it answers. It also keeps the
    steps that it was given.
    """

    def __init__(self, sizes: StepSizes, scripted: Callable[[list[int]], np.ndarray | None] | None = None):
        self.sizes = sizes
        self.pool = np.full((sizes.rows, 2), -1, np.int64)
        self.steps: list[StepInputs] = []
        self.scripted = scripted
        self.closed = False
        self.fails: BaseException | None = None
        self.gate = threading.Event()  # a test clears it to hold the model up
        self.gate.set()
        self.entered = threading.Semaphore(0)

    def step(self, inputs: StepInputs) -> np.ndarray:
        inputs.check(self.sizes)
        self.entered.release()
        assert self.gate.wait(60)
        if self.fails is not None:
            raise self.fails
        self.steps.append(inputs)
        self.pool[inputs.slots, 0], self.pool[inputs.slots, 1] = inputs.tokens, inputs.positions
        rows = inputs.token_rows()
        given = []
        for index in inputs.wanted:
            read = self.pool[rows[index, : inputs.lengths[index]]]
            history = [int(token) if position == at else -2 for at, (token, position) in enumerate(read)]
            script = self.scripted(history) if self.scripted is not None else None
            given.append(logits_after(history, self.sizes.vocabulary) if script is None else script)
        return np.array(given, np.float32).reshape(len(inputs.wanted), self.sizes.vocabulary)

    def reset(self) -> None:
        self.pool[:] = -1

    def close(self) -> None:
        self.closed = True


def sizes_for(tokenizer: Letters, **changes: int | bool) -> StepSizes:
    values: dict = {"context": 200, "pages": 40, "page": 4, "states": 6, "tokens": 16} | changes
    return StepSizes(vocabulary=tokenizer.vocabulary, **values)
