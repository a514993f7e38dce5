"""Every refusal that joins settings of a run: when it applies, what must then hold, and what is said where it does not.

What one setting may be by itself stands at its field (:mod:`server.config.tables`). What needs the methods, the data
or the model to be known is refused where these are made (:mod:`server.runs.assembly`).
"""

import math
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from privacy.events import MOST_RECORDS_PER_UNIT

if TYPE_CHECKING:
    from server.config.schema import RunConfig

Test = Callable[["RunConfig"], Any]


class Rule(NamedTuple):
    """One requirement: `holds` is asked where `applies` is true, and `says` is the refusal where it is not."""

    applies: Test
    holds: Test
    says: str

    def refusal(self, config: "RunConfig") -> str:
        """The refusal, with the values that the configuration has."""
        return self.says.format(
            c=config, most=1 / config.clients, bands=most_bands(config), shares=_colluding_too_many(config)
        )


def broken_rules(config: "RunConfig") -> list[str]:
    """The refusals of a configuration whose clients are counted, in the order of :data:`RULES`; empty where it fits."""
    return [rule.refusal(config) for rule in RULES if rule.applies(config) and not rule.holds(config)]


def _among(applies: Test, where: str, key: str, allowed: tuple[Any, ...], why: str = "") -> Rule:
    """A rule that one key has one of a few values; ``why`` follows the words of the refusal."""
    path, names = key.replace("-", "_"), " or ".join(map(repr, allowed))
    says = f"{key} = {{c.{path}!r}} must be {names} {where}{why and f': {why}'}"
    return Rule(applies, lambda config: attrgetter(path)(config) in allowed, says)


def _by_nodes(c: "RunConfig") -> bool:
    return c.is_deployed


def _many_to_a_node(c: "RunConfig") -> bool:
    return c.data.nodes > 0


def _for_nodes(holds: Test, needs: str) -> Rule:
    return Rule(_many_to_a_node, holds, f"data.nodes = {{c.data.nodes}} needs {needs}")


def _no_canaries(where: Test, why: str) -> Rule:
    says = f"audit.canaries = {{c.audit.canaries}} must be 0 with {why}"
    return Rule(lambda c: c.audit.canaries and where(c), lambda c: False, says)


def _of_sites(c: "RunConfig") -> bool:
    return c.privacy.unit != "client"


def _by_secagg(c: "RunConfig") -> bool:
    return c.privacy.trust == "secagg"


def _colluding_too_many(c: "RunConfig") -> str:
    """What is wrong with the shares of noise; empty where nothing is."""
    try:
        _ = c.noise_shares
    except ValueError as error:
        return str(error)
    return ""


def _correlated(c: "RunConfig") -> bool:
    p = c.privacy
    fits = (not p.bands or p.noise_correlation == "banded") and (not p.buffers or p.noise_correlation == "blt")
    return p.noise_correlation != "none" and fits


def _with_correlated(key: str, allowed: tuple[str, ...], why: str) -> Rule:
    return _among(_correlated, "with privacy.noise-correlation = {c.privacy.noise_correlation!r}", key, allowed, why)


def _with_local_heads(c: "RunConfig") -> bool:
    return c.strategy.aggregation == "local-heads"


def most_bands(c: "RunConfig") -> int:
    """The most bands of correlated noise that the sampling rate and the rounds allow."""
    return min(c.rounds, math.floor(1.0 / c.sampling_rate * (1.0 + 1e-12)))


def _asked_privately(key: str, right: str | int, why: str) -> Rule:
    return _among(lambda c: c.evaluation.data == "private", "with evaluation.data = 'private'", key, (right,), why)


def _by_examples(key: str, holds: Test, why: str) -> Rule:
    says = f"{key} = {{c.{key.replace('-', '_')}!r}} with site.sampling-level = 'example' must be {why}"
    return Rule(lambda c: c.site.sampling_level == "example", holds, says)


def _in_span(c: "RunConfig") -> bool:
    return _of_sites(c) and bool(c.site.span.method)


def _sites_in_span(c: "RunConfig") -> bool:
    return c.several_sites and bool(c.site.span.method)


RULES = (
    Rule(
        lambda c: not c.privacy.non_private,
        lambda c: c.privacy.delta < 1 / c.clients,
        "privacy.delta = {c.privacy.delta:g} must be below 1/clients = {most:g}: at or above it a "
        "mechanism may publish one client's data whole; lower privacy.delta or raise clients",
    ),
    Rule(
        _by_nodes,
        lambda c: not c.data.canaries,
        "data.canaries = {c.data.canaries} must be 0 where data.held-by = 'nodes'",
    ),
    _among(
        _by_nodes,
        "where data.held-by = 'nodes'",
        "data.sensitive",
        ("none",),
        "nodes train on their records as they are; mask them before they are handed to the node",
    ),
    # Columns that say whose a record is, and clients that share records.
    Rule(
        lambda c: c.privacy.unit == "client",
        lambda c: not c.data.unit_column,
        "data.unit-column = {c.data.unit_column!r} must be empty where clients are protected: public records are "
        "held out by it, so they would be of clients that are trained; set privacy.unit = 'group', or name the "
        "column in data.client-column with data.partition = 'natural'",
    ),
    Rule(
        lambda c: c.data.client_column and not c.is_deployed,
        lambda c: c.data.partition == "natural",
        "data.client-column = {c.data.client_column!r} needs data.partition = 'natural', got "
        "{c.data.partition!r}, which deals records to clients whoever they are of",
    ),
    Rule(
        lambda c: c.data.partition == "natural",
        lambda c: not c.data.train_records,
        "data.train-records = {c.data.train_records} must be 0 with data.partition = 'natural': which records of "
        "a client are drawn would depend on the other clients",
    ),
    Rule(
        lambda c: c.data.partition == "repeated",
        lambda c: c.privacy.non_private,
        "data.partition = 'repeated' needs privacy.non-private = true: clients share records, so a guarantee for "
        "one client says nothing; it is there to measure speed",
    ),
    # Nodes of many clients each.
    _for_nodes(_by_nodes, "data.held-by = 'nodes', got {c.data.held_by!r}"),
    _for_nodes(
        lambda c: c.data.client_column, "data.client-column: the column of the nodes' records that says whose one is"
    ),
    _for_nodes(
        lambda c: c.privacy.unit == "client", "privacy.unit = 'client': a site that protects its records is one client"
    ),
    _for_nodes(
        lambda c: c.privacy.trust == "server",
        "privacy.trust = 'server': in a secure sum every party is one client with a share of the noise for one",
    ),
    _for_nodes(
        lambda c: not c.privacy.seeded_cohorts, "privacy.seeded-cohorts = false: nodes draw with secrets of their own"
    ),
    _for_nodes(lambda c: c.data.nodes <= c.clients, "at least one client on every node, got clients = {c.clients}"),
    # Canaries: somebody must plant them, and see what they did.
    _no_canaries(_by_nodes, "data.held-by = 'nodes': every node brings its own update"),
    _no_canaries(
        lambda c: c.several_sites, "several sites with ledgers of their own: audit one site's run (clients = 1)"
    ),
    _no_canaries(_by_secagg, "privacy.trust = 'secagg': clients make the noise, and none is made up"),
    _no_canaries(lambda c: c.privacy.noise_correlation != "none", "correlated noise: its releases are not independent"),
    Rule(
        lambda c: c.audit.canaries and not c.is_single_site,
        lambda c: 2 * c.audit.canaries <= c.clients,
        "audit.canaries = {c.audit.canaries} must be at most half of clients = {c.clients}: canaries take the "
        "places of clients; lower audit.canaries or raise clients",
    ),
    Rule(
        lambda c: c.is_single_site and c.site.span.method,
        lambda c: not c.audit.canaries,
        "audit.canaries = {c.audit.canaries} must be 0 with site.span.method = {c.site.span.method!r}: releases "
        "lie in the span of few directions, where canaries are all alike",
    ),
    # Sites that protect their records.
    Rule(
        lambda c: c.privacy.unit == "group",
        lambda c: c.data.unit_column or (c.data.source == "notes" and not c.is_deployed),
        "privacy.unit = 'group': data.unit-column must name what records of one group have in common",
    ),
    _among(
        _of_sites,
        "where records are protected",
        "local.balance",
        ("none",),
        "it makes the loss of one record depend on the labels of the others",
    ),
    _among(_of_sites, "where sites add their own noise", "privacy.trust", ("server",)),
    _among(lambda c: c.is_single_site, "for one site, whose rounds are its steps", "site.steps", (1,)),
    _among(
        lambda c: _of_sites(c) and c.model.task == "preference",
        "with model.task = 'preference'",
        "site.gradients",
        ("stacked",),
        "it knows no pairs",
    ),
    Rule(
        lambda c: c.is_single_site and c.engine.checkpoint_blocks,
        lambda c: c.site.gradients == "stacked",
        "engine.checkpoint-blocks = true needs site.gradients = 'stacked': Opacus keeps every activation",
    ),
    Rule(
        lambda c: c.several_sites,
        lambda c: c.site.gradients == "stacked",
        "site.gradients = {c.site.gradients!r} must be 'stacked' in a run over sites; for adapters it does not "
        "know set engine.sequential = true, which takes gradients one record at a time",
    ),
    Rule(
        lambda c: c.several_sites,
        lambda c: not c.privacy.account,
        "privacy.account = {c.privacy.account!r} must be empty where sites protect their own records: each names "
        "an account in the settings of its node (account)",
    ),
    # Releases in the span of public texts.
    Rule(
        _in_span,
        lambda c: c.model.task == "causal-lm" and c.site.gradients == "stacked",
        "site.span.method = {c.site.span.method!r} needs model.task = 'causal-lm', whose model can write texts, "
        "and site.gradients = 'stacked'",
    ),
    Rule(
        _in_span,
        lambda c: c.site.span.samples % c.site.span.variants == 0,
        "site.span.samples = {c.site.span.samples} must be a multiple of variants = {c.site.span.variants}",
    ),
    Rule(
        lambda c: _in_span(c) and c.site.span.method != "coefficients",
        lambda c: c.site.span.directions <= c.site.span.samples,
        "site.span.directions = {c.site.span.directions} must be at most site.span.samples = "
        "{c.site.span.samples}: they are directions of the texts' gradients",
    ),
    Rule(
        _sites_in_span,
        lambda c: c.site.span.method == "coefficients",
        "site.span.method = {c.site.span.method!r} must be 'coefficients' in a run over sites; the others send "
        "whole updates, from the run of one site (clients = 1)",
    ),
    _among(
        _sites_in_span,
        "with site.span.method = 'coefficients'",
        "site.steps",
        (1,),
        "they are of the gradients at the adapter that a round begins with",
    ),
    Rule(
        _sites_in_span,
        lambda c: c.strategy.controller == "fixed",
        "strategy.controller = {c.strategy.controller!r} must be 'fixed' with site.span.method = 'coefficients', "
        "which normalises and has no threshold",
    ),
    # Batches of records drawn by themselves from protected groups.
    _by_examples("privacy.unit", lambda c: c.privacy.unit == "group", "'group': records are drawn of groups"),
    _by_examples("clients", lambda c: c.clients == 1, "1: sites of a run over sites draw whole units"),
    _by_examples("privacy.mode", lambda c: c.privacy.mode == "floor", "'floor': no filter accounts it"),
    _by_examples(
        "site.records-per-unit",
        lambda c: 1 <= c.site.records_per_unit <= MOST_RECORDS_PER_UNIT,
        f"in 1..{MOST_RECORDS_PER_UNIT}: it is what the noise of a unit is for",
    ),
    _by_examples("audit.canaries", lambda c: not c.audit.canaries, "0: canaries take the places of units"),
    Rule(
        lambda c: True,
        lambda c: c.expected_cohort >= 1,
        "sampling-rate x clients = {c.expected_cohort:g} clients expected in a round must be >= 1; "
        "raise sampling-rate or clients",
    ),
    # Secure sums.
    Rule(
        _by_secagg,
        lambda c: c.sampling_rate == 1.0,
        "sampling-rate = {c.sampling_rate:g} must be 1 with privacy.trust = 'secagg': the server knows who takes "
        "part, so leaving clients out would buy no privacy",
    ),
    Rule(
        _by_secagg,
        lambda c: c.privacy.mode == "filter",
        "privacy.mode must be 'filter' with privacy.trust = 'secagg': sums of discrete Gaussians are accounted in "
        "Rényi terms",
    ),
    Rule(
        _by_secagg,
        lambda c: c.privacy.noise != "gaussian",
        "privacy.noise must be 'discrete' with privacy.trust = 'secagg': the clients add exact integers",
    ),
    Rule(
        _by_secagg, lambda c: c.privacy.unit == "client", "privacy.unit must be 'client' with privacy.trust = 'secagg'"
    ),
    Rule(
        lambda c: _by_secagg(c) and not c.privacy.secagg.federation,
        lambda c: c.simulation.clients_per_node == 1,
        "simulation.clients-per-node must be 1 with privacy.trust = 'secagg': every client is a party",
    ),
    Rule(_by_secagg, lambda c: not _colluding_too_many(c), "privacy.secagg: {shares}"),
    # Noise that is correlated over rounds, whose guarantee or use others would void.
    Rule(
        lambda c: c.privacy.bands,
        lambda c: c.privacy.noise_correlation == "banded",
        "privacy.bands = {c.privacy.bands} needs privacy.noise-correlation = 'banded', got "
        "{c.privacy.noise_correlation!r}",
    ),
    Rule(
        lambda c: c.privacy.buffers,
        lambda c: c.privacy.noise_correlation == "blt",
        "privacy.buffers = {c.privacy.buffers} needs privacy.noise-correlation = 'blt', got "
        "{c.privacy.noise_correlation!r}",
    ),
    _with_correlated("privacy.unit", ("client",), "it is made for rounds over clients"),
    _with_correlated("privacy.trust", ("server",), "clients that make the noise cannot take any of it off again"),
    _with_correlated("privacy.mode", ("floor",), "a run of it is accounted as a whole"),
    _with_correlated("privacy.noise", ("gaussian",), "correlated noise is not exact on the grid"),
    _with_correlated("strategy.controller", ("fixed",), "noise takes off earlier noise at one threshold only"),
    _with_correlated("strategy.aggregation", ("plain", "ffa"), "every round must train the same values"),
    _with_correlated("strategy.optimizer", ("fedavg", "fedavgm"), "others do not add releases up"),
    Rule(
        _correlated,
        lambda c: c.privacy.bands <= most_bands(c),
        "privacy.bands = {c.privacy.bands} must be at most {bands}: a cohort comes from one of so many "
        "groups of clients, and a group takes part once in so many rounds (bands x sampling-rate <= 1, bands <= "
        "rounds)",
    ),
    # Heads that stay with their clients: there must be one, of one client, and learning from it must be possible.
    Rule(
        _with_local_heads,
        lambda c: c.model.task == "classification" and c.privacy.unit == "client",
        "strategy.aggregation = 'local-heads' needs model.task = 'classification' and privacy.unit = 'client', got "
        "{c.model.task!r} and {c.privacy.unit!r}: no other model has a head, and one that all records of a site train "
        "would carry each of them into the others' updates",
    ),
    Rule(
        _with_local_heads,
        lambda c: c.public.warm_start_epochs or c.model.adapter,
        "strategy.aggregation = 'local-heads' needs public.warm-start-epochs above 0, or model.adapter: a head of "
        "zeros passes no gradient on, and nobody sends a better one",
    ),
    # Evaluation: a held-out client must be able to answer, and a round to be chosen.
    Rule(
        lambda c: c.several_sites,
        lambda c: c.evaluation.keep == "last" and not c.evaluation.patience,
        "evaluation.keep = {c.evaluation.keep!r}, evaluation.patience = {c.evaluation.patience}: several sites "
        "with ledgers of their own end with the last round; take 'last' and 0",
    ),
    _asked_privately("privacy.unit", "client", "whole clients are held out"),
    _asked_privately("privacy.trust", "server", "in a secure sum every client takes part in every round"),
    _asked_privately("privacy.mode", "floor", "a filter adds up what different clients are asked"),
    _asked_privately("privacy.noise-correlation", "none", "it is made for one kind of release"),
    _asked_privately("data.nodes", 0, "nodes of many clients draw for themselves whom they train"),
    _asked_privately("audit.canaries", 0, "canaries take the places of clients that are trained on"),
    Rule(
        lambda c: c.evaluation.confusion,
        lambda c: c.evaluation.data == "private" and c.model.task == "classification",
        "evaluation.confusion = true asks held-out clients what labels are taken for, with evaluation.data = 'private' "
        "and model.task = 'classification' (now {c.evaluation.data!r}, {c.model.task!r}); leave it out: public records "
        "show it for free",
    ),
    Rule(
        lambda c: c.evaluation.tokens,
        lambda c: c.evaluation.data == "private" and c.model.task not in ("classification", "preference"),
        "evaluation.tokens = {c.evaluation.tokens} asks held-out clients how many tokens a language model predicts, "
        "with evaluation.data = 'private' (now {c.evaluation.data!r}, {c.model.task!r}); leave it out",
    ),
    Rule(
        lambda c: c.evaluation.data == "private",
        lambda c: c.evaluation.epsilon <= c.privacy.epsilon,
        "evaluation.epsilon = {c.evaluation.epsilon:g} must be at most privacy.epsilon = {c.privacy.epsilon:g}, "
        "which is the guarantee of every client; lower it, or 0 takes that",
    ),
)
"""The rules, in the order in which what is wrong is told."""
