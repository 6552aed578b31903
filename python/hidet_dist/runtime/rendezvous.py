"""The rendezvous of ranks: settings in torchrun's convention, and a store that rank 0 hosts."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import itertools
import json
import os
import resource
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hidet_dist.errors import ConfigError, RendezvousError
from hidet_dist.files import parse_json
from hidet_dist.runtime.liveness import BEAT_SECONDS, SILENCE_SECONDS, ActiveTime, Heartbeat, run_bounded
from hidet_dist.runtime.store import FullError, SecretError, Store, StoreClient, StoreError, StoreServer
from hidet_dist.runtime.store.addresses import format_address, host_local_address, is_host_local

SECRET_VARIABLE = "HIDET_DIST_SECRET"
"""The environment variable with the secret that the ranks share."""

LEAST_SECRET_BYTES = 16
"""The least length of the secret if other hosts can reach the store: a shorter one could be guessed."""

LINGER_SECONDS = 5.0
"""The longest time, in seconds, that the store's host waits, when it closes, for the other ranks to leave the store."""

_CONNECTIONS = 3  # of each rank to the store: for collectives, failures and heartbeats
_HOST_DESCRIPTORS = 5  # of the store's host: the listener, the selector, a socket pair to wake it, and a spare one
_POLL_SECONDS = 0.02
_ANSWER_SECONDS = SILENCE_SECONDS + 1.0  # how long the store may take to answer a rank whose time is up
_PORT_SECONDS = 1.0  # how long to retry a taken port: a client that probes for a listener may hold it briefly

# The tokens by which this process identified itself, one per rendezvous.
_process_tokens: set[str] = set()

# Under torchrun, all rendezvous of a process belong to one run, so each needs a distinct number.
_generations = itertools.count()


@dataclass(frozen=True)
class Settings:
    """The rank of this process, the number of ranks, and the address of their store.

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
        Whether the address is that of the store of torchrun's agent. Ranks on several hosts then look up the address of
        rank 0's store in the agent's.
    run_id: str
        The name of the run, under torchrun.
    attempt: int
        How often torchrun has restarted the ranks.
    one_host: bool
        Whether the environment says that all ranks are on one host.
    secret: bytes
        The shared secret that every rank must prove to know.
    first_rank: int
        For a group of ranks, which are numbered from 0 within it: the global number of its first rank.
    """

    rank: int
    world_size: int
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    timeout_seconds: float = 60.0
    agent_store: bool = False
    run_id: str = ""
    attempt: int = 0
    one_host: bool = False
    secret: bytes = field(default=b"", repr=False)
    first_rank: int = 0

    @property
    def host_rank(self) -> int:
        """The rank that hosts the store, numbered from the group's first rank: negative if it is in another group."""
        return -self.first_rank


def resolve_settings(
    rank: int | None = None,
    world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    timeout_seconds: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Complete the arguments from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; with neither, there is one rank.

    The secret is read from HIDET_DIST_SECRET only, because arguments end up in logs and process lists. An address or
    port given here replaces the environment's, because a program may need a second one. Raises ``ConfigError`` where a
    value is missing or malformed, or where the rank or world size contradicts the environment.
    """
    env = os.environ if environment is None else environment
    rank, world_size = _rank_of_world(rank, world_size, env)
    if not timeout_seconds > 0:
        raise ConfigError(f"timeout_seconds must be positive, not {timeout_seconds}")
    explicit_address = master_addr is not None or master_port is not None
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
        agent_store=not explicit_address and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        run_id=env.get("TORCHELASTIC_RUN_ID", ""),
        attempt=_integer("TORCHELASTIC_RESTART_COUNT", env) or 0,
        one_host=_integer("LOCAL_WORLD_SIZE", env) == world_size,
        secret=env.get(SECRET_VARIABLE, "").encode(),
    )


def _rank_of_world(rank: int | None, world_size: int | None, env: Mapping[str, str]) -> tuple[int, int]:
    """Complete the rank and the world size from the environment; 0 of 1 without any. Raises ConfigError."""
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
    return rank, world_size


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
    """The connections of this rank to the ranks' store, and its heartbeat there.

    Attributes
    ----------
    settings: Settings
        The settings that the ranks met with.
    address, port:
        The store's address: on loopback or within this host, unless the settings say that there are several hosts.
    store: Store
        A connection to the store, for threads that communicate.
    failure_store: Store
        Another connection, for the attribution of failures: a connection serves one call at a time, which may be long.
    heartbeat: Heartbeat
        This rank's heartbeat.
    """

    def __init__(self, settings: Settings):
        """Meet the other ranks; returns once all have come.

        Raises ``RendezvousError``, at the latest after the time-out, where a rank did not come, came twice, or has a
        different world size or secret, or where the store's port is taken. Raises ``ConfigError`` where other hosts
        could reach the store and there is no secret.
        """
        self.settings = settings
        self._gone: set[int] = set()
        self._names = itertools.count()
        self._loadings = itertools.count()
        self._closed = False
        self._server: StoreServer | None = None
        self._clients: list[Store] = []
        # Tells this rank's earlier claim, made over a connection that broke, from a claim of another process.
        self._token = json.dumps([socket.gethostname(), os.getpid(), secrets.token_hex(16)])
        _process_tokens.add(self._token)
        deadline = time.monotonic() + settings.timeout_seconds
        try:
            _check_descriptors(settings)
            self.address, self.port = self._locate(deadline)
            self._claim(deadline)
            self._meet(deadline)
        except BaseException:
            if settings.rank == settings.host_rank:
                # Leave the other ranks time to read the cause of the failure from the store.
                time.sleep(BEAT_SECONDS)
            self._release()
            raise

    def next_name(self) -> str:
        """Return a name for the next communicator: the same on all ranks, which make theirs in the same order."""
        return f"communicator{next(self._names)}"

    def next_loading(self) -> str:
        """Return a name for the next collective loading, the same on all ranks."""
        return f"loading{next(self._loadings)}"

    def mark_gone(self, ranks: tuple[int, ...]) -> None:
        """Do not wait for these ranks in :meth:`close`: they have died or do not respond."""
        self._gone.update(ranks)

    def close(self) -> None:
        """Leave. The store's host waits up to ``LINGER_SECONDS`` for the others, which may still need the store."""
        if self._closed:
            return
        self._closed = True
        # The store may have gone first, with its host.
        with contextlib.suppress(RuntimeError, TimeoutError):
            run_bounded(self._leave, LINGER_SECONDS + 1.0)
        self._release()

    def abandon(self) -> None:
        """Close this process's copies of the connections, which belong to its parent."""
        self._closed = True
        for client in self._clients:
            client.abandon()
        if self._server is not None:
            self._server.abandon()

    def _leave(self) -> None:
        store = self.failure_store
        self.heartbeat.stop()
        store.set(f"left/{self.settings.rank}", "")
        if self.settings.host_rank != self.settings.rank:
            return
        waited = [f"left/{rank}" for rank in range(self.settings.world_size) if rank not in self._gone]
        if self._gone:
            # Leave live ranks the time to read, at their next beat, why the others have stopped.
            time.sleep(3 * BEAT_SECONDS)
        deadline = time.monotonic() + LINGER_SECONDS
        while not store.check(waited) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _release(self) -> None:
        self._close_clients()
        if self._server is not None:
            self._server.close()

    def _close_clients(self) -> None:
        for client in self._clients:
            client.close()

    @property
    def _where(self) -> str:
        return format_address(self.address, self.port)

    def _locate(self, deadline: float) -> tuple[str, int]:
        """Return the store's address and port, after checking that strangers cannot use it. Rank 0 opens it."""
        settings = self.settings
        assert settings.master_port is not None
        if not settings.agent_store:
            _check_exposure(settings.master_addr, settings.secret)
            if settings.rank == settings.host_rank:
                self._host(settings.master_addr, settings.master_port)
            return settings.master_addr, settings.master_port
        if settings.one_host:
            # Derive the address from the run and the agent's port, which no other run on this host has. Asking the
            # agent instead would take PyTorch.
            run = (settings.run_id, settings.master_addr, settings.master_port, settings.attempt, next(_generations))
            digest = hashlib.sha256(json.dumps(run).encode()).hexdigest()
            address = host_local_address(f"hidet_dist-{digest[:32]}")
            if settings.rank == settings.host_rank:
                self._host(address, 0)
            return address, 0
        address = local_address(settings.master_addr, settings.master_port)
        _check_exposure(address, settings.secret)
        agent = _agent_store(settings, deadline)
        key = f"hidet_dist/{settings.attempt}/{next(_generations)}/store"
        if settings.rank == settings.host_rank:
            self._host(address, 0)
            assert self._server is not None
            agent.set(key, json.dumps([address, self._server.port]))
        try:
            host, port = parse_json(run_bounded(lambda: agent.get(key), max(deadline - time.monotonic(), 0.1)))
        except (RuntimeError, TimeoutError) as error:
            raise RendezvousError(
                f"rank {settings.host_rank}, which hosts the rendezvous store, did not publish its address in the "
                f"store of torchrun's agent at {settings.master_addr}:{settings.master_port} within "
                f"{settings.timeout_seconds:g} s"
            ) from error
        return str(host), int(port)

    def _host(self, address: str, port: int) -> None:
        until = time.monotonic() + _PORT_SECONDS
        while True:
            try:
                self._server = StoreServer(address, port, self.settings.secret)
                return
            except OSError as error:
                taken = error.errno == errno.EADDRINUSE
                if taken and time.monotonic() < until:
                    time.sleep(_POLL_SECONDS)
                    continue
                hint = "another program, or another rank 0, is using the port" if taken else error
                where = format_address(address, port)
                raise RendezvousError(f"rank 0 cannot host the rendezvous store on {where}: {hint}") from error

    def _claim(self, deadline: float) -> None:
        """Connect to the store, and claim this process's rank there.

        Tries again where a connection breaks, as under a flood of connections, and where this is the store of the
        previous rendezvous. That one exists until its host has seen all ranks leave, and a rank may be early with its
        next rendezvous.
        """
        rank = self.settings.rank
        problem: StoreError | None = None
        while True:
            self._clients = []
            try:
                client = self._connect(deadline, problem)
                self._clients.append(client)
                owner = client.compare_set(f"claim/{rank}", "", self._token).decode()
                if owner == self._token:
                    self._clients += [client.clone() for _ in range(_CONNECTIONS - 1)]
                    self.store: Store
                    self.failure_store: Store
                    self.store, self.failure_store, beats = self._clients
                    self.heartbeat = Heartbeat(beats, rank)
                    return
                problem = None
                rival = not client.check([f"left/{rank}"])
            except StoreError as error:
                _raise_without_descriptors(rank, error.__cause__)
                problem, rival = error, False
            self._close_clients()
            if rival and owner not in _process_tokens:
                host, process, _ = parse_json(owner)
                raise RendezvousError(
                    f"two processes are rank {rank}: process {process} on {host}, which came first, and this one, "
                    f"process {os.getpid()} on {socket.gethostname()}: each rank must be launched once"
                )
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"rank {rank} could not enter the rendezvous store at {self._where} within "
                    f"{self.settings.timeout_seconds:g} s: {problem or 'it belongs to an earlier run, still going on'}"
                ) from problem
            time.sleep(_POLL_SECONDS)

    def _connect(self, deadline: float, earlier: StoreError | None = None) -> StoreClient:
        """Connect, with retries until the deadline. ``earlier`` is how a connection broke, for the message."""
        settings = self.settings
        problem: Exception | None = earlier
        told = problem  # by a connection that broke, or by the host
        where = self._where
        while (left := deadline - time.monotonic()) > 0:
            try:
                return StoreClient(self.address, self.port, settings.secret, settings.timeout_seconds, left)
            except SecretError as error:
                raise RendezvousError(
                    f"rank {settings.rank} and the rendezvous store at {where} have different secrets: give all ranks "
                    f"the same {SECRET_VARIABLE}, or another port if this one is used by another job"
                ) from error
            except StoreError as error:
                raise RendezvousError(
                    f"rank {settings.rank} reached {where}, but no rendezvous store answers there ({error}): "
                    "another program may be listening on that port"
                ) from error
            except TimeoutError as error:
                # An attempt that the deadline cuts short tells less than what was told before it.
                problem = told or error
            except OSError as error:
                _raise_without_descriptors(settings.rank, error)
                problem = error
                told = error if isinstance(error, FullError) else told
                time.sleep(min(_POLL_SECONDS, max(deadline - time.monotonic(), 0.0)))
        raise RendezvousError(
            f"rank {settings.host_rank}, which hosts the rendezvous store on {where}, did not answer within "
            f"{settings.timeout_seconds:g} s: {problem or 'no answer'}"
        )

    def _meet(self, deadline: float) -> None:
        missing = list(range(self.settings.world_size))
        try:
            left = deadline - time.monotonic()
            run_bounded(lambda: self._announce_and_wait(left, missing), left + _ANSWER_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            if isinstance(error, RendezvousError):
                raise
            raise RendezvousError(
                f"rank {self.settings.rank} lost the rendezvous store at {self._where} "
                f"({error}) while it waited for ranks {_join(missing)}"
            ) from error

    def _announce_and_wait(self, seconds: float, missing: list[int]) -> None:
        """Announce this rank and wait for the others, for so many seconds.

        Removes ranks from ``missing`` as they come, so that the caller knows the absent ones if the store is lost.
        """
        settings = self.settings
        store = self.store
        active = ActiveTime()
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
            if active.seconds() > seconds:
                raise RendezvousError(
                    f"ranks {_join(missing)} of {settings.world_size} did not come within "
                    f"{settings.timeout_seconds:g} s (store at {self._where})"
                )
            time.sleep(_POLL_SECONDS)


def _check_descriptors(settings: Settings) -> None:
    """Raise ``RendezvousError`` where the system's limit leaves this process too few file descriptors."""
    needed, use = _CONNECTIONS, "to connect to the rendezvous store"
    if settings.rank == settings.host_rank:
        needed += _HOST_DESCRIPTORS + _CONNECTIONS * settings.world_size
        use = f"to host the rendezvous store of {settings.world_size} ranks"
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        free = limit - len(os.listdir("/proc/self/fd"))
    except OSError as error:
        _raise_without_descriptors(settings.rank, error)
        return  # they cannot be counted; a lack of them then shows when one is opened
    if limit != resource.RLIM_INFINITY and free < needed:
        raise RendezvousError(
            f"rank {settings.rank} needs {needed} file descriptors {use}, but only {max(free, 0)} of {limit} are left: "
            "raise the limit (ulimit -n), or close files and connections"
        )


def _raise_without_descriptors(rank: int, error: BaseException | None) -> None:
    """Raise ``RendezvousError`` if an error comes from a lack of file descriptors: no other rank is to blame then."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        whose = "this process" if error.errno == errno.EMFILE else "the system"
        raise RendezvousError(
            f"rank {rank} cannot open another connection, because {whose} has no file descriptors left: raise "
            "the limit (ulimit -n), or close files and connections"
        ) from error


def _join(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def local_address(address: str, port: int) -> str:
    """Return this host's address on the route to another host; loopback if ``address`` is on this host."""
    if is_host_local(address):
        return "127.0.0.1"
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)  # sends nothing: it only has the system choose a route
        return str(probe.getsockname()[0])


def _check_exposure(address: str, secret: bytes) -> None:
    """Raise ``ConfigError`` for a store that other hosts can reach, unless there is a secret."""
    if _is_loopback(address) or len(secret) >= LEAST_SECRET_BYTES:
        return
    given = f"of {len(secret)} bytes is too short" if secret else "is missing"
    raise ConfigError(
        f"other hosts can reach a rendezvous on {address}, which is not loopback, so the ranks must share a secret; it "
        f"{given}: set {SECRET_VARIABLE} on all ranks to the same {LEAST_SECRET_BYTES} random characters or more"
    )


def _is_loopback(address: str) -> bool:
    try:
        places = {str(entry[4][0]) for entry in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False  # a name that may become known later
    return all(ipaddress.ip_address(place.partition("%")[0]).is_loopback for place in places)


def _agent_store(settings: Settings, deadline: float) -> Any:
    """Connect to the store of torchrun's agent through PyTorch, which is imported only for this."""
    from datetime import timedelta

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
            f"rank {settings.rank} cannot reach the store of torchrun's agent at {settings.master_addr}:"
            f"{settings.master_port}: {error}"
        ) from error


os.register_at_fork(after_in_child=_process_tokens.clear)  # they are the parent's
