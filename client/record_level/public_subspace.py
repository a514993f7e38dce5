r"""Private training in the span of gradients of public texts: PE-SGD, FixSample, PDP-SGD, GEP and B-GEP.

Every step, the gradients of N public (synthetic) texts at the current adapter span where the update lies:

==================  =============================================  =====================================  =========
method              clip map of the step                           afterwards                             name
==================  =============================================  =====================================  =========
coefficients        normalised coefficients of the N gradients     the texts may evolve                   PE-SGD
projection          that of the controller                         u <- V^T V u                           PDP-SGD
embedding-residual  V x and x - V^T V x, clipped apart             nothing                                GEP
embedding           V x alone                                      nothing                                B-GEP
==================  =============================================  =====================================  =========

V [k, d] are the k leading right singular vectors of the texts' gradients; the clip maps are those of
``privacy/clipping/subspace.py``. With texts that never change the first method is FixSample; in PE-SGD the sizes of the
released coefficients choose which texts stay and get variations (``client/record_level/synthetic_texts.py``). What
projecting leaves of the noise is handed on, so that an optimizer which corrects for noise corrects for what there is.

References: PE-SGD, Zou et al., ICLR 2026; PDP-SGD, Zhou, Wu, Banerjee 2021, "Bypassing the Ambient Dimension: Private
SGD with Gradient Subspace Identification" (arXiv 2007.03813), Algorithm 1; GEP, Yu, Zhang, Chen, Liu 2021 (arXiv
2102.12677).
Guarantee: that of ``client/record_level/dp_sgd.py``, one Poisson-sampled Gaussian per step: texts, gradients and V are
made of the public prompts, the base model and earlier releases; projecting is post-processing of the release.
Deviations: one basis for the whole adapter (GEP has one per group of parameters, from one power iteration; here exact
eigenvectors); thresholds can be set from the public gradients, see :func:`public_bounds`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from client.data.records import Records
from client.record_level.dp_sgd import PrivateSgd
from client.record_level.units import GradientEngine
from privacy import checks
from privacy.clipping.norms import FlatClip, NoUpdate
from privacy.clipping.subspace import CoefficientClip, EmbeddingResidualClip, SubspaceClip
from privacy.contribution import Plan
from privacy.mechanism import Release
from strategies.adapter.trainable import TrainedSubset
from strategies.optimizers.optimizer import Optimizer, ServerStep


@dataclass(frozen=True)
class Projecting:
    """An optimizer that is given the released update projected on V: PDP-SGD.

    Attributes:
        basis: V ``[k, d]``, orthonormal rows, in the coordinates of the sent vector.
        scales: those of the sent vector, which an optimizer's coordinates are without; None where all are 1.
    """

    inner: Optimizer
    basis: Float[Tensor, "k d"]
    scales: Float[Tensor, " d"] | None = None

    @property
    def moments(self) -> Mapping[str, Literal[1, 2]]:
        return self.inner.moments

    def init(self, parameters: Float[Tensor, " d"]) -> dict[str, Tensor]:
        return self.inner.init(parameters)

    def step(
        self, state: dict[str, Tensor], parameters: Float[Tensor, " d"], step: ServerStep
    ) -> tuple[dict[str, Tensor], Float[Tensor, " d"]]:
        """The inner step, with the noise that is left after projecting."""
        v = self.basis.double()
        into, out = (v, v) if self.scales is None else (v * self.scales, v / self.scales)
        update = (into @ step.update.double()) @ out
        covariance = (into * step.noise_std.double()) @ (into * step.noise_std.double()).T
        std = ((covariance @ out) * out).sum(dim=0).clamp_min(0.0).sqrt()
        given = replace(step, update=update.to(step.update.dtype), noise_std=std)
        return self.inner.step(state, parameters, given)


def leading_directions(rows: Float[Tensor, "n d"], rank: int) -> Float[Tensor, "k d"]:
    """The `rank` leading right singular vectors of the rows, orthonormal also where rows depend on each other."""
    wide = rows.double()
    _, vectors = torch.linalg.eigh(wide @ wide.T)
    basis: Tensor = torch.linalg.qr(wide.T @ vectors[:, -rank:].flip(1)).Q.T.float().contiguous()
    return basis


METHODS = ("coefficients", "projection", "embedding-residual", "embedding")

Evolve = Callable[[Records, Tensor, Tensor, int], Records]
"""(texts, released coefficients, full adapter, step) -> texts of the next step; ``Synthesiser.evolved`` is one."""


@dataclass(frozen=True)
class SpanState:
    """The public texts of the next step and what its clip map is made of; tensors, so that a checkpoint holds both.

    Attributes:
        tokens, offsets: the texts, as in :class:`client.data.records.Records`.
        basis: float32 ``[k, d]``, gradients of the texts or V, in the coordinates of the sent vector.
        round: the step ``basis`` was made for.
    """

    tokens: Tensor
    offsets: Tensor
    basis: Tensor | None = None
    round: int = -1

    @property
    def texts(self) -> Records:
        return Records(self.tokens.numpy(), self.offsets.numpy())

    def with_texts(self, texts: Records) -> "SpanState":
        tokens, offsets = (torch.from_numpy(np.asarray(values)) for values in (texts.tokens, texts.offsets))
        return replace(self, tokens=tokens, offsets=offsets)


@dataclass(frozen=True)
class PublicSpan:
    """The :class:`strategies.private_training.Subspace` of public texts.

    Attributes:
        texts: D_0.
        method: one of :data:`METHODS`.
        rank: k, for all methods but ``coefficients``.
        residual_bound: S1 of GEP.
        evolve: makes the texts of the next step from the released coefficients; None keeps them.
    """

    engine: GradientEngine
    texts: Records
    method: str
    rank: int = 50
    residual_bound: float = 1.0
    evolve: Evolve | None = None

    def __post_init__(self) -> None:
        checks.one_of(METHODS, method=self.method)
        checks.positive(residual_bound=self.residual_bound)
        if self.method != "coefficients":
            checks.within(1, min(len(self.texts), self.engine.layout.dim), rank=self.rank)
            if self.evolve is not None:
                raise ValueError(f"evolve needs released coefficients, which method {self.method!r} has not")

    def gradients(self, adapter: Float[Tensor, " size"], texts: Records, part: TrainedSubset) -> Float[Tensor, "n d"]:
        """The gradient of every text, as `part` sends it."""
        self.engine.train_factors(part.factors)
        layout = self.engine.layout
        start = adapter if part.ranks is None else layout.truncate_ranks(adapter, part.ranks)
        rows = torch.zeros(len(texts), part.layout(layout).dim)
        for chunk in self.engine.per_record_gradients(start, texts):
            rows[torch.from_numpy(chunk.records)] = part.sent_rows(layout, chunk.rows.cpu()).float()
        return rows

    def basis(self, adapter: Float[Tensor, " size"], texts: Records, part: TrainedSubset) -> Float[Tensor, "k d"]:
        """The rows that the step's clip map is made of: the gradients themselves, or V."""
        rows = self.gradients(adapter, texts, part).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return rows if self.method == "coefficients" else leading_directions(rows, self.rank)

    def start(self) -> SpanState:
        """The state with the first texts."""
        nothing = torch.empty(0)
        return SpanState(nothing, nothing).with_texts(self.texts)

    def refresh_state(
        self, own: SpanState, adapter: Float[Tensor, " size"], round: int, part: TrainedSubset
    ) -> SpanState:
        """Take the span of the texts' gradients at this adapter, which is made once a step."""
        if own.round == round:
            return own
        return replace(own, basis=self.basis(adapter, own.texts, part), round=round)

    def clip_plan(self, own: SpanState, plan: Plan) -> Plan:
        """Give the plan the clip map of the method; ValueError for a controller that plans no flat clipping."""
        clip, basis = plan.clip, own.basis
        if isinstance(clip, NoUpdate) or self.method == "projection":
            return plan
        if not isinstance(clip, FlatClip):
            raise ValueError(
                f"method {self.method!r} sets the clip map itself and needs a controller of flat clipping, the "
                f"controller planned {type(clip).__name__}; take fixed, dynamic or dp-lac"
            )
        assert basis is not None, "refreshed() comes first"
        match self.method:
            case "coefficients":
                return replace(plan, clip=CoefficientClip(basis))
            case "embedding-residual":
                return replace(plan, clip=EmbeddingResidualClip(basis, clip.bound, self.residual_bound))
            case _:
                return replace(plan, clip=SubspaceClip(basis, clip.bound))

    def project_optimizer(self, own: SpanState, optimizer: Optimizer, scales: Float[Tensor, " d"] | None) -> Optimizer:
        """The optimizer, which PDP-SGD gives the projected release."""
        if self.method != "projection":
            return optimizer
        assert own.basis is not None, "refreshed() comes first"
        return Projecting(optimizer, own.basis, scales)

    def after(self, own: SpanState, release: Release, adapter: Float[Tensor, " size"], round: int) -> SpanState:
        """Take the texts of the next step, where the released coefficients make them."""
        if self.evolve is None or release.encoded is None:
            return own
        return own.with_texts(self.evolve(own.texts, release.encoded, adapter, round))


def public_bounds(span: PublicSpan, adapter: Float[Tensor, " size"], part: TrainedSubset) -> tuple[float, float, float]:
    """Medians over the texts, at an adapter, of ||g||, ||V g|| and ||g - V^T V g||: free thresholds C, S0 and S1.

    The texts' own V fits them better than records that did not make it: S1 is a low guess. 1e-12 at least.
    """
    rows = span.gradients(adapter, span.texts, part).double()
    basis = leading_directions(rows.float(), min(span.rank, *rows.shape)).double()
    inside = rows @ basis.T
    lengths = [rows.norm(dim=1), inside.norm(dim=1), (rows - inside @ basis).norm(dim=1)]
    whole, embedded, rest = (max(1e-12, float(values.median())) for values in lengths)
    return whole, embedded, rest


def in_public_span(training: PrivateSgd, span: PublicSpan) -> PrivateSgd:
    """The training, before it begins, with its releases made in the public span."""
    training.planner = replace(training.planner, subspace=span)
    return training
