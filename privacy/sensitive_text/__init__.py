"""Sensitive spans of texts: who finds them, and what is done about them."""
