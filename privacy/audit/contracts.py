"""Contracts that every clip map and every query must satisfy, as checks that raise AssertionError; nothing here is
released.

For the project's own maps and for yours: call ``check_clip_map(MyMap(...), rows)`` and ``check_query(MyQuery(...),
units)`` in a test, with :func:`adversarial_rows` among the rows. A map that passes on all inputs makes every plan that
uses it a Gaussian mechanism of the plan's noise multiplier; ``contribute`` enforces the bound once more at run time.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Int64, Real
from torch import Tensor

from privacy.clipping.clip_map import ClipMap
from privacy.clipping.norms import NoUpdate
from privacy.clipping.units import Units, squared_norms
from privacy.contribution import GRID, Contribution, Plan, contribute, validate
from privacy.queries import Query

# Encoded rows may exceed the unit ball by the roundoff of computing their norm; ``contribute`` removes it exactly.
_ROUNDOFF = 1e-9


def adversarial_rows(params: int, dtype: torch.dtype = torch.float32) -> Real[Tensor, "units params"]:
    """Rows that broke other clippers: zeros, NaN, infinities, subnormal and largest numbers, one huge entry."""
    tiny, huge = torch.zeros(params), torch.full((params,), 1e38)
    spike, mixed = torch.zeros(params), torch.ones(params)
    spike[-1], mixed[0], mixed[-1] = 1e30, torch.nan, 1e6
    infinite = torch.ones(params)
    infinite[params // 2] = -torch.inf
    tiny += 1e-45
    rows = torch.stack([torch.zeros(params), tiny, huge, -huge, spike, mixed, infinite, torch.ones(params)])
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        extremes = torch.tensor([limits.max, limits.tiny], dtype=dtype).unsqueeze(1).expand(2, params)
        return torch.cat([rows.to(dtype), extremes])
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    whole = rows.nan_to_num(0.0).clamp(-100.0, 100.0).to(dtype)
    return torch.cat([whole, torch.tensor([[least], [most]], dtype=dtype).expand(2, params)])


def check_clip_map(
    clip: ClipMap, rows: Real[Tensor, "units params"], rebuild: Callable[..., ClipMap] | None = None
) -> None:
    """Assert that ``clip`` keeps its contract on these rows; ``rebuild`` is its from-JSON function, if it has one.

    ``rebuild(json)`` makes a map of numbers alone, ``rebuild(json, arrays)`` one that has arrays.

    Checked: finite float64 rows of norm <= 1; rows that are not finite become 0; each row is encoded by itself (the
    sensitivity of a sum needs it); inputs stay unchanged; the exact integer norm on the grid is at most GRID; decoding
    gives ``params`` finite numbers, repeatably and without touching its input; JSON gives back an equal map.
    """
    before = rows.clone()
    encoded = clip.encode(rows)
    _same(rows, before, "encode changed its input")
    assert encoded.dtype == torch.float64, f"encoded rows must be float64, got {encoded.dtype}"
    assert tuple(encoded.shape) == (len(rows), clip.dim), f"encoded shape {tuple(encoded.shape)}"
    assert bool(encoded.isfinite().all()), "an encoded row is not finite"
    longest = float(squared_norms(encoded).sqrt().max()) if encoded.numel() else 0.0
    assert longest <= 1 + _ROUNDOFF, f"an encoded row has norm {longest}, more than 1"
    lost = ~rows.to(torch.float64).isfinite().all(dim=1)
    assert not encoded[lost].any(), "a row that is not finite must be encoded as 0"
    plan = Plan(clip, 1.0) if clip.dim else None
    for i in range(len(rows)):
        alone = clip.encode(rows[i : i + 1])[0]
        _same(alone, encoded[i], f"row {i} is encoded differently beside other rows")
        if plan is not None:
            assert_in_unit_ball(contribute(Units(rows[i : i + 1]), plan).encoded)
    if plan is not None:
        validate(contribute(Units(rows), plan), plan, len(rows))
    total = encoded.sum(dim=0)
    kept = total.clone()
    decoded = clip.decode(total, 7.0)
    assert tuple(decoded.shape) == (clip.params,), f"decoded shape {tuple(decoded.shape)}"
    assert bool(decoded.isfinite().all()), "a decoded number is not finite"
    _same(total, kept, "decode changed its input")
    _same(clip.decode(total, 7.0), decoded, "decode is not repeatable")
    if rebuild is not None:
        arrays = clip.arrays()
        sent = json.loads(json.dumps(clip.to_json()))
        assert all(_sendable(array) for array in arrays.values()), "arrays must be finite float32 vectors"
        assert (rebuild(sent, arrays) if arrays else rebuild(sent)) == clip, "JSON does not give back the same map"


def check_query(query: Query, units: Units, rebuild: Callable[[Mapping[str, Any]], Query] | None = None) -> None:
    """Assert that ``query`` keeps its contract on these units: bounded, one unit at a time, repeatable through JSON."""
    answers = query.answer(units)
    assert answers.dtype == torch.float64, f"answers must be float64, got {answers.dtype}"
    assert tuple(answers.shape) == (len(units), query.dim), f"answers have shape {tuple(answers.shape)}"
    assert bool(answers.isfinite().all()), "an answer is not finite"
    longest = float(squared_norms(answers).sqrt().max()) if answers.numel() else 0.0
    assert longest <= query.sensitivity * (1 + _ROUNDOFF), f"an answer has norm {longest} > {query.sensitivity}"
    for i in range(len(units)):
        one = _only(units, i)
        _same(query.answer(one)[0], answers[i], f"unit {i} answers differently beside other units")
        summed = contribute(one, _query_only(query)).answers[0]
        assert_in_unit_ball(summed)
        assert query.is_possible(summed.to(torch.float64) * (query.sensitivity / GRID), 1), "refuses an honest answer"
    plan = _query_only(query)
    validate(contribute(units, plan), plan, len(units))
    validate(Contribution.zero(plan), plan, 0)
    if rebuild is not None:
        assert rebuild(json.loads(json.dumps(query.to_json()))) == query, "JSON does not give back the same query"


def assert_in_unit_ball(vector: Int64[Tensor, " k"]) -> None:
    """Assert in exact integer arithmetic that a grid vector's L2 norm is at most one unit of sensitivity."""
    squares = sum(int(number) ** 2 for number in vector[vector != 0].tolist())
    assert squares <= int(GRID) ** 2, f"squared norm exceeds the unit ball by {squares - int(GRID) ** 2} grid squares"


def _query_only(query: Query) -> Plan:
    return Plan(NoUpdate(), 1.0, (query,))


def _only(units: Units, i: int) -> Units:
    part = slice(i, i + 1)
    losses = None if units.losses is None else units.losses[part]
    votes = None if units.votes is None else units.votes[part]
    return Units(units.rows[part], losses, votes)


def _sendable(array: Tensor) -> bool:
    return array.dtype == torch.float32 and array.dim() == 1 and bool(array.isfinite().all())


def _same(left: Tensor, right: Tensor, complaint: str) -> None:
    assert torch.equal(left.nan_to_num(nan=0.1234), right.nan_to_num(nan=0.1234)), complaint
