"""The private loop: plain SGD without noise and clipping, one bounded row per unit, charged before it is released."""

import numpy as np
import pytest
import torch

from client.engine.cohort import CohortEngine
from client.record_level.units import UnitGradients, UnitIndex
from privacy.accountants.composition import epsilon
from privacy.clipping.norms import FlatClip
from privacy.contribution import GRID, Contribution, Plan, contribute
from privacy.errors import BudgetExceeded
from privacy.events import ExampleLevelPoisson, Poisson
from tests.cases.cohorts import build, distance, fresh
from tests.cases.drawn import always
from tests.cases.record_level import EXACT, PRIVATE, engine, gradient, records, run, site_training, vector


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_without_noise_and_clipping_it_is_plain_sgd(tmp_path, name):
    data = records()
    found = run(site_training(tmp_path, data, name=name, **EXACT), 3)
    layout, expected = engine(name).layout, vector(name).double()
    for _ in range(3):
        mean = gradient(expected.float(), data, name).mean(dim=0)
        expected = layout.with_trainable(expected, layout.trainable_values(expected) - 0.5 * mean).float().double()
    moved = expected - vector(name)
    assert distance(found - vector(name), moved) < 1e-5
    assert moved.norm() > 1e-2


@pytest.mark.parametrize("memory", [1, 2**28])  # every unit computed by itself, or in the company of larger ones
@pytest.mark.parametrize("most", [2, 3])
def test_a_group_brings_the_mean_of_its_records(tmp_path, most, memory):
    units = [0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 4, 4]
    data = records(units=units)
    made = UnitGradients(engine(), UnitIndex.of(data, grouped=True, most=most), memory=memory)
    (plan,) = (Plan(FlatClip(1e3, made.engine.layout.dim), 1.0),)
    single = gradient(vector(), data)
    part = site_training(tmp_path, data, **EXACT | {"unit": "group:patient", "batch_size": 5}).next_release().part
    rows = torch.cat([chunk.rows for chunk in made.of(vector(), np.arange(5), part, step=1)])
    expected = torch.stack([-single[made.index.draw_records(unit, 1)].mean(dim=0) for unit in range(5)])
    assert distance(rows, expected) < 1e-10
    assert plan.clip.params == rows.shape[1]


def test_adam_takes_off_no_noise_where_there_is_none(tmp_path):
    """At a threshold this large it would hold every gradient for noise and not move."""
    settings = EXACT | {"optimizer": "fedadam", "optimizer_options": {"learning-rate": 0.01}}
    moved = run(site_training(tmp_path, records(), **settings), 1) - vector()
    clear = gradient(vector(), records()).mean(dim=0).abs() > 1e-3
    assert clear.double().mean() > 0.3
    torch.testing.assert_close(moved[clear].abs(), torch.full_like(moved[clear], 0.01), rtol=0.01, atol=0)


def test_records_that_are_not_side_by_side_are_one_unit():
    index = UnitIndex.of(records(count=6, units=[1, 0, 1, 2, 0, 1]), grouped=True)
    assert [index.draw_records(unit, step=1).tolist() for unit in range(len(index))] == [[1, 4], [0, 2, 5], [3]]


def test_the_sample_of_a_large_unit_is_its_own_affair():
    data = records(units=[0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2])
    index = UnitIndex.of(data, grouped=True, most=2, seed=3)
    samples = [tuple(index.draw_records(1, step)) for step in range(20)]
    assert len(set(samples)) > 3
    assert all(len(sample) == 2 and set(sample) <= {4, 5, 6, 7, 8} for sample in samples)
    # The same unit in other company, in another order and under another number: the same records by content.
    mixed = np.array([8, 6, 4, 5, 7, 11, 9])
    alone = UnitIndex.of(data.select(mixed), grouped=True, most=2, seed=3)
    for step in range(20):
        assert {int(mixed[record]) for record in alone.draw_records(0, step)} == set(
            index.draw_records(1, step).tolist()
        )


EXAMPLES = PRIVATE | {"unit": "group:patient", "sampling_level": "example", "records_per_unit": 3, "combine": "sum"}
VISITS = [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 3]
"""The patient of every record; under a cap of 3 nine of them are left."""


def test_where_records_are_sampled_a_unit_has_at_most_so_many():
    data = records(units=VISITS)
    index = UnitIndex.of(data, grouped=True, most=3, seed=3)
    rows = index.cap_units()
    assert (len(index), len(rows), index.kept) == (4, 9, 9)
    used = [[rows.draw_records(row, step).tolist() for row in range(9)] for step in (1, 2)]
    assert used[0] == used[1]  # once for the run
    assert len({record for (record,) in used[0]}) == 9
    assert np.bincount([VISITS[record] for (record,) in used[0]]).tolist() == [3, 3, 2, 1]
    with pytest.raises(ValueError, match="records_per_unit must be an integer >= 1, got 0"):
        UnitIndex.of(data, grouped=True).cap_units()


@pytest.mark.parametrize("seed", range(5))
def test_which_records_of_a_unit_are_kept_is_its_own_affair(seed):
    """Whoever else is there, in whatever order and under whatever number: the others' rows stay what they are."""
    units = [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    data = records(units=units, seed=seed)

    def kept(data, seed=3):
        rows = UnitIndex.of(data, grouped=True, most=2, seed=seed).cap_units()
        return [data.select(rows.draw_records(row, 1)).tokens.tolist() for row in range(len(rows))]

    whole = kept(data)
    mixed = np.random.default_rng(seed).permutation(12)
    for absent in (0, 1, 2):
        rest = kept(data.select(np.array([record for record in mixed if units[record] != absent])))
        assert len(whole) - len(rest) == 2
        assert all(row in whole for row in rest)
    assert sorted(kept(data, seed=4)) != sorted(whole)


def test_the_rows_of_sampled_records_are_their_gradients(tmp_path):
    data = records(units=VISITS)
    training = site_training(tmp_path, data, **EXAMPLES)
    part = training.next_release().part
    rows = torch.cat([chunk.rows for chunk in training.gradients.of(vector(), np.arange(9), part, step=1)])
    single, index = gradient(vector(), data), training.gradients.index
    expected = torch.stack([-single[int(index.draw_records(row, 1)[0])] for row in range(9)])
    assert distance(rows[rows.norm(dim=1).argsort()], expected[expected.norm(dim=1).argsort()]) < 1e-10


def test_a_unit_of_sampled_records_moves_the_sum_by_the_rows_that_were_drawn(tmp_path):
    """At most one clipped row for each of its records that joined, and by more than one where three did."""
    training = site_training(tmp_path, records(units=VISITS), **EXAMPLES)
    planned, index = training.next_release(), training.gradients.index
    owners = np.array([VISITS[int(index.draw_records(row, 1)[0])] for row in range(9)])

    def total(rows):
        chunks = training.gradients.of(vector() * 50, rows, planned.part, 1)
        whole = sum((contribute(chunk, planned.plan) for chunk in chunks), _zero(planned))
        return whole.encoded.double() / GRID

    for unit, most in enumerate((3, 3, 2, 1)):
        moved = float((total(np.arange(9)) - total(np.flatnonzero(owners != unit))).norm())
        assert moved <= most
        assert moved > 1.0 or most == 1


def test_steps_of_sampled_records_are_drawn_and_charged_as_such(tmp_path):
    training = site_training(tmp_path, records(units=VISITS), **EXAMPLES)
    sampling = ExampleLevelPoisson(4 / 9, 4, "group:patient", 3, 9)
    assert training.ledger.commitment.floor[0].sampling == sampling
    assert training.cohort(training.next_release()).sampling == sampling
    run(training, 4)
    assert {charge.event.sampling for charge in training.ledger.charges} == {sampling}
    assert training.release.expected_units == 4
    single = [(Poisson(4 / 9, 4, "group:patient"), training.release.plan.noise_multiplier, 4)]
    assert epsilon(single, 1e-3) < 0.6 * training.ledger.epsilon_spent()
    assert 0.99 * 4.0 < training.ledger.epsilon_spent() <= 4.0


@pytest.mark.parametrize("controller", ["percentile", "dc-sgd-e", "geoclip", "quantile", "adaclip"])
def test_controllers_plan_steps_of_sampled_records(tmp_path, controller):
    """Whatever else they ask is of a record too, and within the one joint release."""
    noise = {"percentile": "query-noise", "dc-sgd-e": "histogram-noise", "quantile": "bit-noise"}.get(controller)
    settings = {"controller": controller, "controller_options": {noise: 8.0} if noise else {}, "batch_size": 8}
    training = site_training(tmp_path, records(units=VISITS), **EXAMPLES | settings)
    run(training, 2 + (training.state.round < 0))
    assert bool(training.state.adapter.isfinite().all())
    assert all(isinstance(event.sampling, ExampleLevelPoisson) for event in training.ledger.events)


PUBLISHED = {"controller": "strategies.published.rldp:PublishedRldp", "not_private": "published"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unit": "record"}, "needs groups as units and records_per_unit >= 1"),
        ({"records_per_unit": 0}, "needs groups as units and records_per_unit >= 1"),
        ({"mode": "filter"}, "a floor instead of a filter"),
        ({"batch_size": 10}, r"number of records under the cap \(9\), got 10"),
        ({"records_per_unit": 300}, r"records_per_unit must be in \[1, 256\], got 300"),
        (PUBLISHED, "site.sampling-level = 'user'"),
    ],
)
def test_what_sampling_of_records_does_not_go_with_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        site_training(tmp_path, records(units=VISITS), **EXAMPLES | {"controller_options": {}} | settings)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_how_the_work_is_cut_changes_no_bit_of_a_sum(tmp_path):
    """Sums are integers: chunks of any size add up to the same, row by row or all at once."""
    data = records()
    training = site_training(tmp_path, data, **PRIVATE | {"batch_size": 12})
    planned = training.next_release()
    chunks = list(training.gradients.of(training.state.adapter, np.arange(12), planned.part, 1))
    rows = torch.cat([chunk.rows for chunk in chunks])
    whole = sum((contribute(chunk, planned.plan) for chunk in chunks), Contribution.zero(planned.plan))
    for size in (1, 5, 12):
        total = Contribution.zero(planned.plan)
        for piece in rows.split(size):
            total = total + contribute(type(chunks[0])(piece), planned.plan)
        assert torch.equal(total.encoded, whole.encoded)


@pytest.mark.parametrize("token_budget", [1, 4096])
def test_token_budgets_agree_up_to_the_rounding_of_a_gradient(tmp_path, token_budget):
    data = records()
    totals = []
    for folder, budget in ((tmp_path / "a", token_budget), (tmp_path / "b", 200)):
        folder.mkdir()
        training = site_training(folder, data, made=engine(token_budget=budget), **PRIVATE | {"batch_size": 12})
        totals.append(summed(training).encoded)
    assert (totals[0] - totals[1]).abs().max() <= 12  # grid steps of 2^-40: a rounding per unit


def test_one_unit_moves_the_sum_by_at_most_one(tmp_path):
    units = [0, 0, 1, 2, 3, 4, 5, 5, 5, 5, 5, 5]
    settings = PRIVATE | {"unit": "group:patient", "batch_size": 6, "combine": "sum"}
    with_it = site_training(tmp_path, records(units=units), **settings)
    planned = with_it.next_release()
    sums = []
    for present in (np.arange(6), np.arange(5)):
        total = Contribution.zero(planned.plan)
        for chunk in with_it.gradients.of(vector() * 50, present, planned.part, 1):
            total = total + contribute(chunk, planned.plan)
        sums.append(total.encoded.double() / GRID)
    assert 0.5 < (sums[0] - sums[1]).norm() <= 1.0


def test_every_step_is_charged_and_the_budget_ends_the_run(tmp_path):
    training = site_training(tmp_path, records(), **PRIVATE)
    adapter = run(training, 4)
    assert [charge.event.round for charge in training.ledger.charges] == [1, 2, 3, 4]
    assert all(charge.released_at is not None for charge in training.ledger.charges)
    assert training.ledger.commitment.unit == "record"
    assert 0 < training.ledger.epsilon_spent() <= 4.0
    assert "all 4 planned steps" in training.refusal()
    with pytest.raises(BudgetExceeded):
        training.step()
    assert torch.equal(training.state.adapter, adapter)
    assert len(training.ledger.charges) == 4


def test_an_empty_batch_is_released_and_charged(tmp_path, monkeypatch):
    training = site_training(tmp_path, records(), **PRIVATE)
    monkeypatch.setattr(training.sampler.__class__, "draw", always())
    release = training.step()
    bound, z = release.plan.clip.bound, release.plan.noise_multiplier
    assert len(training.ledger.charges) == 1
    assert float(release.update.std()) == pytest.approx(bound * z / 4, rel=0.2)


def test_what_fails_before_the_charge_costs_nothing_and_draws_the_same_batch(tmp_path, monkeypatch):
    training = site_training(tmp_path, records(), **PRIVATE)
    drawn, gradients = [], UnitGradients.of

    def killed(self, adapter, units, part, step):
        if len(self.index) == 1:  # the made-up record
            return gradients(self, adapter, units, part, step)
        drawn.append(units.tolist())
        raise KeyboardInterrupt

    monkeypatch.setattr(UnitGradients, "of", killed)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            training.step()
    assert drawn[0] == drawn[1]
    assert not training.ledger.charges


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_batch_of_which_every_unit_raises_is_released_and_charged(tmp_path, monkeypatch, caplog, grouped, name):
    settings = PRIVATE | ({"unit": "group:patient"} if grouped else {})
    data = records(units=[0, 0, 1, 1, 1, 2, 3, 4, 4, 5, 5, 5] if grouped else None)
    training = site_training(tmp_path, data, name=name, **settings)
    gradients = training.gradients.engine.per_record_gradients
    held = {tuple(data.select([record]).tokens) for record in range(len(data))}

    def raising(adapter, batch):
        if any(tuple(batch.select([row]).tokens) in held for row in range(len(batch))):
            raise IndexError("secret")
        yield from gradients(adapter, batch)

    monkeypatch.setattr(training.gradients.engine, "per_record_gradients", raising)
    for _ in range(4):
        release = training.step()
    assert len(training.ledger.charges) == 4
    assert all(charge.released_at is not None for charge in training.ledger.charges)
    bound, z = release.plan.clip.bound, release.plan.noise_multiplier
    assert float(release.update.std()) == pytest.approx(bound * z / 4, rel=0.2)
    assert "every unit raised (IndexError in raising, test_dp_sgd.py:" in caplog.text
    assert "secret" not in caplog.text


def test_what_fails_with_any_records_is_found_out_before_the_first_charge(tmp_path, monkeypatch):
    training = site_training(tmp_path, records(), **PRIVATE)

    def broken(adapter, batch):
        raise MemoryError

    monkeypatch.setattr(training.gradients.engine, "per_record_gradients", broken)
    monkeypatch.setattr(training.sampler.__class__, "draw", always())
    with pytest.raises(MemoryError):  # also where the first batch is empty: it does not depend on records
        training.step()
    assert not training.ledger.charges


@pytest.mark.parametrize("grouped", [False, True])
def test_a_unit_that_raises_takes_nobody_with_it(tmp_path, monkeypatch, caplog, grouped):
    units = [0, 0, 1, 1, 1, 2, 3, 4, 4, 5, 5, 5] if grouped else None
    data, made = records(units=units), engine(token_budget=16)
    settings = PRIVATE | ({"unit": "group:patient"} if grouped else {})
    training = site_training(tmp_path, data, made=made, **settings)
    planned, everyone = training.next_release(), np.arange(6 if grouped else 12)
    monkeypatch.setattr(training.sampler.__class__, "draw", always(*everyone))
    broken, gradients = data.select([3]).tokens.tolist(), made.per_record_gradients

    def raising(adapter, batch):
        for chunk in gradients(adapter, batch):  # those before it are there when it raises
            if any(batch.select([row]).tokens.tolist() == broken for row in chunk.records):
                raise IndexError(f"secret {broken}")
            began.append(len(chunk.records))
            yield chunk

    began = []
    monkeypatch.setattr(made, "per_record_gradients", raising)
    found = summed(training).encoded
    assert began
    others = np.delete(everyone, 1 if grouped else 3)
    expected = sum((contribute(chunk, planned.plan) for chunk in training.rows(others, planned)), _zero(planned))
    assert torch.equal(found, expected.encoded)
    assert "a unit contributes zero: its work raised IndexError" in caplog.text
    assert "secret" not in caplog.text
    monkeypatch.setattr(training.sampler.__class__, "draw", always(1 if grouped else 3))
    assert not summed(training).encoded.any()  # nothing else was in the batch


def summed(training):
    planned = training.next_release()
    return training.total(planned, training.cohort(planned))


def _zero(planned):
    return Contribution.zero(planned.plan)


def test_a_vote_is_refused(tmp_path):
    with pytest.raises(ValueError, match="clip-norm"):
        site_training(tmp_path, records(), **PRIVATE | {"controller": "dp-lac", "controller_options": {}})


@pytest.mark.parametrize(
    ("controller", "options", "mode"),
    [
        ("percentile", {"query-noise": 8.0}, "floor"),
        ("dc-sgd-e", {"histogram-noise": 8.0}, "floor"),
        ("dp-clac", {"clip-norm": 0.1}, "floor"),
        ("rl", {}, "filter"),
    ],
)
def test_controllers_of_the_server_plan_steps_of_a_site(tmp_path, controller, options, mode):
    settings = PRIVATE | {"controller": controller, "controller_options": options, "mode": mode}
    training = site_training(tmp_path, records(), **settings)
    before = 1 if training.state.round < 0 else 0
    run(training, 2 + before)
    assert training.state.round == 2
    assert bool(training.state.adapter.isfinite().all())


def test_single_precision_trains_too(tmp_path):
    model, spec, task = build("llama")
    training = site_training(tmp_path, records(), made=CohortEngine(fresh(model), spec, task), **EXACT)
    double = tmp_path / "double"
    double.mkdir()
    moved = run(site_training(double, records(), **EXACT), 2) - vector()
    assert distance(run(training, 2) - vector(), moved) < 1e-4
