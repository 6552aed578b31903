"""The store's server: one thread that serves all connections, none of which can block it."""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import threading
import time
from collections.abc import Sequence

from hidet_dist.runtime.store import addresses, wire
from hidet_dist.runtime.store.wire import ProtocolError, SignedChannel

HANDSHAKE_SECONDS = 10.0
"""The longest time, in seconds, for the handshake of a connection."""

MAX_STRANGERS = 128
"""The limit of connections whose handshake is not complete; beyond it, the oldest is closed."""

MAX_STORE_BYTES = 1 << 28
"""The most bytes that keys and values may take together."""

_READ_BYTES = 1 << 16
_PAUSE_SECONDS = 0.1


class _Table:
    """The values, and the requests for them. A refused request raises ``ValueError``."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._bytes = 0

    def answer(self, request: Sequence[bytes]) -> list[bytes]:
        if not request:
            raise ValueError("an empty request")
        name, *arguments = request
        if name == b"get":
            values = [self._values.get(key) for key in arguments]
            return [b"missing"] if None in values else [b"ok", *(value for value in values if value is not None)]
        if name == b"check":
            return [b"ok", b"1" if all(key in self._values for key in arguments) else b"0"]
        if name == b"set" and len(arguments) == 2:
            self._put(*arguments)
            return [b"ok"]
        if name == b"add" and len(arguments) == 2:
            total = str(_integer(self._values.get(arguments[0], b"0")) + _integer(arguments[1])).encode()
            self._put(arguments[0], total)
            return [b"ok", total]
        if name == b"compare_set" and len(arguments) == 3:
            return [b"ok", self._compare_set(*arguments)]
        if name == b"delete" and len(arguments) == 1:
            return [b"ok", b"1" if self._delete(arguments[0]) else b"0"]
        raise ValueError(f"an unknown request {name[:32]!r} with {len(arguments)} arguments")

    def _compare_set(self, key: bytes, expected: bytes, value: bytes) -> bytes:
        """Set a value that is as expected, or missing where none is; return what is there, or was expected."""
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._put(key, value)
            return value
        return expected if current is None else current

    def _delete(self, key: bytes) -> bool:
        old = self._values.pop(key, None)
        if old is not None:
            self._bytes -= len(key) + len(old)
        return old is not None

    def _put(self, key: bytes, value: bytes) -> None:
        old = self._values.get(key)
        grown = len(value) - len(old) if old is not None else len(key) + len(value)
        if self._bytes + grown > MAX_STORE_BYTES:
            raise ValueError(f"more than {MAX_STORE_BYTES} bytes in the store")
        self._values[key] = value
        self._bytes += grown


def _integer(digits: bytes) -> int:
    if len(digits) > 20:
        raise ValueError("a number of more than 20 digits")
    return int(digits)


class _Connection:
    """A client's connection: received and unsent bytes, and the state of its handshake."""

    def __init__(self, peer: socket.socket, secret: bytes):
        self.peer = peer
        self.since = time.monotonic()
        self.outgoing = bytearray()
        self._incoming = bytearray()
        self._secret = secret
        self._nonces: tuple[bytes, bytes] | None = None
        self._channel: SignedChannel | None = None

    @property
    def trusted(self) -> bool:
        return self._channel is not None

    def receive(self) -> None:
        """Receive the bytes that have arrived. Raises ``OSError`` or ``ProtocolError`` when the connection must end."""
        data = self.peer.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError("closed")
        self._incoming += data

    def send(self) -> None:
        """Send what can be sent without waiting."""
        if self.outgoing:
            with contextlib.suppress(BlockingIOError):
                del self.outgoing[: self.peer.send(self.outgoing)]

    def work(self, table: _Table) -> None:
        """Answer the complete requests in order, each after the previous answer was sent."""
        while not self.outgoing:
            if self._channel is None:
                if not self._prove():
                    return
            elif (message := self._message()) is not None:
                try:
                    answer = table.answer(self._channel.open(message))
                    self.outgoing += self._channel.seal(answer)
                except (ValueError, UnicodeError) as error:
                    self.outgoing += self._channel.seal([b"refused", str(error).encode()])
            else:
                return
            self.send()

    def _prove(self) -> bool:
        """Make the next step of the handshake. Returns False where more bytes must be received first."""
        if self._nonces is None:
            if not wire.MAGIC.startswith(self._incoming[: len(wire.MAGIC)]):
                raise ProtocolError("another protocol")
            if len(self._incoming) < wire.HELLO_BYTES:
                return False
            client_nonce, server_nonce = self._take(wire.HELLO_BYTES)[len(wire.MAGIC) :], wire.nonce()
            self._nonces = client_nonce, server_nonce
            proof = wire.proof(self._secret, wire.SERVER, client_nonce, server_nonce)
            self.outgoing += wire.MAGIC + server_nonce + proof
            return True
        if len(self._incoming) < wire.DIGEST_BYTES:
            return False
        expected = wire.proof(self._secret, wire.CLIENT, *self._nonces)
        if not hmac.compare_digest(self._take(wire.DIGEST_BYTES), expected):
            raise ProtocolError("a wrong proof")
        self._channel = SignedChannel(self._secret, wire.SERVER, *self._nonces)
        return True

    def _message(self) -> bytes | None:
        if len(self._incoming) < wire.LENGTH_BYTES:
            return None
        length = wire.message_length(self._incoming)
        if len(self._incoming) < wire.LENGTH_BYTES + length:
            return None
        return self._take(wire.LENGTH_BYTES + length)[wire.LENGTH_BYTES :]

    def _take(self, count: int) -> bytes:
        data = bytes(self._incoming[:count])
        del self._incoming[:count]
        return data


def _spare_descriptor() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


class StoreServer:
    """The server of a store, which runs until it is closed.

    Parameters
    ----------
    address: str
        The only address to listen on (see :mod:`hidet_dist.runtime.store.addresses`).
    port: int
        The TCP port; 0 for any free one, and for an address without ports.
    secret: bytes
        The shared secret that clients must prove to know; may be empty.

    Raises
    ------
    OSError
        Where it cannot listen on the address.
    """

    def __init__(self, address: str, port: int, secret: bytes = b""):
        self._spare = _spare_descriptor()
        self._listener = addresses.listen(address, port)
        self.port: int = 0 if addresses.is_host_local(address) else self._listener.getsockname()[1]
        self._secret = secret
        self._table = _Table()
        self._connections: dict[socket.socket, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="hidet_dist-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")
        self._thread.join()
        self._wake_writer.close()

    def abandon(self) -> None:
        """Close this forked child's copies of the descriptors of a server that goes on running in its parent."""
        # Nothing is unregistered, because the parent uses the same selector object in the kernel.
        self._selector.close()
        for peer in (*self._connections, self._listener, self._wake_reader, self._wake_writer):
            peer.close()
        if self._spare >= 0:
            os.close(self._spare)

    def _run(self) -> None:
        selector = self._selector
        selector.register(self._wake_reader, selectors.EVENT_READ)
        selector.register(self._listener, selectors.EVENT_READ)
        try:
            while True:
                strangers = any(not connection.trusted for connection in self._connections.values())
                for key, _ in selector.select(1.0 if strangers else None):
                    if key.fileobj is self._wake_reader:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._connections:
                        self._serve(key.data)
                self._drop_strangers()
        finally:
            for connection in tuple(self._connections.values()):
                self._drop(connection)
            selector.close()
            self._listener.close()
            self._wake_reader.close()
            if self._spare >= 0:
                os.close(self._spare)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError, InterruptedError):
            return
        except OSError:
            # No file descriptor is left. Without a pause, the selector would report the connection again at once.
            if not self._turn_away():
                time.sleep(_PAUSE_SECONDS)
            return
        try:
            peer.setblocking(False)
            addresses.check_user(peer)
            addresses.send_at_once(peer)
        except OSError:  # another user's, or closed by now
            peer.close()
            return
        connection = _Connection(peer, self._secret)
        self._connections[peer] = connection
        self._selector.register(peer, selectors.EVENT_READ, connection)

    def _turn_away(self) -> bool:
        """Use the spare descriptor to tell a client that there is none left. Returns False if the spare one is gone."""
        if self._spare < 0:
            return False
        os.close(self._spare)
        self._spare = -1
        with contextlib.suppress(OSError):
            peer, _ = self._listener.accept()
            with peer:
                peer.settimeout(_PAUSE_SECONDS)
                peer.recv(wire.HELLO_BYTES)  # if bytes were left unread, the system would drop the answer
                peer.sendall(wire.FULL)
        with contextlib.suppress(OSError):
            self._spare = _spare_descriptor()
        return True

    def _serve(self, connection: _Connection) -> None:
        # An error of one connection must not affect the others.
        try:
            if connection.outgoing:
                connection.send()
            else:
                connection.receive()
            connection.work(self._table)
            # Nothing more is received while an answer waits to be sent.
            wanted = selectors.EVENT_WRITE if connection.outgoing else selectors.EVENT_READ
            self._selector.modify(connection.peer, wanted, connection)
        except (BlockingIOError, InterruptedError):
            return
        except Exception:
            self._drop(connection)

    def _drop_strangers(self) -> None:
        strangers = [connection for connection in self._connections.values() if not connection.trusted]
        now = time.monotonic()
        excess = len(strangers) - MAX_STRANGERS
        for number, connection in enumerate(strangers):  # oldest first
            if number < excess or now - connection.since > HANDSHAKE_SECONDS:
                self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.peer, None) is not None:
            self._selector.unregister(connection.peer)
            connection.peer.close()
