"""``load``: a checkpoint in, a model over several ranks out, with its tokenizer.

The ranks may be on several hosts. Rank 0 is the process that loads on the first host; on the others, :func:`join`
starts the ranks, which follow rank 0.
"""

from __future__ import annotations

import importlib
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hidet_dist.errors import ConfigError, RendezvousError
from hidet_dist.launch import TERMINATE_SECONDS, HostPlace, environment_of, hosts_problem, place_on_host
from hidet_dist.llm.cached import found_or_built
from hidet_dist.llm.chat import start_renderer
from hidet_dist.llm.options import LoadOptions
from hidet_dist.llm.sizes import StepSizes
from hidet_dist.llm.stored import StoredModel
from hidet_dist.llm.tokenizer import CheckpointTokenizer, tokenizer_process
from hidet_dist.runtime import session
from hidet_dist.runtime.rendezvous import SECRET_VARIABLE, Settings
from hidet_dist.runtime.threads import divide_cores

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hidet_dist.llm.step import StepInputs, StepModel

_BUILT = (
    "stages",
    "sequences",
    "step_tokens",
    "context",
    "cached_tokens",
    "page",
    "dtype",
    "distributed",
    "optimization",
)
"""Options that decide what is built, and mean nothing for a model that was built."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a model's ranks. Each has equally many.

    Attributes
    ----------
    count: int
        The number of hosts.
    number: int, optional
        The number of this host, from 0.
    rendezvous: str, optional
        An address and port of host 0, such as ``10.0.0.1:29500``, at which the ranks meet.
    """

    count: int = 1
    number: int | None = None
    rendezvous: str | None = None

    def place(self, world_size: int) -> HostPlace:
        """Return the ranks of this host.

        Raises
        ------
        ConfigError
            When the hosts are not described in whole, lack a common secret, or cannot have equally many ranks.
        """
        if problem := hosts_problem(self.count, self.number, self.rendezvous):
            raise ConfigError(f"{problem}.")
        if world_size % self.count:
            raise ConfigError(f"{world_size} ranks cannot be on {self.count} hosts: each has equally many.")
        return place_on_host(world_size // self.count, self.count, self.number, self.rendezvous)

    def place_of(self, options: LoadOptions) -> HostPlace:
        """Return the ranks of this host for options, before the model is found. Raises ConfigError as :meth:`place`."""
        return self.place(options.ranks or max(options.stages, self.count))


ONE_HOST = Hosts()


def load(
    model: str | Path, *, cache: str | Path | None = None, hosts: Hosts = ONE_HOST, **options: Any
) -> LanguageModel:
    """Load a language model over ranks of this machine, or of several. This process is rank 0; it starts the others.

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
    hosts: Hosts
        The hosts of the ranks. On each other host than the first one, call :func:`join` with equal options.
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
    wanted = _checked(options)
    if hosts.number:
        raise ConfigError(f"This is host {hosts.number}: rank 0 is on host 0. Call join here.")
    if session.current() is not None:
        raise ConfigError("This process is a rank already: call hidet_dist.shutdown first.")
    divide_cores(hosts.place_of(wanted).count)
    process = tokenizer_process()
    process.start()  # it takes as long as finding the model
    with ThreadPoolExecutor(1) as meanwhile:
        folder = _folder_of(Path(model), wanted, cache)
        tokenizer = meanwhile.submit(StoredModel.tokenizer_in, folder, process)
        stored = _opened(folder, wanted)
        place = hosts.place(stored.manifest.world_size)
        return LanguageModel(stored, wanted.timeout_seconds, place, tokenizer)


def join(model: str | Path, hosts: Hosts, *, cache: str | Path | None = None, **options: Any) -> int:
    """Be the ranks of another host than that of rank 0, until rank 0 closes the model.

    Parameters
    ----------
    model, cache, hosts, options:
        As for :func:`load` on host 0, with equal options; the model is built on each host that does not have it.

    Returns
    -------
    int
        0, or the exit status of a rank that failed.

    Raises
    ------
    ConfigError, HidetDistError
        As :func:`load`.
    """
    wanted = _checked(options)
    if not hosts.number:
        raise ConfigError("This is host 0, on which rank 0 is: call load here.")
    hosts.place_of(wanted)
    stored = stored_model(Path(model), wanted, cache)
    place = hosts.place(stored.manifest.world_size)
    secret = os.environ[SECRET_VARIABLE]
    processes = [_started(stored, wanted.timeout_seconds, place, local, secret) for local in range(place.count)]
    try:
        return max(abs(process.wait()) for process in processes)
    finally:
        _end(processes, 0.0)


def _checked(options: Mapping[str, Any]) -> LoadOptions:
    """Make options of their names and values. Raises ConfigError."""
    if unknown := sorted(options.keys() - LoadOptions.__dataclass_fields__.keys()):
        raise ConfigError(
            f"load has no option {unknown[0]!r}; those that it has are {', '.join(LoadOptions.__dataclass_fields__)}."
        )
    wanted = LoadOptions(**options)
    wanted.check()
    return wanted


def _started(
    stored: StoredModel, timeout_seconds: float, place: HostPlace, local_rank: int, secret: str
) -> subprocess.Popen[bytes]:
    """Start a rank of this host that follows rank 0. It ends when the pipe does, and thus when this process does."""
    command = [sys.executable, "-m", "hidet_dist.llm.rank", str(stored.folder), repr(timeout_seconds)]
    env = environment_of(place, local_rank, secret)
    # In a session of its own, so that a signal of the terminal reaches this process alone, which decides.
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, start_new_session=True)


def _end(processes: Sequence[subprocess.Popen[bytes]], patience_seconds: float) -> None:
    """Wait for processes of ranks, and end those that do not end by themselves."""
    for wait, end in ((patience_seconds, "terminate"), (TERMINATE_SECONDS, "kill")):
        for process in processes:
            try:
                process.wait(wait)
            except subprocess.TimeoutExpired:
                getattr(process, end)()
    for process in processes:
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def stored_model(path: Path, options: LoadOptions, cache: str | Path | None = None) -> StoredModel:
    """Return a model that was built, after it was built if need be; see :func:`load`.

    Raises
    ------
    ConfigError
        When there is no such model, or it was built for other options.
    ArtifactError, HidetDistError
        As :meth:`StoredModel.open`, and :func:`hidet_dist.llm.building.build`.
    """
    return _opened(_folder_of(path, options, cache), options)


def _folder_of(path: Path, options: LoadOptions, cache: str | Path | None) -> Path:
    """Return the folder of a model that was built, after it was built if need be. Raises as :func:`stored_model`."""
    if not StoredModel.is_in(path):
        return found_or_built(path, name_of(path), options, None if cache is None else Path(cache))
    defaults = LoadOptions()
    if changed := [name for name in _BUILT if getattr(options, name) != getattr(defaults, name)]:
        raise ConfigError(f"{path} was built already, and {changed[0]} decides how a model is built: leave it out.")
    return path


def _opened(folder: Path, options: LoadOptions) -> StoredModel:
    """Read what a folder says of its model. Raises as :func:`stored_model`."""
    stored = StoredModel.open(folder)
    world_size = stored.manifest.world_size
    if options.ranks not in (None, world_size):
        raise ConfigError(f"{folder} was built for {world_size} ranks, not for {options.ranks}.")
    return stored


def name_of(path: Path) -> str:
    """Return the name of a model: that of its folder or file, without an ending."""
    path = path.resolve()
    return path.stem if path.suffix == ".gguf" else path.name


class LanguageModel:
    """A language model over several ranks, as rank 0 has it: a ``StepModel`` with a tokenizer.

    Parameters
    ----------
    stored: StoredModel
        The model.
    timeout_seconds: float
        How long ranks wait for one another.
    place: HostPlace
        The ranks of this host, rank 0 among them.
    tokenizer: Future
        The tokenizer, which is read meanwhile.

    Attributes
    ----------
    name: str
        The name of the model.
    tokenizer: CheckpointTokenizer
        Its tokenizer.
    pooling: Pooling, optional
        For an encoder, how the vectors of a text's tokens become one; None for a model that generates texts.
    on_death: function, optional
        What is called with the number and the exit status of a rank of this host that ends while the model is open,
        from another thread.

    Raises
    ------
    HidetDistError
        As :func:`hidet_dist.load_partition`. The processes of other ranks of this host were ended.
    """

    def __init__(
        self, stored: StoredModel, timeout_seconds: float, place: HostPlace, tokenizer: Future[CheckpointTokenizer]
    ):
        self.name = stored.name
        self.on_death: Callable[[int, int], None] | None = None
        self.pooling = stored.pooling
        self._processes: list[subprocess.Popen[bytes]] = []
        self._model: StepModel | None = None
        self._ranks = stored.manifest.world_size
        try:
            self._start(stored, timeout_seconds, place)
            if stored.pooling is None:
                start_renderer()  # whoever chats waits for it otherwise, once the model is loaded
            self._model = self._part(stored)
            # Whoever serves the model imports it next: here that is done while the tokenizer is read.
            importlib.import_module("hidet_dist.llm.engine")
            self.tokenizer: CheckpointTokenizer = tokenizer.result()
            if self._ranks > 1:
                from hidet_dist.llm.ranks import LeadingModel

                self._model = LeadingModel(self._model, self._ranks)
        except RendezvousError as error:
            ended = [f"rank {rank} exited with status {code}" for rank, code in self._ended()]
            self.close()
            if not ended:
                raise
            raise RendezvousError(f"{error} ({', '.join(ended)})") from error
        except BaseException:
            self.close()
            raise

    def _part(self, stored: StoredModel) -> StepModel:
        """Load rank 0's part of the model."""
        with stored.verifying(0) as opened:
            # What loads it, and NumPy, is imported once all else has started: it takes as long as that.
            from hidet_dist.llm.partition_model import PartitionModel

            return PartitionModel(stored, led=self._ranks > 1, opened=opened)

    def _start(self, stored: StoredModel, timeout_seconds: float, place: HostPlace) -> None:
        """Become rank 0, and start the other ranks of this host."""
        secret = os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32)
        session.start(
            Settings(
                0,
                self._ranks,
                place.address,
                place.port if self._ranks > 1 else None,
                timeout_seconds,
                one_host=place.count == place.world_size,
                secret=secret.encode(),
            )
        )
        for rank in range(1, place.count):
            process = _started(stored, timeout_seconds, place, rank, secret)
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
        """End the other ranks, and release memory. It may be called twice. Ranks of other hosts end by themselves."""
        model, self._model = self._model, None
        try:
            if model is not None:
                model.close()
        finally:
            session.shutdown()
            processes, self._processes = self._processes, []
            _end(processes, TERMINATE_SECONDS if model is not None else 0.0)

    def __enter__(self) -> LanguageModel:
        """Return the model; it is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the model."""
        self.close()
