"""Messages between a server and sites that protect their own records: an adapter down, a private update up.

With public texts in the request the update is as many numbers as there are texts, see
:mod:`client.record_level.public_subspace`.

The update is private when it leaves the site, so unlike a client's contribution it is sent as it is.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from client.data.records import Records
from client.record_level.settings import RecordLevelSettings
from strategies.messages.client_update import code_fingerprint
from strategies.messages.records import (
    BadMessage,
    arrays_of,
    config_of,
    exactly,
    model_arrays,
    read_setting,
    residual_of,
    vector,
)

ACTION = "site"
"""Of Flower's message type: ``train.site``."""


@dataclass(frozen=True)
class SiteRequest:
    """Server to site: take so many private steps from this adapter.

    Attributes:
        round: of the run, 1..T.
        adapter: float32 ``[size]``, the full adapter vector.
        steps: private steps to take, at most.
        client: number of the site in a simulation's data.
        site: the settings its ledger is committed to; the same in every round.
        state: where a simulation keeps the sites' ledgers; a deployed site has a folder of its own.
        residual: float32, what the base's weights are moved by, see :mod:`strategies.adapter.residual`; None: nothing.
        texts: public ones, in coefficients of whose gradients the one step is to be released; None: as an update.
    """

    round: int
    adapter: np.ndarray
    steps: int
    client: int
    site: RecordLevelSettings
    job: str
    state: str
    residual: np.ndarray | None = None
    texts: Records | None = None

    def to_records(self) -> RecordDict:
        config: dict[str, Any] = {
            "round": self.round,
            "steps": self.steps,
            "client": self.client,
            "site": self.site.to_json(),
            "job": self.job,
            "state": self.state,
        }
        arrays = model_arrays(self.adapter, self.residual)
        if self.texts is not None:
            arrays["tokens"] = Array(self.texts.tokens.astype(np.int32))
            arrays["offsets"] = Array(self.texts.offsets.astype(np.int64))
        return RecordDict({"arrays": ArrayRecord(arrays), "config": ConfigRecord(config)})

    @staticmethod
    def from_records(records: RecordDict) -> "SiteRequest":
        """Read a request from Flower's records; BadMessage for anything else."""
        config = config_of(records)
        try:
            site = RecordLevelSettings.from_json(read_setting(config, "site", str))
        except ValueError as error:
            raise BadMessage(f"site cannot be read: {error}") from None
        numbers = {name: read_setting(config, name, int) for name in ("round", "steps", "client")}
        if min(numbers.values()) < 0 or numbers["steps"] < 1:
            raise BadMessage("round and client must be >= 0 and steps >= 1")
        texts = _texts_of(records)
        if texts is not None and numbers["steps"] != 1:
            raise BadMessage("coefficients are of one step: steps must be 1")
        adapter = vector(records, "adapter", "float32")
        return SiteRequest(
            **numbers,
            adapter=adapter,
            site=site,
            job=read_setting(config, "job", str),
            state=read_setting(config, "state", str),
            residual=residual_of(records),
            texts=texts,
        )


def _texts_of(records: RecordDict) -> Records | None:
    """The public texts of a request, each with a token at least."""
    if "tokens" not in arrays_of(records):
        return None
    tokens, offsets = vector(records, "tokens", "int32"), vector(records, "offsets", "int64")
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(tokens) or int(np.diff(offsets).min()) < 1:
        raise BadMessage("offsets must rise from 0 to the number of tokens, one text after the other")
    return Records(tokens, offsets)


@dataclass(frozen=True)
class SiteReply:
    """The reply of a site to the server. Everything in it is released by the site's mechanism, or public.

    Attributes:
        round: answered.
        update: float32 ``[size]``, the adapter after the steps minus that before; or, of a request with n texts, the
            released coefficients ``[n]``, divided by the expected batch; empty if no step was taken.
        refused: why the site took none, or fewer than asked; empty if it took all.
        epsilon: guaranteed for the site's whole commitment; infinite if it is not private.
        noise_multiplier: effective, of its first step.
    """

    round: int
    update: np.ndarray
    steps: int
    refused: str
    epsilon: float
    population: int
    noise_multiplier: float = 0.0

    def to_records(self) -> RecordDict:
        config: dict[str, Any] = {
            "round": self.round,
            "steps": self.steps,
            "refused": self.refused,
            "epsilon": self.epsilon,
            "population": self.population,
            "noise-multiplier": self.noise_multiplier,
            "code": code_fingerprint(),
        }
        arrays = ArrayRecord({"update": Array(self.update.astype(np.float32))})
        return RecordDict({"arrays": arrays, "config": ConfigRecord(config)})

    @staticmethod
    def from_records(records: RecordDict, round: int, size: int, steps: int) -> "SiteReply":
        """Read a reply and check it against what was asked; BadMessage in words that repeat nothing of the sender's but
        its refusal.

        Args:
            size: of an update.
        """
        config = config_of(records)
        if read_setting(config, "round", int) != round:
            raise BadMessage(f"reply is for another round, this is round {round}")
        if read_setting(config, "code", str) != code_fingerprint():
            raise BadMessage("site runs other code than the server")
        taken, refused = read_setting(config, "steps", int), read_setting(config, "refused", str)
        if not 0 <= taken <= steps or (taken == 0 and not refused) or len(refused) > 1000:
            raise BadMessage("steps must lie between 0 and what was asked, and a site that takes none must say why")
        if len(arrays_of(records)) != 1 or len(config) != 7:
            raise BadMessage("reply must hold one update and seven settings")
        exactly(records, "arrays", "config")
        update = vector(records, "update", "float32", (size if taken else 0,))
        if not bool(np.isfinite(update).all()):
            raise BadMessage("update must be finite")
        epsilon, population = read_setting(config, "epsilon", float), read_setting(config, "population", int)
        noise = read_setting(config, "noise-multiplier", float)
        return SiteReply(round, update, taken, refused, epsilon, population, noise)
