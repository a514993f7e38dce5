"""Checks for methods of your own: does this class keep the contract that a run relies on?

    from strategies.conformance import check_controller
    check_controller(MyController(strength=2.0))      # silence, or a ConformanceError that says what to change

They need no test runner and no data: releases are made by the real mechanism from made-up clients. The guarantee of a
run does not depend on them (the ledger refuses what is not paid for, and a Release is all a method sees); what they
find would end a run half-way, make a resumed run another one, or spend noise for nothing.
"""

from strategies.conformance.aggregations import check_aggregation
from strategies.conformance.controllers import check_controller
from strategies.conformance.optimizers import check_optimizer
from strategies.conformance.purity import ConformanceError

__all__ = ["ConformanceError", "check_aggregation", "check_controller", "check_optimizer"]
