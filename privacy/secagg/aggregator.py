"""The server of a secure sum: collects, checks, passes on, and opens the sum of those who got through.

It learns the public keys, who was there at which step, masked vectors, and in the end the seeds of the survivors' own
masks and the masking keys of those who dropped out in between: what it takes to open one sum. Whatever a party sends is
checked here and refused by :class:`BadPart`, in words that repeat nothing of it; a party refused has dropped out.
"""

from collections.abc import Callable, Container, Mapping

import numpy as np
from jaxtyping import Int64, UInt8

from privacy.secagg import keys, primitives
from privacy.secagg.federation import Federation
from privacy.secagg.keys import Announcement
from privacy.secagg.party import SEALED_BYTES


class BadPart(ValueError):
    """A party sent something that an honest one would not have."""


class NotOpened(RuntimeError):
    """The masks could not be taken off: too few good shares."""


class Aggregator:
    """The server's side of one round.

    The ``add_`` methods take one reply each; a step is over when the caller begins the next.

    Args:
        federation: list and terms.
        session: of the round.
        length: number of values of a vector.
    """

    def __init__(self, federation: Federation, session: bytes, length: int) -> None:
        self.federation = federation
        self.session = session
        self.length = length
        self.announcements: dict[int, Announcement] = {}
        self.signatures: dict[int, bytes] = {}
        self._sealed: dict[int, Mapping[int, bytes]] = {}
        self._total = np.zeros(length, dtype=np.uint32)
        self._survivors: set[int] = set()
        self._revealed: dict[int, Mapping[int, bytes]] = {}

    @property
    def sharers(self) -> list[int]:
        """The parties that shared their keys: they may hand in a vector."""
        return sorted(self._sealed)

    @property
    def survivors(self) -> list[int]:
        """The parties whose vectors are in the sum."""
        return sorted(self._survivors)

    @property
    def revealers(self) -> list[int]:
        """The parties that revealed their shares."""
        return sorted(self._revealed)

    def add_announcement(self, party: int, data: bytes) -> None:
        """Step 1: keys, signed by the identity of that number."""
        self._once(party, self.announcements, range(len(self.federation.members)))
        if len(data) != keys.ANNOUNCEMENT_BYTES:
            raise BadPart("an announcement has another length")
        announcement = Announcement.from_bytes(party, data)
        if not keys.is_announced(announcement, self.session, self.federation.members[party]):
            raise BadPart("an announcement is not signed by the member it came from, or for another session")
        probe, _ = keys.fresh_key()
        for public in (announcement.sealing_key, announcement.masking_key):
            if keys.pair_key(probe, public, self.session, 0, 1) is None:
                raise BadPart("an announcement holds no usable key")
        self.announcements[party] = announcement

    def add_sealed(self, party: int, sealed: Mapping[int, bytes]) -> None:
        """Step 2: one sealed pair of shares for every other party."""
        self._once(party, self._sealed, self.announcements)
        if set(sealed) != set(self.announcements) - {party}:
            raise BadPart("shares must be for every other party")
        if any(len(box) != SEALED_BYTES for box in sealed.values()):
            raise BadPart("sealed shares have another length")
        self._sealed[party] = dict(sealed)

    def sealed_for(self, party: int) -> dict[int, bytes]:
        """The boxes that the others sealed for a party, by sender."""
        return {sender: boxes[party] for sender, boxes in sorted(self._sealed.items()) if sender != party}

    def add_masked(self, party: int, data: UInt8[np.ndarray, " bytes"]) -> None:
        """Step 3: a masked vector; it is added and let go."""
        self._once(party, self._survivors, self._sealed)
        bits = self.federation.noise_shares.modulus_bits
        if data.dtype != np.uint8 or data.shape != (self.length * bits // 8,):
            raise BadPart("a masked vector has another length")
        np.add(self._total, primitives.unpack_values(data, bits), out=self._total)
        self._survivors.add(party)

    def add_signature(self, party: int, signature: bytes) -> None:
        """Step 4: a survivor's word for the list of survivors."""
        self._once(party, self.signatures, self._survivors)
        if not keys.survivors_signed(signature, self.session, self.survivors, self.federation.members[party]):
            raise BadPart("a signature of the survivors is not the member's")
        self.signatures[party] = signature

    def add_revealed(self, party: int, shares: Mapping[int, bytes]) -> None:
        """Step 5: one share of every party that shared its keys; some may be missing."""
        self._once(party, self._revealed, self.signatures)
        if not set(shares) <= set(self._sealed):
            raise BadPart("shares must be of parties of this round")
        if any(len(one) != primitives.SHARE_BYTES for one in shares.values()):
            raise BadPart("a revealed share has another length")
        self._revealed[party] = dict(shares)

    def open_sum(self) -> Int64[np.ndarray, " length"]:
        """The sum of the survivors' vectors, as integers in [-2^(b-1), 2^(b-1)).

        Raises:
            NotOpened: a secret cannot be put together from what was revealed.
        """
        total = self._total.copy()
        for party in self.survivors:
            seed = self._secret(party, keys.commitment_to, self.announcements[party].commitment)
            total -= primitives.mask(seed, self.length)
        for party in set(self._sealed) - self._survivors:
            private = self._secret(party, keys.public_key, self.announcements[party].masking_key)
            for other in self.survivors:
                key = keys.pair_key(private, self.announcements[other].masking_key, self.session, other, party)
                assert key is not None, "checked when it was announced"
                pairwise = primitives.mask(key, self.length)
                total = total - pairwise if other < party else total + pairwise
        return primitives.centre_values(total, self.federation.noise_shares.modulus_bits)

    def _secret(self, party: int, known_by: Callable[[bytes], bytes], public: bytes) -> bytes:
        """A secret of a party, of which ``known_by`` gives what it announced, from any t of its shares that do."""
        held = {holder + 1: shares[party] for holder, shares in self._revealed.items() if party in shares}
        points, threshold = sorted(held), self.federation.noise_shares.threshold
        # Some may have sent a wrong share: every run of t holders around the circle is tried before giving up.
        for start in range(len(points) if len(points) > threshold else int(len(points) == threshold)):
            chosen = [points[(start + i) % len(points)] for i in range(threshold)]
            secret = primitives.combine({point: held[point] for point in chosen})
            if secret is not None and known_by(secret) == public:
                return secret
        raise NotOpened("the shares that were revealed do not give a party's secret back")

    @staticmethod
    def _once(party: int, done: Container[int], allowed: Container[int]) -> None:
        if party not in allowed:
            raise BadPart("this party did not take the step before")
        if party in done:
            raise BadPart("this party took the step already")
