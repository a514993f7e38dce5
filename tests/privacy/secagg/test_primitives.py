"""Literal numbers of secure sums: the ring, shares at their limits, what is hashed and signed, what a party keeps."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from privacy.secagg import keys, primitives
from privacy.secagg.federation import load_identity
from privacy.secagg.party import PartyState

SEED, SESSION = bytes(range(32)), b"\x07" * 32


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
def test_the_upper_half_of_the_ring_is_negative(bits: int) -> None:
    half = 1 << (bits - 1)
    inside = np.array([0, 1, half // 2, half - 1, half, half + 1, 2 * half - 1], dtype=np.uint32)
    expected = [0, 1, half // 2, half - 1, -half, 1 - half, -1]
    assert primitives.centre_values(inside, bits).tolist() == expected


def test_a_constant_that_is_no_word_of_a_secret_gives_nothing() -> None:
    def one_share(value: int) -> dict[int, bytes]:
        return {1: np.full(primitives.WORDS, value, dtype="<u4").tobytes()}

    assert primitives.combine(one_share(0xFFFF)) == b"\xff" * 32
    assert primitives.combine(one_share(0x10000)) is None
    assert primitives.combine(one_share(primitives.PRIME - 1)) is None


def test_more_shares_than_parties_are_refused() -> None:
    with pytest.raises(ValueError, match="parties must be an integer >= 3, got 2"):
        primitives.split(SEED, 3, 2)


class Scripted:
    """In the place of SecureRandom: the one number that is not in the field, twice, then others."""

    draws: ClassVar[list[int]]

    def words(self, count: int) -> np.ndarray:
        taken, Scripted.draws = self.draws[:count], self.draws[count:]
        return np.array(taken, dtype=np.uint64)


def test_numbers_outside_the_field_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    top = 1 << 40  # above the 31 bits that count
    Scripted.draws = [primitives.PRIME + top, *range(2, 2 + primitives.WORDS - 1), primitives.PRIME, top + 5]
    monkeypatch.setattr(primitives, "SecureRandom", Scripted)
    assert primitives._field_elements(1).tolist() == [[5, *range(2, 2 + primitives.WORDS - 1)]]
    assert Scripted.draws == []


def test_what_is_hashed_and_signed_has_its_own_name() -> None:
    """A party with other code would be refused anyway; two kinds of text must never be taken for each other."""
    assert keys.commitment_to(SEED) == hashlib.sha256(b"lacquer secagg 1 seed" + SEED).digest()
    identity = keys.fresh_identity()
    said = keys.announce(identity, SESSION, 3, b"s" * 32, b"m" * 32, SEED)
    text = b"lacquer secagg 1 keys" + SESSION + b"\0\0\0\3" + b"s" * 32 + b"m" * 32 + said.commitment
    Ed25519PrivateKey.from_private_bytes(identity).public_key().verify(said.signature, text)


def test_a_party_finds_everything_again_that_it_kept() -> None:
    said = keys.announce(keys.fresh_identity(), SESSION, 1, b"s" * 32, b"m" * 32, SEED)
    state = PartyState("keys", 1, SESSION, b"c" * 32, b"p" * 32, b"q" * 32, SEED, b"o" * 64)
    for kept in (state, replace(state, step="unmask", peers={1: said}, sealed={0: b"box", 2: b""}, survivors=(0, 1))):
        assert PartyState.from_text(kept.to_text()) == kept


def test_a_file_that_is_no_text_holds_no_identity(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(b"\xff" * 64)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="holds no identity; it must be 64 hexadecimal digits"):
        load_identity(path)
