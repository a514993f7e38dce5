"""What `lacquer init` writes is a configuration, and its guesses are those a person would make."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.config.load import parse
from server.config.schema import RunConfig
from simulations.cli.app import app
from simulations.presets.template import full_template, look

ROWS = [(f"the card number {n} was lost somewhere", "card" if n % 3 else "loan", f"c{n % 40}") for n in range(400)]


def written(place: Path, name: str, content: bytes) -> dict[str, object]:
    (place / name).write_bytes(content)
    done = CliRunner().invoke(app, ["init", str(place / name), "-o", str(place / "made.toml")])
    assert done.exit_code == 0, done.output
    table = tomllib.loads((place / "made.toml").read_text())
    parse(table)
    return table


def test_the_template_of_all_settings_is_the_defaults() -> None:
    assert parse(tomllib.loads(full_template())) == RunConfig()
    active = re.sub(r"^# (?=[\w-]+ = )", "", full_template(), flags=re.MULTILINE)
    assert parse(tomllib.loads(active)) == RunConfig()


def test_a_csv_file_with_labels_and_clients(tmp_path: Path) -> None:
    text = "txt;product;customer_id\n" + "".join(";".join(row).replace("card", "café") + "\n" for row in ROWS)
    table = written(tmp_path, "mine.csv", text.encode("latin-1"))
    assert table["data"] == {
        "source": "csv:mine.csv",
        "text-column": "txt",
        "label-column": "product",
        "client-column": "customer_id",
        "separator": ";",
        "encoding": "latin-1",
        "partition": "natural",
        "validation-records": 40,
        "test-records": 40,
    }
    assert (table["clients"], table["model"]["task"], table["model"]["targets"]) == (0, "classification", "auto")  # type: ignore[index]
    assert table["privacy"]["delta"] == pytest.approx(1e-3)  # type: ignore[index]


def test_conversations_and_plain_texts(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"prompt": f"What is {n}?", "completion": "A number."}) + "\n" for n in range(300))
    table = written(tmp_path, "chat.jsonl", lines.encode())
    assert table["model"]["task"] == "instruction"  # type: ignore[index]
    texts = "".join(json.dumps({"body": f"a longer text with number {n}", "id": n}) + "\n" for n in range(300))
    assert look_at(tmp_path, texts) == ("causal-lm", {"text-column": "body"})


def look_at(place: Path, content: str) -> tuple[str, dict[str, str]]:
    (place / "d.jsonl").write_text(content)
    found = look(place / "d.jsonl")
    return found.task, found.chosen


def test_what_is_no_data_and_what_is_there_already_are_refused(tmp_path: Path) -> None:
    (tmp_path / "numbers.csv").write_text("a,b\n1,2\n3,4\n")
    (tmp_path / "there.toml").touch()
    for arguments, words in (
        (["numbers.csv"], "no column holds texts; it has a, b"),
        (["none.csv"], "there is no such file"),
        (["there.toml"], "is there already"),
        (["numbers.xlsx"], "there is no such file"),
    ):
        done = CliRunner().invoke(
            app, ["init", *(str(tmp_path / each) for each in arguments), "-o", str(tmp_path / "x.toml")]
        )
        assert done.exit_code == 2
        assert words in done.stderr
