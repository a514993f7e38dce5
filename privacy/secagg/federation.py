"""The federation's public list: who may take part, and on what terms. Every party has it before a run begins.

A server that could write this list could fill it with parties of its own, so in a deployment it reaches the parties by
another way than through the server.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from privacy import checks, durable
from privacy.commitment import WEAKEST_NOISE_MULTIPLIER, Commitment
from privacy.events import NoiseShares
from privacy.secagg import keys

_FORMAT: Final = 2  # 1 had no commitment: nobody but the server counted


@dataclass(frozen=True)
class Federation:
    """Public identities and terms.

    Attributes:
        members: public Ed25519 identity of every party, by its number.
        commitment: what all runs of the federation may cost together, and how its parties make the noise. Every party
            keeps a ledger of it and hands in nothing beyond.
        least_noise_multiplier: no party takes part in a release with less (effective) noise than this.
    """

    members: tuple[bytes, ...]
    commitment: Commitment
    least_noise_multiplier: float = WEAKEST_NOISE_MULTIPLIER

    def __post_init__(self) -> None:
        if self.commitment.noise_shares is None:
            raise ValueError("commitment must say how the parties share the noise (noise_shares), got None")
        checks.positive(least_noise_multiplier=self.least_noise_multiplier)
        if len(self.members) != self.noise_shares.parties:
            raise ValueError(f"members must be {self.noise_shares.parties}, as agreed, got {len(self.members)}")
        if len(set(self.members)) < len(self.members) or any(len(one) != keys.KEY_BYTES for one in self.members):
            raise ValueError("members must be distinct public keys of 32 bytes; nobody may stand on the list twice")

    @property
    def noise_shares(self) -> NoiseShares:
        """The way in which the parties make the noise."""
        assert self.commitment.noise_shares is not None
        return self.commitment.noise_shares

    @property
    def digest(self) -> bytes:
        """SHA-256 of the list; it enters every session, so parties with different lists cannot meet."""
        return hashlib.sha256(self.to_text().encode()).digest()

    def session(self, run: str, label: str, round: int, attempt: int, content: bytes) -> bytes:
        """The name of one round, which every key and signature of it is bound to.

        Args:
            run: identifier of the run.
            label, round, attempt: of the release, and how often it was tried before.
            content: digest of what the parties are asked to compute, the same for all of them.
        """
        name = json.dumps([self.digest.hex(), run, label, int(round), int(attempt), content.hex()])
        return hashlib.sha256(name.encode()).digest()

    def to_text(self) -> str:
        """The list as canonical JSON."""
        terms = {
            "format": _FORMAT,
            "members": [one.hex() for one in self.members],
            "commitment": self.commitment.to_json(),
            "least_noise_multiplier": float(self.least_noise_multiplier),
        }
        return json.dumps(terms, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_text(cls, text: str) -> "Federation":
        """Read a federation from the text of :meth:`to_text`; ValueError for anything else."""
        try:
            terms: Mapping[str, Any] = json.loads(text)
            if terms["format"] != _FORMAT:
                raise ValueError(
                    f"format must be {_FORMAT}, got {terms['format']!r}; a list of format 1 commits to no budget: make "
                    "the list anew with `lacquer federation`, under an epsilon and a delta"
                )
            members = tuple(bytes.fromhex(one) for one in terms["members"])
            commitment = Commitment.from_json(terms["commitment"])
            return cls(members, commitment, float(terms["least_noise_multiplier"]))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"this is no list of a federation ({type(error).__name__}: {error})") from error


def save_identity(path: Path, identity: bytes) -> None:
    """Write a private identity to a new file that only its owner can read; FileExistsError if there is one."""
    durable.write(path, identity.hex() + "\n", mode=0o600, new=True)


def load_identity(path: Path) -> bytes:
    """A private identity from its file; ValueError if others may read it, or if it holds none."""
    if path.stat().st_mode & 0o077:
        raise ValueError(f"mode of {path} must give no right to group or others; chmod 600 it, or make a new identity")
    text = path.read_text(encoding="ascii", errors="replace").strip()
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise ValueError(f"{path} holds no identity; it must be 64 hexadecimal digits")
    return bytes.fromhex(text)
