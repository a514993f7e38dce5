"""Runs of every kind, from a configuration to artefacts."""
