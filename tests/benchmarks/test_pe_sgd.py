"""The comparison of PE-SGD: what its settings files say is what its writer is asked for."""

import json
import tomllib
from pathlib import Path

import pytest

from client.record_level import synthetic_texts
from server.config.tables import Span
from simulations.benchmarks.papers import pe_sgd
from simulations.benchmarks.papers.pe_sgd import Settings, read_settings
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
    span = Span.model_validate(tomllib.loads(preset_files()["silo-pubmed-paper"].read_text())["silo"]["span"])
    assert settings.instruction == span.instruction
    assert settings.openings == (span.openings,)
    assert "medical research paper" in settings.instruction


def test_committed_cells_are_of_the_settings_as_they_are() -> None:
    found = json.loads((HERE.parent / "results" / "pesgd.json").read_text())
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
