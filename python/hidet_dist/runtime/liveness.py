"""Heartbeats of ranks, and the attribution of failed collectives to ranks by them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hidet_dist.files import parse_json

if TYPE_CHECKING:
    from hidet_dist.runtime.store import Store

BEAT_SECONDS = 0.5
"""Seconds between two heartbeats of a rank."""

SILENCE_SECONDS = 3.0
"""A rank whose heartbeat stays the same for this long counts as dead: several beats, because busy machines are late."""

ABSENT = -1
"""Stands for the sequence number of a rank that has not made the communicator yet."""

LATE_SECONDS = 1.0
"""The most seconds that count from one look at the time to the next."""

_STEP_SECONDS = 0.1
_LATE_STEP_SECONDS = 2 * _STEP_SECONDS

T = TypeVar("T")


class ActiveTime:
    """The time since this was made, without that in which this process was stopped, or had to wait for a processor.

    Ranks that stop together, as the machine does, cannot answer one another meanwhile, and none of them is to blame.
    The caller is to look more often than once in ``late_seconds``, the most that count from one look to the next. The
    fewer they are, the less counts of the time in which this process waits for a processor again and again.
    """

    def __init__(self, late_seconds: float = LATE_SECONDS) -> None:
        self._late_seconds = late_seconds
        self._seconds = 0.0
        self._last = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds so far."""
        now = time.monotonic()
        self._seconds += min(now - self._last, self._late_seconds)
        self._last = now
        return self._seconds


def run_bounded(function: Callable[[], T], seconds: float) -> T:
    """Call ``function()`` in a thread; raise ``TimeoutError`` after so many seconds of :class:`ActiveTime`.

    It serves for calls into the store, some of which wait without a limit for a stopped host. After a time-out the
    thread is left running, because nothing can interrupt it.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="hidet_dist-bounded", daemon=True)
    active = ActiveTime(_LATE_STEP_SECONDS)
    thread.start()
    while thread.is_alive() and (left := seconds - active.seconds()) > 0:
        thread.join(min(left, _STEP_SECONDS))
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]


@dataclass(frozen=True)
class CollectiveProgress:
    """The number of collectives that a rank has started on a communicator, and the peers of the current one."""

    sequence: int
    peers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Beat:
    """The last state that a rank published.

    ``sequences`` maps each of its communicators to the number of collectives started there, ``None`` for a closed one.
    ``peers`` maps each to the other ranks of its current or failed collective.
    """

    count: int
    sequences: dict[str, int | None]
    peers: dict[str, list[int]]
    left: bool = False

    def dumps(self) -> str:
        """Encode as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: bytes) -> Beat:
        """Decode the result of ``dumps``."""
        return Beat(**parse_json(text))


@dataclass(frozen=True)
class Verdict:
    """The ranks that made a communicator fail (empty if unknown), the reason, and the rank that reported it."""

    ranks: tuple[int, ...]
    reason: str
    reporter: int

    def shifted(self, by: int) -> Verdict:
        """Return the verdict with the numbers of ranks, except those in the reason, increased by a number."""
        return Verdict(tuple(rank + by for rank in self.ranks), self.reason, self.reporter + by)

    def dumps(self) -> str:
        """Encode as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: bytes) -> Verdict:
        """Decode the result of ``dumps``."""
        value: dict[str, Any] = parse_json(text)
        return Verdict(tuple(value["ranks"]), value["reason"], value["reporter"])


def beat_key(rank: int) -> str:
    """Return the key under which a rank publishes its beat."""
    return f"beat/{rank}"


def verdict_key(communicator: str) -> str:
    """Return the key under which the first rank to detect a communicator's failure publishes the verdict."""
    return f"{communicator}/verdict"


@dataclass(frozen=True)
class _Watched:
    progress: Callable[[], CollectiveProgress]
    on_verdict: Callable[[Verdict], None]


class Heartbeat:
    """A daemon thread that publishes this rank's beat, and passes on the verdicts that other ranks publish.

    Parameters
    ----------
    store: Store
        A store client that nothing else uses: a client serves one call at a time, and other users' calls may be long.
    rank: int
        This rank.
    """

    def __init__(self, store: Store, rank: int):
        self._store = store
        self._rank = rank
        self._count = 0
        self._watched: dict[str, _Watched] = {}
        self._closed: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hidet_dist-heartbeat", daemon=True)

    def start(self) -> None:
        """Publish the first beat, and start the thread that publishes further ones."""
        self._publish()
        self._thread.start()

    def watch(
        self, communicator: str, progress: Callable[[], CollectiveProgress], on_verdict: Callable[[Verdict], None]
    ) -> None:
        """Publish a communicator's progress too, and call ``on_verdict`` once when there is a verdict about it.

        Both functions are called in the heartbeat's thread, but not after ``unwatch`` has returned.
        """
        with self._lock:
            self._watched[communicator] = _Watched(progress, on_verdict)

    def unwatch(self, communicator: str) -> None:
        """Publish from now on that this rank has closed the communicator."""
        with self._lock:
            if self._watched.pop(communicator, None) is not None:
                self._closed.add(communicator)

    def stop(self) -> None:
        """Publish that this rank has left, and end the thread. Waits at most two seconds for it."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def _publish(self) -> None:
        with self._lock:
            sequences: dict[str, int | None] = dict.fromkeys(self._closed)
            progress = {name: watched.progress() for name, watched in self._watched.items()}
        sequences.update({name: each.sequence for name, each in progress.items()})
        peers = {name: list(each.peers) for name, each in progress.items()}
        self._count += 1
        self._store.set(beat_key(self._rank), Beat(self._count, sequences, peers, left=self._stop.is_set()).dumps())

    def _run(self) -> None:
        told: set[str] = set()
        try:
            while True:
                stopping = self._stop.wait(BEAT_SECONDS)
                self._publish()
                if stopping:
                    return
                with self._lock:
                    names = [name for name in self._watched if name not in told]
                for name in names:
                    if not self._store.check([verdict_key(name)]):
                        continue
                    told.add(name)
                    verdict = Verdict.loads(self._store.get(verdict_key(name)))
                    with self._lock:
                        if name in self._watched:
                            self._watched[name].on_verdict(verdict)
        except RuntimeError:
            # The store is gone. That alone is no failure, because the host may simply have finished first. If a
            # collective fails later, the store is unreachable, and its host is blamed.
            return


class SilenceWatch:
    """A watch over ranks, for those that have left, or been silent for ``SILENCE_SECONDS`` since it was made."""

    def __init__(self, store: Store, ranks: tuple[int, ...]):
        self._store = store
        self._active = ActiveTime()
        self._seen = {rank: (beat.count, 0.0) for rank, beat in read_beats(store, ranks).items()}

    def gone(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of ``ranks``, a subset of the watched ones, that are dead or have left."""
        now = self._active.seconds()
        gone = []
        for rank, beat in read_beats(self._store, ranks).items():
            count, since = self._seen[rank]
            if beat.count != count:
                self._seen[rank] = (beat.count, now)
            elif now - since > SILENCE_SECONDS:
                gone.append(rank)
            if beat.left:
                gone.append(rank)
        return tuple(dict.fromkeys(gone))


def read_beats(store: Store, ranks: tuple[int, ...]) -> dict[int, Beat]:
    """Read the last beat of each of these ranks. They must have joined: a rank publishes a beat before it does so."""
    if not ranks:
        return {}
    return dict(zip(ranks, map(Beat.loads, store.multi_get([beat_key(rank) for rank in ranks])), strict=True))


def blame(
    store: Store,
    communicator: str,
    rank: int,
    world_size: int,
    progress: CollectiveProgress,
    host: int,
    first: int = 0,
    waits: bool = True,
) -> Verdict:
    """Find the ranks that made a communicator's collective fail, and publish the verdict, or adopt an earlier one.

    The ranks to blame are the first non-empty set of: those whose heartbeat stopped; among the ranks that this one
    waits for, directly or through others, those that have left; among the same, those that wait for no rank; those that
    have gone on since. If the store cannot be reached, its host is to blame. Takes at most ``SILENCE_SECONDS`` + 1 s.

    Parameters
    ----------
    store: Store
        A store client that is used for this only.
    communicator: str
        The communicator's name.
    rank, world_size: int
        This rank, and the number of ranks.
    progress: CollectiveProgress
        This rank's progress, with the ranks of the collective that failed.
    host: int
        The rank that hosts the store, negative if it is in another group.
    first: int
        The global number of rank 0, for the reason, in which ranks are numbered globally.
    waits: bool
        Whether the thread that makes this rank's calls waits for other ranks. If not, and the ranks that this one waits
        for wait for it, it is to blame itself.
    """

    def search() -> Verdict:
        key = verdict_key(communicator)
        earlier = _earlier_verdict(store, key)
        verdict = earlier or _search(store, communicator, rank, world_size, progress, first, waits)
        return Verdict.loads(store.compare_set(key, "", verdict.dumps()))

    try:
        return run_bounded(search, SILENCE_SECONDS + 1.0)
    except (RuntimeError, TimeoutError) as error:
        if host == rank:
            return Verdict((), f"the rendezvous store cannot be reached ({error})", rank)
        name = f"rank {first + host}"
        return Verdict((host,), f"{name}, which hosts the rendezvous store, cannot be reached", rank)


def publish(store: Store, communicator: str, verdict: Verdict) -> Verdict:
    """Publish a verdict. Returns the earlier one if there is any, else this one, even if the store is unreachable."""
    try:
        return run_bounded(
            lambda: Verdict.loads(store.compare_set(verdict_key(communicator), "", verdict.dumps())), 1.0
        )
    except (RuntimeError, TimeoutError):
        return verdict


def _earlier_verdict(store: Store, key: str) -> Verdict | None:
    return Verdict.loads(store.get(key)) if store.check([key]) else None


def _search(
    store: Store,
    communicator: str,
    rank: int,
    world_size: int,
    progress: CollectiveProgress,
    first_rank: int,
    waits: bool,
) -> Verdict:
    def named(ranks: list[int]) -> str:
        return _ranks([first_rank + other for other in ranks])

    others = tuple(other for other in range(world_size) if other != rank)
    active = ActiveTime()
    first = read_beats(store, others)
    while True:
        earlier = _earlier_verdict(store, verdict_key(communicator))
        if earlier is not None:
            return earlier
        beats = read_beats(store, others)
        awaited = _awaited(rank, progress.peers, communicator, beats)
        left = [other for other in awaited if _has_left(beats[other], communicator)]
        silent = [
            other
            for other in others
            if not _has_left(beats[other], communicator) and beats[other].count == first[other].count
        ]
        if not silent or active.seconds() > SILENCE_SECONDS:
            break
        time.sleep(0.1)
    if silent:
        return Verdict(tuple(silent), f"{named(silent)} stopped responding", rank)
    if left:
        return Verdict(tuple(left), f"{named(left)} left before the collective", rank)
    late = _late(awaited, communicator, first, beats)
    if late:
        least = min(_started(beats[other], communicator) for other in late)
        return Verdict(tuple(late), f"{named(late)} did not reach collective {max(least, 0) + 1}", rank)
    if not waits and any(rank in beats[other].peers.get(communicator, []) for other in awaited):
        return Verdict((rank,), f"{named([rank])} did not go on within the time-out", rank)
    slow = _slow(awaited, communicator, first, beats)
    if slow:
        return Verdict(tuple(slow), f"{named(slow)} took longer than the time-out, and went on since", rank)
    if all(_started(beats[other], communicator) == progress.sequence for other in awaited):
        return Verdict((), "all ranks are alive and have reached the same collective", rank)
    return Verdict((), f"{named(sorted([rank, *awaited]))} wait for one another, in different collectives", rank)


def _late(awaited: Sequence[int], communicator: str, first: Mapping[int, Beat], beats: Mapping[int, Beat]) -> list[int]:
    """List the ranks that are awaited and wait for nobody; ``first`` and ``beats`` are their states before and now."""
    idle = [other for other in awaited if not beats[other].peers.get(communicator)]
    # A rank that makes progress is not to blame for the delay, unless there is no other.
    late = [other for other in idle if _started(beats[other], communicator) == _started(first[other], communicator)]
    return late or idle


def _slow(awaited: Sequence[int], communicator: str, first: Mapping[int, Beat], beats: Mapping[int, Beat]) -> list[int]:
    """List the ranks that are awaited and went on after the failure, those that others waited for if there are any.

    They came to the failed collective late: its data had been sent, so they completed it, and wait in a later one.
    """
    moved = [other for other in awaited if _started(beats[other], communicator) != _started(first[other], communicator)]
    return [other for other in moved if not first[other].peers.get(communicator)] or moved


def _awaited(rank: int, peers: tuple[int, ...], communicator: str, beats: dict[int, Beat]) -> list[int]:
    """List the ranks that a rank waits for, directly or through others, in ascending order."""
    awaited: set[int] = set()
    result = list(peers)
    while result:
        other = result.pop()
        if other != rank and other not in awaited:
            awaited.add(other)
            result.extend(beats[other].peers.get(communicator, []))
    return sorted(awaited)


def _has_left(beat: Beat, communicator: str) -> bool:
    return beat.left or beat.sequences.get(communicator, ABSENT) is None


def _started(beat: Beat, communicator: str) -> int:
    count = beat.sequences.get(communicator, ABSENT)
    return ABSENT if count is None else count


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
