"""Audits, attacks and the cost of the mechanism."""
