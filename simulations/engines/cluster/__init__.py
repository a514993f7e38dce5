"""A Ray cluster that a run joins: its head, what its nodes have, and whether they see what the run needs."""
