"""Clip maps: every unit's row into the unit ball, and the noisy sum back into parameters."""
