"""Keyed randomness, which decides the guarantee, and seeded randomness, which experiments repeat; they never mix.

``noise`` and ``discrete_gaussian`` make the noise of a release, ``sampling`` draws who takes part, ``rng`` has the two
sources.
"""

from privacy.randomness.noise import (
    DiscreteGaussianNoise,
    GaussianNoise,
    InsecureSeededNoise,
    InsecureZeroNoise,
    Noise,
)
from privacy.randomness.rng import SecureRandom, simulation_generator, torch_generator
from privacy.randomness.sampling import CohortSampler

__all__ = [
    "CohortSampler",
    "DiscreteGaussianNoise",
    "GaussianNoise",
    "InsecureSeededNoise",
    "InsecureZeroNoise",
    "Noise",
    "SecureRandom",
    "simulation_generator",
    "torch_generator",
]
