"""Long-lived processes of the variants of a model, and timing them in turns."""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hidet_dist.launch import free_port

FIRST_CALL_SECONDS = 300.0  # to load, and to compile where the variant does that
CALL_SECONDS = 60.0
CLOSE_SECONDS = 5.0
MOST_WAITED = 3  # calls whose time is waited for: bursts of more are of short calls
BURST_SECONDS = 0.3  # about: what one variant takes before it is another's turn
# Calls shorter than this are preceded by one that does not count, when their turn begins: it finds nothing of its own
# in the caches, and where there are several processes it lasts from when the first begins to when the last ends.
SHORT_SECONDS = 0.5
LEAST_ROUNDS, MOST_ROUNDS = 5, 40
WORKER = "-m", "benchmarks.serving.worker"
_LOG_LINES = 15


class VariantError(RuntimeError):
    """A variant's processes did not do what they should."""


def input_of(process: subprocess.Popen[bytes]) -> IO[bytes]:
    """Return the pipe to a process that has one."""
    assert process.stdin is not None
    return process.stdin


def output_of(process: subprocess.Popen[bytes]) -> IO[bytes]:
    """Return the pipe from a process that has one."""
    assert process.stdout is not None
    return process.stdout


class Variant:
    """The processes of one variant, one a rank.

    Parameters
    ----------
    name: str
        What it is called in messages and files.
    settings: mapping
        What :mod:`benchmarks.serving.worker` loads.
    ranks, threads: int
        Processes, and the threads of each.
    folder: Path
        Where their logs go.
    worker: sequence of str
        What Python is given to start each.
    call_seconds: float
        What a call may take.
    """

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        ranks: int,
        threads: int,
        folder: Path,
        worker: Sequence[str] = WORKER,
        call_seconds: float = CALL_SECONDS,
    ):
        self.name, self.ranks, self.threads = name, ranks, threads
        self._call_seconds = call_seconds
        self._logs = [folder / f"{name}-{rank}.log" for rank in range(ranks)]
        port = str(free_port())
        self._processes = []
        for rank, log in enumerate(self._logs):
            env = {**os.environ, "OMP_NUM_THREADS": str(threads), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            with log.open("w", encoding="utf-8") as file:
                command = [sys.executable, *worker]
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=env,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=file,
                        bufsize=0,
                        start_new_session=True,
                    )
                )
        self._send(settings)

    def ready(self, seconds: float = FIRST_CALL_SECONDS) -> float:
        """Wait for the first call, and return its seconds. Raises VariantError, as all do."""
        return max(reply["first_seconds"] for reply in self._replies(seconds))

    def answer(self, folder: Path) -> list[Path]:
        """The files with what each rank's call gives."""
        files = [folder / f"{self.name}-{rank}.npy" for rank in range(self.ranks)]
        for process, file in zip(self._processes, files, strict=True):
            self._write(process, {"do": "answer", "file": str(file)})
        self._replies(self._call_seconds)
        return files

    def burst(self, calls: int, warm_up: int) -> list[float]:
        """The seconds of some calls, each as the slowest rank took it."""
        self._send({"do": "burst", "calls": calls, "warm_up": warm_up})
        times = [reply["seconds"] for reply in self._replies(self._call_seconds * min(calls + warm_up, MOST_WAITED))]
        return [max(own) for own in zip(*times, strict=True)]

    def profile(self, calls: int) -> dict[str, Any]:
        """The first rank's profile of a call's kernels (hidet_dist only)."""
        self._send({"do": "profile", "calls": calls})
        return self._replies(self._call_seconds * calls)[0]

    def close(self) -> None:
        """End the processes; those that do not heed the end of their input, by force."""
        close_all([self])

    def hang_up(self) -> None:
        """End the input of the processes, which have them end."""
        for process in self._processes:
            with suppress(OSError):
                input_of(process).close()

    def end(self, deadline: float) -> None:
        """Wait for the processes until ``deadline`` (of ``time.monotonic``); then kill them, and what they started."""
        for process in self._processes:
            if output_of(process).closed:
                continue
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output_of(process).close()

    def kill(self) -> None:
        """Kill the processes, also while another thread waits for them: it finds that they have ended."""
        for process in self._processes:
            process.kill()

    def _send(self, message: Mapping[str, Any]) -> None:
        for process in self._processes:
            self._write(process, message)

    def _write(self, process: subprocess.Popen[bytes], message: Mapping[str, Any]) -> None:
        try:
            input_of(process).write(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self._failed("has ended") from error

    def _replies(self, seconds: float) -> list[dict[str, Any]]:
        """A line from each process, within a time."""
        deadline = time.monotonic() + seconds
        lines: dict[int, bytes] = {output_of(process).fileno(): b"" for process in self._processes}
        with selectors.DefaultSelector() as selector:
            for file in lines:
                selector.register(file, selectors.EVENT_READ)
            while not all(line.endswith(b"\n") for line in lines.values()):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise self._failed(f"did not answer within {seconds:g} s")
                for key, _ in ready:
                    got = os.read(key.fd, 2**20)
                    if not got:
                        raise self._failed("has ended")
                    lines[key.fd] += got
        return [json.loads(line) for line in lines.values()]

    def _failed(self, what: str) -> VariantError:
        for log in self._logs:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            if lines:
                return VariantError(
                    f"{self.name} {what}; the last lines of its log:\n" + "\n".join(lines[-_LOG_LINES:])
                )
        return VariantError(f"{self.name} {what}")


def close_all(variants: Sequence[Variant], seconds: float = CLOSE_SECONDS) -> None:
    """End the processes of some variants, which have so long to end by themselves."""
    deadline = time.monotonic() + seconds
    for variant in variants:
        variant.hang_up()
    for variant in variants:
        variant.end(deadline)


def measure_in_turns(
    variants: Sequence[Variant], seconds: float, failed: Callable[[Variant, VariantError], None]
) -> dict[str, list[float]]:
    """The seconds of calls of each variant: short bursts in turns, so that what else the machine does hits all alike.

    ``seconds`` is about what all may take. Variants that fail are told of, and left out from then on.
    """
    running = list(variants)
    one_call: dict[str, float] = {}
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}

    def turn(variant: Variant, calls: int, warm_up: int) -> list[float]:
        try:
            return variant.burst(calls, warm_up)
        except VariantError as error:
            running.remove(variant)
            failed(variant, error)
            return []

    for variant in list(running):
        found = turn(variant, 2, 1)
        if found:
            one_call[variant.name] = min(found)
    calls = {name: max(1, math.ceil(BURST_SECONDS / own)) for name, own in one_call.items()}
    warm_up = {name: int(own < SHORT_SECONDS) for name, own in one_call.items()}
    a_round = sum(own * (calls[name] + warm_up[name]) for name, own in one_call.items())
    rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, round(seconds / a_round))) if one_call else 0
    for number in range(rounds):
        # From another one each time, so that none always follows the same.
        first = number % max(1, len(running))
        for variant in running[first:] + running[:first]:
            times[variant.name] += turn(variant, calls[variant.name], warm_up[variant.name])
    return {name: own for name, own in times.items() if own}


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each variant's calls."""
    return {name: statistics.median(own) for name, own in times.items()}
