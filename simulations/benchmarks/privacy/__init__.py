"""Attacks on trained models: what an adversary finds out."""
