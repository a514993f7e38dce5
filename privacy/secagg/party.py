"""One party of a secure sum: five steps, each taken once, each only if what the server says can be true.

A step takes the state that the step before left and returns the next one. Nothing of a state but what the steps return
may leave the party. Who is refused learns the reason, which holds nothing of the party's own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Int64, UInt8

from privacy.randomness.rng import SecureRandom
from privacy.secagg import keys, primitives
from privacy.secagg.federation import Federation
from privacy.secagg.keys import Announcement

SEALED_BYTES = 2 * primitives.SHARE_BYTES + 16
"""Two shares and the tag of the cipher."""


class Refused(ValueError):
    """The server's request cannot be part of an honest round; the party stops."""


@dataclass(frozen=True, repr=False)
class PartyState:
    """The memory of a party between the steps of a round. Secret.

    Attributes:
        step: the step that was done last.
        party: its number.
        session, content: what the round is called, and the digest of what it computes.
        sealing_private, masking_private, seed: its secrets of this round.
        own: its share of its own seed.
        peers: announcements of everyone in the round, itself included, by number.
        sealed: shares sealed for it by others, by sender.
        survivors: the list it signed.
    """

    step: str
    party: int
    session: bytes
    content: bytes
    sealing_private: bytes
    masking_private: bytes
    seed: bytes
    own: bytes = b""
    peers: Mapping[int, Announcement] = field(default_factory=dict)
    sealed: Mapping[int, bytes] = field(default_factory=dict)
    survivors: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"PartyState(secrets withheld, after {self.step})"

    def to_text(self) -> str:
        """JSON, to be kept by the party itself from message to message."""
        plain = {
            name: getattr(self, name).hex()
            for name in ("session", "content", "sealing_private", "masking_private", "seed", "own")
        }
        return json.dumps(
            plain
            | {
                "step": self.step,
                "party": self.party,
                "peers": {number: one.to_bytes().hex() for number, one in self.peers.items()},
                "sealed": {number: text.hex() for number, text in self.sealed.items()},
                "survivors": list(self.survivors),
            }
        )

    @classmethod
    def from_text(cls, text: str) -> "PartyState":
        data = json.loads(text)
        return cls(
            step=data["step"],
            party=data["party"],
            peers={int(n): Announcement.from_bytes(int(n), bytes.fromhex(one)) for n, one in data["peers"].items()},
            sealed={int(n): bytes.fromhex(one) for n, one in data["sealed"].items()},
            survivors=tuple(data["survivors"]),
            **{
                name: bytes.fromhex(data[name])
                for name in ("session", "content", "sealing_private", "masking_private", "seed", "own")
            },
        )


def begin(
    identity: bytes, federation: Federation, party: int, session: bytes, content: bytes
) -> tuple[PartyState, Announcement]:
    """Step 1: keys of this round, and a seed, announced under the party's identity."""
    if not 0 <= party < len(federation.members) or keys.public_identity(identity) != federation.members[party]:
        raise Refused("this party is not who the server takes it for; its identity is not that of the number given")
    sealing_private, sealing_public = keys.fresh_key()
    masking_private, masking_public = keys.fresh_key()
    seed = SecureRandom().bytes(primitives.KEY_BYTES)
    announcement = keys.announce(identity, session, party, sealing_public, masking_public, seed)
    return PartyState("keys", party, session, content, sealing_private, masking_private, seed), announcement


def share(
    state: PartyState, federation: Federation, announcements: Sequence[Announcement]
) -> tuple[PartyState, dict[int, bytes]]:
    """Step 2: shares of its masking key and of its seed, sealed for every other party, by receiver."""
    _after("keys", state)
    peers = {one.party: one for one in announcements}
    if len(peers) < len(announcements) or not all(0 <= number < len(federation.members) for number in peers):
        raise Refused("announcements must be of distinct members of the federation")
    if len(peers) < federation.noise_shares.survivors:
        raise Refused("fewer parties take part than were agreed at least")
    own = peers.get(state.party)
    if (
        own is None
        or own.masking_key != keys.public_key(state.masking_private)
        or own.commitment != keys.commitment_to(state.seed)
    ):
        raise Refused("the party's own announcement is missing or changed")
    for number, one in peers.items():
        if not keys.is_announced(one, state.session, federation.members[number]):
            raise Refused("an announcement is not signed by the member it names, or for another session")
    shares, count = federation.noise_shares, federation.noise_shares.parties
    key_shares = primitives.split(state.masking_private, shares.threshold, count)
    seed_shares = primitives.split(state.seed, shares.threshold, count)
    sealed = {}
    for number, one in peers.items():
        if number != state.party:
            text = key_shares[number] + seed_shares[number]
            box = keys.seal(state.sealing_private, one.sealing_key, state.session, state.party, number, text)
            if box is None:
                raise Refused("an announcement holds no usable key")
            sealed[number] = box
    return replace(state, step="shares", peers=peers, own=seed_shares[state.party]), sealed


def accept(state: PartyState, federation: Federation, content: bytes, sealed: Mapping[int, bytes]) -> PartyState:
    """Step 3, before any work: is this the content that everyone signed for, and are enough parties left?

    ``sealed`` is what others sealed for this party; those whose shares are not there have dropped out.
    """
    _after("shares", state)
    if content != state.content:
        raise Refused("the server asks for another computation than the one everybody announced")
    if state.party in sealed or not set(sealed) <= set(state.peers):
        raise Refused("shares must come from the other parties of this round")
    if any(len(box) != SEALED_BYTES for box in sealed.values()):
        raise Refused("sealed shares must have their one length")
    if len(sealed) + 1 < federation.noise_shares.survivors:
        raise Refused("fewer parties are left than were agreed at least")
    return replace(state, step="accepted", sealed=dict(sealed))


def mask_vector(
    state: PartyState, federation: Federation, vector: Int64[np.ndarray, " n"]
) -> tuple[PartyState, UInt8[np.ndarray, " bytes"]]:
    """Step 3: the party's vector, noise included, under its own mask and one for every other party, packed."""
    _after("accepted", state)
    total = primitives.to_ring(vector) + primitives.mask(state.seed, len(vector))
    for number in state.sealed:
        key = keys.pair_key(state.masking_private, state.peers[number].masking_key, state.session, state.party, number)
        if key is None:
            raise Refused("an announcement holds no usable key")
        pairwise = primitives.mask(key, len(vector))
        total = total + pairwise if state.party < number else total - pairwise
    return replace(state, step="masked"), primitives.pack_values(total, federation.noise_shares.modulus_bits)


def confirm(
    state: PartyState, federation: Federation, identity: bytes, survivors: Sequence[int]
) -> tuple[PartyState, bytes]:
    """Step 4: sign the list of those whose vectors will be summed, if there are enough of them."""
    _after("masked", state)
    known = {state.party, *state.sealed}
    if list(survivors) != sorted(set(survivors)) or not set(survivors) <= known or state.party not in survivors:
        raise Refused("survivors must be parties of this round, in order, this one among them")
    if len(survivors) < federation.noise_shares.survivors:
        raise Refused("fewer parties are left than were agreed at least; their sum has too little noise")
    signature = keys.sign_survivors(identity, state.session, list(survivors))
    return replace(state, step="consistency", survivors=tuple(survivors)), signature


def reveal(state: PartyState, federation: Federation, signatures: Mapping[int, bytes]) -> dict[int, bytes]:
    """Step 5: one share of every party: of its seed if it is a survivor, else of its masking key. Ends the round.

    Whoever sealed something unreadable is left out; never both shares of one party.
    """
    _after("consistency", state)
    listed = list(state.survivors)
    if not set(signatures) <= set(listed):
        raise Refused("signatures must be of survivors")
    good = [
        keys.survivors_signed(signature, state.session, listed, federation.members[number])
        for number, signature in signatures.items()
    ]
    if sum(good) < federation.noise_shares.threshold:
        raise Refused("too few parties confirm that they were told the same list of survivors")
    revealed = {state.party: state.own}
    for number, box in state.sealed.items():
        text = keys.unseal(
            state.sealing_private, state.peers[number].sealing_key, state.session, number, state.party, box
        )
        if text is not None:
            key_share, seed_share = text[: primitives.SHARE_BYTES], text[primitives.SHARE_BYTES :]
            revealed[number] = seed_share if number in state.survivors else key_share
    return revealed


def _after(step: str, state: PartyState) -> None:
    if state.step != step:
        raise Refused(f"this step follows {step!r}, the party's last one was {state.step!r}; each is taken once")
