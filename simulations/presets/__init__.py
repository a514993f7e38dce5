"""Presets, and how a preset or a file with settings on top becomes a configuration."""
