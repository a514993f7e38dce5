"""The guarantee of a run, as data (``privacy.json``) and as one sentence: every epsilon rounded UP.

The guarantee is that of the COMMITMENT, which holds whenever and why ever the run stopped. ``epsilon_spent`` is what
the releases made so far account for; as a guarantee it is good only if the moment of stopping was not chosen from
released values. In floor mode the guarantee is the smaller of the PLD and the RDP epsilon of the committed floor, in
filter mode the conversion of the committed Rényi budget and nothing else: the loss distribution of the path actually
taken is no bound there, so it is not even computed.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Decimal
from itertools import groupby
from typing import Any

from privacy.accountants import composition, renyi, selection
from privacy.commitment import Commitment, Tuning
from privacy.errors import UnsupportedEvent
from privacy.events import BufferedToeplitz, Correlation, CyclicPoisson, ExampleLevelPoisson, Json, PartPoisson, Poisson
from privacy.ledger.ledger import Ledger

TRUSTED_AGGREGATOR = (
    "trusted aggregator: the server adds the noise, and until then sees who takes part and the sums of their clipped "
    "contributions; the guarantee is against everyone who sees only what the run releases"
)
CENTRAL = "Gaussian noise on sums of clipped contributions; all statistics of one cohort are one release"
HELD_OUT = (
    "; {members:,} {unit}s are held out by their number and a public seed, are never trained on and answer the "
    "evaluations alone, so that a {unit} is in one part or the other: epsilon is the larger of what each part costs"
)
CORRELATED = (
    "Gaussian noise on sums of clipped contributions, correlated over the rounds (banded matrix factorisation, {bands} "
    "bands); clients lie in {groups} groups that take turns, drawn once and independently of all data, so that one "
    "client takes part at most once in {groups} releases; all statistics of one cohort are one release"
)
BUFFERED = (
    "Gaussian noise on sums of clipped contributions, correlated over all rounds (buffered linear Toeplitz matrix, "
    "{buffers} buffers); clients lie in {groups} groups that take turns, drawn once and independently of all data, so "
    "that one client takes part at most once in {groups} releases; the {releases} committed releases together are one "
    "release that costs one Gaussian of a noise multiplier {share:.4g} times smaller than each has, and no "
    "amplification by sampling is claimed; all statistics of one cohort are one release"
)
EXAMPLE_LEVEL = (
    "Gaussian noise on sums of clipped gradients of single records; every record is drawn by itself, and of one "
    "{unit} at most {most}, chosen once by what it holds alone, so that its presence moves a sum by as many clipped "
    "rows as were drawn of these; accounted as that mixture of Gaussians; all statistics of one draw are one release"
)
SHARED = (
    "sums of clipped contributions to each of which its client added discrete Gaussian noise, opened by secure "
    "aggregation; all statistics of one cohort are one release"
)
DISTRIBUTED = (
    "no trusted aggregator: every client adds a share of the noise before its vector is masked, and the server sees "
    "nothing but sums with that noise in them; the guarantee is against the server too, under computational "
    "assumptions (X25519, ChaCha20, Ed25519), as long as at most {colluding} of the {parties} clients tell the server "
    "what they know and at least {survivors} hand in honest vectors with their noise; no amplification by sampling is "
    "claimed, for the server knows who takes part. Every client counts what it hands in, over all runs, in a ledger of "
    "its own, and refuses beyond what its copy of the federation's list commits to"
)
HELD_BY_NODES = (
    ". Every node is trusted with its own clients alone: it holds their records, draws its part of every cohort with a "
    "secret that it tells nobody, clips what each client brings, and hands in one sum"
)
ONE_NODE = (
    "a node that does not do its part: it can leave its own clients without this guarantee (draw some of them every "
    "time, not clip, tell what it holds), and hand in any vector no longer than the clipped contributions of the most "
    "clients that it can draw, which moves a mean by up to {share:.2f} clipping bounds; it takes nothing from the "
    "guarantee of other nodes' clients",
    "a client whose data end its node's work in a round, or hold it up beyond the time of a round: the sum of all "
    "clients of that node is then missing from the release, more than that client's own row",
)
OTHER_CHOICES = (
    "choices made by looking at other runs on the same data (hyper-parameters, seeds, the best of several models): "
    "every such run spends an epsilon of its own, and they add up"
)
ONE_PERSON = "one person behind several units: k units together are protected by a k-fold group guarantee only"
NOT_COVERED = (
    OTHER_CHOICES,
    "what the server sees before noise is added, and what a network observer sees: who takes part, when, and the size "
    "and timing of messages",
    "the public validation and test data: they are taken to hold nothing of the protected units",
    "the names of the labels, the number of protected units and every setting: they are taken as public",
    ONE_PERSON,
    "anything computed on the data outside this ledger, such as logs and files on the clients' own machines",
    "which units were in a file before public and training sets were drawn from it: the guarantee is for a unit of the "
    "training set as it was drawn",
    "that a run ended because most messages of a round failed: whether they do may depend on who took part",
    "a unit whose data kill the workers that train it, or hold them up beyond the time of a round: the clients sent "
    "along with it are asked again one by one, but where no worker is left for some of them, more than its own row is "
    "missing",
)
SEEN_BY_THE_SERVER = NOT_COVERED[1]
SEEN_WITH_SHARES = (
    "who takes part, when, and the size and timing of messages: the server and a network observer see that",
    "clients that lie: one that adds no noise and hands in more than its share of the sum weakens the guarantee of the "
    "others as one that colludes does, and nothing proves that a masked vector was clipped",
    "rounds and runs that the server does not enter in this ledger: the clients' own ledgers end them where the "
    "epsilon of the federation's list is spent, by all runs on it together; it may be larger than that of this run",
    "the host of a simulation: it holds the secrets of all clients, so protection against it is rehearsed, not had",
)
RECORDS_COUNTED = (
    "the number of records that are sampled, at most {most} of one {unit}: like the number of protected units it is "
    "taken as public"
)
TUNED = (
    "choices made by looking at runs outside this sweep on the same data: every such run spends an epsilon of its own, "
    "and they add up",
    "how many candidates this sweep ran, when it began and how long it took (from which their number can be guessed), "
    "and every other candidate's adapter, metrics and files: none of that is released, and whoever runs the sweep must "
    "not let it out",
)
_DELTAS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10)


def privacy_statement(
    ledger: Ledger,
    *,
    trust_model: str | None = None,
    not_covered: Sequence[str] | None = None,
    further: Sequence[str] = (),
    nodes: Json | None = None,
) -> Json:
    """The content of ``privacy.json``: plain JSON values only.

    Args:
        ledger: of the run, open or read-only.
        trust_model: who is trusted with what; None says what the commitment does.
        not_covered: what the guarantee does not speak about, one sentence each; None gives the usual ones.
        further: the same, of this run.
        nodes: where every node has many units and draws among them itself: ``clients``, how many each has, and
            ``one_node_moves_a_mean_by``, the most a single one can, in clipping bounds.
    """
    commitment = ledger.commitment
    shares = commitment.noise_shares
    if trust_model is None:
        trust_model = TRUSTED_AGGREGATOR if shares is None else DISTRIBUTED.format(**shares.to_json())
    if not_covered is None:
        not_covered = NOT_COVERED
        if shares is not None:
            not_covered = (*(text for text in NOT_COVERED if text != SEEN_BY_THE_SERVER), *SEEN_WITH_SHARES)
    if commitment.tuning is not None:
        not_covered = (*TUNED, *(text for text in not_covered if text != OTHER_CHOICES))
    if nodes is not None:
        trust_model += HELD_BY_NODES
        share = nodes["one_node_moves_a_mean_by"]
        not_covered = (*not_covered, *(text.format(share=share) for text in ONE_NODE))
    if (sampled := _example_level(commitment)) is not None:
        not_covered = (*not_covered, RECORDS_COUNTED.format(**_named(sampled)))
    released = sum(charge.released_at is not None for charge in ledger.charges)
    committed = {"committed": sum(step.count for step in commitment.floor)} if commitment.floor else {}
    statement: Json = {
        "format": 1,
        "private": ledger.not_private is None,
        "not_private": ledger.not_private,
        "unit": commitment.unit,
        "adjacency": commitment.adjacency,
        "population": commitment.population,
        "delta": commitment.delta,
        "mode": commitment.mode,
        "mechanism": _mechanism(commitment),
        "sampling": {label: _sampling_text(sampling) for label, sampling in _samplings(ledger)},
        "rounds": {**committed, "charged": len(ledger.charges), "released": released},
        "noise_multipliers": [charge.noise_multiplier for charge in ledger.charges],
        "releases": _releases(ledger),
        "trust_model": trust_model,
        **({} if nodes is None else {"nodes": nodes}),
        **({} if shares is None else {"noise_shares": shares.to_json()}),
        **({} if (correlation := _correlation(commitment)) is None else {"correlation": correlation.to_json()}),
        **({} if commitment.tuning is None else {"tuning": _tuning(commitment, commitment.tuning)}),
        "covered": _covered(ledger),
        "not_covered": [*not_covered, *further],
        "ledger": {"run_id": ledger.run_id, "head": ledger.head},
    }
    if ledger.not_private is None:
        statement |= _numbers(ledger)
    return {"sentence": sentence(statement), **statement}


def sentence(statement: Json) -> str:
    """The guarantee of a :func:`privacy_statement` in one plain sentence."""
    if not statement["private"]:
        return f"This run is NOT PRIVATE: {statement['not_private']}."
    unit, population = _unit_text(str(statement["unit"])), f"{statement['population']:,}"
    change = {
        "replace_one": f"replacing any one {unit}",
        "add_remove": f"adding or removing one {unit}",
        "zero_out": f"replacing all that one {unit} contributes by zero",
    }[str(statement["adjacency"])]
    trusted = " but the trusted server" if str(statement["trust_model"]).startswith("trusted aggregator") else ""
    if statement.get("nodes"):
        trusted += f" and the node that holds the {unit}'s records"
    if shares := statement.get("noise_shares"):
        trusted = f", the server included as long as at most {shares['colluding']} clients collude with it"
    tuned = ", and that it was chosen among the candidates of its sweep," if statement.get("tuning") else ""
    mantissa, exponent = f"{statement['delta']:.6e}".split("e")
    delta = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return (
        f"With respect to {change} of a population of {population}, everything this run releases{tuned} is "
        f"differentially private with epsilon at most {rounded_up(statement['epsilon'], 2):.2f} at delta {delta}, "
        f"against anyone{trusted}; other runs on the same data are not included and add to it."
    )


def rounded_up(epsilon: float, digits: int) -> float:
    """Epsilon with ``digits`` decimals, never less than it was; infinite stays infinite."""
    if not math.isfinite(epsilon):
        return epsilon
    return float(Decimal(repr(float(epsilon))).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_CEILING))


def _numbers(ledger: Ledger) -> Json:
    commitment = ledger.commitment
    numbers: Json = {
        "epsilon_target": rounded_up(commitment.epsilon, 4),
        "epsilon_spent": rounded_up(ledger.epsilon_spent(), 4),
    }
    if commitment.order is not None and commitment.rho is not None:
        return numbers | {
            "epsilon": rounded_up(ledger.epsilon_guaranteed(), 4),
            "accountant": f"Rényi filter at order {commitment.order}, in closed form",
            "order": commitment.order,
            "rho": commitment.rho,
            "rho_spent": ledger.rho_spent,
            "cross_checks": {},
            "curve": _curve(commitment),
        }
    if commitment.tuning is not None:
        return numbers | {
            "epsilon": rounded_up(ledger.epsilon_guaranteed(), 4),
            "accountant": f"{composition.version('rdp')}, repeat and select",
            "cross_checks": {},
            "curve": _curve(commitment),
        }
    epsilon, name = composition.tightest_bound(commitment.floor, commitment.delta, adjacency=commitment.adjacency)
    others: dict[str, Any] = {}
    try:
        value = composition.epsilon(commitment.floor, commitment.delta, "rdp", adjacency=commitment.adjacency)
        others["rdp"] = rounded_up(value, 4)
    except UnsupportedEvent as error:
        others["rdp"] = str(error)
    return numbers | {
        "epsilon": rounded_up(epsilon, 4),
        "accountant": composition.version(name),
        "cross_checks": others,
        "curve": _curve(commitment),
    }


def _tuning(commitment: Commitment, tuning: Tuning) -> Json:
    """What privacy.json says of a sweep of which this run is the best candidate, or a candidate."""
    epsilon, order = selection.epsilon(tuning.tries, tuning.candidates, commitment.delta)
    alone, _ = composition.tightest_bound(commitment.floor, commitment.delta, adjacency=commitment.adjacency)
    return {
        "sentence": (
            f"tuning and training: epsilon at most {rounded_up(epsilon, 2):.2f} at delta {commitment.delta:g} by "
            f"repeat-and-select, RDP order {order:g}"
        ),
        "id": tuning.id,
        "tries": {"law": tuning.tries.name, **tuning.tries.to_json()},
        "order": order,
        "epsilon_of_a_candidate": rounded_up(alone, 4),
        "released": "the best candidate by its score on public records; not their number, and no other candidate",
    }


def _curve(commitment: Commitment) -> list[Json]:
    """Pairs (delta, epsilon) that the committed run satisfies all at once."""
    deltas = sorted({commitment.delta, *(delta for delta in _DELTAS if delta < 1.0 / commitment.population)})
    if commitment.order is not None and commitment.rho is not None:
        pairs = [(delta, renyi.epsilon_of(commitment.rho, commitment.order, delta)) for delta in deltas]
    elif (tuning := commitment.tuning) is not None:
        pairs = [(delta, selection.epsilon(tuning.tries, tuning.candidates, delta)[0]) for delta in deltas]
    else:
        pairs = composition.curve(commitment.floor, deltas, suits=commitment.delta, adjacency=commitment.adjacency)
    return [{"delta": delta, "epsilon": rounded_up(value, 4)} for delta, value in pairs if math.isfinite(value)]


def _releases(ledger: Ledger) -> list[Json]:
    """Consecutive charges that differ in their round only, as one entry."""
    rows: list[Json] = []
    for key, group in groupby(
        ledger.charges, key=lambda c: (c.event.label, _planned(c.event.sampling), c.event.components)
    ):
        same = list(group)
        rows.append(
            {
                "label": key[0],
                "first_round": same[0].event.round,
                "last_round": same[-1].event.round,
                "count": len(same),
                "noise_multiplier": same[0].noise_multiplier,
                "sampling": key[1].to_json(),
                "components": [component.to_json() for component in key[2]],
            }
        )
    return rows


def _mechanism(commitment: Commitment) -> str:
    if commitment.noise_shares is not None:
        return SHARED
    if (sampled := _example_level(commitment)) is not None:
        return EXAMPLE_LEVEL.format(**_named(sampled))
    if (correlation := _correlation(commitment)) is None:
        out = [one.sampling for one in commitment.floor if isinstance(one.sampling, PartPoisson)]
        members = [one.members for one in out if one.held_out]
        return CENTRAL + (HELD_OUT.format(members=members[0], unit=_unit_text(commitment.unit)) if members else "")
    releases, sampling = commitment.floor[0].count, commitment.floor[0].sampling
    assert isinstance(sampling, CyclicPoisson)
    if isinstance(correlation, BufferedToeplitz):
        share = correlation.sensitivity(releases, sampling.groups)
        return BUFFERED.format(buffers=correlation.buffers, groups=sampling.groups, releases=releases, share=share)
    return CORRELATED.format(bands=correlation.bands, groups=sampling.groups)


def _example_level(commitment: Commitment) -> ExampleLevelPoisson | None:
    """How records are sampled where units are protected; None where units are."""
    return next((one.sampling for one in commitment.floor if isinstance(one.sampling, ExampleLevelPoisson)), None)


def _named(sampling: ExampleLevelPoisson) -> Json:
    return {"unit": _unit_text(sampling.unit), "most": sampling.records_per_unit}


def _correlation(commitment: Commitment) -> Correlation | None:
    return commitment.floor[0].correlation if commitment.floor else None


def _planned(sampling: Poisson) -> Poisson:
    return replace(sampling, turn=None) if isinstance(sampling, CyclicPoisson) else sampling


def _samplings(ledger: Ledger) -> list[tuple[str, Poisson]]:
    committed = [(step.label, step.sampling) for step in ledger.commitment.floor]
    return committed + [(event.label, event.sampling) for event in ledger.events]


_ROWS = {"evaluation": "counts", "ask": "shares"}
"""What the row of a unit is where it is no update, by the label of the release."""


def _covered(ledger: Ledger) -> list[str]:
    parts: dict[tuple[str, tuple[str, ...]], int] = {}
    for event in ledger.events:
        names = (component.name for component in event.components)
        row = _ROWS.get(event.label, "update")
        key = (event.label, tuple(row if name == "update" else name for name in names))
        parts[key] = parts.get(key, 0) + 1
    return [f"{label}: {', '.join(names)} ({count} charged)" for (label, names), count in parts.items()]


def _sampling_text(sampling: Poisson) -> str:
    units = f"{sampling.population:,} {_unit_text(sampling.unit)}s"
    if isinstance(sampling, PartPoisson):
        units = f"{sampling.members:,} {'held-out' if sampling.held_out else 'trained'} of {units}"
    if isinstance(sampling, ExampleLevelPoisson):
        records = f"{sampling.records:,} records of {units}, at most {sampling.records_per_unit} of each"
        return f"all {records}" if sampling.rate == 1.0 else f"Poisson with rate {sampling.rate:g} from {records}"
    if isinstance(sampling, CyclicPoisson):
        return f"Poisson with rate {sampling.rate:g} from one of {sampling.groups} groups of {units} in turn"
    return f"all {units}" if sampling.rate == 1.0 else f"Poisson with rate {sampling.rate:g} from {units}"


def _unit_text(unit: str) -> str:
    return unit.removeprefix("group:")
