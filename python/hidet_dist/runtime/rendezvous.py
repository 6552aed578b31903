"""How the ranks find one another: settings in torchrun's convention, and a store that rank 0 hosts."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hidet_dist.errors import ConfigError, RendezvousError
from hidet_dist.runtime.liveness import BEAT_SECONDS, Heartbeat, run_bounded

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

LINGER_SECONDS = 5.0
"""How long the store's host waits at its end, at most, for the others to be done with the store."""

_POLL_SECONDS = 0.02

# Under torchrun one store serves all of a process's rendezvous in turn, so each needs keys of its own.
_generations = itertools.count()


@dataclass(frozen=True)
class Settings:
    """Where this process stands among the ranks, and where their store is.

    Attributes
    ----------
    rank, world_size: int
        This rank, and the number of ranks.
    master_addr: str
        The host name or address that rank 0's store listens on.
    master_port: int | None
        Its TCP port; ``None`` only where there is one rank.
    timeout_seconds: float
        How long the ranks wait for one another.
    agent_store: bool
        Whether torchrun's agent hosts the store, rather than rank 0.
    attempt: int
        How often torchrun has restarted the ranks.
    """

    rank: int
    world_size: int
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    timeout_seconds: float = 60.0
    agent_store: bool = False
    attempt: int = 0

    @property
    def host_rank(self) -> int | None:
        """The rank that hosts the store, or ``None`` where torchrun's agent does."""
        return None if self.agent_store else 0


def resolve_settings(
    rank: int | None = None,
    world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    timeout_seconds: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Complete the arguments from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; with neither, there is one rank.

    An address or port given here is used in place of the environment's: a program may need a second one. Raises
    ``ConfigError`` where a value is missing or malformed, or where rank or world size contradict the environment.
    """
    env = os.environ if environment is None else environment
    rank = _agreed("rank", rank, "RANK", env)
    world_size = _agreed("world_size", world_size, "WORLD_SIZE", env)
    if rank is None and world_size is None:
        rank, world_size = 0, 1
    if rank is None and world_size == 1:
        rank = 0
    if rank is None or world_size is None:
        missing, given = ("rank", "world_size") if rank is None else ("world_size", "rank")
        raise ConfigError(f"{given} is given but {missing} is not: give both, or set RANK and WORLD_SIZE")
    if world_size < 1:
        raise ConfigError(f"world_size must be positive, not {world_size}")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must be from 0 to {world_size - 1} for a world_size of {world_size}, not {rank}")
    if not timeout_seconds > 0:
        raise ConfigError(f"timeout_seconds must be positive, not {timeout_seconds}")
    own_store = master_addr is not None or master_port is not None
    port = master_port if master_port is not None else _integer("MASTER_PORT", env)
    if port is None and world_size > 1:
        raise ConfigError(f"world_size is {world_size} but there is no master_port: give one, or set MASTER_PORT")
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"master_port must be from 1 to 65535, not {port}")
    return Settings(
        rank=rank,
        world_size=world_size,
        master_addr=master_addr or env.get("MASTER_ADDR") or "127.0.0.1",
        master_port=port,
        timeout_seconds=float(timeout_seconds),
        agent_store=not own_store and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_integer("TORCHELASTIC_RESTART_COUNT", env) or 0,
    )


def _integer(variable: str, env: Mapping[str, str]) -> int | None:
    text = env.get(variable, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{variable} must be an integer, not {text!r}") from None


def _agreed(name: str, value: int | None, variable: str, env: Mapping[str, str]) -> int | None:
    from_env = _integer(variable, env)
    if value is not None and from_env is not None and value != from_env:
        raise ConfigError(f"{name}={value} contradicts {variable}={from_env} in the environment")
    return from_env if value is None else value


class Rendezvous:
    """All ranks, met: their store, and this rank's heartbeat in it.

    Attributes
    ----------
    settings: Settings
        What they met by.
    store: Store
        A client of their store, for threads that communicate.
    failure_store: Store
        Another, for finding out about failures: a client serves one call at a time, and another's may wait for long.
        It is opened in advance, as opening one looks up host names, which can take longer than there is time then.
    heartbeat: Heartbeat
        This rank's.
    """

    def __init__(self, settings: Settings):
        """Meet the others; returns once all ranks have come.

        Raises ``RendezvousError`` within the time-out where a rank did not come, came twice or has another world size,
        or the store's port is taken.
        """
        self.settings = settings
        self._gone: set[int] = set()
        self._names = itertools.count()
        self._closed = False
        deadline = time.monotonic() + settings.timeout_seconds
        generation = next(_generations) if settings.agent_store else 0
        self._prefix = f"hidet_dist/{settings.attempt}/{generation}"
        while not self._claim(deadline):
            time.sleep(_POLL_SECONDS)
        self._meet(deadline)

    def next_name(self) -> str:
        """A name for the next communicator, the same on all ranks that make theirs in the same order."""
        return f"communicator{next(self._names)}"

    def mark_gone(self, ranks: tuple[int, ...]) -> None:
        """Do not wait long for these ranks at the end: they died, or do not keep up."""
        self._gone.update(ranks)

    def close(self) -> None:
        """Leave. The store's host waits for the others, up to ``LINGER_SECONDS``, as they may need the store yet."""
        if self._closed:
            return
        self._closed = True
        self.heartbeat.stop()
        # The store may have gone first, with its host.
        with contextlib.suppress(RuntimeError, TimeoutError):
            run_bounded(self._leave, LINGER_SECONDS + 1.0)
        # With the last reference to it, the host's store stops listening.
        del self.store, self.failure_store, self.heartbeat

    def _leave(self) -> None:
        store = self.failure_store
        store.set(f"left/{self.settings.rank}", "")
        if self.settings.host_rank != self.settings.rank:
            return
        waited = [f"left/{rank}" for rank in range(self.settings.world_size) if rank not in self._gone]
        if self._gone:
            # Those that still live are to learn from the store, at their next beat, why the others have stopped.
            time.sleep(3 * BEAT_SECONDS)
        deadline = time.monotonic() + LINGER_SECONDS
        while not store.check(waited) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _claim(self, deadline: float) -> bool:
        """Open the store and say there that this process is its rank. False where it is the store of last time.

        That one lives on until its host has seen all ranks leave, and a rank may be early with its next rendezvous.
        """
        from torch.distributed import PrefixStore

        rank = self.settings.rank
        base: Any = self._open(deadline)  # a TCPStore, whose clone() torch's stubs lack
        try:
            self.store: Store = PrefixStore(self._prefix, base)
            if self.store.add(f"claim/{rank}", 1) == 1:
                self.failure_store: Store = PrefixStore(self._prefix, base.clone())
                self.heartbeat = Heartbeat(PrefixStore(self._prefix, base.clone()), rank)
                return True
            left = self.store.check([f"left/{rank}"])
        except RuntimeError:
            left = True
        if left and time.monotonic() < deadline:
            return False
        raise RendezvousError(f"two processes are rank {rank}: each rank must be launched once")

    def _open(self, deadline: float) -> TCPStore:
        settings = self.settings
        assert settings.master_port is not None
        where = f"{settings.master_addr}:{settings.master_port}"
        if settings.host_rank == settings.rank:
            return self._host(where)
        self._await_listener(deadline, where)
        from torch.distributed import TCPStore

        def connect() -> TCPStore:
            assert settings.master_port is not None
            return TCPStore(
                settings.master_addr,
                settings.master_port,
                settings.world_size,
                is_master=False,
                timeout=timedelta(seconds=settings.timeout_seconds),
                wait_for_workers=False,
            )

        try:
            return run_bounded(connect, max(deadline - time.monotonic(), 0.1))
        except (RuntimeError, TimeoutError) as error:
            raise RendezvousError(
                f"rank {settings.rank} reached {where}, but no rendezvous store answers there ({error}): "
                "another program may be listening on that port"
            ) from error

    def _host(self, where: str) -> TCPStore:
        from torch.distributed import TCPStore

        settings = self.settings
        assert settings.master_port is not None
        # Left to itself, TCPStore would listen on every interface, and it asks for no credentials.
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                settings.master_addr, settings.master_port, type=socket.SOCK_STREAM
            )[0]
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(socket.SOMAXCONN)
                descriptor = os.dup(listener.fileno())
        except OSError as error:
            hint = "another program, or another rank 0, is using the port" if error.errno == errno.EADDRINUSE else error
            raise RendezvousError(f"rank 0 cannot host the rendezvous store on {where}: {hint}") from error
        return TCPStore(
            settings.master_addr,
            settings.master_port,
            settings.world_size,
            is_master=True,
            timeout=timedelta(seconds=settings.timeout_seconds),
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )

    def _await_listener(self, deadline: float, where: str) -> None:
        settings = self.settings
        problem: OSError | None = None
        while (left := deadline - time.monotonic()) > 0:
            try:
                with socket.create_connection((settings.master_addr, settings.master_port or 0), timeout=left):
                    return
            except OSError as error:
                problem = error
            time.sleep(min(_POLL_SECONDS * 5, max(left, 0.0)))
        host = "torchrun's agent" if settings.host_rank is None else f"rank {settings.host_rank}"
        raise RendezvousError(
            f"{host}, which hosts the rendezvous store on {where}, was not there within "
            f"{settings.timeout_seconds:g} s: {problem}"
        )

    def _meet(self, deadline: float) -> None:
        missing = list(range(self.settings.world_size))
        try:
            run_bounded(lambda: self._announce_and_wait(deadline, missing), deadline - time.monotonic() + 2.0)
        except (RuntimeError, TimeoutError) as error:
            if isinstance(error, RendezvousError):
                raise
            raise RendezvousError(
                f"rank {self.settings.rank} lost the rendezvous store at {self.settings.master_addr}:"
                f"{self.settings.master_port} ({error}) while it waited for ranks {_join(missing)}"
            ) from error

    def _announce_and_wait(self, deadline: float, missing: list[int]) -> None:
        """Strikes ranks off ``missing`` as they come, so that the caller can tell who had not when the store went."""
        settings = self.settings
        store = self.store
        self.heartbeat.start()
        store.set(f"arrived/{settings.rank}", str(settings.world_size))
        while True:
            for rank in tuple(missing):
                if not store.check([f"arrived/{rank}"]):
                    continue
                world_size = int(store.get(f"arrived/{rank}"))
                if world_size != settings.world_size:
                    raise RendezvousError(
                        f"rank {rank} was launched with a world size of {world_size}, "
                        f"rank {settings.rank} with {settings.world_size}"
                    )
                missing.remove(rank)
            if not missing:
                return
            if time.monotonic() > deadline:
                self.mark_gone(tuple(missing))
                # Ranks that came a little later than this one are still waiting: let them time out with the store.
                time.sleep(BEAT_SECONDS)
                raise RendezvousError(
                    f"ranks {_join(missing)} of {settings.world_size} did not come within "
                    f"{settings.timeout_seconds:g} s (store at {settings.master_addr}:{settings.master_port})"
                )
            time.sleep(_POLL_SECONDS)


def _join(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
