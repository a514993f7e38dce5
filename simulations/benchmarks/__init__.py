"""Measurements that the documentation quotes: scripts, their results, and the tables made from them."""
