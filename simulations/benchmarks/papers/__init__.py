"""Comparisons for the claims of the papers."""
