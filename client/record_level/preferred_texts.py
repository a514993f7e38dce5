"""A generator that learns what votes of private units prefer: POPri, direct preference optimization on votes.

The model writes several texts behind each of K public prompts. Every private record votes, behind each prompt, for the
text nearest to it. The counts are released with noise; the most voted text of a prompt is then preferred to one of the
middle, and the model's adapter is trained on these pairs by DPO. The next texts are written by the adapter so trained.

Reference: Hou et al. 2025, POPri (arXiv 2504.16438), as far as known here: its groups of texts behind prompts, feedback
on each text by private records, the pair of the best and a middle text of a prompt, and DPO round by round.
Deviations: votes for the nearest instead of mean cosines; prompts are openings without few-shot records; every unit
votes in every generation; the start model of DPO is the public one in all of them; a pair whose counts differ by less
than two standard deviations of their noise is left out.
Guarantee: none of its own: it reads released counts, public prompts, and texts of a model that is made of both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from client.data.records import MOST_AT_ONCE, Records
from client.engine.engine import Engine
from client.engine.local_training import LocalTraining
from client.record_level.synthetic_texts import Synthesiser
from privacy.randomness.rng import simulation_generator

TEXTS = 4
"""Texts behind each prompt."""
LOCAL = LocalTraining(optimizer="adamw", learning_rate=1e-3, batch_size=8, epochs=4)


@dataclass
class PreferringWriter:
    """Texts in groups behind prompts, written by an adapter that votes have tuned.

    Attributes:
        engine: trains the adapter on pairs; its own copy of the model.
        adapter: full vector; replaced in every generation.
        noise: standard deviation of a released count.
        local: the training on the pairs of a generation.
    """

    synthesiser: Synthesiser
    engine: Engine
    adapter: Float[Tensor, " size"]
    noise: float
    local: LocalTraining = LOCAL

    def first(self) -> Records:
        """The texts that the public model writes."""
        return self._grouped(0)

    def nearest_texts(
        self, records: Float[Tensor, "n size"], texts: Float[Tensor, "samples size"]
    ) -> Int64[np.ndarray, "n groups"]:
        """The text nearest to each record behind each prompt, by the cosine of unit vectors."""
        first = torch.arange(0, len(texts), TEXTS, device=records.device)
        found = [
            (part @ texts.T).view(len(part), -1, TEXTS).argmax(dim=2) + first
            for part in torch.split(records, MOST_AT_ONCE)
        ]
        chosen: Int64[np.ndarray, "n groups"] = torch.cat(found).cpu().numpy()
        return chosen

    def after(self, texts: Records, counts: Float[Tensor, " samples"], step: int) -> Records:
        """Train on the pairs that released counts give, and write the next texts."""
        pairs = preferred_pairs(texts, counts, self._prompts(step - 1), self.noise)
        if len(pairs):
            seed = int(simulation_generator(self.synthesiser.seed, "preferred texts", step).integers(2**62))
            change = self.engine.train_all(self.adapter, [pairs], self.local, [seed])[0]
            layout = self.engine.layout
            self.adapter = layout.with_trainable(self.adapter, layout.trainable_values(self.adapter) + change.float())
        return self._grouped(step)

    def _prompts(self, step: int) -> list[list[int]]:
        return self.synthesiser.prompts(self.synthesiser.synthesis.samples // TEXTS, step)

    def _grouped(self, step: int) -> Records:
        prompts = [prompt for prompt in self._prompts(step) for _ in range(TEXTS)]
        return self.synthesiser.continue_prompts(prompts, self.adapter, step)


def check_groups(samples: int) -> None:
    """Refuse numbers of texts that are no whole number of groups.

    Raises:
        ValueError: naming the number and the limit.
    """
    if samples < 2 * TEXTS or samples % TEXTS:
        raise ValueError(
            f"the number of texts must be a multiple of {TEXTS}, the texts of a prompt, and at least {2 * TEXTS}; got "
            f"{samples}"
        )


def preferred_pairs(
    texts: Records, counts: Float[Tensor, " samples"], prompts: Sequence[Sequence[int]], noise: float
) -> Records:
    """Pairs of the most voted text of each prompt and the one of the middle, as preference tuning reads them.

    Args:
        texts: :data:`TEXTS` behind each prompt, which they begin with.
        counts: released.
        noise: standard deviation of a count, in the same unit.
    """
    rows, weights, splits = [], [], []
    for number, (prompt, votes) in enumerate(zip(prompts, counts.view(-1, TEXTS), strict=True)):
        order = torch.argsort(votes, descending=True, stable=True).tolist()
        best, middle = order[0], order[TEXTS // 2]
        both = [
            np.asarray(texts.tokens[texts.offsets[i] : texts.offsets[i + 1]]).tolist()
            for i in (TEXTS * number + best, TEXTS * number + middle)
        ]
        if float(votes[best] - votes[middle]) < 2 * math.sqrt(2) * noise or both[0] == both[1]:
            continue
        rows.append(both[0] + both[1])
        weights.append([float(place >= len(prompt)) for text in both for place in range(len(text))])
        splits.append(len(both[0]))
    made = Records.from_lists(rows, token_weights=weights)
    return Records(made.tokens, made.offsets, token_weights=made.token_weights, splits=np.array(splits, np.int64))
