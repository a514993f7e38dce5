"""What `lacquer init` writes is a configuration, and its guesses are those a person would make."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import Result
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


def test_pairs_of_answers(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"prompt": f"{n}?", "chosen": "Yes.", "rejected": "No."}) + "\n" for n in range(300))
    assert written(tmp_path, "pairs.jsonl", lines.encode())["model"]["task"] == "preference"  # type: ignore[index]


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


def init(place: Path, name: str, rows: list[dict[str, Any]], *options: str) -> Result:
    """Of a file of these rows, in the format that its name says."""
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place / name)
    elif name.endswith(".csv"):
        (place / name).write_text("".join(",".join(map(str, row.values())) + "\n" for row in rows))
    else:
        (place / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = str(place / "made.toml")
    return CliRunner().invoke(app, ["init", str(place / name), "-o", made, "--force", *options])


TABLE = [{"text": text, "label": label, "who": f"p{n % 40}"} for n, (text, label, _) in enumerate(ROWS)]


def test_it_shows_what_it_understood(tmp_path: Path) -> None:
    done = init(tmp_path, "d.jsonl", [*TABLE, {"text": "", "label": "card", "who": "p1"}], "--client", "who")
    assert done.exit_code == 0, done.output
    for words in (
        "label-column = 'label': 2 classes: card (267), loan (134)",
        "client-column = 'who': 40 different values; every one is a client",
        "left out: 1 empty",
        "0 of 400 are cut at 128 (model.max-length)",
        "record 1: [CLS] the card number 0 was lost somewhere [SEP] -> loan",
        "record 3: [CLS] the card number 2 was lost somewhere [SEP] -> card",
    ):
        assert words in done.output
    assert "Warning" not in done.output


def test_public_records_are_validated_on_and_started_from(tmp_path: Path) -> None:
    public = tmp_path / "public.jsonl"
    public.write_text("".join(json.dumps({"text": f"a public text {n}", "label": "card"}) + "\n" for n in range(70)))
    done = init(tmp_path, "d.jsonl", TABLE, "--client", "who", "--public", str(public))
    assert done.exit_code == 0, done.output
    config = parse(tomllib.loads((tmp_path / "made.toml").read_text()))
    assert (config.data.validation_source, config.data.validation_records) == ("jsonl:public.jsonl", 70)
    assert (config.public.warm_start_epochs, config.public.warm_start_factors) == (20, "both")
    public.write_text('{"words": "a public text"}\n')
    done = init(tmp_path, "d.jsonl", TABLE, "--client", "who", "--public", str(public))
    assert done.exit_code == 2
    assert "lacks the column 'text' (text-column) and 'label' (label-column) of d.jsonl; it has words" in " ".join(
        done.output.split()
    )


def test_without_a_column_of_people_it_says_whom_the_guarantee_is_for(tmp_path: Path) -> None:
    done = init(tmp_path, "d.jsonl", TABLE)
    assert done.exit_code == 0, done.output
    assert "the guarantee is for invented clients" in done.output
    assert "columns that may name them: who (40 different values)" in done.output
    assert 'partition = "dirichlet"' in (tmp_path / "made.toml").read_text()


def test_few_clients_and_names_that_differ_in_case_are_warned_of(tmp_path: Path) -> None:
    rows = [{"text": f"some text {n}", "user": ("ann", "Ann", "bob")[n % 3]} for n in range(90)]
    done = init(tmp_path, "d.jsonl", rows, "--client", "user")
    assert "2 names in 'user' differ in upper and lower case only" in done.output
    assert "3 clients are too few" in done.output


def test_a_row_without_a_label_is_left_out_and_counted(tmp_path: Path) -> None:
    done = init(tmp_path, "d.jsonl", changed(label=" "), "--client", "who")
    assert done.exit_code == 0, done.output
    assert "2 classes: card (265), loan (134)" in done.output
    assert "left out: 1 without a label" in done.output


def test_all_of_an_instruction_is_read(tmp_path: Path) -> None:
    rows = [{"instruction": "Translate.", "input": f"Fieber {n}", "output": "fever", "user": n % 30} for n in range(90)]
    done = init(tmp_path, "d.jsonl", rows)
    assert done.exit_code == 0, done.output
    assert "Translate.\\n\\nFieber 0" in done.output
    assert "\u00abfever<|im_end|>\u00bb" in done.output, "what is learnt is marked"


def changed(**cells: Any) -> list[dict[str, Any]]:
    """The table with other cells in its eighth row."""
    return [{**row, **(cells if number == 7 else {})} for number, row in enumerate(TABLE)]


UNSURE: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "no label": (
        "d.jsonl",
        [{**row, "label": "NA" if n == 7 else n % 2} for n, row in enumerate(TABLE)],
        "1 of 400 rows have no label in column 'label', the first.*row 8;",
    ),
    "blank labels": ("d.jsonl", [{**row, "label": "" if n % 3 else "a"} for n, row in enumerate(TABLE)], "266 of 400"),
    "three people": ("d.jsonl", [{**row, "user": n % 3} for n, row in enumerate(TABLE)], "'user' names 3 clients"),
    "two cases": ("d.jsonl", changed(label="Card"), "'card', 'Card' differ in upper and lower case only"),
    "fractions": ("d.jsonl", [{**row, "label": n % 3 + 0.5} for n, row in enumerate(TABLE)], "with fractions"),
    "no name": ("d.jsonl", [{"text": "a b", "user": None}, {"text": "c d", "user": "x"}], "no name in column 'user'"),
    "no header": ("d.csv", TABLE, "first line looks like a record.*--columns text,label,user"),
    "nested": ("d.parquet", [{"user_id": "u1 x", "talk": [{"by": "x"}]}] * 9, "talk hold lists or objects"),
    "two labels": ("d.jsonl", [{"body": r["text"], "a": r["label"], "b": r["label"]} for r in TABLE], "a .2 .*, b .2 "),
}


@pytest.mark.parametrize("case", UNSURE)
def test_where_it_is_not_sure_it_asks(tmp_path: Path, case: str) -> None:
    name, rows, message = UNSURE[case]
    done = init(tmp_path, name, rows)
    assert done.exit_code == 2
    assert re.search(message, done.stderr.replace("\n", " ")), done.stderr
    assert not (tmp_path / "made.toml").exists()


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("no label", ["--label", "none"]),
        ("three people", ["--client", "user"]),
        ("two cases", ["--label", "label"]),
        ("no header", ["--columns", "text,label,who"]),
        ("two labels", ["--label", "a", "--client", "none"]),
    ],
)
def test_what_a_person_says_is_taken(tmp_path: Path, case: str, options: list[str]) -> None:
    name, rows, _ = UNSURE[case]
    done = init(tmp_path, name, rows, *options)
    assert done.exit_code == 0, done.output
    parse(tomllib.loads((tmp_path / "made.toml").read_text()))


def test_clients_of_a_natural_partition_are_counted_before_they_are_judged() -> None:
    data = {"source": "csv:d.csv", "client-column": "who", "partition": "natural"}
    assert parse({"data": data, "privacy": {"delta": 1e-3}}).clients == 0
    assert parse({"data": {**data, "source": "notes"}}).clients == RunConfig().clients
    assert parse({"data": data, "clients": 40}).clients == 40


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
