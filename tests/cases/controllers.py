"""Options that make another controller of a registered one."""

from typing import Any

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "dp-lac": [{"clip-norm": 2.0, "smooth": True}],
    "dp-clac": [{"clip-norm": 2.0, "smooth": True, "centred": True}],
    "percentile": [{"source": "histogram"}],
}
