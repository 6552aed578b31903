"""The store that ranks meet in: what it keeps, whom it answers, and what the rest of the network cannot do to it."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.runtime.store import SecretError, StoreClient, StoreError, StoreServer, server, wire
from hidet_dist.runtime.store.addresses import host_local_address

SECRET = b"correct horse battery staple"
PATIENCE = 60.0


@pytest.fixture(scope="module")
def host() -> Iterator[StoreServer]:
    host = StoreServer("127.0.0.1", 0, SECRET)
    yield host
    host.close()


@pytest.fixture(scope="module")
def client(host: StoreServer) -> Iterator[StoreClient]:
    client = StoreClient("127.0.0.1", host.port, SECRET, timeout_seconds=PATIENCE)
    yield client
    client.close()


def test_values_are_kept_by_key(client: StoreClient) -> None:
    client.set("a", "1")
    client.set("b", b"\0\xff")
    client.set("a", "2")
    assert client.multi_get(["b", "a"]) == [b"\0\xff", b"2"]
    assert client.check(["a", "b"]) and not client.check(["a", "c"])
    assert client.delete("a") and not client.delete("a") and not client.check(["a"])
    with pytest.raises(StoreError, match=r"no value was set for a within 0\.05 s"):
        client.wait(["b", "a"], 0.05)


def test_numbers_are_added_to(client: StoreClient) -> None:
    assert [client.add("n", amount) for amount in (3, -5, 0)] == [3, -2, -2]
    client.set("n", "no number")
    with pytest.raises(StoreError, match="refused"):
        client.add("n", 1)
    client.set("n", "7")  # a refused request does the connection no harm
    assert client.add("n", 1) == 8


def test_one_of_several_ranks_sets_a_value(client: StoreClient) -> None:
    assert [client.compare_set("v", "", rank) for rank in ("first", "second")] == [b"first", b"first"]
    assert client.compare_set("v", "first", "third") == b"third"
    assert client.compare_set("w", "expected", "value") == b"expected"
    assert not client.check(["w"])


def test_prefixes_keep_keys_apart(client: StoreClient) -> None:
    inner = client.prefixed("p").prefixed("q")
    inner.set("k", "inner")
    client.set("k", "outer")
    clone = inner.clone()
    assert (clone.get("k"), client.get("p/q/k"), client.get("k")) == (b"inner", b"inner", b"outer")
    clone.close()
    assert inner.get("k") == b"inner"


def test_getting_waits_for_a_value(host: StoreServer, client: StoreClient) -> None:
    other = client.clone()
    thread = threading.Timer(0.1, lambda: other.set("late", "here"))
    thread.start()
    assert client.get("late") == b"here"
    thread.join()
    other.close()


def test_threads_take_turns(client: StoreClient) -> None:
    def count() -> None:
        for _ in range(50):
            client.add("turns", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.get("turns") == b"200"


def test_too_much_is_refused(client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="the most"):
        client.set("big", bytes(wire.MAX_MESSAGE_BYTES + 1))
    monkeypatch.setattr(server, "MAX_STORE_BYTES", 1 << 16)
    with pytest.raises(StoreError, match="more than 65536 bytes"):
        client.set("big", bytes(1 << 16))
    client.set("big", "small")


@pytest.mark.parametrize("secret", [b"", b"Correct horse battery staple"])
def test_another_secret_is_found_out(host: StoreServer, secret: bytes) -> None:
    with pytest.raises(SecretError, match="different secret"):
        StoreClient("127.0.0.1", host.port, secret, timeout_seconds=PATIENCE)


def _shake_hands(host: StoreServer, proof: bytes | None = None) -> tuple[socket.socket, bytes, bytes]:
    """A connection by hand, with a proof that is right unless it is given."""
    peer = socket.create_connection(("127.0.0.1", host.port), timeout=PATIENCE)
    client_nonce = wire.nonce()
    peer.sendall(wire.MAGIC + client_nonce)
    answer = peer.recv(wire.ANSWER_BYTES, socket.MSG_WAITALL)
    server_nonce = answer[len(wire.MAGIC) :][: wire.NONCE_BYTES]
    peer.sendall(proof or wire.proof(SECRET, wire.CLIENT, client_nonce, server_nonce))
    return peer, client_nonce, server_nonce


def _is_cut(peer: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return peer.recv(1) == b""
    return True


def test_the_host_wants_a_proof_too(host: StoreServer) -> None:
    peer, _, _ = _shake_hands(host, proof=bytes(wire.DIGEST_BYTES))
    assert _is_cut(peer)
    # Its own proof, sent back to it, is none.
    peer = socket.create_connection(("127.0.0.1", host.port), timeout=PATIENCE)
    peer.sendall(wire.MAGIC + wire.nonce())
    peer.sendall(peer.recv(wire.ANSWER_BYTES, socket.MSG_WAITALL)[-wire.DIGEST_BYTES :])
    assert _is_cut(peer)


def test_messages_are_forged_or_repeated_in_vain(host: StoreServer, client: StoreClient) -> None:
    client.set("guarded", "yes")
    peer, *nonces = _shake_hands(host)
    channel = wire.SignedChannel(SECRET, wire.CLIENT, *nonces)
    message = channel.seal([b"add", b"replayed", b"1"])
    peer.sendall(message)
    length = wire.message_length(peer.recv(wire.LENGTH_BYTES, socket.MSG_WAITALL))
    assert channel.open(peer.recv(length, socket.MSG_WAITALL)) == [b"ok", b"1"]
    peer.sendall(message)  # the same once more
    assert _is_cut(peer)
    peer, *nonces = _shake_hands(host)
    message = bytearray(wire.SignedChannel(SECRET, wire.CLIENT, *nonces).seal([b"delete", b"guarded"]))
    message[wire.LENGTH_BYTES + wire.LENGTH_BYTES] ^= 1
    peer.sendall(message)
    assert _is_cut(peer)
    assert (client.get("guarded"), client.get("replayed")) == (b"yes", b"1")


garbage = st.one_of(
    st.binary(max_size=300),
    st.binary(max_size=100).map(lambda rest: wire.MAGIC + rest),
    st.just(pickle.dumps({"a": 1})),
    st.just(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    st.just(b"\xff" * 100_000),
)


@given(st.lists(garbage, min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_garbage_is_survived(host: StoreServer, client: StoreClient, pieces: list[bytes]) -> None:
    with (
        socket.create_connection(("127.0.0.1", host.port), timeout=PATIENCE) as peer,
        contextlib.suppress(ConnectionError),
    ):
        for piece in pieces:
            peer.sendall(piece)
    assert client.add("alive", 1) > 0


parts = st.lists(st.one_of(st.binary(max_size=60), st.sampled_from([b"set", b"get", b"add", b"delete", b"check"])))


@given(
    st.one_of(
        st.binary(max_size=200).map(lambda content: ("content", content)), parts.map(lambda given: ("parts", given))
    )
)
@settings(max_examples=40, deadline=None)
def test_nonsense_from_one_who_knows_the_secret_is_survived(
    host: StoreServer, client: StoreClient, sent: tuple
) -> None:
    """Every message is answered, or ends its connection."""
    peer, *nonces = _shake_hands(host)
    channel = wire.SignedChannel(SECRET, wire.CLIENT, *nonces)
    kind, value = sent
    if kind == "parts":
        message = channel.seal(value)
    else:
        whole = channel.seal([value])
        content = value  # in place of the parts' lengths
        digest = channel._digest(wire.CLIENT, 0, content)
        message = (len(content) + len(digest)).to_bytes(4, "big") + content + digest
        assert len(whole) == len(message) + wire.LENGTH_BYTES
    with peer, contextlib.suppress(ConnectionError):
        peer.sendall(message)
        header = peer.recv(wire.LENGTH_BYTES, socket.MSG_WAITALL)
        if header:
            assert channel.open(peer.recv(wire.message_length(header), socket.MSG_WAITALL))[0] in {
                b"ok",
                b"missing",
                b"refused",
            }
    assert client.add("alive", 1) > 0


def test_silent_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 4)
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 2.0)
    host = StoreServer("127.0.0.1", 0)
    strangers = [socket.create_connection(("127.0.0.1", host.port), timeout=PATIENCE) for _ in range(8)]
    client = StoreClient("127.0.0.1", host.port, timeout_seconds=PATIENCE)
    client.set("a", "1")
    assert all(_is_cut(stranger) for stranger in strangers)
    assert client.get("a") == b"1"
    host.close()


def test_a_host_that_goes_is_noticed_by_a_client() -> None:
    host = StoreServer("127.0.0.1", 0)
    client = StoreClient("127.0.0.1", host.port, timeout_seconds=PATIENCE)
    host.close()
    for _ in range(2):
        with pytest.raises(StoreError, match="cannot be reached"):
            client.set("a", "1")
    with pytest.raises(StoreError, match="cannot be reached"):
        client.clone()
    StoreServer("127.0.0.1", host.port).close()  # the port is free again


def test_closing_wakes_a_thread_that_waits_for_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            hello = peer.recv(wire.HELLO_BYTES, socket.MSG_WAITALL)
            nonces = hello[len(wire.MAGIC) :], wire.nonce()
            peer.sendall(wire.MAGIC + nonces[1] + wire.proof(b"", wire.SERVER, *nonces))
            peer.recv(1 << 16)
            time.sleep(0.1)
            client.close()

        client: StoreClient
        thread = threading.Thread(target=answer)
        thread.start()
        client = StoreClient("127.0.0.1", listener.getsockname()[1], timeout_seconds=PATIENCE)
        with pytest.raises(StoreError) as caught:
            client.get("a")
        assert "no answer within" not in str(caught.value)
        thread.join()


def test_another_program_is_told_from_a_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            peer.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            peer.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(StoreError, match="not a store"):
            StoreClient("127.0.0.1", listener.getsockname()[1], timeout_seconds=PATIENCE)
        thread.join()


def test_a_store_within_a_host_is_no_other() -> None:
    address = host_local_address(f"hidet_dist-test-{os.getpid()}")
    with contextlib.closing(StoreServer(address, 0, SECRET)):
        with pytest.raises(OSError, match="in use"):
            StoreServer(address, 0, SECRET)
        with pytest.raises(SecretError):
            StoreClient(address, 0, b"different secret")
        with contextlib.closing(StoreClient(address, 0, SECRET, timeout_seconds=PATIENCE)) as client:
            client.set("a", bytes(1 << 19))
            other = client.clone()
            assert other.get("a") == bytes(1 << 19)
            other.close()
    with pytest.raises(OSError, match="refused"):
        StoreClient(address, 0, SECRET)


NOBODY = 65534


def _as_nobody(function: Callable[[], object]) -> str:
    """The error of a function in a process of another user; an empty string if there is none."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            function()
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user")
def test_within_a_host_other_users_are_refused() -> None:
    """Neither do they reach a store, nor can they stand in for one, even where there is no secret."""
    address = host_local_address(f"hidet_dist-users-{os.getpid()}")
    with contextlib.closing(StoreServer(address, 0)):
        assert _as_nobody(lambda: StoreClient(address, 0, timeout_seconds=PATIENCE)).startswith("PermissionError")

        def intrude() -> None:  # without looking at whose the store is
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.connect(address.replace("@", "\0"))
                peer.sendall(wire.MAGIC + wire.nonce())
                assert not peer.recv(1)

        said = _as_nobody(intrude)
        assert not said or said.startswith(("BrokenPipeError", "ConnectionResetError")), said
        with contextlib.closing(StoreClient(address, 0, timeout_seconds=PATIENCE)) as own:
            own.set("a", "1")
