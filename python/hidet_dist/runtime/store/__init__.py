"""The store that ranks meet in: short values by key, hosted by rank 0, over TCP.

It exists so that serving needs no PyTorch, and because PyTorch's TCPStore asks for no credentials and looks host names
up, which takes seconds where no name server answers. A connection is made as follows; both sides prove that they know
the secret (HMAC, RFC 2104, with SHA-256), by nonces that make each proof good for one connection only::

    client -> server    magic, client nonce
    server -> client    magic, server nonce, HMAC(secret, "server", both nonces)
    client -> server    HMAC(secret, "client", both nonces)

Then each message is its length, its content, and an HMAC over its direction, its number and its content, with a key
made from the secret and the nonces. Without the secret, messages can be read, but not forged, replayed or reordered.
Where there is no secret the proofs prove nothing, which is why such a store is for loopback only.
"""

from hidet_dist.runtime.store.client import StoreClient
from hidet_dist.runtime.store.interface import SecretError, Store, StoreError
from hidet_dist.runtime.store.server import StoreServer

__all__ = ["SecretError", "Store", "StoreClient", "StoreError", "StoreServer"]
