"""A clip threshold that falls from clip-norm to zero along half a cosine."""

import math
from dataclasses import dataclass

from privacy.clipping import FlatClip
from privacy.contribution import Plan
from strategies.controllers.controller import RunInfo
from strategies.controllers.fixed import Fixed


@dataclass(frozen=True)
class Cosine(Fixed):
    def plan(self, state: None, info: RunInfo, round: int) -> Plan:
        share = (1 + math.cos(math.pi * (round - 1) / info.rounds)) / 2
        return Plan(FlatClip(self.clip_norm * share, info.dimension(round)), info.noise_multiplier(round))
