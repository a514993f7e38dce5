"""What the operator of a deployed silo lets it promise, set beside the node's records and not by the server.

``--node-config 'epsilon-limit=2.0 delta-limit=1e-6 privacy-unit="group:patient_nbr"'``; each may be left out. Without
the unit a server could ask for epsilon 2 of single records where the operator thinks of patients, and without the delta
an epsilon says little. ``methods="my_pkg.my_mod:MyController"`` lists methods that are not the package's: a name in a
request would otherwise import and call whatever it names.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from client.silo import Silo
from client.wire_records import BadMessage


@dataclass(frozen=True)
class SiloTerms:
    """The least a silo asks of a guarantee.

    Attributes:
        epsilon: the largest it promises.
        delta: the largest it promises.
        unit: ``"record"``, or ``"group:COLUMN"`` for its operator's column of that name; empty for either.
        methods: controllers, optimizers and aggregations by ``module:Class`` that it runs besides the package's own.
    """

    epsilon: float = math.inf
    delta: float = 1.0
    unit: str = ""
    methods: tuple[str, ...] = ()

    @staticmethod
    def of(node_config: Mapping[str, Any]) -> "SiloTerms":
        """From Flower's node configuration.

        Raises:
            BadMessage: a value that means nothing; guessing could promise what the operator does not want.
        """
        unit = str(node_config.get("privacy-unit", ""))
        if unit not in ("", "record") and not (unit.startswith("group:") and unit != "group:"):
            raise BadMessage(f"privacy-unit must be 'record' or 'group:COLUMN', got {unit!r}")
        limits = {}
        for name, default in (("epsilon-limit", math.inf), ("delta-limit", 1.0)):
            try:
                limits[name] = float(node_config.get(name, default))
            except ValueError:
                limits[name] = math.nan
            if not limits[name] > 0:
                raise BadMessage(f"{name} must be a number > 0, got {node_config[name]!r}")
        methods = tuple(str(node_config.get("methods", "")).split())
        return SiloTerms(limits["epsilon-limit"], limits["delta-limit"], unit, methods)

    def refusal(self, silo: Silo) -> str:
        """Why this is not promised, in words for the server; empty if it is."""
        if silo.not_private:
            return f"this silo trains under a guarantee only; this has none: {silo.not_private}"
        if silo.epsilon > self.epsilon:
            return f"this silo promises an epsilon of at most {self.epsilon:g}"
        if silo.delta > self.delta:
            return f"this silo promises a delta of at most {self.delta:g}"
        if self.unit and silo.unit != self.unit:
            return f"this silo protects {self.unit}, not {silo.unit}"
        for method in (silo.controller, silo.optimizer, silo.aggregation):
            if ":" in method and method not in self.methods:
                return "this silo runs the methods of the package, and others only if its operator names them (methods)"
        return ""
