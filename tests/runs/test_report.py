"""The report: valid, self-contained, complete where the run is, honest where it is not."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from privacy.errors import CorruptRun
from server.run_folder.data_facts import SIMULATED, DataFacts
from server.run_folder.resume import Resumed, note_resumed
from simulations.cli.app import app
from simulations.report.notation import epsilon_text
from simulations.report.page import write_report
from simulations.report.read_run import read_run

VOID = {"meta", "br", "hr", "img", "link", "input", "wbr"}


class Page(HTMLParser):
    """Parses strictly: every element that is opened is closed, in order; collects what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def html(complete_run: Path) -> str:
    return write_report(complete_run).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_a_complete_run_shows_its_numbers_guarantee_and_next_step(page: Page, complete_run: Path) -> None:
    guarantee = json.loads((complete_run / "privacy.json").read_text())
    assert guarantee["sentence"] in page.text
    for sentence in (*guarantee["not_covered"], *guarantee["covered"]):
        assert sentence in page.text
    assert "Test accuracy 81.2 %" in page.text
    assert f"Privacy ε ≤ {epsilon_text(guarantee['epsilon'])} at δ = 1e-5" in page.text
    assert "5 of 5" in page.text
    assert "Time in training 17 s" in page.text
    assert 'load_base("minilm", "classification", num_labels=7)' in page.text
    assert f'PeftModel.from_pretrained(base, "{complete_run.parent.name}/small-1/adapter")' in page.text
    assert f"lacquer export {complete_run.parent.name}/small-1 my-model makes a model that plain" in page.text
    assert "'loan', 'mortgage', 'savings', 'something <else>']" in page.text
    assert "truncation=True, max_length=128" in page.text
    assert "Poisson 0.05 of 1,000 clients" in page.text
    assert "update (9,000)" in page.text
    assert "model.rank 8 4" in page.text
    assert json.loads((complete_run / "environment.json").read_text())["packages"]["torch"] in page.text
    assert "Not private" not in page.text
    assert "Clients added +5.0 points: validation accuracy 50.0 % before round 1, 55.0 % now" in page.text
    banners = [attributes for _, attributes in page.elements if (attributes.get("class") or "").startswith("banner")]
    assert [banner["class"] for banner in banners] == ["banner"]
    assert "Warning. The clip threshold C is still moving" in page.text


def test_the_page_asks_nobody_for_anything(html: str, page: Page) -> None:
    assert "http:" not in html
    assert "https:" not in html
    assert not re.search(r"@import|url\((?!#)", html)
    for tag in ("script", "link", "iframe", "object", "embed"):
        assert page.all(tag) == []
    for _, attributes in page.elements:
        for name in ("src", "href", "xlink:href", "srcset"):
            assert (attributes.get(name) or "#").startswith("#")


def test_it_says_what_was_trained_on_what_and_shows_no_folder_of_this_machine(
    record_run: Callable[..., Path],
) -> None:
    folder = record_run()
    text = (folder / "config.toml").read_text()
    text = text.replace('source = "notes"', f'source = "csv:{folder}/own.csv"')
    text = text.replace('name = "minilm"', f'name = "{folder}/base"').replace('cache = ""', f'cache = "{folder}/cache"')
    (folder / "config.toml").write_text(text)
    html = write_report(folder).read_text(encoding="utf-8")
    assert "<title>small: classification on own.csv with base | Lacquer run report</title>" in html
    assert "csv:…/own.csv" in html
    assert "…/cache" in html
    assert str(folder.parent) not in html
    assert "/home/" not in html


def test_it_names_commands_that_there_are(page: Page, complete_run: Path) -> None:
    run = f"{complete_run.parent.name}/small-1"
    typed = re.findall(r"lacquer [a-z]+ [^ ]+", page.text)
    assert f"lacquer predict {run}" in typed
    assert f"lacquer run {run}/config.toml" in typed
    assert len(typed) > 5
    assert {line.split()[1] for line in typed} <= typer.main.get_command(app).commands.keys()  # type: ignore[attr-defined]


def test_every_round_can_be_read_off(page: Page) -> None:
    assert "round 3: 53.0 %" in page.text
    assert "round 3: 2, noise 1.5, signal 1.323" in page.text
    assert "3 0.3333 53.0 % 0.1667 1.5 0.61 2 1.5 2.5" in page.text  # the row of the table


def test_ids_are_unique_and_references_lead_somewhere(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    wanted = {(attributes["href"] or "")[1:] for tag in ("use", "a") for attributes in page.all(tag)}
    wanted |= {
        attributes["aria-labelledby"] or "" for _, attributes in page.elements if "aria-labelledby" in attributes
    }
    assert wanted <= set(ids)


def test_it_can_be_read_without_seeing_it(page: Page) -> None:
    assert page.all("html")[0]["lang"] == "en"
    assert len(page.all("h1")) == 1
    figures, pictures = page.all("figure"), page.all("svg")
    assert len(figures) == len(pictures) == len(page.all("figcaption")) == 6
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in pictures)
    assert "From 50.0 % to 55.0 %, best 55.0 %. Test: 81.2 %." in page.text
    assert all(header.get("scope") in ("row", "col") for header in page.all("th"))


def test_colours_follow_the_theme_of_the_page(html: str) -> None:
    assert "prefers-color-scheme: dark" in html
    for figure in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL):
        assert "var(--plot-first" in figure
        assert "DejaVu" not in figure
        assert set(re.findall(r"(?<!, )#[0-9a-fA-F]{6}\b", figure)) == set()


def test_what_a_person_typed_cannot_become_markup(record_run: Callable[..., Path]) -> None:
    folder = record_run(done=1, state="failed")
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "message": "<script>alert(1)</script>"}))
    page = page_of(folder)
    assert page.all("script") == []
    assert "<script>alert(1)</script>" in page.text


def test_a_run_that_failed_midway_gets_a_report_that_says_so(record_run: Callable[..., Path]) -> None:
    page = page_of(record_run(done=2, state="failed"))
    assert "Failed. It did 2 of 5 rounds" in page.text
    assert "worker 2 did not answer" in page.text
    assert "Validation accuracy 52.0 % public; not tested" in page.text
    assert "differentially private with epsilon at most" in page.text  # from the ledger: privacy.json was not written
    assert re.search(r"at δ = 1e-5; [0-9.]+ spent", page.text)
    assert "load_base" not in page.text


def test_a_run_without_a_guarantee_says_so_in_red_and_states_no_epsilon(record_run: Callable[..., Path]) -> None:
    page = page_of(record_run(not_private="noise is off"))
    banners = [attributes["class"] for tag, attributes in page.elements if attributes.get("role") == "alert"]
    assert banners == ["banner bad"]
    assert "Not private. This run gives no guarantee of any kind: noise is off." in page.text
    assert "This run is NOT PRIVATE: noise is off." in page.text
    assert "ε ≤" not in page.text
    assert "Privacy spent" not in page.text


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "privacy.json", "results.json", "ledger.jsonl"])
def test_a_file_that_must_be_there_is_named(record_run: Callable[..., Path], name: str) -> None:
    folder = record_run()
    (folder / name).unlink()
    with pytest.raises(CorruptRun, match=f"{folder / name} is missing"):
        write_report(folder)
    shown = CliRunner().invoke(app, ["report", str(folder)])
    assert (shown.exit_code, len(shown.stderr.splitlines())) == (2, 1)


@pytest.mark.parametrize("written", [0.4, 40.0])
def test_another_epsilon_than_the_ledgers_is_refused(record_run: Callable[..., Path], written: float) -> None:
    folder = record_run()
    file = folder / "privacy.json"
    epsilon = json.loads(file.read_text())["epsilon"]
    file.write_text(file.read_text().replace(f'"epsilon": {epsilon}', f'"epsilon": {written}', 1))
    with pytest.raises(CorruptRun, match=f"{file}: epsilon is {written}, by the ledger it is {epsilon}"):
        read_run(folder)


def test_settings_that_the_ledger_does_not_commit_to_are_refused(record_run: Callable[..., Path]) -> None:
    file = record_run() / "config.toml"
    file.write_text(file.read_text().replace("epsilon = 2.0", "epsilon = 0.2", 1))
    with pytest.raises(CorruptRun, match=r"config\.toml: privacy\.epsilon is 0\.2, but ledger\.jsonl commits to 2\.0"):
        read_run(file.parent)


def test_a_folder_with_a_status_alone_is_a_report_too(record_run: Callable[..., Path]) -> None:
    folder = record_run(done=0, state="failed", ledger=False)
    for name in ("config.toml", "environment.json"):
        (folder / name).unlink()
    page = page_of(folder)
    assert "worker 2 did not answer" in page.text
    assert "There is no readable ledger" in page.text
    assert "nothing to draw" in page.text


def test_a_tampered_ledger_is_named_and_nothing_is_shown(record_run: Callable[..., Path]) -> None:
    folder = record_run(done=2, state="failed")
    ledger = folder / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"noise_std":1.5', '"noise_std":2.5', 1))
    with pytest.raises(CorruptRun, match=f"{ledger} line [0-9]+ was changed"):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_a_statement_of_another_ledger_is_noticed(record_run: Callable[..., Path]) -> None:
    folder = record_run()
    statement = json.loads((folder / "privacy.json").read_text())
    statement["ledger"]["head"] = "3:" + "0" * 64
    (folder / "privacy.json").write_text(json.dumps(statement))
    with pytest.raises(CorruptRun, match=r"privacy\.json was not made from ledger\.jsonl as it is now"):
        read_run(folder)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run folder: .*config.toml"):
        read_run(tmp_path)


def test_a_resumed_run_says_so(record_run: Callable[..., Path]) -> None:
    folder = record_run()
    assert "Resumed." not in Page(write_report(folder).read_text(encoding="utf-8")).text
    for resumed in (Resumed(2, 1.0, 0), Resumed(3, 2.0, 1, ("server/runs/loop.py was changed",))):
        note_resumed(folder, resumed)
    text = Page(write_report(folder).read_text(encoding="utf-8")).text
    assert "It was interrupted and resumed 2 times, after rounds 2, 3. 1 release was lost after the charge" in text
    assert "It resumed with other code: server/runs/loop.py was changed." in text
    assert "resumed.jsonl" in text


EXAMPLES = [
    {"prompt": "<script>alert(1)</script> Is it?", "reference": "It & is.", "before": "", "after": "Yes.\nIt is."},
    {"prompt": "Second", "reference": "b", "before": "c", "after": "d"},
    {"prompt": "of an earlier version"},
]


def test_classes_data_and_perplexity_are_shown_where_they_are_known(record_run: Callable[..., Path]) -> None:
    folder = record_run()
    results = json.loads((folder / "results.json").read_text())
    pairs = [[0] * 7 for _ in range(7)]
    pairs[0][0], pairs[0][6], pairs[6][6] = 3, 1, 4
    (folder / "results.json").write_text(json.dumps({**results, "test_confusion": pairs}))
    parts, cut = {"train": 20, "test": 8}, {"train": 3}
    facts = DataFacts(SIMULATED, {"source": 30}, {"empty": 2}, {}, {}, parts, cut, 4, 0, (2, 5.0, 9))
    (folder / "records.json").write_text(json.dumps(asdict(facts)))
    page = page_of(folder)
    assert "Read 30 records in data.source; left out: 2 empty" in page.text
    assert "4 with 2 to 9, median 5 records each" in page.text
    assert SIMULATED in page.text
    assert "card 4 75.0 % 100.0 % 85.7 %" in page.text  # records, recall, precision, F1
    assert "something <else> 0 0 0 0 0 0 4" in page.text  # a row of the matrix
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record["validation_perplexity"] = 20.0 - record["round"]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    page = page_of(folder)
    assert "From 20 to 15, lowest 15." in page.text
    assert "Accuracy On the server" not in page.text


def test_answers_before_and_after_stand_side_by_side_and_escaped(complete_run: Path) -> None:
    results = json.loads((complete_run / "results.json").read_text())
    assert 'id="examples"' not in write_report(complete_run).read_text(encoding="utf-8")
    (complete_run / "results.json").write_text(json.dumps({**results, "examples": EXAMPLES}))
    html = write_report(complete_run).read_text(encoding="utf-8")
    page = Page(html)
    assert "<script" not in html
    assert "Prompt <script>alert(1)</script> Is it? Reference It & is. Before (nothing) After Yes. It is." in page.text
    assert [attributes.get("class") for tag, attributes in page.elements if tag == "article"] == ["example"] * 2
