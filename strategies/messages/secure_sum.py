"""Messages of a secure sum between server and parties, and the only place that knows their form as Flower records.

Every step is a message type of its own (:data:`STEPS`). What parties tell each other is a table: bytes of one width, by
the party's number. The third step carries a :class:`strategies.messages.client_update.TrainRequest` beside its table.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from jaxtyping import UInt8

from strategies.messages.client_update import code_fingerprint
from strategies.messages.records import BadMessage, arrays_of, config_of, exactly, read_setting, vector

STEPS: Final = ("secagg_keys", "secagg_shares", "secagg_masked", "secagg_confirm", "secagg_reveal")
"""Names of the steps; the message type is ``train.NAME``."""

_OWN_OF_A_PARTY: Final = ("clients", "ranks")


@dataclass(frozen=True)
class KeysRequest:
    """Server to party: a round begins.

    Attributes:
        run, label, round, attempt: what names the round, see :meth:`privacy.secagg.federation.Federation.session`.
        content: digest of what will be computed, see :func:`content_digest`.
        party: who the party is; a party with an identity of its own knows better.
        source: folder of identities and list (simulation); "" where every party has its own.
    """

    run: str
    label: str
    round: int
    attempt: int
    content: bytes
    party: int
    source: str = ""

    def to_records(self) -> RecordDict:
        header = ConfigRecord(
            {
                "run": self.run,
                "label": self.label,
                "round": self.round,
                "attempt": self.attempt,
                "content": self.content.hex(),
                "party": self.party,
                "source": self.source,
            }
        )
        return RecordDict({"header": header})

    @staticmethod
    def from_records(records: RecordDict) -> "KeysRequest":
        header = _header(records)
        texts = {name: read_setting(header, name, str) for name in ("run", "label", "source")}
        numbers = {name: read_setting(header, name, int) for name in ("round", "attempt", "party")}
        return KeysRequest(content=_digest(header, "content"), **texts, **numbers)


@dataclass(frozen=True)
class StepRequest:
    """Server to party: what the others said in the step before.

    Attributes:
        session: of the round.
        party, source: as in :class:`KeysRequest`.
        table: bytes by party; announcements, sealed shares, survivors (no bytes) or signatures.
    """

    session: bytes
    party: int
    table: Mapping[int, bytes]
    source: str = ""

    def to_records(self, train: RecordDict | None = None) -> RecordDict:
        """``train`` is the work of the third step."""
        records = RecordDict() if train is None else train
        records["step"] = ArrayRecord(_table_arrays(self.table))
        records["header"] = ConfigRecord({"session": self.session.hex(), "party": self.party, "source": self.source})
        return records

    @staticmethod
    def from_records(records: RecordDict, width: int) -> "StepRequest":
        header = _header(records)
        step = records.array_records.get("step")
        if step is None:
            raise BadMessage("message has no record 'step'")
        table = _table(RecordDict({"arrays": step}), width)
        return StepRequest(
            _digest(header, "session"), read_setting(header, "party", int), table, read_setting(header, "source", str)
        )


def content_digest(train: RecordDict, noise: str) -> bytes:
    """SHA-256 of what all parties of a round must be asked alike: model, plan, work, kind of noise.

    What differs from party to party by right (who trains, and how many ranks it can) does not enter.
    """
    digest = hashlib.sha256(f"lacquer content 1 {noise}".encode())
    for name, array in sorted(arrays_of(train).items()):
        if name not in _OWN_OF_A_PARTY:
            head = json.dumps([name, array.dtype, list(array.shape), array.stype, len(array.data)])
            digest.update(head.encode() + array.data)
    config = config_of(train)
    digest.update(json.dumps([[name, config[name]] for name in sorted(config)], sort_keys=True).encode())
    return digest.digest()


def table_records(table: Mapping[int, bytes]) -> RecordDict:
    """Party to server: bytes of one width by party."""
    return _reply(_table_arrays(table))


def read_table(records: RecordDict, width: int, most: int) -> dict[int, bytes]:
    """A party's table of at most ``most`` lines. BadMessage otherwise."""
    _check_reply(records, "parties", "table")
    if int(arrays_of(records)["parties"].shape[0]) > most:
        raise BadMessage("table must not have more lines than there are parties")
    return _table(records, width)


def masked_records(masked: UInt8[np.ndarray, " bytes"]) -> RecordDict:
    """Party to server: its masked vector."""
    return _reply({"masked": Array(masked)})


def read_masked(records: RecordDict, size: int) -> UInt8[np.ndarray, " bytes"]:
    """A masked vector of ``size`` bytes. BadMessage otherwise."""
    _check_reply(records, "masked")
    return vector(records, "masked", "uint8", (size,))


def _reply(arrays: dict[str, Array]) -> RecordDict:
    return RecordDict({"arrays": ArrayRecord(arrays), "config": ConfigRecord({"code": code_fingerprint()})})


def _check_reply(records: RecordDict, *names: str) -> None:
    config = config_of(records)
    if read_setting(config, "code", str) != code_fingerprint():
        raise BadMessage(f"client runs other code than the server ({code_fingerprint()[:12]})")
    if len(config) != 1:
        raise BadMessage("config must hold code and no others")
    if len(arrays_of(records)) != len(names) or set(arrays_of(records)) != set(names):
        raise BadMessage(f"reply must hold the arrays {sorted(names)} and no others")
    exactly(records, "arrays", "config")


def _table_arrays(table: Mapping[int, bytes]) -> dict[str, Array]:
    parties = sorted(table)
    data = b"".join(table[party] for party in parties)
    return {
        "parties": Array(np.array(parties, dtype=np.int64)),
        "table": Array(np.frombuffer(data, dtype=np.uint8)),
    }


def _table(records: RecordDict, width: int) -> dict[int, bytes]:
    parties = vector(records, "parties", "int64")
    if len(parties) and (not bool(np.all(np.diff(parties) > 0)) or int(parties[0]) < 0 or int(parties[-1]) >= 1 << 31):
        raise BadMessage("parties must be listed once each, in increasing order")
    data = vector(records, "table", "uint8", (len(parties) * width,)).tobytes()
    return {int(party): data[i * width : (i + 1) * width] for i, party in enumerate(parties)}


def _header(records: RecordDict) -> ConfigRecord:
    header = records.config_records.get("header")
    if header is None:
        raise BadMessage("message has no record 'header'")
    return header


def _digest(header: ConfigRecord, name: str) -> bytes:
    text = read_setting(header, name, str)
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise BadMessage(f"{name} must be 64 hexadecimal digits")
    return digest
