"""Keyed randomness, which decides the guarantee, and seeded randomness, which experiments repeat; they never mix.

``noise`` and ``discrete_gaussian`` make the noise of a release, ``sampling`` draws who takes part, ``rng`` has the two
sources.
"""
