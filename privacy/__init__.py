"""Everything that a proof leans on. Imports no other package of Lacquer, so it can be read and audited alone.

Read in this order, from the bottom up; docs/guarantee.md says how long each takes and what to look for.

1. ``checks``, ``errors``, ``durable``: refusals in words, and files that survive a crash.
2. ``events``: what a release is, as data; what several statistics of one cohort cost together.
3. ``clipping``, ``queries``: one unit's row or answer into a ball of known radius.
4. ``contribution``: those rows as exact integers, summed; here private values die.
5. ``commitment``, ``accountants``: what a run commits to before any data is touched, and what that costs.
6. ``ledger``: the commitment and every charge, on the disk before noise is drawn.
7. ``randomness``: noise and cohorts that nobody can predict or replay.
8. ``mechanism``: charge, noise, decode; the only lines that add noise, and the only ones that make a ``Release``.

What need not be read, and the line that makes it so:

- ``audit``, ``secagg`` and ``sensitive_text`` stand above ``mechanism`` in the import rules (pyproject.toml, "Layers of
  privacy"), so nothing above imports them. ``audit`` only tries to refute; ``secagg`` is used with ``privacy.trust =
  "secagg"`` alone, and then it is part of the proof; ``sensitive_text`` decides what is masked before a text is a
  record, and its guarantee is stated apart from the ledger's.
"""
