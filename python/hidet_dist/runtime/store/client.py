"""A rank's connection to the store."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Sequence

from hidet_dist.runtime.store import addresses, wire
from hidet_dist.runtime.store.interface import FullError, SecretError, StoreError
from hidet_dist.runtime.store.wire import ProtocolError, SignedChannel

_LEAST_POLL_SECONDS = 0.001
_MOST_POLL_SECONDS = 0.02


class _Link:
    """An authenticated connection. Threads take turns in using it."""

    def __init__(self, address: str, port: int, secret: bytes, timeout_seconds: float):
        deadline = time.monotonic() + timeout_seconds
        self._lock = threading.Lock()
        self._peer = addresses.connect(address, port, timeout_seconds)
        try:
            client_nonce = wire.nonce()
            self._peer.sendall(wire.MAGIC + client_nonce)
            magic = self._read(len(wire.MAGIC), deadline)
            if magic == wire.FULL:
                raise FullError("its process has no file descriptors left (ulimit -n)")
            if magic != wire.MAGIC:
                raise StoreError("the program that answers there is not a store of hidet_dist")
            server_nonce = self._read(wire.NONCE_BYTES, deadline)
            proof = wire.proof(secret, wire.SERVER, client_nonce, server_nonce)
            if not hmac.compare_digest(self._read(wire.DIGEST_BYTES, deadline), proof):
                raise SecretError("the store there has a different secret")
            self._peer.sendall(wire.proof(secret, wire.CLIENT, client_nonce, server_nonce))
        except TimeoutError:
            self._peer.close()
            raise TimeoutError("something listens there, but does not answer") from None
        except BaseException:
            self._peer.close()
            raise
        self._channel = SignedChannel(secret, wire.CLIENT, client_nonce, server_nonce)

    def call(self, request: Sequence[bytes], timeout_seconds: float) -> list[bytes]:
        with self._lock:
            try:
                message = self._channel.seal(request)
            except ProtocolError as error:
                raise StoreError(str(error)) from error
            try:
                deadline = time.monotonic() + timeout_seconds
                self._peer.settimeout(timeout_seconds)
                self._peer.sendall(message)
                length = wire.message_length(self._read(wire.LENGTH_BYTES, deadline))
                answer = self._channel.open(self._read(length, deadline))
            except (OSError, ProtocolError) as error:
                # A late answer would be taken for the answer to the next request.
                self._peer.close()
                reason = f"no answer within {timeout_seconds:g} s" if isinstance(error, TimeoutError) else str(error)
                raise StoreError(f"the store cannot be reached: {reason}") from error
        if not answer or answer[0] == b"refused":
            raise StoreError(f"the store refused: {b' '.join(answer[1:]).decode(errors='replace')}")
        return answer

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer; closing alone would not
        self._peer.close()

    def abandon(self) -> None:
        self._peer.close()  # no shutdown: that would end the parent's connection too

    def _read(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._peer.settimeout(left)
            piece = self._peer.recv(count - len(data))
            if not piece:
                raise ConnectionResetError("the store's host closed the connection")
            data += piece
        return bytes(data)


class StoreClient:
    """A connection to a store; see :class:`~hidet_dist.runtime.store.interface.Store` for its methods.

    Parameters
    ----------
    address, port:
        The address that the store listens on (see :mod:`hidet_dist.runtime.store.addresses`).
    secret: bytes
        The shared secret that both sides prove to know.
    timeout_seconds: float
        How long a call waits for an answer, and ``get`` for a value.
    connect_seconds: float, optional
        How long to wait for the connection; ``timeout_seconds`` by default.

    Raises
    ------
    OSError
        Where nothing listens there, or the connection broke during the handshake.
    SecretError
        Where the store has a different secret.
    StoreError
        Where another program listens there.
    """

    def __init__(
        self,
        address: str,
        port: int,
        secret: bytes = b"",
        timeout_seconds: float = 60.0,
        connect_seconds: float | None = None,
    ):
        self._endpoint = (address, port, secret)
        self._timeout_seconds = timeout_seconds
        self._prefix = ""
        self._link = _Link(*self._endpoint, timeout_seconds if connect_seconds is None else connect_seconds)

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._call(b"set", self._key(key), _bytes(value))

    def get(self, key: str) -> bytes:
        """Wait until a key has a value, and return it."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all of the keys have values, and return them."""
        request = [b"get", *map(self._key, keys)]
        while (answer := self._call(*request))[0] == b"missing":
            self.wait(keys)
        return answer[1:]

    def add(self, key: str, amount: int) -> int:
        """Add to a key's number, which is 0 if the key has no value, and return the sum."""
        return int(self._call(b"add", self._key(key), str(amount).encode())[1])

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Set a key's value if its value is ``expected``, where empty means none; return its value afterwards.

        If the key has no value and ``expected`` is not empty, sets nothing and returns ``expected``.
        """
        return self._call(b"compare_set", self._key(key), _bytes(expected), _bytes(value))[1]

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all of the keys have values."""
        return self._call(b"check", *map(self._key, keys))[1] == b"1"

    def wait(self, keys: Sequence[str], timeout_seconds: float | None = None) -> None:
        """Wait until all of the keys have values."""
        timeout = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + timeout
        pause = _LEAST_POLL_SECONDS
        while not self.check(keys):
            if time.monotonic() > deadline:
                missing = ", ".join(key for key in keys if not self.check([key]))
                raise StoreError(f"no value was set for {missing} within {timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _MOST_POLL_SECONDS)

    def delete(self, key: str) -> bool:
        """Remove a key. Returns whether it had a value."""
        return self._call(b"delete", self._key(key))[1] == b"1"

    def prefixed(self, prefix: str) -> StoreClient:
        """Return a view of the store with a prefix before all keys, over the same connection."""
        other = object.__new__(StoreClient)
        other.__dict__.update(self.__dict__, _prefix=f"{self._prefix}{prefix}/")
        return other

    def clone(self) -> StoreClient:
        """Open another connection to the store."""
        other = self.prefixed("")
        other._prefix = self._prefix
        try:
            other._link = _Link(*self._endpoint, self._timeout_seconds)
        except OSError as error:
            raise StoreError(f"the store cannot be reached: {error}") from error
        return other

    def close(self) -> None:
        """Close the connection. A call that is waiting in another thread fails."""
        self._link.close()

    def abandon(self) -> None:
        """Close this forked child's copy of a connection, which its parent keeps."""
        self._link.abandon()

    def _key(self, key: str) -> bytes:
        return (self._prefix + key).encode()

    def _call(self, *request: bytes) -> list[bytes]:
        return self._link.call(request, self._timeout_seconds)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
