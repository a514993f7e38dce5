"""Data sets that Lacquer knows by name."""
