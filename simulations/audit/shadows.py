r"""Shadow runs: what the loss of a unit is where it was trained on, and where it was not (LiRA).

Carlini et al., "Membership Inference Attacks From First Principles" (S&P 2022, arXiv:2112.03570v2). A shadow run is the
run once more, with its settings, its noise among them, on other records. The targets are m members and m units that
were held out; every shadow trains on a random half of them, in the places of the m members, so all else, the number of
units too, is the run's. Shadows come in pairs of which the second has the other half: a target is in half of them.

    phi = log(p / (1 - p)),  p = exp(-loss), mean over the unit's records        (section V; of a text the mean token's)
    online:  log N(phi; mu_in, s_in^2) - log N(phi; mu_out, s_out^2)             offline:  (phi - mu_out) / s_out

mu_in and mu_out are means over a target's own shadows, s_in and s_out are pooled over targets, as the paper does where
there are few shadows. Online uses both; with few shadows their difference is mostly noise, and offline may be better.

A shadow run reads the private records as the run did, and no ledger of the run counts it. Its folder, ledger and
adapter lie in the run's audit folder, which its owner alone can open, and are deleted when it ends.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client.data.prepare import COLUMNS
from client.data.prepared import META_FILE, PARTS, PreparedData, sha256
from client.data.records import Records
from client.record_level.units import UnitIndex
from privacy import durable
from privacy.randomness.rng import simulation_generator
from server.config.schema import RunConfig
from server.evaluation.finished import FinishedRun, read_finished
from server.run_folder.names import AUDIT_FOLDER, CANDIDATE_FILE, PHASES_FILE, START_FOLDER
from simulations.audit.losses import adapter_losses, reference_losses
from simulations.audit.membership import attack_level
from simulations.audit.units import Rows, Units
from simulations.engines.inprocess import run_inprocess
from simulations.report.notation import duration_text

Floats = NDArray[np.float64]

LEAST = 4
"""Fewest shadows: two with and two without a unit, or there is no variance."""


def refuse_shadows(run: FinishedRun, count: int) -> None:
    """Refuse so many shadow runs where this run cannot be run again on other records.

    Raises:
        ValueError: saying why.
    """
    config, wrong = run.config, ""
    if count < LEAST or count % 2:
        raise ValueError(
            f"--shadows = {count} must be an even number of at least {LEAST}: every unit is in half of them"
        )
    if config.is_deployed:
        wrong = "the nodes hold the records (data.held-by = 'nodes')"
    elif (run.folder / PHASES_FILE).is_file():
        wrong = "it is a run in phases"
    elif config.several_sites:
        wrong = f"it has {config.clients} sites with ledgers of their own, which shadow runs would spend"
    elif config.privacy.trust == "secagg":
        wrong = "its clients make the noise and keep ledgers of their own, which shadow runs would spend"
    elif (run.folder / CANDIDATE_FILE).is_file():
        wrong = "it is a candidate of a private sweep, whose noise is the sweep's to choose"
    elif config.data.partition == "repeated":
        wrong = "its clients share records (data.partition = 'repeated')"
    elif config.data.sensitive == "weights":
        wrong = "its training records have weights and the held-out ones have none (data.sensitive = 'weights')"
    if wrong:
        raise ValueError(
            f"--shadows = {count}: this run cannot be run again on other records, because {wrong}; leave --shadows out"
        )


def shadow_cost(run: FinishedRun, count: int) -> str:
    """Say what so many shadow runs take, before they are begun."""
    seconds = float(run.results["seconds"])
    return (
        f"{count} shadow runs, {count} times the run's {duration_text(seconds)}: {duration_text(count * seconds)}. "
        "Each trains on the private records again, which no ledger counts; nothing of them is released."
    )


def shadow_findings(run: FinishedRun, data: PreparedData, level: Units, count: int) -> dict[str, Any]:
    """Train `count` shadow runs and judge what they say about the run.

    The result is a level as of :func:`simulations.audit.membership.membership`.

    Args:
        level: of the protected units.
    """
    draws = simulation_generator(run.config.seed, "shadow runs")
    targets = _targets(level, draws)
    sets = [data.train.select(targets.rows[0]), data.test.select(targets.rows[1])]

    def scored(losses: Sequence[Floats]) -> Floats:
        """phi of every target, members first."""
        sides = zip(map(logit, losses), targets.rows, (targets.members, targets.others), strict=True)
        return np.array([of[np.searchsorted(known, rows)].mean() for of, known, units in sides for rows in units])

    slots = unit_of_rows(run.config, data)
    phi, included = [], list(_halves(len(targets.members), count, draws))
    folder = run.folder / AUDIT_FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    for inside in included:
        with tempfile.TemporaryDirectory(prefix="shadow-", dir=folder) as place:
            shadow = _trained(run, data, exchange_units(run.config, data, slots, targets, inside), Path(place))
            phi.append(scored(adapter_losses(shadow, sets)))
    scores = likelihood_ratios(scored(adapter_losses(run, sets)), np.array(phi), np.array(included))
    m = len(targets.members)
    reference = -scored(reference_losses(run, data, sets))
    sides = {name: (values[:m], values[m:]) for name, values in scores.items()}
    return {"shadows": count, **attack_level(run, targets, sides, (reference[:m], reference[m:]))}


def logit(losses: Floats) -> Floats:
    """The logit log(p / (1 - p)) of p = exp(-loss).

    Of a loss of 0 it is that of the least positive one that changes p.
    """
    losses = np.maximum(losses, np.finfo(np.float64).eps)
    return -losses - np.log(-np.expm1(-losses))


def likelihood_ratios(phi: Floats, shadows: Floats, included: NDArray[np.bool_]) -> Mapping[str, Floats]:
    """Compute LiRA's scores of the targets, larger meaning "member".

    Args:
        phi: ``[targets]``, under the run.
        shadows: ``[shadows, targets]``, under each shadow; `included` says which targets it was trained on, each target
            being in some and out of others, of at least two.
    """
    means, spreads = [], []
    for side in (included, ~included):
        counts = side.sum(axis=0)
        mean = np.where(side, shadows, 0).sum(axis=0) / counts
        squares = np.where(side, (shadows - mean) ** 2, 0).sum()
        means.append(mean)
        spreads.append(max(float(np.sqrt(squares / (counts - 1).sum())), 1e-12))
    inside, outside = ((phi - mean) / spread for mean, spread in zip(means, spreads, strict=True))
    online = (outside**2 - inside**2) / 2 + np.log(spreads[1] / spreads[0])
    return {"LiRA, online": online, "LiRA, offline": outside}


def unit_of_rows(config: RunConfig, data: PreparedData) -> Rows:
    """The protected unit of every training record, numbered as the run numbers them."""
    if config.unit == "client":
        return np.repeat(np.arange(data.num_clients), np.asarray(data.stops) - np.asarray(data.starts))
    index = UnitIndex.of(data.train, grouped=config.privacy.unit == "group")
    units = np.empty(len(data.train), dtype=np.int64)
    units[index.order] = np.repeat(np.arange(len(index)), np.diff(index.starts))
    return units


def exchange_units(
    config: RunConfig, data: PreparedData, slots: Rows, targets: Units, inside: NDArray[np.bool_]
) -> tuple[Records, Rows]:
    """Make the training records of a shadow, and the unit of each.

    The targets that are `inside` take the places of the members.

    Args:
        slots: unit of every training record.
        inside: ``[2m]``, of members and others; m of them.
    """
    m = len(targets.members)
    places = [int(slots[rows[0]]) for rows in targets.members]
    left = [place for place, kept in zip(places, inside[:m], strict=True) if not kept]
    taken = [rows for rows, chosen in zip(targets.others, inside[m:], strict=True) if chosen]
    stay = np.flatnonzero(~np.isin(slots, left))
    rows = np.concatenate([stay, *(len(data.train) + rows for rows in taken)])
    units = np.concatenate([slots[stay], *(np.full(len(rows), at) for at, rows in zip(left, taken, strict=True))])
    order = np.argsort(units, kind="stable")
    grouped = config.unit not in ("client", "record")
    both = _joined(data.train, data.test).select(rows[order])
    return replace(both, units=units[order] if grouped else None), units[order]


def _joined(first: Records, second: Records) -> Records:
    lengths = np.concatenate([first.lengths, second.lengths])

    def both(name: str) -> Any:
        one, two = getattr(first, name), getattr(second, name)
        return None if one is None or two is None else np.concatenate([one, two])

    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Records(both("tokens"), offsets, both("labels"), both("token_weights"), splits=both("splits"))


def _targets(level: Units, draws: np.random.Generator) -> Units:
    """Choose as many members as others, at random, in the order of their rows."""
    m = min(len(level.members), len(level.others))
    chosen = [np.sort(draws.permutation(len(of))[:m]) for of in (level.members, level.others)]
    return replace(
        level,
        members=tuple(level.members[at] for at in chosen[0]),
        others=tuple(level.others[at] for at in chosen[1]),
    )


def _halves(m: int, count: int, draws: np.random.Generator) -> Iterator[NDArray[np.bool_]]:
    """Draw which of 2m targets each shadow is trained on, m of them."""
    for _ in range(count // 2):
        inside = np.zeros(2 * m, dtype=np.bool_)
        inside[draws.permutation(2 * m)[:m]] = True
        yield inside
        yield ~inside


def _trained(run: FinishedRun, data: PreparedData, train: tuple[Records, Rows], place: Path) -> FinishedRun:
    """Train a shadow to its end, in a folder of its own.

    Its data set lies in a cache of its own under the name of the run's, where the run's code finds it.

    Raises:
        RuntimeError: the run's code has not found it, and prepared the run's own records.
    """
    cache, folder = place / "cache", place / "run"
    durable.keep_names(data.folder.parent, cache)
    _write(run.config, data, *train, cache / data.folder.name)
    folder.mkdir()
    start = run.folder / START_FOLDER  # the place it was taken from may be gone
    config = run.config.replace(
        model=run.config.model.replace(adapter=str(start) if run.config.model.adapter else ""),
        data=run.config.data.replace(cache=str(cache)),
        privacy=run.config.privacy.replace(account=""),  # nothing of a shadow is released
        engine=run.config.engine.replace(kind="inprocess", workers=1),
        evaluation=run.config.evaluation.replace(examples=0, rouge_records=0),
    )
    run_inprocess(config, folder)
    if others := {path.name for path in cache.iterdir() if path.is_dir()} - {data.folder.name}:
        raise RuntimeError(f"a shadow trained on {others.pop()} in its cache, not on the records that were put there")
    return read_finished(folder)


def _write(config: RunConfig, data: PreparedData, train: Records, units: Rows, folder: Path) -> None:
    """Write the prepared data set with other training records."""
    folder.mkdir(parents=True)
    starts, stops = np.array([0]), np.array([len(train)])
    if config.unit == "client":
        clients = np.arange(data.num_clients)
        starts, stops = (np.searchsorted(units, clients, side) for side in ("left", "right"))
    ends = train.offsets
    arrays = {
        "client_starts": starts,
        "client_stops": stops,
        "client_tokens": ends[stops] - ends[starts],
        "train_tokens": train.tokens,
        "train_offsets": ends,
    }
    columns = {name: of for name in COLUMNS if (of := getattr(train, name)) is not None}
    for name, array in (arrays | {f"train_{name}": of for name, of in columns.items()}).items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    for name in data.meta["files"]:
        if name.startswith(PARTS[1:]):
            shutil.copyfile(data.folder / name, folder / name)
    meta = {
        **data.meta,
        "columns": {**data.meta["columns"], "train": list(columns)},
        "records": {**data.meta["records"], "train": len(train)},
        "tokens": {**data.meta["tokens"], "train": len(train.tokens)},
        "files": {path.name: sha256(path) for path in sorted(folder.iterdir())},
    }
    durable.write(folder / META_FILE, json.dumps(meta))
