"""The configuration of a run: its tables, and what they must not say together.

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
from privacy.events import MOST_RECORDS_PER_UNIT, NoiseShares
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
        wrong = []
        if not self.clients:
            return self._counted_later()
        if self.privacy.delta >= 1 / self.clients and not self.privacy.non_private:
            wrong.append(
                f"privacy.delta = {self.privacy.delta:g} must be below 1/clients = {1 / self.clients:g}: at or above "
                "it a mechanism may publish one client's data whole; lower privacy.delta or raise clients"
            )
        if self.data.held_by == "nodes" and self.data.canaries:
            wrong.append(f"data.canaries = {self.data.canaries} must be 0 where data.held-by = 'nodes'")
        if self.data.held_by == "nodes" and self.data.sensitive != "none":
            wrong.append(
                f"data.sensitive = {self.data.sensitive!r} must be 'none' where data.held-by = 'nodes': nodes train on "
                "their records as they are; mask them before they are handed to the node"
            )
        wrong += self._wrong_of_columns()
        wrong += self._wrong_of_nodes() if self.data.nodes else []
        wrong += self._wrong_of_canaries() if self.audit.canaries else []
        wrong += self._wrong_of_site() if self.privacy.unit != "client" else []
        wrong += self._wrong_of_examples() if self.site.sampling_level == "example" else []
        if self.expected_cohort < 1:
            wrong.append(
                f"sampling-rate x clients = {self.expected_cohort:g} clients expected in a round must be >= 1; "
                "raise sampling-rate or clients"
            )
        wrong += self._wrong_of_secagg() if self.privacy.trust == "secagg" else []
        wrong += self._wrong_of_correlation()
        wrong += self._wrong_of_evaluation()
        if self.privacy.account and self.several_sites:
            wrong.append(
                f"privacy.account = {self.privacy.account!r} must be empty where sites protect their own records: each "
                "names an account in the settings of its node (account)"
            )
        if wrong:
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

    def _wrong_of_columns(self) -> list[str]:
        """List what is wrong with columns that say whose a record is, and with clients that share records."""
        wrong, data = [], self.data
        if data.unit_column and self.privacy.unit == "client":
            wrong.append(
                f"data.unit-column = {data.unit_column!r} must be empty where clients are protected: public records "
                "are held out by it, so they would be of clients that are trained; set privacy.unit = 'group', or name "
                "the column in data.client-column with data.partition = 'natural'"
            )
        if data.client_column and data.partition != "natural" and not self.is_deployed:
            wrong.append(
                f"data.client-column = {data.client_column!r} needs data.partition = 'natural', got "
                f"{data.partition!r}, which deals records to clients whoever they are of"
            )
        if data.train_records and data.partition == "natural":
            wrong.append(
                f"data.train-records = {data.train_records} must be 0 with data.partition = 'natural': which records "
                "of a client are drawn would depend on the other clients"
            )
        if data.partition == "repeated" and not self.privacy.non_private:
            wrong.append(
                "data.partition = 'repeated' needs privacy.non-private = true: clients share records, so a guarantee "
                "for one client says nothing; it is there to measure speed"
            )
        return wrong

    def _wrong_of_nodes(self) -> list[str]:
        """List the settings that do not go with nodes of many clients each."""
        data, wrong = self.data, []
        for fits, why in (
            (self.is_deployed, f"data.held-by = 'nodes', got {data.held_by!r}"),
            (bool(data.client_column), "data.client-column: the column of the nodes' records that says whose one is"),
            (self.privacy.unit == "client", "privacy.unit = 'client': a site that protects its records is one client"),
            (
                self.privacy.trust == "server",
                "privacy.trust = 'server': in a secure sum every party is one client with a share of the noise for one",
            ),
            (not self.privacy.seeded_cohorts, "privacy.seeded-cohorts = false: nodes draw with secrets of their own"),
            (data.nodes <= self.clients, f"at least one client on every node, got clients = {self.clients}"),
        ):
            if not fits:
                wrong.append(f"data.nodes = {data.nodes} needs {why}")
        return wrong

    def _wrong_of_canaries(self) -> list[str]:
        """List the settings under which nobody could plant canaries, or see what they did."""
        count, wrong = self.audit.canaries, []
        for where, why in (
            (self.is_deployed, "data.held-by = 'nodes': every node brings its own update"),
            (self.several_sites, "several sites with ledgers of their own: audit one site's run (clients = 1)"),
            (self.privacy.trust == "secagg", "privacy.trust = 'secagg': clients make the noise, and none is made up"),
            (self.privacy.noise_correlation != "none", "correlated noise: its releases are not independent"),
        ):
            if where:
                wrong.append(f"audit.canaries = {count} must be 0 with {why}")
        if not self.is_single_site and 2 * count > self.clients:
            wrong.append(
                f"audit.canaries = {count} must be at most half of clients = {self.clients}: canaries take the places "
                "of clients; lower audit.canaries or raise clients"
            )
        return wrong

    def _wrong_of_secagg(self) -> list[str]:
        wrong = []
        if self.sampling_rate != 1.0:
            wrong.append(
                f"sampling-rate = {self.sampling_rate:g} must be 1 with privacy.trust = 'secagg': the server knows who "
                "takes part, so leaving clients out would buy no privacy"
            )
        if self.privacy.mode != "filter":
            wrong.append(
                "privacy.mode must be 'filter' with privacy.trust = 'secagg': sums of discrete Gaussians are accounted "
                "in Rényi terms"
            )
        if self.privacy.noise == "gaussian":
            wrong.append(
                "privacy.noise must be 'discrete' with privacy.trust = 'secagg': the clients add exact integers"
            )
        if self.privacy.unit != "client":
            wrong.append("privacy.unit must be 'client' with privacy.trust = 'secagg'")
        if not self.privacy.secagg.federation and self.simulation.clients_per_node != 1:
            wrong.append("simulation.clients-per-node must be 1 with privacy.trust = 'secagg': every client is a party")
        try:
            _ = self.noise_shares
        except ValueError as error:
            wrong.append(f"privacy.secagg: {error}")
        return wrong

    def _wrong_of_correlation(self) -> list[str]:
        """List the settings that do not go with correlated noise, whose guarantee or use they would void."""
        privacy, chosen, wrong, kind = self.privacy, self.strategy, [], self.privacy.noise_correlation
        for name, count, of in (("bands", privacy.bands, "banded"), ("buffers", privacy.buffers, "blt")):
            if count and kind != of:
                wrong.append(f"privacy.{name} = {count} needs privacy.noise-correlation = {of!r}, got {kind!r}")
        if kind == "none" or wrong:
            return wrong
        for key, value, allowed, why in (
            ("privacy.unit", privacy.unit, ("client",), "it is made for rounds over clients"),
            (
                "privacy.trust",
                privacy.trust,
                ("server",),
                "clients that make the noise cannot take any of it off again",
            ),
            ("privacy.mode", privacy.mode, ("floor",), "a run of it is accounted as a whole"),
            ("privacy.noise", privacy.noise, ("gaussian",), "correlated noise is not exact on the grid"),
            (
                "strategy.controller",
                chosen.controller,
                ("fixed",),
                "noise takes off earlier noise at one threshold only",
            ),
            ("strategy.aggregation", chosen.aggregation, ("plain", "ffa"), "every round must train the same values"),
            ("strategy.optimizer", chosen.optimizer, ("fedavg", "fedavgm"), "others do not add releases up"),
        ):
            if value not in allowed:
                names = " or ".join(map(repr, allowed))
                wrong.append(f"{key} = {value!r} must be {names} with privacy.noise-correlation = {kind!r}: {why}")
        most = min(self.rounds, math.floor(1.0 / self.sampling_rate * (1.0 + 1e-12)))
        if privacy.bands > most:
            wrong.append(
                f"privacy.bands = {privacy.bands} must be at most {most}: a cohort comes from one of so many groups of "
                "clients, and a group takes part once in so many rounds (bands x sampling-rate <= 1, bands <= rounds)"
            )
        return wrong

    def _wrong_of_evaluation(self) -> list[str]:
        """List the settings under which no held-out client could answer, or no round be chosen."""
        asked, wrong = self.evaluation, []
        if self.several_sites and (asked.keep != "last" or asked.patience):
            wrong.append(
                f"evaluation.keep = {asked.keep!r}, evaluation.patience = {asked.patience}: several sites with ledgers "
                "of their own end with the last round; take 'last' and 0"
            )
        if asked.data == "public":
            return wrong
        for key, value, right, why in (
            ("privacy.unit", self.privacy.unit, "client", "whole clients are held out"),
            ("privacy.trust", self.privacy.trust, "server", "in a secure sum every client takes part in every round"),
            ("privacy.mode", self.privacy.mode, "floor", "a filter adds up what different clients are asked"),
            ("privacy.noise-correlation", self.privacy.noise_correlation, "none", "it is made for one kind of release"),
            ("data.nodes", self.data.nodes, 0, "nodes of many clients draw for themselves whom they train"),
            ("audit.canaries", self.audit.canaries, 0, "canaries take the places of clients that are trained on"),
        ):
            if value != right:
                wrong.append(f"{key} = {value!r} must be {right!r} with evaluation.data = 'private': {why}")
        if asked.epsilon > self.privacy.epsilon:
            wrong.append(
                f"evaluation.epsilon = {asked.epsilon:g} must be at most privacy.epsilon = {self.privacy.epsilon:g}, "
                "which is the guarantee of every client; lower it, or 0 takes that"
            )
        return wrong

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

    def _wrong_of_site(self) -> list[str]:
        wrong = []
        generated = self.data.source == "notes" and not self.is_deployed  # nodes have records of their own
        if self.privacy.unit == "group" and not (self.data.unit_column or generated):
            wrong.append("privacy.unit = 'group': data.unit-column must name what records of one group have in common")
        if self.local.balance != "none":
            wrong.append(
                f"local.balance = {self.local.balance!r} must be 'none' where records are protected: it makes the loss "
                "of one record depend on the labels of the others"
            )
        if self.privacy.trust != "server":
            wrong.append(f"privacy.trust = {self.privacy.trust!r} must be 'server' where sites add their own noise")
        if self.is_single_site and self.site.steps != 1:
            wrong.append(f"site.steps = {self.site.steps} must be 1 for one site, whose rounds are its steps")
        if self.site.gradients == "opacus" and self.model.task == "preference":
            wrong.append(
                "site.gradients = 'opacus' must be 'stacked' with model.task = 'preference': it knows no pairs"
            )
        if self.is_single_site and self.site.gradients == "opacus" and self.engine.checkpoint_blocks:
            wrong.append(
                "engine.checkpoint-blocks = true needs site.gradients = 'stacked': Opacus keeps every activation"
            )
        return wrong + (self._wrong_of_span() if self.site.span.method else [])

    def _wrong_of_span(self) -> list[str]:
        span, wrong = self.site.span, []
        if span.samples % span.variants:
            wrong.append(f"site.span.samples = {span.samples} must be a multiple of variants = {span.variants}")
        if span.method != "coefficients" and span.directions > span.samples:
            wrong.append(
                f"site.span.directions = {span.directions} must be at most site.span.samples = {span.samples}: "
                "they are directions of the texts' gradients"
            )
        return wrong

    def _wrong_of_examples(self) -> list[str]:
        """List the settings that do not go with batches of records drawn by themselves from protected groups."""
        wrong = []
        for key, value, right, why in (
            ("privacy.unit", self.privacy.unit, self.privacy.unit == "group", "'group': records are drawn of groups"),
            ("clients", self.clients, self.clients == 1, "1: sites of a run over sites draw whole units"),
            ("privacy.mode", self.privacy.mode, self.privacy.mode == "floor", "'floor': no filter accounts it"),
            (
                "site.records-per-unit",
                self.site.records_per_unit,
                1 <= self.site.records_per_unit <= MOST_RECORDS_PER_UNIT,
                f"in 1..{MOST_RECORDS_PER_UNIT}: it is what the noise of a unit is for",
            ),
            ("audit.canaries", self.audit.canaries, not self.audit.canaries, "0: canaries take the places of units"),
        ):
            if not right:
                wrong.append(f"{key} = {value!r} with site.sampling-level = 'example' must be {why}")
        return wrong

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
