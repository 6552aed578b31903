"""Addresses of stores: a TCP port, or a name within this host that needs neither a port nor a file.

Such a name begins with ``@``; it is the name of a socket in Linux's abstract namespace (unix(7)), which disappears with
the process that listens. Both ends must belong to the same user: the system tells each the other's user, and a
different one is refused.
"""

from __future__ import annotations

import os
import socket
import struct

_MARK = "@"
_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): process, user, group


def host_local_address(name: str) -> str:
    """Return the address for a name within this host, of at most 100 bytes."""
    return _MARK + name


def is_host_local(address: str) -> bool:
    """Tell whether an address is a name within this host."""
    return address.startswith(_MARK)


def format_address(address: str, port: int) -> str:
    """Format an address and a port for errors."""
    return address if is_host_local(address) else f"{address}:{port}"


def listen(address: str, port: int) -> socket.socket:
    """Open a non-blocking socket that listens on an address; port 0 selects a free port. Raises OSError."""
    if is_host_local(address):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        place: object = _abstract(address)
    else:
        family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    try:
        if listener.family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)  # type: ignore[arg-type]
        listener.listen(socket.SOMAXCONN)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(address: str, port: int, timeout_seconds: float) -> socket.socket:
    """Connect to a listener. Raises OSError if there is none, PermissionError if it belongs to another user."""
    if is_host_local(address):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.settimeout(timeout_seconds)
            peer.connect(_abstract(address))
            check_user(peer)
        except BaseException:
            peer.close()
            raise
        return peer
    peer = socket.create_connection((address, port), timeout=timeout_seconds)
    try:
        if peer.getsockname() == peer.getpeername():
            # Without a listener, the system may connect a socket to itself, if it happened to assign it that port.
            raise ConnectionRefusedError("nothing listens there")
        send_at_once(peer)
    except BaseException:
        peer.close()
        raise
    return peer


def check_user(peer: socket.socket) -> None:
    """Raise PermissionError if the other end of a connection within this host belongs to another user."""
    if peer.family == socket.AF_UNIX:
        _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user != os.geteuid():
            raise PermissionError(f"the other end belongs to user {user}, not {os.geteuid()}")


def send_at_once(peer: socket.socket) -> None:
    """Send small messages on TCP at once, instead of collecting them (Nagle's algorithm)."""
    if peer.family != socket.AF_UNIX:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _abstract(address: str) -> bytes:
    return b"\0" + address.removeprefix(_MARK).encode()
