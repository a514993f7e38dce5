"""The configuration of a run: its tables; what they must not say together is :mod:`server.config.rules`.

The tables are those of the TOML form; keys are kebab-case. Reading them from files and flat mappings, and saying what
is wrong with them, is :mod:`server.config.load`.
"""

import math
from typing import Annotated, Any

import tomli_w
from pydantic import Field, model_validator

from client.data.spec import NOTES, DataSettings
from client.engine.local_training import LocalTraining
from client.record_level.settings import MethodSettings
from client.settings import Count, CountOrAuto, Rate, Table
from privacy.events import NoiseShares
from server.config.rules import broken_rules
from server.config.tables import Audit, Engine, Evaluation, Model, Privacy, Public, Simulation, Site


class RunConfig(Table):
    """All settings that decide a run.

    Attributes:
        name: name of the run, of its folder and of its report.
        rounds: number of training rounds; of a single site, its private steps.
        clients: number of clients; 0 takes as many as ``data.client-column`` names, as does no number where
            ``data.partition`` is ``natural`` and the records are in a file.
        sampling_rate: probability with which each client takes part in a round.
        seed: seed of everything random except the noise and the cohorts.
        output: folder in which run folders are made.
    """

    name: str = "run"
    rounds: Count = 40
    clients: CountOrAuto = 1000
    sampling_rate: Rate = 0.05
    seed: Annotated[int, Field(ge=0)] = 0
    output: str = "runs"
    privacy: Privacy = Privacy()
    strategy: MethodSettings = MethodSettings()
    model: Model = Model()
    data: DataSettings = DataSettings()
    public: Public = Public()
    local: LocalTraining = LocalTraining()
    site: Site = Site()
    engine: Engine = Engine()
    simulation: Simulation = Simulation()
    evaluation: Evaluation = Evaluation()
    audit: Audit = Audit()

    @model_validator(mode="before")
    @classmethod
    def _as_many_as_are_named(cls, values: Any) -> Any:
        """Set ``clients`` to 0, to be counted later, where a column of a file says whose records are.

        The default of 1,000 says nothing about such clients.
        """
        data = values.get("data") if isinstance(values, dict) else None
        if data is None or "clients" in values:
            return values
        table = data if isinstance(data, dict) else data.model_dump()
        natural = table.get("partition") == "natural" and table.get("source", NOTES) != NOTES
        held = table.get("held_by", table.get("held-by", "server")) == "server"
        return {**values, "clients": 0} if natural and held else values

    @model_validator(mode="after")
    def _sensible(self) -> "RunConfig":
        if not self.clients:
            return self._counted_later()
        if wrong := broken_rules(self):
            raise ValueError("\n".join(wrong))
        return self

    def _counted_later(self) -> "RunConfig":
        """Accept ``clients = 0``; what depends on their number is checked once they are counted.

        Raises:
            ValueError: nothing would count them.
        """
        if self.data.partition != "natural" or self.data.source == "notes" or self.is_deployed:
            raise ValueError(
                "clients = 0 takes as many as data.client-column names; it needs data.partition = 'natural' and "
                "records in a file or on the hub"
            )
        return self

    @property
    def noise_shares(self) -> NoiseShares | None:
        """The shares in which the clients make the noise together; None if the server adds it.

        Raises:
            ValueError: more clients may collude than the number of survivors allows.
        """
        if self.privacy.trust == "server":
            return None
        asked, count = self.privacy.secagg, self.clients
        least = (count + asked.colluding) // 2 + 1
        survivors = asked.min_survivors or min(count, max(math.ceil(0.8 * count), least, asked.colluding + 2))
        most = min(survivors - 2, 2 * survivors - count - 1)  # two honest ones left, and enough of them to open a sum
        if 0 <= most < asked.colluding:
            raise ValueError(
                f"colluding = {asked.colluding} is too large for {count} clients of which {survivors} must be left; "
                f"it may be at most {most}"
            )
        return NoiseShares(count, survivors, asked.colluding, asked.modulus_bits)

    @property
    def starts_public(self) -> bool:
        """Whether public records alone make the adapter before round 1."""
        return self.public.warm_start_epochs > 0 and not self.model.adapter

    @property
    def nodes(self) -> int:
        """The number of nodes in a deployment."""
        return self.data.nodes or self.clients

    @property
    def is_deployed(self) -> bool:
        """Whether clients are nodes with records of their own."""
        return self.data.held_by == "nodes"

    @property
    def is_single_site(self) -> bool:
        """Whether this is a run of one site that trains by itself and protects its records."""
        return self.privacy.unit != "client" and self.clients == 1

    @property
    def several_sites(self) -> bool:
        """Whether several sites train, each of which protects its own records."""
        return self.privacy.unit != "client" and self.clients > 1

    @property
    def members_text(self) -> str:
        """The parties that take part, in words: "1,000 clients", or sites and what each protects."""
        if self.privacy.unit == "client":
            return f"{self.clients:,} clients"
        protected = f"{self.unit.removeprefix('group:')}s protected"
        return f"one site, {protected}" if self.is_single_site else f"{self.clients:,} sites, {protected} in each"

    @property
    def units_text(self) -> str:
        """The plural of what a cohort is made of: clients, sites, or what one site's batch draws."""
        if self.privacy.unit == "client":
            return "clients"
        if self.is_single_site and self.site.sampling_level == "example":
            return "records"
        return f"{self.unit.removeprefix('group:')}s" if self.is_single_site else "sites"

    @property
    def unit(self) -> str:
        """The unit of privacy as the ledger names it."""
        if self.privacy.unit == "group":
            return f"group:{self.data.unit_column or 'patient'}"
        return self.privacy.unit

    @property
    def expected_cohort(self) -> float:
        """The expected number of clients in a round: sampling rate times clients, without those held out."""
        trained = 1.0 - self.evaluation.held_out if self.evaluation.data == "private" else 1.0
        return self.sampling_rate * self.clients * trained

    def to_table(self) -> dict[str, Any]:
        """The configuration as nested tables with kebab-case keys, as TOML holds it."""
        return self.model_dump(by_alias=True)

    def to_toml(self) -> str:
        """The resolved configuration as TOML text; parsing it gives an equal configuration."""
        return tomli_w.dumps(self.to_table())
