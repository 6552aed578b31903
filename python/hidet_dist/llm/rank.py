"""A rank of a language model beside rank 0, as a program: ``python -m hidet_dist.llm.rank FOLDER SECONDS``.

It has torchrun's environment variables. It computes the steps that rank 0 sends, and ends when rank 0 closes the model.
Rank 0 holds the other end of its standard input: where that is closed, rank 0 is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from hidet_dist.errors import HidetDistError
from hidet_dist.launch import TERMINATE_SECONDS
from hidet_dist.llm.stored import StoredModel
from hidet_dist.runtime import session


def main(folder: str, timeout_seconds: str) -> int:
    """Load a model that was built, compute its steps, and return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to end
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    try:
        session.init(timeout_seconds=float(timeout_seconds))
        settings = session.current()
        assert settings is not None
        stored = StoredModel.open(folder)
        with stored.verifying(settings.rank) as opened:
            from hidet_dist.llm.partition_model import PartitionModel  # imported while files are verified, with NumPy
            from hidet_dist.llm.ranks import follow

            model = PartitionModel(stored, led=True, opened=opened)
        follow(model, stored.manifest.world_size)
    except HidetDistError as error:
        print(f"rank {os.environ.get('RANK')}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _end_with_rank_0() -> None:
    """End this process soon after rank 0 is gone, if it does not end by itself."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    time.sleep(TERMINATE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
