"""A server of the model that tests step, as a process. It prints its port. The argument is JSON.

``options`` are those of the server, ``queue`` and ``context`` the engine's and the model's,
``load_seconds`` is how long the model loads, ``step_seconds`` how long a step takes, ``fails_at`` the step at which the
model fails.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import numpy as np
from tests.llm.models import History, Letters, sizes_for

from hidet_dist.llm.engine import Engine, EngineOptions
from hidet_dist.llm.server.run import ServerOptions, serve
from hidet_dist.llm.step import StepInputs

given = json.loads(sys.argv[1])
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"


class Slow(History):
    """A model that takes its time, keeps no steps, and may fail."""

    count = 0

    def step(self, inputs: StepInputs) -> np.ndarray:
        time.sleep(given.get("step_seconds", 0))
        self.count += 1
        if self.count == given.get("fails_at"):
            raise RuntimeError("rank 1 died")
        logits = super().step(inputs)
        self.steps.clear()
        return logits


def load(failed: Callable[[BaseException], None]) -> Engine:
    time.sleep(given.get("load_seconds", 0))
    letters = Letters()
    letters.chat_template = TEMPLATE
    sizes = sizes_for(letters, context=given.get("context", 4096), pages=600, page=16, states=16, tokens=128)
    return Engine(Slow(sizes), letters, EngineOptions(queue=given.get("queue", 64)), failed)


def told(_: str, port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(serve("tiny", load, ServerOptions(port=0, **given.get("options", {})), told))
