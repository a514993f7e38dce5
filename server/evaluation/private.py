"""Private evaluation: what clients that are never trained on answer about a released adapter, bounded and with noise.

Every held-out client answers two bounded numbers about the adapter that would be served: the mean loss of its records,
clipped to a public range, and its share of right answers. Both are centred, so that a client moves a sum by half the
range, and are ONE joint Gaussian release of multiplier z, in which each has z times the square root of 2. A third
answer may be asked for, and each of the three then has z times the square root of 3: of a classifier the share of the
client's records in every cell of the matrix of confusions, a row no longer than 1; of a language model how many tokens
it predicts for the client, clipped. With S the noisy sum of a mean, c the centre, q the rate at which the n held-out
clients are asked,

    estimate = c + S / (q n),    its variance over noise and drawing <= (z sqrt(2) c / (q n))^2 + (1 - q) c^2 / (q n)

The estimate is unbiased for the mean over the held-out clients, each counting once whatever the number of its records
(one without records counts as c). The interval is for that mean. What the next clients would say differs from it as a
sample of n does: by at most 1.96 sqrt(m (range - m) / n) more, for a mean m.

Guarantee: a client is held out or trained on by its number alone, so a run costs the larger of what its rounds and what
its evaluations cost, not their sum; the proof is at :class:`privacy.events.PartPoisson`. What is done with an estimate
(a threshold that follows it, the best round, an early end) is post-processing of it. At a rate below 1 the drawing adds
error and the noise of the mean, z / (q n), does not fall: it saves work, never noise.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from client.models.tasks import Metrics
from privacy.clipping.norms import FlatClip, NoUpdate
from privacy.contribution import Plan
from privacy.events import PartPoisson
from privacy.mechanism import Release
from privacy.queries import BoundedMean
from server.evaluation.shares import nearest_shares
from server.run_folder.round_record import RoundRecord

if TYPE_CHECKING:
    from strategies.dp_fedavg import DpFedAvg

MOST_WITHIN = 0.25
"""The widest half interval of an accuracy that is worth its price: it then covers half of what an accuracy can be."""
NORMAL_95 = 1.959964
LOSS_OF_A_TOKEN = 10.0


def accuracy_within(sampling: PartPoisson, noise_multiplier: float, answers: int = 2) -> float:
    """Half the width of the 95 % interval around an accuracy that is one of so many answers, from noise and drawing."""
    return within(BoundedMean(1.0, math.sqrt(answers) * noise_multiplier / 2, centred=True), sampling)


def within(query: BoundedMean, sampling: PartPoisson) -> float:
    """Half the width of the 95 % interval around a mean over the held-out clients, from noise and drawing."""
    asked, rate = sampling.expected_units, sampling.rate
    return NORMAL_95 * math.hypot(query.noise_std / asked, query.sensitivity * math.sqrt((1.0 - rate) / asked))


def default_bound(num_labels: int, task: str = "") -> float:
    """The largest loss that counts where none is set: twice that of a guess; of a language model a round number."""
    num_labels = 2 if task == "preference" else num_labels
    return 2.0 * math.log(num_labels) if num_labels > 1 else LOSS_OF_A_TOKEN


@dataclass(frozen=True)
class PrivateEvaluation:
    """The evaluations of a run on its held-out clients.

    Attributes:
        sampling: of the held-out clients.
        noise_multiplier: of all answers together, as committed.
        loss_bound: in nats.
        classes: labels of the matrix of confusions; 0 where it is not asked for.
        tokens: most tokens of a client that count; 0 where they are not asked for.
    """

    sampling: PartPoisson
    noise_multiplier: float
    loss_bound: float
    classes: int = 0
    tokens: int = 0

    @property
    def plan(self) -> Plan:
        """The plan of a release: the two bounded means that a held-out client is asked for, and the third answer."""
        each = math.sqrt(3.0 if self.classes or self.tokens else 2.0) * self.noise_multiplier
        loss = BoundedMean(self.loss_bound, each * self.loss_bound / 2, "loss", centred=True)
        accuracy = BoundedMean(1.0, each / 2, "accuracy", centred=True, of="accuracies")
        means = (loss, accuracy)
        if self.classes:
            return Plan(FlatClip(1.0, self.classes**2), each, means)
        return Plan(FlatClip(float(self.tokens), 1), each, means) if self.tokens else Plan(NoUpdate(), 1.0, means)

    def estimate(self, release: Release) -> Metrics:
        """The metrics that a release stands for, each inside its range, with its interval."""
        values = dict[str, Any]()
        for query in release.plan.queries:
            assert isinstance(query, BoundedMean)
            mean = query.mean(release.answer(query.name), release.expected_units)
            values |= {
                query.name: min(max(mean, 0.0), query.bound),
                f"{query.name}_within": within(query, self.sampling),
            }
        if self.classes:
            values |= self._confusions(release)
        elif self.tokens:
            told = self.sampling.members * float(release.update[0].clamp(0.0, self.tokens))
            values |= {"tokens": told, "tokens_within": self._total_within(release, self.tokens)}
        return Metrics(count=round(release.expected_units), **values)

    def _confusions(self, release: Release) -> dict[str, Any]:
        """The matrix as counts of the held-out clients, each its records' share, none below 0, with its interval."""
        noisy, members = release.update.double(), self.sampling.members
        counts = members * nearest_shares(noisy, float(noisy.sum().clamp(0.0, 1.0)))
        matrix = tuple(tuple(map(round, row)) for row in counts.reshape(self.classes, -1).tolist())
        return {"confusion": matrix, "confusion_within": self._total_within(release, 1.0)}

    def _total_within(self, release: Release, bound: float) -> float:
        """Half the width of the 95 % interval around a sum over all held-out clients of values from 0 to ``bound``."""
        missed = bound * math.sqrt((1.0 - self.sampling.rate) / release.expected_units)
        one = math.hypot(release.plan.noise_std(release.expected_units), missed)
        return NORMAL_95 * self.sampling.members * one

    def measure(self, strategy: "DpFedAvg") -> Metrics | None:
        """Charge for, and release, what held-out clients say of the served adapter; None where nothing pays for it."""
        release = strategy.measure(self.plan, self.sampling)
        return None if release is None else self.estimate(release)


def last_measured(records: Iterable[RoundRecord], round: int) -> Metrics:
    """The estimate of ``round``, or of the last round that has one where that is 0.

    Raises:
        ValueError: there is none: every evaluation was lost.
    """
    for one in sorted(records, key=lambda record: -record.round):
        loss, accuracy = one.validation_loss, one.validation_accuracy
        if round in (0, one.round) and loss is not None and accuracy is not None:
            return Metrics(
                loss,
                accuracy,
                0,
                confusion=one.validation_confusion,
                loss_within=one.validation_loss_within,
                accuracy_within=one.validation_accuracy_within,
                confusion_within=one.validation_confusion_within,
                tokens=one.validation_tokens,
                tokens_within=one.validation_tokens_within,
            )
    raise ValueError("no evaluation on held-out clients was released; each that was charged is lost")
