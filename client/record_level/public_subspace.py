r"""Private training in the span of gradients of public texts: PE-SGD, FixSample, PDP-SGD, GEP and B-GEP.

Every step, the gradients of N public (synthetic) texts at the current adapter span where the update lies:

==================  ===============================================================  ================================
method              clip map of the step                                             afterwards
==================  ===============================================================  ================================
coefficients        normalised coefficients of the N gradients (``privacy/clipping/subspace.py``)  the texts may
evolve: PE-SGD projection          that of the controller                                           u <- V^T V u:
PDP-SGD embedding-residual  V x and x - V^T V x, clipped apart: GEP                          nothing
embedding           V x alone (``privacy/clipping/subspace.py``): B-GEP                       nothing
==================  ===============================================================  ================================

V are the k leading eigenvectors of the texts' gradients. With texts that never change the first method is FixSample;
in PE-SGD the sizes of the released coefficients choose which texts stay and get variations
(``client/record_level/synthetic_texts.py``).

References: PE-SGD, Zou et al., ICLR 2026; PDP-SGD, Zhou, Wu, Banerjee 2021 (arXiv 2007.03813); GEP, Yu, Zhang, Chen,
Liu 2021 (arXiv 2102.12677).
Guarantee: that of ``client/record_level/dp_sgd.py``, one Poisson-sampled Gaussian per step: texts, gradients and V are
made of the public prompts, the base model and earlier releases; projecting is post-processing.
Deviations: one basis for the whole adapter (GEP has one per group of parameters, from one power iteration; here exact
eigenvectors); thresholds can be set from the public gradients, see :func:`public_bounds`.

:func:`in_public_span` puts planner and server step of a silo's training inside wrappers of the same structure.

Projecting on the leading directions of public gradients: what PDP-SGD does to a released update.

    u <- V^T V u,   V [k, d] the leading right singular vectors of public gradients

Reference: Zhou, Wu, Banerjee 2021, "Bypassing the Ambient Dimension: Private SGD with Gradient Subspace Identification"
(arXiv 2007.03813), Algorithm 1. Guarantee: post-processing of the release. The noise that is left is handed on, so that
an optimizer which corrects for noise corrects for what there is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

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
from privacy.mechanism import Release
from strategies.adapter.trainable import TrainedSubset
from strategies.private_training import PlannedRelease


@dataclass(frozen=True)
class Projecting:
    """An optimizer that is given the released update projected on V: PDP-SGD.

    Attributes:
        inner: the optimizer.
        basis: V ``[k, d]``, orthonormal rows, in the coordinates of the sent vector.
        scales: those of the sent vector, which an optimizer's coordinates are without; None where all are 1.
    """

    inner: Any
    basis: Float[Tensor, "k d"]
    scales: Float[Tensor, " d"] | None = None

    @property
    def reads_public_loss(self) -> bool:
        return bool(self.inner.reads_public_loss)

    @property
    def moments(self) -> Mapping[str, Any]:
        moments: Mapping[str, Any] = self.inner.moments
        return moments

    def init(self, parameters: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.inner.init(parameters)
        return state

    def step(self, state: dict[str, Tensor], parameters: Tensor, step: Any) -> tuple[dict[str, Tensor], Tensor]:
        """The inner step, with the noise that is left after projecting."""
        v = self.basis.double()
        into, out = (v, v) if self.scales is None else (v * self.scales, v / self.scales)
        update = (into @ step.update.double()) @ out
        covariance = (into * step.noise_std.double()) @ (into * step.noise_std.double()).T
        std = ((covariance @ out) * out).sum(dim=0).clamp_min(0.0).sqrt()
        given = replace(step, update=update.to(step.update.dtype), noise_std=std)
        stepped: tuple[dict[str, Tensor], Tensor] = self.inner.step(state, parameters, given)
        return stepped


def leading(rows: Float[Tensor, "n d"], rank: int) -> Float[Tensor, "k d"]:
    """The `rank` leading right singular vectors of the rows, orthonormal also where rows depend on each other."""
    wide = rows.double()
    _, vectors = torch.linalg.eigh(wide @ wide.T)
    basis: Tensor = torch.linalg.qr(wide.T @ vectors[:, -rank:].flip(1)).Q.T.float().contiguous()
    return basis


METHODS = ("coefficients", "projection", "embedding-residual", "embedding")

Evolve = Callable[[Records, Tensor, Tensor, int], Records]
"""(texts, released coefficients, full adapter, step) -> texts of the next step; ``Synthesiser.evolved`` is one."""


@dataclass(frozen=True)
class Texts:
    """A controller's state and the public texts of the next step; tensors, so that a checkpoint holds both."""

    inner: Any
    tokens: Tensor
    offsets: Tensor

    @staticmethod
    def of(inner: Any, records: Records) -> "Texts":
        return Texts(inner, torch.from_numpy(np.asarray(records.tokens)), torch.from_numpy(np.asarray(records.offsets)))

    @property
    def records(self) -> Records:
        return Records(self.tokens.numpy(), self.offsets.numpy())


@dataclass(frozen=True)
class PublicSpan:
    """What the wrappers share.

    Attributes:
        engine: gives gradients of the texts.
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
        """Of every text, as `part` sends them."""
        self.engine.train_factors(part.factors)
        layout = self.engine.layout
        start = adapter if part.ranks is None else layout.truncated(adapter, part.ranks)
        rows = torch.zeros(len(texts), part.layout(layout).dim)
        for chunk in self.engine.per_record_gradients(start, texts):
            rows[torch.from_numpy(chunk.records)] = part.sent(layout, chunk.rows.cpu()).float()
        return rows

    def basis(self, adapter: Float[Tensor, " size"], texts: Records, part: TrainedSubset) -> Float[Tensor, "k d"]:
        """What the step's clip map is made of: the gradients themselves, or V."""
        rows = self.gradients(adapter, texts, part).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return rows if self.method == "coefficients" else leading(rows, self.rank)

    def clipped(self, planned: Any, basis: Float[Tensor, "k d"]) -> Any:
        """The release with the clip map of the method; ValueError for a controller that plans no flat clipping."""
        clip = planned.plan.clip
        if isinstance(clip, NoUpdate) or self.method == "projection":
            return planned
        if not isinstance(clip, FlatClip):
            raise ValueError(
                f"method {self.method!r} sets the clip map itself and needs a controller of flat clipping, the "
                f"controller planned {type(clip).__name__}; take fixed, dynamic or dp-lac"
            )
        made: Any
        match self.method:
            case "coefficients":
                made = CoefficientClip(basis)
            case "embedding-residual":
                made = EmbeddingResidualClip(basis, clip.bound, self.residual_bound)
            case _:
                made = SubspaceClip(basis, clip.bound)
        return replace(planned, plan=replace(planned.plan, clip=made))


@dataclass(frozen=True)
class SpanController:
    """A controller whose state carries the public texts along."""

    inner: Any
    span: PublicSpan

    def init(self, setting: Any, public: Any) -> Texts:
        return Texts.of(self.inner.init(setting, public), self.span.texts)

    def update(self, state: Texts, released: Release, public: Any) -> Texts:
        return replace(state, inner=self.inner.update(state.inner, released, public))

    def step_scale(self, state: Texts) -> float:
        scale: float = self.inner.step_scale(state.inner)
        return scale

    def released_values(self, state: Texts) -> dict[str, float]:
        values: dict[str, float] = self.inner.released_values(state.inner)
        return values

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass(frozen=True)
class SpanPlanner:
    """A planner whose releases are made in the public span at the current adapter."""

    inner: Any
    span: PublicSpan
    controller: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "controller", SpanController(self.inner.controller, self.span))

    @property
    def setting(self) -> Any:
        return self.inner.setting

    def initial(self) -> Any:
        return self.inner.initial()

    def based(self, state: Any) -> Any:
        """The state with the span of the next step, which is made once."""
        step = state.round + 1
        if state.basis is not None and state.basis_round == step:
            return state
        basis = self.span.basis(state.adapter, state.controller.records, self.inner.part(step))
        return replace(state, basis=basis, basis_round=step)

    def planned(self, state: Any) -> PlannedRelease:
        planned: PlannedRelease = self.inner.planned(replace(state, controller=state.controller.inner, basis=None))
        return self.span.clipped(planned, state.basis) if planned.round > 0 else planned


@dataclass(frozen=True)
class SpanServer:
    """A server step that projects where the method does, and lets the texts evolve behind it."""

    inner: Any
    span: PublicSpan

    @property
    def optimizer(self) -> Any:
        return self.inner.optimizer

    def start(self, adapter: Tensor, controller: object, round: int) -> Any:
        return self.inner.start(adapter, controller, round)

    def after(
        self, state: Any, release: Release, part: TrainedSubset, round: int, scale: float, public_loss: Any
    ) -> Any:
        server = self.inner
        if self.span.method == "projection":
            server = replace(
                server, optimizer=Projecting(server.optimizer, state.basis, part.scales(self.span.engine.layout))
            )
        state = server.after(state, release, part, round, scale, public_loss)
        if self.span.evolve is None or release.encoded is None:
            return state
        texts = self.span.evolve(state.controller.records, release.encoded, state.adapter, round)
        return replace(state, controller=Texts.of(state.controller.inner, texts))


def public_bounds(span: PublicSpan, adapter: Float[Tensor, " size"], part: TrainedSubset) -> tuple[float, float, float]:
    """Medians over the texts, at an adapter, of ||g||, ||V g|| and ||g - V^T V g||: free thresholds C, S0 and S1.

    The texts' own V fits them better than records that did not make it: S1 is a low guess. 1e-12 at least.
    """
    rows = span.gradients(adapter, span.texts, part).double()
    basis = leading(rows.float(), min(span.rank, *rows.shape)).double()
    inside = rows @ basis.T
    lengths = [rows.norm(dim=1), inside.norm(dim=1), (rows - inside @ basis).norm(dim=1)]
    whole, embedded, rest = (max(1e-12, float(values.median())) for values in lengths)
    return whole, embedded, rest


def in_public_span(training: PrivateSgd, span: PublicSpan) -> PrivateSgd:
    """The same training, before it begins, with its releases made in the public span."""
    planner: Any = SpanPlanner(training.planner, span)
    server: Any = SpanServer(training.server, span)
    return PrivateSgd(
        gradients=training.gradients,
        planner=planner,
        server=server,
        ledger=training.ledger,
        sampler=training.sampler,
        noise=training.noise,
        schedule=training.schedule,
        public_loss=training.public_loss,
    )
