"""Measurements behind the documentation's claims. Not part of the package that is installed; nothing imports it."""
