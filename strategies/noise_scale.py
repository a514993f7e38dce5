"""How much noise each value of a released update carries: public, because it follows from the plan alone."""

import torch
from jaxtyping import Float64
from torch import Tensor

from privacy.clip_map import ArrayMap
from privacy.clipping import AutomaticClip, FlatClip, PsacClip
from privacy.mechanism import Plan
from privacy.subspace import SubspaceClip


def noise_std(plan: Plan, expected_units: float) -> Float64[Tensor, "*d"]:
    """Standard deviation of the noise in each value of ``Release.update``: 0-d where all are alike, else ``[d]``.

    Flat, automatic, PSAC: z C / (q N). Subspace: that times the length of each column of the basis, for the noise lies
    in the span of its rows. Maps with arrays say it themselves. Any other map is taken to decode each coordinate by
    itself, as per-adapter clipping does: then decoding z in every coordinate gives it.
    """
    z = plan.noise_multiplier
    match plan.clip:
        case FlatClip(bound=bound) | AutomaticClip(bound=bound) | PsacClip(bound=bound):
            return torch.tensor(z * bound / expected_units, dtype=torch.float64)
        case SubspaceClip(basis=basis, bound=bound):
            lengths: Tensor = torch.linalg.vector_norm(basis.double(), dim=0)
            return lengths * (z * bound / expected_units)
        case ArrayMap() as clip:
            return clip.spread() * (z / expected_units)
        case clip:
            return clip.decode(torch.full((clip.dim,), z, dtype=torch.float64), expected_units).abs()
