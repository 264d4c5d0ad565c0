"""Keys, mask streams, encryption and shares of seeds of a secure sum, all with primitives of `cryptography` and PyCryptodome.

A seed of 16 random bytes gives a private key (X25519) or a self mask; a label keeps the keys derived from one secret apart (HKDF-SHA256).
A mask is a ChaCha20 key stream, six bytes per number. Every key encrypts one message, so nonces are zero. Shamir's secret sharing splits a
seed (in the field of 2^128 elements); shares belong to the names of a cohort in ascending order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from edge_fl.errors import SecureSumError
from edge_fl.failures import Failure
from edge_fl.secure import fixed_point
from edge_fl.secure.fixed_point import Numbers

SEED_BYTES = 16

Stream = Callable[[bytes, int], Numbers]
"""(key, length) -> pseudorandom numbers modulo 2^48."""


def private_key(seed: bytes) -> X25519PrivateKey:
    """The private key of a seed."""
    return X25519PrivateKey.from_private_bytes(derive(seed, b"private key"))


def agree(own: X25519PrivateKey, peer: bytes, label: bytes) -> bytes:
    """The key that two devices derive from their own private and the other's public key. Raises SecureSumError for an invalid one."""
    try:
        return derive(own.exchange(X25519PublicKey.from_public_bytes(peer)), label)
    except ValueError as error:
        raise SecureSumError("a device's key is not a public key of X25519", Failure.FORGED) from error


def derive(secret: bytes, label: bytes) -> bytes:
    """A key of 32 bytes."""
    return HKDF(hashes.SHA256(), 32, salt=None, info=b"edge-fl secure sum: " + label).derive(secret)


def pair_label(session: bytes, one: str, other: str) -> bytes:
    """The label of the mask that two devices share."""
    return b"mask " + session + " ".join(sorted((one, other))).encode()


def channel_label(session: bytes, sender: str, recipient: str) -> bytes:
    """The label of the key for the shares that one device sends to another."""
    return b"shares " + session + f"{sender} {recipient}".encode()


def self_mask_key(seed: bytes) -> bytes:
    """The key of a device's own mask."""
    return derive(seed, b"self mask")


def commitment(seed: bytes) -> bytes:
    """A hash by which the seed of a self mask is recognised."""
    return derive(seed, b"commitment")


def stream(key: bytes, length: int) -> Numbers:
    """The mask of a key."""
    encryptor = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return fixed_point.from_bytes(encryptor.update(bytes(length * fixed_point.BYTES)))


def sign_of(own: str, peer: str) -> int:
    """+1 or -1: of two devices one adds their mask and the other subtracts it."""
    return 1 if own < peer else -1


def seal(key: bytes, text: bytes) -> bytes:
    """Encrypt and authenticate the one message of a key."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), text, None)


def unseal(key: bytes, sealed: bytes, sender: str) -> bytes:
    """Decrypt the message of `sender`. Raises SecureSumError if it was changed or encrypted with another key."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, None)
    except InvalidTag as error:
        raise SecureSumError(f"shares of {sender}: changed or made for other keys", Failure.FORGED) from error


def split_seed(seed: bytes, threshold: int, names: Sequence[str]) -> dict[str, bytes]:
    """One share of a seed for each name; any `threshold` of them give the seed."""
    shares = Shamir.split(threshold, len(names), seed)
    return {names[index - 1]: share for index, share in shares}


def combine_shares(shares: Mapping[str, bytes], threshold: int, names: Sequence[str]) -> bytes:
    """The seed of at least `threshold` shares."""
    places = {name: place for place, name in enumerate(names, 1)}
    points = [(places[name], share) for name, share in sorted(shares.items())]
    return bytes(Shamir.combine(points[:threshold]))
