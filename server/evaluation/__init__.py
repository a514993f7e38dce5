"""Metrics on public data."""
