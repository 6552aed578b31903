"""``load``: a checkpoint in, a model over several ranks out, with its tokenizer."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hidet_dist.errors import ConfigError, RendezvousError
from hidet_dist.launch import TERMINATE_SECONDS, Place, environment_of, free_port
from hidet_dist.llm.cached import found_or_built
from hidet_dist.llm.options import LoadOptions
from hidet_dist.llm.partition_model import PartitionModel
from hidet_dist.llm.ranks import LeadingModel
from hidet_dist.llm.step import StepInputs, StepModel, StepSizes
from hidet_dist.llm.stored import StoredModel
from hidet_dist.llm.tokenizer import CheckpointTokenizer
from hidet_dist.runtime import session
from hidet_dist.runtime.rendezvous import SECRET_VARIABLE, Settings
from hidet_dist.runtime.threads import divide_cores, spin_between_kernels

_LOOPBACK = "127.0.0.1"
_BUILT = ("sequences", "step_tokens", "context", "cached_tokens", "page", "dtype", "distributed", "optimization")
"""Options that decide what is built, and mean nothing for a model that was built."""


def load(model: str | Path, *, cache: str | Path | None = None, **options: Any) -> LanguageModel:
    """Load a language model over ranks of this machine. This process is rank 0; it starts the others.

    A checkpoint is built first: a plan is searched that shards it over the ranks, and the program of a step is
    compiled. What was built is kept in the cache, by content, so that a second start only loads.

    Parameters
    ----------
    model: str or Path
        A transformers folder with ``config.json``, safetensors and ``tokenizer.json``; a GGUF file; or the folder of a
        model that was built. Nothing is downloaded.
    cache: str or Path, optional
        The folder of models that were built; by default ``$XDG_CACHE_HOME/hidet_dist/models``, or
        ``~/.cache/hidet_dist/models``.
    options:
        The fields of :class:`hidet_dist.llm.options.LoadOptions`, such as ``ranks``, ``context`` and ``dtype``.

    Returns
    -------
    LanguageModel
        The model. Give it and its tokenizer to an engine, or call its :meth:`LanguageModel.step`. It must be closed.

    Raises
    ------
    ConfigError
        When an option is unknown or unfit, there is no such model, or this process is a rank already.
    HidetDistError
        As :func:`hidet_dist.llm.building.build` and :func:`hidet_dist.load_partition`.
    """
    if unknown := sorted(options.keys() - LoadOptions.__dataclass_fields__.keys()):
        raise ConfigError(
            f"load has no option {unknown[0]!r}; those that it has are {', '.join(LoadOptions.__dataclass_fields__)}."
        )
    wanted = LoadOptions(**options)
    wanted.check()
    if session.current() is not None:
        raise ConfigError("This process is a rank already: call hidet_dist.shutdown first.")
    divide_cores(wanted.ranks or 1)
    spin_between_kernels()
    return LanguageModel(StoredModel.open(folder_of(Path(model), wanted, cache)), wanted.timeout_seconds)


def folder_of(path: Path, options: LoadOptions, cache: str | Path | None = None) -> Path:
    """Return the folder of a model that was built, after it was built if need be; see :func:`load`.

    Raises
    ------
    ConfigError
        When there is no such model, or it was built for other options.
    HidetDistError
        As :func:`hidet_dist.llm.building.build`.
    """
    if not StoredModel.is_in(path):
        return found_or_built(path, name_of(path), options, None if cache is None else Path(cache))
    defaults = LoadOptions()
    if changed := [name for name in _BUILT if getattr(options, name) != getattr(defaults, name)]:
        raise ConfigError(f"{path} was built already, and {changed[0]} decides how a model is built: leave it out.")
    world_size = StoredModel.open(path).manifest.world_size
    if options.ranks not in (None, world_size):
        raise ConfigError(f"{path} was built for {world_size} ranks, not for {options.ranks}.")
    return path


def name_of(path: Path) -> str:
    """Return the name of a model: that of its folder or file, without an ending."""
    path = path.resolve()
    return path.stem if path.suffix == ".gguf" else path.name


class LanguageModel:
    """A language model over the ranks of this machine: a ``StepModel`` with a tokenizer.

    Parameters
    ----------
    stored: StoredModel
        The model.
    timeout_seconds: float
        How long ranks wait for one another.

    Attributes
    ----------
    name: str
        The name of the model.
    tokenizer: CheckpointTokenizer
        Its tokenizer.
    pooling: Pooling, optional
        For an encoder, how the vectors of a text's tokens become one; None for a model that generates texts.
    on_death: function, optional
        What is called with the number and the exit status of a rank that ends while the model is open, from another
        thread.

    Raises
    ------
    HidetDistError
        As :func:`hidet_dist.load_partition`. The processes of other ranks were ended.
    """

    def __init__(self, stored: StoredModel, timeout_seconds: float = 60.0):
        self.name = stored.name
        self.on_death: Callable[[int, int], None] | None = None
        self.tokenizer: CheckpointTokenizer = stored.tokenizer()
        self.pooling = stored.pooling
        self._processes: list[subprocess.Popen[bytes]] = []
        self._model: StepModel | None = None
        self._ranks = stored.manifest.world_size
        try:
            self._start(stored, timeout_seconds)
            part = PartitionModel(stored, led=self._ranks > 1)
            self._model = part
            if self._ranks > 1:
                self._model = LeadingModel(part, self._ranks)
        except RendezvousError as error:
            ended = [f"rank {rank} exited with status {code}" for rank, code in self._ended()]
            self.close()
            if not ended:
                raise
            raise RendezvousError(f"{error} ({', '.join(ended)})") from error
        except BaseException:
            self.close()
            raise

    def _start(self, stored: StoredModel, timeout_seconds: float) -> None:
        """Become rank 0, and start the other ranks."""
        secret = os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32)
        place = Place(self._ranks, 0, self._ranks, _LOOPBACK, free_port())
        session.start(
            Settings(
                0,
                self._ranks,
                place.address,
                place.port if self._ranks > 1 else None,
                timeout_seconds,
                one_host=True,
                secret=secret.encode(),
            )
        )
        command = [sys.executable, "-m", "hidet_dist.llm.rank", str(stored.folder), repr(timeout_seconds)]
        for rank in range(1, self._ranks):
            env = environment_of(place, rank, secret)
            # In sessions of their own, so that a signal of the terminal reaches rank 0 alone, which decides. The pipe
            # ends when this process does.
            process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, start_new_session=True)
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    @property
    def sizes(self) -> StepSizes:
        """The sizes of the model."""
        return self._open.sizes

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self._ranks

    @property
    def _open(self) -> StepModel:
        if self._model is None:
            raise ConfigError("The model is closed; load it again.")
        return self._model

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Compute one step, and return the logits of the tokens that are wanted [R, vocabulary].

        Raises
        ------
        InputError, CallError
            When the step was refused, on all ranks. Nothing was written.
        EngineError, CommunicationError
            When a rank failed or died. Later steps are not possible.
        """
        return self._open.step(inputs)

    def reset(self) -> None:
        """Forget all sequences."""
        self._open.reset()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if self._model is not None and self.on_death is not None:
            self.on_death(rank, status)

    def _ended(self) -> list[tuple[int, int]]:
        ended = ((rank, process.poll()) for rank, process in enumerate(self._processes, 1))
        return [(rank, status) for rank, status in ended if status is not None]

    def close(self) -> None:
        """End the other ranks, and release memory. It may be called twice."""
        model, self._model = self._model, None
        try:
            if model is not None:
                model.close()
        finally:
            session.shutdown()
            self._end(TERMINATE_SECONDS if model is not None else 0.0)

    def _end(self, patience_seconds: float) -> None:
        """Wait for the processes of the other ranks, and end those that do not end by themselves."""
        for wait, end in ((patience_seconds, "terminate"), (TERMINATE_SECONDS, "kill")):
            for process in self._processes:
                try:
                    process.wait(wait)
                except subprocess.TimeoutExpired:
                    getattr(process, end)()
        for process in self._processes:
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        self._processes = []

    def __enter__(self) -> LanguageModel:
        """Return the model; it is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the model."""
        self.close()
