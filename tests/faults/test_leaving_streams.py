"""Streams that one rank leaves: no rank gives a wrong result, and all others name it at once."""

from __future__ import annotations

from pathlib import Path

import hidet
import numpy as np

import hidet_dist

from .conftest import PATIENCE_SECONDS, Start, assert_blames, load_all

SHAPE = [2**16, 8]
"""Of each tensor. The results that a rank may be ahead of the others are more than the 4 MiB that messages may take."""
RANKS, COUNT = 3, 4
WAYS = [  # each with the rank that leaves
    (0, "break"),
    (1, "exception"),
    (0, "close"),
    (2, "garbage"),
    (0, "another call"),
    (1, "close of the model"),
]


def _build(folder: Path) -> Path:
    """Build three stages of one rank each, whose outputs all ranks give."""
    rng = np.random.default_rng(0)
    x = hidet.symbol(SHAPE, "float32", "cpu")
    outputs = []
    for _ in range(RANKS):
        w = rng.uniform(-1, 1, (SHAPE[1], SHAPE[1])).astype(np.float32)
        outputs.append(hidet.ops.tanh(hidet.ops.matmul(outputs[-1] if outputs else x, hidet.asarray(w))))
    stages = [{"operators": [2 * number, 2 * number + 2], "mesh_shape": [1]} for number in range(RANKS)]
    hidet_dist.auto_parallel(hidet.trace_from(outputs, [x]), {"mesh_shape": [RANKS]}, {"stages": stages}, folder)
    return folder


def test_a_stream_that_one_rank_leaves_ends_on_all(start: Start, tmp_path: Path) -> None:
    """The rank leaves while others wait, so that its results are on their way; then the others go on."""
    folder = _build(tmp_path / "artifacts")
    ranks = start(RANKS)
    for leaver, way in WAYS:
        load_all(ranks, folder)
        for number, rank in enumerate(ranks):
            rank.send("leave_stream", shape=SHAPE, count=COUNT, way=way if number == leaver else "never")
        for rank in ranks:
            assert rank.answer()["result"] == "waiting"
        ranks[leaver].go_on()
        assert ranks[leaver].answer()["result"] == "left"
        others = [rank for number, rank in enumerate(ranks) if number != leaver]
        for rank in others:
            rank.go_on()
        for rank in others:
            cause = "The partition is in a stream" if way == "another call" else f"rank {leaver} left its stream"
            assert_blames(rank.answer(), leaver, "CommunicationError", cause)
        for rank in ranks:
            rank.do("close")
    for rank in ranks:
        rank.dismiss()
    assert [rank.process.wait(PATIENCE_SECONDS) for rank in ranks] == [0] * RANKS
