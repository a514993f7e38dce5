"""Attacks on a finished run, by its auditor: what they find is beside the guarantee and not covered by it."""
