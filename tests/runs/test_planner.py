"""`lacquer plan`: the noise of the accountant, what is recommended, refusals with a remedy that is one, JSON."""

import json
import re
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner, Result

from client.models.base import load_base, load_skeleton
from server.config.load import load
from server.config.methods import methods
from server.runs.assembly import trained_values
from simulations.cli.app import app
from simulations.planning import choices
from simulations.planning.choices import Situation, changed_settings, paces
from simulations.planning.signal import Agreement
from simulations.presets.load import preset_files

KNOWN = ["--records-per-client", "10", "--labels", "2"]
QUICK = ["compare-sst2", "--set", "model.name=random:bert", "--set", "rounds=20", *KNOWN]


@pytest.fixture(autouse=True)
def few_paces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "RATES", (0.5, 1))
    monkeypatch.setattr(choices, "ROUNDS", (1,))


def plan(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(app, ["plan", *arguments])


def planned(*arguments: str) -> dict[str, Any]:
    done = plan(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("clients", "rate", "rounds", "noise"),
    [
        (1_000, 0.05, 100, 18.8),
        (1_000, 0.1, 100, 13.9),
        (5_000, 0.02, 100, 6.9),
        (10_000, 0.03, 40, 2.3),
        (10_000, 0.05, 60, 1.7),
    ],
)
@pytest.mark.nightly
def test_a_thousand_times_the_noise_per_value_at_epsilon_4(
    clients: int, rate: float, rounds: int, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "RATES", (1,))
    settings = {"clients": clients, "sampling-rate": rate, "rounds": rounds, "strategy.controller": "fixed"}
    config = changed_settings(load(preset_files()["compare-sst2"]), settings)
    (pace,) = paces(Situation(config, clients, 2, Agreement(0.1, ""), 10**9))
    assert round(1000 * pace.noise_multipliers[0] / pace.cohort, 1) == noise


def test_a_skeleton_has_the_shape_and_no_weights() -> None:
    config = load(preset_files()["site-diabetes"])
    skeleton, (model, _) = load_skeleton("lacquer-small", "causal-lm"), load_base("lacquer-small", "causal-lm")
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    values = trained_values(config, methods(config), skeleton)
    assert values == trained_values(config, methods(config), model) == 28672


def test_what_is_trained_follows_all_linear() -> None:
    """random:llama has 2 blocks of 7 linear layers, whose A and B together have rank x (in + out) values."""
    keys = {"model.name": "random:llama", "model.targets": "all-linear", "model.layers": 0, "model.rank": 2}
    config = changed_settings(load(preset_files()["site-diabetes"]), {**keys, "strategy.aggregation": "plain"})
    model = load_base("random:llama", "causal-lm")[0]
    layers = [m for path, m in model.named_modules() if isinstance(m, nn.Linear) and path != "lm_head"]
    assert len(layers) == 14
    assert trained_values(config, methods(config), model) == sum(2 * (m.in_features + m.out_features) for m in layers)


@pytest.mark.nightly
def test_more_clients_and_more_epsilon_mean_more_signal() -> None:
    now = planned(*QUICK)
    more = planned(*QUICK, "--clients", "2000")
    richer = planned(*QUICK, "--set", "privacy.epsilon=6")
    signals = [one["signal_to_noise"] for found in (now, more, richer) for one in found["trained"][:1]]
    assert signals[0] < min(signals[1:])
    by_values = [one["signal_to_noise"] for one in sorted(now["trained"], key=lambda one: one["dimension"])]
    assert by_values == sorted(by_values, reverse=True)


@pytest.mark.nightly
def test_enough_signal_buys_adapters() -> None:
    found = planned(*QUICK, "--clients", "100000", "--set", "privacy.delta=1e-6")
    best = found["recommended"]
    assert "rank" in best["trained"]
    assert best["signal_to_noise"] >= 3
    larger = [one for one in found["trained"] if one["dimension"] > best["dimension"]]
    assert all(one["signal_to_noise"] < 3 for one in larger)


def test_a_hopeless_setting_is_refused_and_its_remedy_is_one() -> None:
    poor = [*QUICK, "--set", "strategy.controller=fixed", "--set", "sampling-rate=0.5", "--set", "privacy.epsilon=0.2"]
    done = plan(*poor, "--clients", "40")
    assert done.exit_code == 2
    assert "hopeless" in done.stderr
    assert "public.warm-start-epochs" in done.stderr
    remedy = re.search(r"([\d,]+) clients at the rate ([\d.]+)", done.stderr)
    assert remedy
    clients, rate = remedy[1].replace(",", ""), remedy[2]
    enough = plan(*poor, "--clients", clients, "--set", f"sampling-rate={rate}")
    assert enough.exit_code == 0, enough.output


def test_the_records_of_a_site() -> None:
    found = planned("site-diabetes", "--clients", "20000", "--set", "rounds=20")
    assert found["unit"] == "record"
    assert found["recommended"]["settings"]["site.batch-size"] in (32, 64)
    assert "head alone" not in [one["trained"] for one in found["trained"]]


def test_the_cost_is_kept() -> None:
    found = planned(*QUICK, "--cost", "600")
    assert {one["cost"] for one in found["paces"]} == {500}
    done = plan(*QUICK, "--cost", "1")
    assert done.exit_code == 2
    assert "the cheapest choice takes 500 updates" in done.stderr


def test_the_page_ends_with_a_command_that_is_one() -> None:
    done = plan(*QUICK)
    assert done.exit_code == 0, done.output
    command = done.output.splitlines()[-1].split()
    assert command[:3] == ["lacquer", "run", "compare-sst2"]
    assert (
        changed_settings(load(preset_files()["compare-sst2"]), {"model.targets": "", "model.layers": 0}).model.targets
        == ""
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--agreement", "2"], "agreement"),
        (["--agreement", "0.1", "--like", "."], "not both"),
        (
            ["--set", "strategy.controller=fixed", "--set", "privacy.noise-correlation=banded"],
            "then see --correlated",
        ),
    ],
)
def test_bad_arguments(arguments: list[str], said: str) -> None:
    done = plan(*QUICK, *arguments)
    assert done.exit_code == 2
    assert said in done.stderr


def test_several_sites_are_planned_one_by_one() -> None:
    done = plan("sites")
    assert done.exit_code == 2
    assert "plan each by itself" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ["site-quickstart", "--set", "site.sampling-level=example", "--clients", "9000"],
            "drawn whole",
        ),
        (["site-quickstart", "--correlated"], "got privacy.unit = 'group'"),
        (["secure-sums", "--correlated"], "privacy.trust = 'secagg'"),
    ],
)
def test_what_is_not_planned_is_refused(arguments: list[str], reason: str) -> None:
    done = plan(*arguments)
    assert done.exit_code == 2
    assert reason in " ".join(done.output.split())


def test_correlated_noise_is_priced_at_the_settings() -> None:
    small = ["quickstart", "--correlated", "--set", "clients=40", "--set", "sampling-rate=0.2", "--set", "rounds=4"]
    found = planned(*small, "--set", "privacy.delta=1e-3")
    assert {one["bands"] for one in found["tried"]} >= {1, 4}
    assert min(found["tried"], key=lambda one: one["error"]) == found["tried"][0]
    said = plan(*small, "--set", "privacy.delta=1e-3").output
    assert "40 clients, sampling rate 0.2, 4 rounds" in " ".join(said.split())
