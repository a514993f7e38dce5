"""Noise and cohorts from the operating system's entropy; seeded randomness for everything else."""
