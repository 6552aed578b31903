"""The wire format of a store's connection: proofs, and messages, which are lists of byte strings."""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Sequence

MAGIC = b"hidetds1"
FULL = b"hidetds!"
"""Sent in place of ``MAGIC`` by a server that has no file descriptor left for the connection."""

NONCE_BYTES = 32
DIGEST_BYTES = 32
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = len(MAGIC) + NONCE_BYTES + DIGEST_BYTES
MAX_MESSAGE_BYTES = 1 << 20
"""The most bytes of a message's content; far more than any value that the ranks exchange."""

_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")
LENGTH_BYTES = _LENGTH.size

CLIENT, SERVER = b"client", b"server"


class ProtocolError(RuntimeError):
    """A received message does not follow the protocol."""


def nonce() -> bytes:
    """Return fresh random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Compute the proof that the sender, in this role on this connection, knows the secret."""
    return hmac.digest(secret, b"hidet_dist store " + role + client_nonce + server_nonce, "sha256")


def message_length(data: bytes | bytearray) -> int:
    """Decode a message's length: the bytes that follow it. Raises ``ProtocolError`` if it is out of range."""
    (length,) = _LENGTH.unpack_from(data)
    if not DIGEST_BYTES <= length <= MAX_MESSAGE_BYTES + DIGEST_BYTES:
        raise ProtocolError(f"a message of {length} bytes")
    return int(length)


class SignedChannel:
    """One side of an authenticated connection, which encodes and decodes numbered, signed messages."""

    def __init__(self, secret: bytes, sender: bytes, client_nonce: bytes, server_nonce: bytes):
        self._key = proof(secret, b"messages", client_nonce, server_nonce)
        self._sender = sender
        self._receiver = SERVER if sender == CLIENT else CLIENT
        self._sent = 0
        self._received = 0

    def seal(self, parts: Sequence[bytes]) -> bytes:
        """Encode a message, including its length. Raises ``ProtocolError`` if it is too long."""
        content = b"".join(piece for part in parts for piece in (_LENGTH.pack(len(part)), part))
        if len(content) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(content)} bytes; {MAX_MESSAGE_BYTES} are the most")
        digest = self._digest(self._sender, self._sent, content)
        self._sent += 1
        return _LENGTH.pack(len(content) + DIGEST_BYTES) + content + digest

    def open(self, message: bytes) -> list[bytes]:
        """Decode a message, given without its length, to its parts. Raises ``ProtocolError`` if it is not genuine."""
        content, digest = message[:-DIGEST_BYTES], message[-DIGEST_BYTES:]
        if not hmac.compare_digest(digest, self._digest(self._receiver, self._received, content)):
            raise ProtocolError("a message with a wrong signature: it was altered, replayed or reordered")
        self._received += 1
        parts = []
        position = 0
        while position < len(content):
            if position + LENGTH_BYTES > len(content):
                raise ProtocolError("a message with a broken length")
            (length,) = _LENGTH.unpack_from(content, position)
            position += LENGTH_BYTES
            if position + length > len(content):
                raise ProtocolError("a message with a part that is longer than the message")
            parts.append(content[position : position + length])
            position += length
        return parts

    def _digest(self, sender: bytes, number: int, content: bytes) -> bytes:
        return hmac.digest(self._key, sender + _NUMBER.pack(number) + content, "sha256")
