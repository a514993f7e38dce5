"""The outside of a run: the `lacquer` command, the two engines, presets, progress and reports."""
