"""The comparison of PE-SGD: what its settings files say is what its writer is asked for."""

import json
import tomllib
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from client.record_level import synthetic_texts
from server.config.tables import Span
from simulations.benchmarks.harness.results import RESULTS
from simulations.benchmarks.papers.pe_sgd import step as pe_sgd_step
from simulations.benchmarks.papers.pe_sgd import tables
from simulations.benchmarks.papers.pe_sgd import training as pe_sgd
from simulations.benchmarks.papers.pe_sgd.training import Settings, read_settings
from simulations.presets.load import preset_files

HERE = Path(pe_sgd.__file__).parent


@pytest.mark.parametrize(("name", "form"), [("small", "continuation"), ("paper", "instruction")])
def test_the_writer_is_asked_as_the_file_says(name: str, form: str, monkeypatch) -> None:
    settings = read_settings(HERE / f"pesgd-{name}.toml")
    table = tomllib.loads((HERE / f"pesgd-{name}.toml").read_text())
    asked: list[list[int]] = []

    def written(model, tokenizer, prompts, decoding):
        asked.extend(prompts)
        return [tokenizer("a word")["input_ids"][:-1] for _ in prompts]

    monkeypatch.setattr(synthetic_texts, "continuations", written)
    few = settings.model_copy(update={"samples": 8, "model": "random:llama", "token_budget": 256})
    bench = pe_sgd.Bench(few, few.model)
    made = bench.synthesiser(0)
    assert (made.synthesis.form, made.synthesis.samples, made.synthesis.openings) == (form, 8, tuple(table["openings"]))
    made.initial(bench.adapter)
    prompts = [bench.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in asked]
    openings, variations = prompts[:4], prompts[4:]
    assert len(variations) == 4
    assert {opening.replace(" ", "") for opening in openings} <= {text.replace(" ", "") for text in table["openings"]}
    if form == "instruction":
        for prompt in variations:
            assert prompt in {table["instruction"].format(sample="a word", tone=tone) for tone in synthetic_texts.TONES}


def test_both_roads_to_the_paper_s_scale_ask_in_the_same_words() -> None:
    settings = read_settings(HERE / "pesgd-paper.toml")
    span = Span.model_validate(tomllib.loads(preset_files()["pe-sgd-paper"].read_text())["site"]["span"])
    assert settings.instruction == span.instruction
    assert settings.openings == (span.openings,)
    assert "medical research paper" in settings.instruction


def test_committed_cells_are_of_the_settings_as_they_are() -> None:
    found = json.loads((RESULTS / "pesgd.json").read_text())
    assert found["settings"] == read_settings(HERE / "pesgd-small.toml").to_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"form": "instruction"}, "instruction must be set with form = 'instruction'"),
        ({"instruction": "{sample} again:"}, "and only there"),
        ({"form": "instruction", "instruction": "again:"}, "must contain {sample}"),
        ({"form": "instruction", "instruction": "{sample} {style}:"}, "no braces but"),
        ({"form": "prompt", "instruction": "{sample}"}, "form"),
        ({"samples": 201}, "multiple of variants"),
        ({"instructions": "{sample}"}, "instructions\n  Extra inputs are not permitted"),
        ({"steps": None}, "steps\n  Field required"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_their_file(changes: dict, message: str, tmp_path: Path) -> None:
    import tomli_w

    table = tomllib.loads((HERE / "pesgd-small.toml").read_text()) | changes
    (tmp_path / "mine.toml").write_text(
        tomli_w.dumps({key: value for key, value in table.items() if value is not None})
    )
    with pytest.raises(ValueError, match=r"^mine\.toml: ") as refused:
        read_settings(tmp_path / "mine.toml")
    assert message in str(refused.value)


def test_an_instruction_is_written_to_the_results() -> None:
    settings = read_settings(HERE / "pesgd-paper.toml")
    assert settings.to_json()["instruction"] == settings.instruction
    assert isinstance(settings, Settings)


def few(**changes: object) -> Settings:
    """The small settings on a very small model, with few texts."""
    sizes = {"samples": 8, "private": 12, "test": 6, "batch": 4, "steps": 2, "directions": 3, "evaluate_at": ()}
    settings = read_settings(HERE / "pesgd-small.toml")
    return settings.model_copy(update={**sizes, "model": "random:llama", "token_budget": 256, **changes})


def test_common_rates_are_every_rate_with_every_seed() -> None:
    settings = few(rates=(0.001, 0.01))
    cells = list(pe_sgd.wanted(settings, None, [0, 1], ["GEP", "PE-SGD"], (0.0, 1.0), common=True))
    assert sorted(cells) == [(s, m, r) for s in (0, 1) for m in ("GEP", "PE-SGD") for r in (0.001, 0.01)]
    assert {seed for seed, _, _ in pe_sgd.wanted(settings, None, [0], ["GEP"], (0.0, 1.0))} == {pe_sgd.TUNING_SEED}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus that is a test file alone, of which few texts are for tuning."""
    monkeypatch.setattr(pe_sgd, "TUNING_TEXTS", 100)
    texts = [f"in {i} of {i * i} mice the dose was {i + 3}" for i in range(1100)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "test.parquet")
    return tmp_path


def test_a_corpus_of_one_file_keeps_its_parts_apart(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[str]] = []
    bench = pe_sgd.Bench(few(), "random:llama")
    monkeypatch.setattr(bench, "records", lambda texts: taken.append(texts))
    monkeypatch.setattr(pe_sgd, "Seed", lambda *_: None)
    pe_sgd.seed_of(bench, corpus, 0, tuning=False)
    pe_sgd.seed_of(bench, corpus, pe_sgd.TUNING_SEED, tuning=True)
    private, test, tuned, validated = map(set, taken)
    assert (len(private), len(test)) == (12, 6)
    assert not private & test
    assert not (private | test) & (tuned | validated)


def test_one_step_points_where_the_loss_falls_but_for_its_noise(corpus: Path) -> None:
    bench = pe_sgd.Bench(few(epsilon=25.0, batch=80, private=100), "random:llama")
    seed = pe_sgd.seed_of(bench, corpus, 0, tuning=False)
    towards = pe_sgd_step.falling(seed)
    rows = {method: pe_sgd_step.measured(seed, towards, method, 1, (1e-3,)) for method in pe_sgd_step.FIRST_STEP}
    # little noise: DP-SGD's step is the mean of the clipped gradients of most texts
    assert rows["DP-SGD"]["cosine"] > 0.8
    assert rows["DP-SGD"]["falls"][0] > 0
    assert all(-1 <= row["cosine"] <= 1 for row in rows.values())
    # the tables take rows of the small model's sizes alone
    sizes = {"model": "lacquer-small", "epsilon": 1.0, "values": pe_sgd_step.VALUES}
    keys = {"corpus": "mice", "machine": "m", "commit": "c", **sizes}
    cells = [
        {
            **row,
            **keys,
            "method": method,
            "seed": number,
            "lengths": [pe_sgd_step.SHOWN],
            "cosine": row["cosine"] + tilt,
        }
        for method, row in rows.items()
        for number, tilt in enumerate((0.0, 0.01))
    ]
    assert "| PE-SGD, FixSample |" in pe_sgd_step.steps({"rows": cells})
    assert "PDP-SGD less DP-SGD" in pe_sgd_step.pairs({"rows": cells})


def test_rates_in_common_are_shown_with_the_order_that_they_give() -> None:
    cells = [
        {
            "method": method, "seed": seed, "learning_rate": rate, "loss": 5 + place / 10 + seed * place * rate,
            "accuracy": 0.2, "start_loss": 5.5, "start_accuracy": 0.1, "cpu_seconds": 1.0,
            "machine": "m", "commit": "c",
        }
        for place, method in enumerate(tables.ORDER) for seed in range(3) for rate in (0.001, 0.01)
    ]  # fmt: skip
    shown = tables.common({"cells": cells})
    assert [line.count("**") for line in shown.splitlines()[2:7]] == [4, 0, 0, 0, 0]
    assert "PE-SGD < FixSample" in tables.common_claims({"cells": cells})
    own = tables.claims({"cells": [cell for cell in cells if cell["learning_rate"] == 0.001]})
    assert [line.split(" | ")[0] for line in own.splitlines()[2:]][-1] == "| PE-SGD < DP-SGD"
    assert own.count("lower on 3 of 3 seeds | yes |") == 5
