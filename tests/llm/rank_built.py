"""A rank of a model that was built. Rank 0 has three open requests; it prints what became of them as a line of JSON.

The arguments are the model's folder, and what rank 1 does at its sixth step: ``refuse`` it, because the inputs that it
gives to the program are wrong, or ``die``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import replace

import numpy as np

from hidet_dist.errors import HidetDistError
from hidet_dist.llm.engine import Engine, Request
from hidet_dist.llm.partition_model import PartitionModel
from hidet_dist.llm.ranks import LeadingModel, follow
from hidet_dist.llm.step import StepInputs
from hidet_dist.llm.stored import StoredModel
from hidet_dist.runtime import session


class Failing(PartitionModel):
    """A model whose sixth step fails."""

    count = 0

    def step(self, inputs: StepInputs) -> np.ndarray:
        self.count += 1
        if self.count == 6:
            if sys.argv[2] == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            inputs = replace(inputs, tokens=inputs.tokens + self.sizes.vocabulary)
        return super().step(inputs)


def main() -> int:
    rank = int(os.environ["RANK"])
    session.init(timeout_seconds=120)
    stored = StoredModel.open(sys.argv[1])
    told: dict = {"rank": rank, "error": "", "errors": [], "counts": []}
    try:
        if rank:
            follow(Failing(stored, led=True), 2)
        else:
            model = LeadingModel(PartitionModel(stored, led=True), 2)
            with Engine(model, StoredModel.tokenizer_in(stored.folder)) as engine:
                streams = [engine.submit(Request((7, 8, n), max_tokens=60, ignore_end=True)) for n in (4, 5, 6)]
                threads = [threading.Thread(target=take, args=(stream, told)) for stream in streams]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                told["error"] = str(engine.failure or "")
    except HidetDistError as error:
        told["error"] = str(error)
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    return 1 if told["error"] else 0


def take(stream: object, told: dict) -> None:
    """Take the tokens of a request, and what it ended with."""
    count = 0
    try:
        for _ in stream:  # type: ignore[attr-defined]
            count += 1
    except HidetDistError as error:
        told["errors"].append(str(error))
    told["counts"].append(count)


if __name__ == "__main__":
    sys.exit(main())
