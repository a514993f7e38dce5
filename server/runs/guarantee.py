"""The guarantee of a run in phases, in the weakest words that are true.

- ``record``: every phase that reads private texts is differentially private. A record-level (epsilon, delta).
- ``selective``: the phases without noise read redacted texts only. Selective DP: neighbours differ in the sensitive
  spans of ONE record, as a public policy finds them, and have the same redacted texts, so that the phases without noise
  cannot tell them apart. (Neither is a text that occurs among the public records: such a record was left out before.)
  It protects nothing that the detector misses, and neither presence nor the rest of a record.
  At record level epsilon is infinite. Neighbours of this kind REPLACE a record, so the epsilon printed is that of
  replacement, which is larger than the one for adding or removing that JFT and ATDP print.
- ``none``: a phase without noise read original texts. Epsilon is infinite, whatever follows.

Who trusts whom with what at a site, and what its guarantee does not cover: the words of its privacy.json.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from client.data.sensitive import make_detector
from client.models.devices import find_cuda
from client.models.frozen.batch_invariance import batch_invariance_note
from client.models.frozen.gpu_trial import tried_here
from privacy.accountants import composition
from privacy.commitment import Commitment
from privacy.ledger.ledger import Ledger
from privacy.ledger.statement import ONE_PERSON, OTHER_CHOICES, privacy_statement, rounded_up
from privacy.randomness.sampling import most_drawn
from server.config.schema import RunConfig
from server.run_folder.progress import SiteGuarantee
from server.runs.phase_plan import Phase, PhasesConfig, PlannedNoise


@dataclass(frozen=True)
class Guarantee:
    """The guarantee of a whole run in phases.

    Attributes:
        kind: ``"record"``, ``"selective"`` or ``"none"``.
        delta: of every epsilon here.
        record_epsilon: one unit added or removed, rounded UP; None is infinite.
        selective_epsilon: the sensitive spans of one record replaced, rounded UP; None if there is no such guarantee.
        noise_epsilon: what the phases with noise cost by themselves; no guarantee of the run unless ``kind`` is
            ``"record"``.
        policy: detectors that selective DP depends on, or "".
        not_private: why there is no record-level guarantee; the stamp of every artefact. None if there is one.
    """

    kind: str
    delta: float
    record_epsilon: float | None
    selective_epsilon: float | None
    noise_epsilon: float
    policy: str
    not_private: str | None

    @property
    def sentence(self) -> str:
        """The guarantee in plain words."""
        at = f"at delta {self.delta:g}"
        if self.kind == "record":
            return (
                f"Adding or removing one protected unit: epsilon at most {self.record_epsilon:g} {at}; every phase "
                "that reads private texts is differentially private."
            )
        if self.kind == "selective":
            return (
                f"NOT PRIVATE at record level (epsilon infinite): {self.not_private}. selective-DP (policy "
                f"{self.policy}, detector assumed perfect): epsilon at most {self.selective_epsilon:g} {at}, for the "
                "sensitive spans of one record; what the detector misses has no protection."
            )
        return f"NOT PRIVATE (epsilon infinite): {self.not_private}."

    def to_json(self) -> dict[str, Any]:
        """The guarantee as plain JSON values; an infinite epsilon is the word "infinite"."""
        values = {"sentence": self.sentence, **asdict(self)}
        return values | {"record_epsilon": self.record_epsilon if self.kind == "record" else "infinite"}


def guarantee_of(config: PhasesConfig, planned: PlannedNoise) -> Guarantee:
    """Derive the guarantee of a run in phases from its phases and their planned noise."""
    delta = config.run.privacy.delta
    if not config.non_private_phases:
        return Guarantee("record", delta, planned.epsilon, None, planned.epsilon, "", None)
    readers = [phase.name for phase in config.non_private_phases if phase.text != "redacted"]
    if readers:
        reason = f"phase {' and '.join(repr(name) for name in readers)} trains on private texts without noise"
        return Guarantee("none", delta, None, None, planned.epsilon, "", reason)
    policy = ", ".join(
        dict.fromkeys(make_detector(config.detector_of(phase)).name for phase in config.non_private_phases)
    )
    names = " and ".join(repr(phase.name) for phase in config.non_private_phases)
    reason = f"phase {names} trains without noise on texts redacted by {policy}"
    selective = 0.0
    if planned.floor:
        selective, _ = composition.tightest_bound(planned.floor, delta, adjacency="replace_one")
    return Guarantee("selective", delta, None, rounded_up(selective, 4), planned.epsilon, policy, reason)


TRUST = (
    "the site itself: it holds the records, draws the batches and adds the noise; the guarantee is against everyone "
    "who sees only what the run releases (the adapter, its metrics, its ledger)"
)
NOT_COVERED = (
    OTHER_CHOICES,
    "the number of protected units, the names of the labels, the texts' largest length and every setting: they are "
    "taken as public",
    "the held-out validation and test records: they are not among the protected, and their metrics are published",
    "which units were in a file before these and the training records were drawn from it",
    ONE_PERSON,
    "the base model: what it was trained on before",
    "anything computed on the data outside this ledger, such as the prepared files, logs and timing at the site",
    "that a site fails: a record that kills its process, or holds it up for good, shows in that",
)


def not_covered(config: RunConfig, *, steered: bool) -> tuple[str, ...]:
    """List what the guarantee of a site does not cover, with what this run does with the held-out records.

    Args:
        steered: whether the run's controller or optimizer reads their loss.
    """
    found = [*NOT_COVERED, *_public_start(config)]
    if steered:
        found.append(
            "the loss on held-out validation records after every step: it is read without noise and steers what is "
            f"released ({config.strategy.controller}, {config.strategy.optimizer})"
        )
    return tuple(found)


def _public_start(config: RunConfig) -> tuple[str, ...]:
    """The note on the records that a warm start trains on; none without one."""
    if not config.public.warm_start_epochs:
        return ()
    origin = "of data.validation-source" if config.data.validation_source else "held-out"
    return (
        f"{config.public.training_fraction:.0%} of the validation records ({origin}): they are trained on WITHOUT "
        "noise before the first step (public.warm-start-epochs), so the adapter may hold what they say",
    )


def _kept_heads(config: RunConfig) -> tuple[str, ...]:
    """The note on heads that clients keep; none where they are sent."""
    if config.strategy.aggregation != "local-heads":
        return ()
    return (
        "the head that each client trains and keeps: it is not released and holds what the client's records say. Used "
        "at its client alone, it leaves the guarantee to every other client as it is (joint differential privacy); "
        "whoever is given it, or its answers, learns of that client without limit",
    )


def client_level_statement(
    config: RunConfig, ledger: Ledger, listed: Commitment | None = None, held: Sequence[int] = ()
) -> dict[str, Any]:
    """The content of privacy.json for a run over clients.

    Args:
        listed: commitment of secure sums: the most that all runs on their list cost together; else None.
        held: number of clients of each node, where nodes have many.
    """
    further = (*_rounding(config), *_public_start(config), *_kept_heads(config))
    if listed is not None and ledger.not_private is None:
        further = (
            *further,
            f"a server that asks for more than it says: the clients refuse beyond epsilon "
            f"{rounded_up(listed.epsilon, 2):.2f} at delta {listed.delta:g} over all runs on their list",
        )
    nodes = {"clients": list(held), "one_node_moves_a_mean_by": moved_by_one(ledger, held)} if held else None
    return privacy_statement(ledger, further=further, nodes=nodes)


def _rounding(config: RunConfig) -> tuple[str, ...]:
    """The note on rounding in privacy.json; a GPU trains if this process sees one, and may on a cluster."""
    elsewhere = bool(config.engine.ray_address)
    gpu = config.engine.device != "cpu" and (elsewhere or find_cuda().devices > 0)
    return batch_invariance_note(config.engine.precision, gpu=gpu, tried=None if elsewhere else tried_here())


def moved_by_one(ledger: Ledger, held: Sequence[int]) -> float:
    """The most that one node can move the mean of a release, whatever it sends: in clipping bounds, rounded up."""
    samplings = [step.sampling for step in ledger.commitment.floor] + [event.sampling for event in ledger.events]
    most = (max(most_drawn(units, by.rate) for units in held) / by.expected_units for by in set(samplings))
    return rounded_up(max(most, default=0.0), 2)


def record_level_statement(config: RunConfig, ledger: Ledger, *, steered: bool) -> dict[str, Any]:
    """The content of privacy.json for a run over the records of one site; ``steered``: see :func:`not_covered`."""
    said = not_covered(config, steered=steered)
    further = _rounding(config)
    return privacy_statement(ledger, trust_model=TRUST, not_covered=said, further=further)


def phases_statement(config: PhasesConfig, guarantee: Guarantee, ledger: Ledger | None) -> dict[str, Any]:
    """The content of privacy.json for a run in phases; ``ledger`` is None if no phase is private."""
    statement: dict[str, Any] = {**guarantee.to_json(), "private": guarantee.kind == "record"}
    statement["phases"] = [_described(config, phase) for phase in config.phases]
    if ledger is not None:
        further = _rounding(config.run)
        statement["ledger"] = privacy_statement(ledger, trust_model=TRUST, not_covered=NOT_COVERED, further=further)
    return statement


def _described(config: PhasesConfig, phase: Phase) -> dict[str, Any]:
    detector = None if phase.text == "original" else config.detector_of(phase)
    return {"kind": phase.kind, **vars(phase), "detector": detector}


def sites_statement(
    config: RunConfig, not_private: str | None, sites: Mapping[int, SiteGuarantee], *, steered: bool
) -> dict[str, Any]:
    """The content of privacy.json for a run over sites: what each site says of its own commitment.

    Args:
        not_private: why no site gives a guarantee, or None.
        sites: guarantees of the sites, by number.
        steered: see :func:`not_covered`.
    """
    unit, delta = config.unit.removeprefix("group:"), config.privacy.delta
    worst = max((reply.epsilon for reply in sites.values()), default=0.0)
    sentence = (
        f"This run is NOT PRIVATE: {not_private}."
        if not_private
        else f"With respect to adding or removing one {unit} of any one site, everything that site sends in this run "
        f"is differentially private with epsilon at most {rounded_up(worst, 2):.2f} at delta {delta:g}, against "
        "anyone, the server and the other sites included; other runs on the same data are not included and add to it."
    )
    return {
        "sentence": sentence,
        "format": 1,
        "private": not_private is None,
        "not_private": not_private,
        "unit": config.unit,
        "adjacency": "add_remove",
        "epsilon": rounded_up(worst, 4),
        "delta": delta,
        "mode": config.privacy.mode,
        "mechanism": "DP-SGD at every site, with the site's own ledger; the server averages and adds nothing",
        "trust_model": "every site trusts itself only",
        "silos": {
            str(number): {
                "population": reply.population,
                "epsilon": rounded_up(reply.epsilon, 4),
                "noise_multiplier": reply.noise_multiplier,
            }
            for number, reply in sorted(sites.items())
        },
        "silos_asked": config.clients,
        "not_covered": [
            *not_covered(config, steered=steered),
            *_rounding(config),
        ],
    }
