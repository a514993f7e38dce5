r"""Averaging sites that are private already: the server adds no noise and is not trusted with anything.

    plain, ffa:   x_{t+1} = x_t + (1/n) sum_k Delta_k        over the n sites that sent an update
    fedex:        the same, and R_{t+1} = R_t + s ((1/n) sum_k B_k A_k - B_{t+1} A_{t+1})
    flora:        R_{t+1} = R_t + (s/n) sum_k B_k A_k,  A_{t+1} drawn anew,  B_{t+1} = 0
    fedgsa:       A shared, B and A from the sites' common subspace, see ``strategies/aggregations/individual.py``

    coefficients: x_{t+1} = step(x_t, G ((1/n) sum_k c_k))   with the run's optimizer, see :class:`SpanUpdate`

Delta_k is what K private steps of site k moved the adapter (``client/record_level/participant.py``), B_k and A_k its
factors after them; R is added to the frozen weights (``strategies/adapter/residual.py``), s = alpha / r; heads are
averaged.
References: McMahan et al. 2017 (arXiv 1602.05629v4); Liu et al., "DP-LoRA" (arXiv 2312.17493), for averaging LoRA
factors that were trained by DP-SGD in every client; the other three as in ``aggregations/individual.py``.
Guarantee: post-processing of the sites' releases. Each site's epsilon is its own, for one unit of its own data. Sites
weigh alike, since sizes may be private; a site that refuses, fails or sends nonsense is left out of the mean.
Deviations: what FLoRA and FedEx write into W0 is kept beside it, which computes the same; sites share one rank.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from strategies.adapter.layout import AdapterLayout, drawn_a
from strategies.adapter.residual import Pair, pairs, residual_size
from strategies.adapter.trainable import TrainedSubset
from strategies.aggregations.individual import FedEx, FedGsa, Flora, shared_subspace, stack_factors
from strategies.aggregations.individual import average_factors as residual_of_mean
from strategies.plugins import BadAnswer
from strategies.server_update import ServerState, ServerUpdate, served_share

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GlobalModel:
    """The model that the sites share.

    Attributes:
        adapter: float32 ``[size]``.
        residual: float32, of the frozen weights; None until an aggregation writes into them.
        average: exponential moving average of the adapter over the rounds; None where none is kept.
    """

    adapter: Float[Tensor, " size"]
    residual: Float[Tensor, " values"] | None = None
    average: Float[Tensor, " size"] | None = None

    @property
    def served(self) -> Float[Tensor, " size"]:
        """The adapter that is evaluated and saved; sites continue from ``adapter``."""
        return self.adapter if self.average is None else self.average


@dataclass(frozen=True)
class Place:
    """The place of a combination in the run: layout and scale s of the adapter, seed and round for what is drawn,
    factor of the served average.
    """

    layout: AdapterLayout
    scale: float
    seed: int
    round: int
    served_average: float = 0.0


Combine = Callable[[GlobalModel, Sequence[Float[Tensor, " size"]], Place], GlobalModel]
"""From the global model and the sites' updates of its adapter to the next global model."""


@dataclass(frozen=True)
class SiteAnswer:
    """The checked reply of one site.

    Attributes:
        update: float32 ``[size]``, or coefficients ``[n]`` of n public texts; None if it took no step.
        refused: why it took none or fewer than asked.
    """

    site: int
    update: Float[Tensor, " size"] | None
    steps: int
    refused: str


def combine_of(aggregation: object) -> Combine:
    """Choose how sites are put together under an aggregation of ``strategies``."""
    if isinstance(aggregation, FedEx):
        return exact_mean
    if isinstance(aggregation, Flora):
        return merged_and_restarted
    return common_subspace if isinstance(aggregation, FedGsa) else add_mean


def add_mean(model: GlobalModel, updates: Sequence[Tensor], place: Place) -> GlobalModel:
    """Add the mean update to the global model's adapter."""
    return replace(model, adapter=model.adapter + torch.stack(list(updates)).mean(dim=0))


def exact_mean(model: GlobalModel, updates: Sequence[Tensor], place: Place) -> GlobalModel:
    """FedEx: the mean update, and what the product of the mean factors lacks of the mean product."""
    result = _with_residual(add_mean(model, updates, place), place)
    for pair, factors in _factors(model, updates, place):
        _, _, lacking = residual_of_mean(factors, place.scale)
        pair.of(_residual(result)).add_(lacking)
    return result


def merged_and_restarted(model: GlobalModel, updates: Sequence[Tensor], place: Place) -> GlobalModel:
    """FLoRA: the mean product goes into the residual, and the factors start again."""
    result = _with_residual(add_mean(model, updates, place), place)
    for pair, factors in _factors(model, updates, place):
        tall, wide = stack_factors(factors)
        pair.of(_residual(result)).add_(place.scale * (tall @ wide))
        pair.a.of(result.adapter).copy_(drawn_a(pair.a, place.seed, "flora", place.round))
        pair.b.of(result.adapter).zero_()
    return result


def _with_residual(model: GlobalModel, place: Place) -> GlobalModel:
    """With a residual of its own to write into; without one where no layer is adapted."""
    size = residual_size(place.layout)
    if not size:
        return model
    return replace(model, residual=torch.zeros(size) if model.residual is None else model.residual.clone())


def _residual(model: GlobalModel) -> Tensor:
    assert model.residual is not None
    return model.residual


def _factors(
    model: GlobalModel, updates: Sequence[Tensor], place: Place
) -> Iterator[tuple[Pair, list[tuple[Tensor, Tensor]]]]:
    """Every adapted layer with B and A of every site, in float64."""
    trained = [model.adapter + update for update in updates]
    for pair in pairs(place.layout):
        yield pair, [(pair.b.of(full).double(), pair.a.of(full).double()) for full in trained]


def common_subspace(model: GlobalModel, updates: Sequence[Tensor], place: Place) -> GlobalModel:
    """FedGSA for every adapter; heads are averaged."""
    result = add_mean(model, updates, place)
    for pair, factors in _factors(model, updates, place):
        bs = [b for b, _ in factors]
        if all(bool((matrix == 0).all()) for matrix in bs):
            continue  # nothing was learnt yet: there is no direction to agree on
        left, right = shared_subspace(bs, pair.a.of(model.adapter).double())
        pair.b.of(result.adapter).copy_(left)
        pair.a.of(result.adapter).copy_(right)
    return result


@dataclass(frozen=True)
class SpanUpdate:
    """The server's step where sites send coefficients of public gradients: PE-SGD and FixSample over sites.

    A site sends as many numbers as there are texts, c_k = (sum of its batch's normalised coefficients + noise) / its
    expected batch; the server has the texts, so it has G, and the optimizer is the server's.

    References: Zou et al., PE-SGD, ICLR 2026, which trains at one site. Guarantee: post-processing of the sites'
    releases; whatever texts a server sends, a site's coefficients are normalised before they are summed.

    Attributes:
        part: what of the adapter is trained.
        schedule: public factor on the step of every round.
    """

    server: ServerUpdate
    part: TrainedSubset
    schedule: Callable[[int], float]

    def __call__(
        self,
        model: GlobalModel,
        optimizer: dict[str, Tensor],
        gradients: Float[Tensor, "n d"],
        sent: Sequence[Float[Tensor, " n"]],
        noise: float,
        round: int,
    ) -> tuple[GlobalModel, dict[str, Tensor]]:
        """The next global model, and the optimizer's state.

        Args:
            sent: coefficients of one site or more.
            gradients: G^T, of the texts at the adapter, as an update is sent.
            noise: standard deviation of the noise in each of the mean coefficients.
        """
        wide = gradients.double()
        update = torch.stack(list(sent)).double().mean(dim=0) @ wide
        std = torch.linalg.vector_norm(wide, dim=0) * noise
        before = ServerState(round - 1, model.adapter, model.served, optimizer, None)
        after = self.server.apply_update(before, update.float(), std, self.part, round, self.schedule(round))
        average = after.served if self.server.served_average else None
        return replace(model, adapter=after.adapter, average=average), after.optimizer


def updates_of(answers: Iterable[SiteAnswer], round: int) -> list[Tensor]:
    """The updates that the sites sent, in one order: sums of floats depend on it. Refusals are logged."""
    updates = []
    for answer in sorted(answers, key=lambda answer: answer.site):
        if answer.refused:
            log.warning("round %d: site %d took %d steps: %s", round, answer.site, answer.steps, answer.refused)
        if answer.update is not None:
            updates.append(answer.update)
    if not updates:
        log.warning("round %d: no site took a step; the model stays as it is", round)
    return updates


def next_model(model: GlobalModel, answers: Iterable[SiteAnswer], combine: Combine, place: Place) -> GlobalModel:
    """The next global model; the old one if no site took a step. Refusals are logged, and the round continues.

    With a served average the newest adapter counts ``1 - factor`` in it, more in the first rounds.
    """
    updates = updates_of(answers, place.round)
    if not updates:
        return model
    new = _with_average(combine(model, updates, place), model, place)
    for values in (new.adapter, new.residual):  # of what sites released, behind their noise
        if values is not None and not bool(values.isfinite().all()):
            raise BadAnswer(f"strategy.aggregation: the sites' mean is not finite in round {place.round}")
    return new


def _with_average(model: GlobalModel, before: GlobalModel, place: Place) -> GlobalModel:
    if not place.served_average:
        return model
    share = served_share(place.served_average, place.round)
    return replace(model, average=torch.lerp(before.served, model.adapter, share))
