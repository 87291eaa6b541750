"""Keys of one connection: agreed by both its ends, each of which proves the key of its group.

Owns whom a node trusts, the agreement (X25519 over the groups' keys and a fresh one of each end,
then HKDF-SHA256), and the authentication codes of messages and frames (AES-GCM without a
plaintext). Knows no sockets: handshake.py exchanges the offers, tcp.py sends the codes.

A code's nonce is the number of codes made before it in its direction, so that a message which is
replayed, missing or out of order has a wrong one. Imported only where keys are used: it needs the
package `cryptography`.
"""

from __future__ import annotations

import hashlib
import hmac
from array import array
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from m2n_comm.pairing.hello import KeyOffer, NodeRole
from topspin.errors import UntrustedPeer

if TYPE_CHECKING:
    from topspin.processes.keys import KeyDirectory

_KEY_BYTES = 32
_NONCE_BYTES = 12
# Up to this size one call over a copy is faster than a call for each part: 1.6 us against 5.
_JOINED_BYTES = 2**17
_CONTEXT = b"topspin m2n 3"


class Codes:
    """The authentication codes of one direction of a connection, in the order of its messages."""

    __slots__ = ("_at_once", "_cipher", "count", "key")

    def __init__(self, key: bytes) -> None:
        self.key = key
        # In memory of its own, since compiled code makes codes too: see host/frames/codes.py.
        self.count = array("Q", (0,))
        self._cipher = AES(key)
        self._at_once = AESGCM(key)

    def next(self, parts: Sequence[bytes | memoryview]) -> bytes:
        """Return the code of the next message, whose content is that of all `parts`."""
        nonce = self.count[0].to_bytes(_NONCE_BYTES, "little")
        self.count[0] += 1
        if sum(map(len, parts)) <= _JOINED_BYTES:
            return self._at_once.encrypt(nonce, b"", b"".join(parts))
        context = Cipher(self._cipher, GCM(nonce)).encryptor()
        for part in parts:
            context.authenticate_additional_data(part)
        context.finalize()
        return context.tag

    def is_next(self, parts: Sequence[bytes | memoryview], code: bytes | memoryview) -> bool:
        """Return whether `code` is the next one; if it is not, no later one will be."""
        return hmac.compare_digest(self.next(parts), code)


class Session(NamedTuple):
    """The codes that this end sends with its messages, and those of the peer's."""

    ours: Codes
    theirs: Codes


class Trust:
    """This node's keys, and the groups of peers that it accepts (None: all)."""

    def __init__(self, keys: KeyDirectory, groups: Collection[str] | None = None) -> None:
        self._keys = keys
        self._groups = groups

    def begin(self, role: NodeRole) -> Agreement:
        """Begin one agreement as an attention or expert node, with the keys as they are now."""
        keys = self._keys.read()
        accepted = {
            public
            for public, group in keys.accepted.items()
            if self._groups is None or group in self._groups
        }
        return Agreement(role, keys.secret, accepted)


class Agreement:
    """One end of an agreement; `offer` is for the other end."""

    def __init__(self, role: NodeRole, secret: bytes, accepted: Collection[bytes]) -> None:
        self._role = role
        self._accepted = accepted
        self._static = X25519PrivateKey.from_private_bytes(secret)
        self._ephemeral = X25519PrivateKey.generate()
        self.offer = KeyOffer(
            static=self._static.public_key().public_bytes_raw(),
            ephemeral=self._ephemeral.public_key().public_bytes_raw(),
        )

    def agree(self, theirs: KeyOffer) -> Session:
        """Return the session with the sender of `theirs`, who has not proved it yet.

        Raises UntrustedPeer unless its key is accepted.
        """
        if theirs.static not in self._accepted:
            raise UntrustedPeer(f"key {theirs.static.hex()[:16]}... is not accepted here")
        static = X25519PublicKey.from_public_bytes(theirs.static)
        ephemeral = X25519PublicKey.from_public_bytes(theirs.ephemeral)
        try:
            mixed = [self._ephemeral.exchange(static), self._static.exchange(ephemeral)]
            shared = self._ephemeral.exchange(ephemeral)
        except ValueError as error:
            raise UntrustedPeer("a key of low order") from error
        offers = [self.offer, theirs]
        if self._role == "expert":  # both ends must use the same order
            mixed.reverse()
            offers.reverse()
        transcript = b"".join(each.static + each.ephemeral for each in offers)
        derived = HKDF(
            SHA256(),
            length=2 * _KEY_BYTES,
            salt=hashlib.sha256(transcript).digest(),
            info=_CONTEXT,
        ).derive(shared + b"".join(mixed))
        requests, answers = Codes(derived[:_KEY_BYTES]), Codes(derived[_KEY_BYTES:])
        return (
            Session(requests, answers) if self._role == "attention" else Session(answers, requests)
        )
