"""Rules without a guarantee, shown raw rows of records or exact counts, in runs marked so and nowhere else.

A controller sees releases (:mod:`strategies.controllers.controller`). The rules of this package, as their papers print
them, see norms, losses and gradients of single records, or statistics of clients that nothing protects; a run of one is
refused unless it is marked (``privacy.non-private``), and its ledger, results and metrics say that it has no guarantee.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from privacy.clipping.units import Units
from privacy.commitment import Commitment
from privacy.events import effective_noise_multiplier
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.private_training import PlannedRelease, PrivateTraining


class UnsoundRule:
    """A rule without a guarantee."""

    unsound: ClassVar[str]
    """Why there is no guarantee, in words."""

    def refusal(self) -> str:
        """The refusal that an unmarked run is told."""
        return f"{self.unsound}; set privacy.non-private = true"

    def commit_noise(self, commitment: Commitment) -> Commitment:
        """The commitment with the noise that the rule really plans."""
        raise NotImplementedError


class ExactCounts(UnsoundRule):
    """A rule over clients whose queries tell it exact counts, beside an update with all of the calibrated noise.

    They come as any answer does, summed and with noise, so no message of a run differs; the noise is too small to
    hide anybody, and the ledger records it as it is.
    """

    noise_on_counts: ClassVar[float] = 0.05
    """Standard deviation of the noise on each count: rounding undoes it."""

    def commit_noise(self, commitment: Commitment) -> Commitment:
        exact = (1.0, self.noise_on_counts)  # sensitivity and noise of one count
        floor = tuple(
            replace(step, noise_multiplier=effective_noise_multiplier((1.0, step.noise_multiplier), exact))
            if step.label == "round"
            else step
            for step in commitment.floor
        )
        return replace(commitment, floor=floor)


class RawRule(UnsoundRule):
    """The methods that a rule over records, which is shown their rows, adds to a controller."""

    @property
    def noise_share(self) -> float:
        """The share of the calibrated noise multiplier that a release of the rule really gets."""
        return 1.0

    def regroup_rows(self, chunks: list[Units]) -> list[Units]:
        """The rows that are clipped one by one; those of the records unless the rule makes others of them."""
        return chunks

    def see(self, state: Any, info: RunInfo, batch: list[Units]) -> Any:
        """The controller's state after a step on this batch."""
        raise NotImplementedError

    def commit_noise(self, commitment: Commitment) -> Commitment:
        floor = tuple(
            replace(step, noise_multiplier=step.noise_multiplier * self.noise_share) for step in commitment.floor
        )
        return replace(commitment, floor=floor)


class ShownRaw(PrivateTraining):
    """A mixin for a training over records whose controller is a :class:`RawRule`."""

    _seen: list[Units] | None = None

    def rows(self, batch: Any, planned: PlannedRelease) -> Iterable[Units]:
        """The rows of the training, regrouped by the rule and kept for it until :meth:`observe`.

        Raises:
            ValueError: the run is not marked.
        """
        rule: Any = self.controller
        if self.ledger.commitment.not_private is None:
            raise ValueError(rule.refusal())
        self.ledger.stamp_not_private(rule.unsound)
        over: Any = super()
        self._seen = rule.regroup_rows(list(over.rows(batch, planned)))
        return self._seen

    def observe(self, public: PublicSignals) -> None:
        """Observe as :meth:`PrivateTraining.observe` does; the rule is shown the rows of the step too."""
        super().observe(public)
        if self._seen is not None:
            rule: Any = self.controller
            self.state = replace(self.state, controller=rule.see(self.state.controller, self.planner.info, self._seen))
            self._seen = None
