"""Two ranks prove to each other that they know the key, before either takes the other's word for anything.

    caller                                  called

                      nonce ------------->  (32 bytes)     no proof goes to a stranger
    <------------- rank, nonce, proof       (68 bytes)
                      proof ------------->  (32 bytes)

Each proof covers both nonces, both ranks and the direction, so that none of them is of use a second time. All
lengths are fixed: nobody can announce more than is read.
"""

import hmac
import secrets
import struct
from collections.abc import Collection, Generator

NONCE_NBYTES = 32
PROOF_NBYTES = 32
_HELLO = struct.Struct(f"!I{NONCE_NBYTES}s{PROOF_NBYTES}s")

# Yields what is to be sent, and how many bytes are to be read then; gets them, and returns the peer's rank.
Handshake = Generator[tuple[bytes, int], bytes, int]


class Stranger(Exception):
    """Somebody who does not know the key, or who is not waited for."""


def answer(key: bytes, rank: int, awaited: Collection[int]) -> Handshake:
    """Be called, by one of the ranks that are still ``awaited`` at the end."""
    nonce = secrets.token_bytes(NONCE_NBYTES)
    peer, theirs, proof = _HELLO.unpack((yield nonce, _HELLO.size))
    if not hmac.compare_digest(proof, _proof(key, b"call", peer, rank, theirs, nonce)):
        raise Stranger("it does not know the key")
    if peer not in awaited:
        raise Stranger(f"rank {peer} is not waited for")
    yield _proof(key, b"answer", peer, rank, theirs, nonce), 0
    return int(peer)


def call(key: bytes, rank: int, peer: int) -> Handshake:
    """Call another rank."""
    theirs = yield b"", NONCE_NBYTES
    nonce = secrets.token_bytes(NONCE_NBYTES)
    hello = _HELLO.pack(rank, nonce, _proof(key, b"call", rank, peer, nonce, theirs))
    proof = yield hello, PROOF_NBYTES
    if not hmac.compare_digest(proof, _proof(key, b"answer", rank, peer, nonce, theirs)):
        raise Stranger("it does not know the key")
    return peer


def _proof(key: bytes, side: bytes, caller: int, called: int, callers: bytes, calleds: bytes) -> bytes:
    return hmac.digest(key, struct.pack("!II", caller, called) + callers + calleds + side, "sha256")
