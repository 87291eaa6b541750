"""Agreement of session keys, and authentication codes."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from m2n_comm.pairing.hello import KeyOffer
from m2n_comm.pairing.session import Agreement, Codes, Session
from topspin.errors import UntrustedPeer
from topspin.processes.keys import new_secret, public_of_secret


def agreed() -> tuple[Session, Session]:
    """Return the sessions of both ends of a pair: the attention node's, the expert node's."""
    ours, theirs = new_secret(), new_secret()
    attention = Agreement("attention", ours, {public_of_secret(theirs)})
    expert = Agreement("expert", theirs, {public_of_secret(ours)})
    return attention.agree(expert.offer), expert.agree(attention.offer)


def test_both_ends_agree_on_a_key_for_each_direction() -> None:
    left, right = agreed()
    requests = [left.ours.next([b"a", b"bc"]) for _ in range(3)]
    answers = [right.ours.next([b"abc"]) for _ in range(3)]
    assert all(right.theirs.is_next([b"abc"], code) for code in requests)
    assert all(left.theirs.is_next([b"ab", b"", b"c"], code) for code in answers)
    assert len({*requests, *answers}) == 6


@pytest.mark.parametrize("size", [2**17, 2**17 + 1, 2**20])
def test_the_code_of_a_large_message_is_made_as_that_of_a_small_one(size: int) -> None:
    """Small ones, and the count: see tests/m2n_comm/host/frames/test_codes.py."""
    key, rows = bytes(32), bytes(range(256)) * (size // 256 + 1)
    parts = [rows[:6], memoryview(rows)[6:100], memoryview(rows)[100:size]]
    assert Codes(key).next(parts) == AESGCM(key).encrypt(bytes(12), b"", rows[:size])


def test_the_keys_follow_from_all_four_secrets_and_all_that_was_offered() -> None:
    """By the HKDF of RFC 5869, written out."""
    ours, theirs = new_secret(), new_secret()
    expert = Agreement("expert", theirs, {public_of_secret(ours)})
    ephemeral = X25519PrivateKey.generate()
    offer = KeyOffer(
        static=public_of_secret(ours), ephemeral=ephemeral.public_key().public_bytes_raw()
    )
    static = X25519PrivateKey.from_private_bytes(ours)
    their_static = X25519PublicKey.from_public_bytes(expert.offer.static)
    their_ephemeral = X25519PublicKey.from_public_bytes(expert.offer.ephemeral)
    shared = ephemeral.exchange(their_ephemeral)
    shared += ephemeral.exchange(their_static) + static.exchange(their_ephemeral)
    offers = offer.static + offer.ephemeral + expert.offer.static + expert.offer.ephemeral
    secret = hmac.digest(hashlib.sha256(offers).digest(), shared, "sha256")
    requests = hmac.digest(secret, b"topspin m2n 3\x01", "sha256")
    answers = hmac.digest(secret, requests + b"topspin m2n 3\x02", "sha256")
    session = expert.agree(offer)
    assert session.theirs.is_next([b"x"], Codes(requests).next([b"x"]))
    assert session.ours.next([b"x"]) == Codes(answers).next([b"x"])


def test_a_changed_replayed_missing_or_reordered_message_has_a_wrong_code() -> None:
    messages = [b"one", b"two", b"three"]
    for received in ([0, 0], [1], [0, 2], [1, 0]):
        left, right = agreed()
        sent = [(each, left.ours.next([each])) for each in messages]
        assert not all(right.theirs.is_next([sent[i][0]], sent[i][1]) for i in received)
    left, right = agreed()
    code = left.ours.next([b"one"])
    assert not right.theirs.is_next([b"onf"], code)


def test_a_peer_without_the_secret_of_its_key_makes_no_valid_code() -> None:
    """It knows the public keys, which are no secret, and makes its own ephemeral key."""
    ours, theirs = new_secret(), new_secret()
    expert = Agreement("expert", theirs, {public_of_secret(ours)})
    forger = Agreement("attention", new_secret(), {public_of_secret(theirs)})
    offer = KeyOffer(static=public_of_secret(ours), ephemeral=forger.offer.ephemeral)
    session = expert.agree(offer)
    forged = forger.agree(expert.offer)
    assert not session.theirs.is_next([b"x"], forged.ours.next([b"x"]))


def test_an_offer_that_is_replayed_gives_another_session() -> None:
    ours, theirs = new_secret(), new_secret()
    attention = Agreement("attention", ours, {public_of_secret(theirs)})
    first, second = (Agreement("expert", theirs, {public_of_secret(ours)}) for _ in range(2))
    code = attention.agree(first.offer).ours.next([b"x"])
    assert first.agree(attention.offer).theirs.is_next([b"x"], code)
    assert not second.agree(attention.offer).theirs.is_next([b"x"], code)


def test_our_own_offer_sent_back_proves_nothing() -> None:
    secret = new_secret()
    attention = Agreement("attention", secret, {public_of_secret(secret)})
    session = attention.agree(attention.offer)
    assert not session.theirs.is_next([b"x"], session.ours.next([b"x"]))


def test_keys_that_are_not_accepted_or_of_low_order_are_refused() -> None:
    ours, theirs = new_secret(), new_secret()
    attention = Agreement("attention", ours, {public_of_secret(theirs)})
    with pytest.raises(UntrustedPeer, match=f"key {attention.offer.static.hex()[:16]}.* not acc"):
        Agreement("expert", theirs, set()).agree(attention.offer)
    with pytest.raises(UntrustedPeer, match="low order"):
        attention.agree(KeyOffer(static=public_of_secret(theirs), ephemeral=bytes(32)))
