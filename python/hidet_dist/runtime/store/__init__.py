"""The store through which ranks meet: short values by key, hosted by rank 0, over TCP.

It exists so that serving needs no PyTorch. PyTorch's TCPStore also asks for no credentials, and looks up host names,
which takes seconds where no name server answers. A connection begins with a handshake in which both sides prove that
they know the secret (HMAC, RFC 2104, with SHA-256); nonces make each proof valid for one connection only::

    client -> server    magic, client nonce
    server -> client    magic, server nonce, HMAC(secret, "server", both nonces)
    client -> server    HMAC(secret, "client", both nonces)

Each message then consists of its length, its content, and an HMAC over its direction, number and content, with a key
derived from the secret and the nonces. Without the secret, messages can be read, but not forged, replayed or
reordered. With an empty secret the proofs prove nothing, so such a store listens on loopback only.
"""

from hidet_dist.runtime.store.client import StoreClient
from hidet_dist.runtime.store.interface import FullError, SecretError, Store, StoreError
from hidet_dist.runtime.store.server import StoreServer

__all__ = ["FullError", "SecretError", "Store", "StoreClient", "StoreError", "StoreServer"]
