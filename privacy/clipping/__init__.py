"""Clip maps: every unit's row into the unit ball, and the noisy sum back. What a clip map is: ``clip_map.py``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from privacy import checks
from privacy.clipping.clip_map import ClipMap, check_length
from privacy.clipping.norms import AutomaticClip, FlatClip, NoUpdate, PerAdapterClip, PsacClip
from privacy.clipping.subspace import CoefficientClip, EmbeddingResidualClip, SubspaceClip
from privacy.clipping.units import Units
from privacy.clipping.whitening import AdaClip, GeoClip

__all__ = [
    "CLIP_MAPS",
    "AdaClip",
    "AutomaticClip",
    "ClipMap",
    "CoefficientClip",
    "EmbeddingResidualClip",
    "FlatClip",
    "GeoClip",
    "NoUpdate",
    "PerAdapterClip",
    "PsacClip",
    "SubspaceClip",
    "Units",
    "clip_from_json",
]

CLIP_MAPS: tuple[type[ClipMap], ...] = (
    FlatClip,
    PerAdapterClip,
    AutomaticClip,
    PsacClip,
    NoUpdate,
    AdaClip,
    GeoClip,
    SubspaceClip,
    CoefficientClip,
    EmbeddingResidualClip,
)
"""Every clip map, for the property tests that prove them all alike."""


def clip_from_json(data: Mapping[str, Any], arrays: Mapping[str, Tensor] = MappingProxyType({})) -> ClipMap:
    """Rebuild a clip map from its ``to_json`` and its ``arrays``.

    Raises:
        ValueError: an unknown kind, or impossible values.
        KeyError: a value or an array is missing.
    """
    match data["kind"]:
        case "flat":
            return FlatClip(float(data["bound"]), int(data["params"]))
        case "per-adapter":
            return PerAdapterClip(tuple(map(float, data["bounds"])), tuple(map(int, data["sizes"])))
        case "automatic":
            return AutomaticClip(float(data["bound"]), int(data["params"]), float(data["gamma"]))
        case "psac":
            return PsacClip(float(data["bound"]), int(data["params"]), float(data["r"]))
        case "none":
            return NoUpdate()
        case "adaclip":
            check_length("scale", arrays["scale"], int(data["params"]))
            return AdaClip(arrays["centre"], arrays["scale"])
        case "geoclip":
            sizes, ranks = tuple(map(int, data["sizes"])), tuple(map(int, data["ranks"]))
            return GeoClip(arrays["centre"], arrays["directions"], arrays["weights"], arrays["rest"], sizes, ranks)
        case "subspace":
            return SubspaceClip(_matrix("basis", data, arrays), float(data["bound"]))
        case "coefficients":
            return CoefficientClip(_matrix("gradients", data, arrays), float(data["ridge"]))
        case "embedding-residual":
            bounds = float(data["embedding_bound"]), float(data["residual_bound"])
            return EmbeddingResidualClip(_matrix("basis", data, arrays), *bounds, share=float(data["share"]))
        case other:
            raise ValueError(
                "kind of clip map must be flat, per-adapter, automatic, psac, none, adaclip, geoclip, subspace, "
                f"coefficients or embedding-residual, got {other!r}; server and client must run the same version"
            )


def _matrix(name: str, data: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> Tensor:
    """An array as the matrix ``[rank, params]`` that the JSON says it is."""
    rank, params = int(data["rank"]), int(data["params"])
    checks.integer_at_least(1, rank=rank, params=params)
    if len(arrays[name]) != rank * params:
        raise ValueError(f"{name} must have {rank} x {params} values, got {len(arrays[name])}")
    return arrays[name].reshape(rank, params)
