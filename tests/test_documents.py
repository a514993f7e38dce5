"""What the documents name exists: paths, modules, commands and their options, settings, targets of make."""

import ast
import importlib
import re
import runpy
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import typer
from click import Command, Group

from privacy.accountants import epsilon
from privacy.commitment import WEAKEST_NOISE_MULTIPLIER
from privacy.events import Poisson
from server.config.load import known_keys
from server.run_folder import names
from simulations.benchmarks.__main__ import BENCHMARKS
from simulations.cli.app import app
from simulations.presets.load import preset_files
from simulations.report import page
from simulations.sweep.cells import sweep_files

ROOT = Path(__file__).resolve().parents[1]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
DOCUMENTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in TRACKED if name.endswith(".md")}

APPENDIX = "docs/results/"
FOLDERS = "privacy|client|strategies|server|simulations|tests|docker|docs"
MADE_BY_READERS = {"ask.py", "docker/records/", "docs/quickstart", "my_methods.py"}
"""Paths that a text asks its reader to make, or that only begin the names of files."""
MADE = runpy.run_path(str(ROOT / "docs/generated.py"))
TASKS = runpy.run_path(str(ROOT / "docs/tools/transcripts.py"))["tasks"]()
METHOD_PAGES = {ROOT / "docs/methods" / f"{name}.md" for name in MADE["method_pages"]()}
"""Written by `make docs`, and in no checkout."""

COMMANDS = typer.main.get_command(app)
assert isinstance(COMMANDS, Group)
SHOWN: dict[str, Command] = dict(COMMANDS.commands)
OWN_OPTIONS = {option for each in COMMANDS.params for option in each.opts} | {"--help"}


def code(text: str) -> Iterator[str]:
    """Lines of fenced blocks and `spans`, without comments."""
    for block in re.findall(r"^```[a-z]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            yield line.partition(" #")[0].strip()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def exists(path: str) -> bool:
    return path in MADE_BY_READERS or any(ROOT.glob(path.rstrip("/")))


def known_page(path: Path) -> bool:
    return path in METHOD_PAGES or (path.exists() and path.parent != ROOT / "docs/methods")


def wrong_paths(name: str, text: str) -> list[str]:
    paths = {match.rstrip("./") for match in re.findall(rf"(?<![\w/.$-])(?:{FOLDERS})/[\w/.*-]+", text)}
    files = {match for match in re.findall(r"`([\w/]+\.py)`", text) if not re.match(rf"(?:{FOLDERS})/", match)}
    links = {match for match in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)}
    made = {path.rstrip("/") for path in MADE_BY_READERS}
    return sorted(
        [path for path in paths - made if not exists(path)]
        + [file for file in files - made if not any(f"/{known}".endswith(f"/{file}") for known in TRACKED)]
        + [link for link in links if not known_page((ROOT / name).parent.joinpath(link).resolve())]
    )


def wrong_modules(name: str, text: str) -> list[str]:
    wrong = []
    for module, benchmark in re.findall(r"python -m ([\w.]+)(?: ([\w.]+))?", text):
        path = ROOT / module.replace(".", "/")
        if module.startswith("simulations") and not (
            path.with_suffix(".py").exists() or (path / "__main__.py").exists()
        ):
            wrong.append(module)
        if module == "simulations.benchmarks" and benchmark and benchmark not in BENCHMARKS:
            wrong.append(f"{module} {benchmark}")
    return wrong


def wrong_benchmarks(name: str, text: str) -> list[str]:
    """What a benchmark's own command line says of the options and arguments that a text gives it."""
    wrong = []
    for line in code(text):
        for benchmark, given in re.findall(r"python -m simulations\.benchmarks (\w+\.[\w.]+)([^|;&)>]*)", line):
            if benchmark not in BENCHMARKS:
                continue  # wrong_modules says so
            program = typer.Typer(add_completion=False)
            program.command()(importlib.import_module(f"simulations.benchmarks.{benchmark}").main)
            command = typer.main.get_command(program)
            for parameter in command.params:
                if isinstance(parameter.type, click.Path):
                    parameter.type.exists = False  # the reader's own files
            words = shlex.split(given)
            if words:  # alone it is only named
                try:
                    command.make_context(benchmark, [*words])
                except click.UsageError as error:
                    wrong.append(f"{benchmark} {' '.join(words)}: {error.format_message()}")
    return wrong


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Command and arguments of every `lacquer ...` in code, whatever starts it."""
    for line in code(text):
        for call in re.findall(r"(?:^|[\s/(])lacquer ([^|;&)>]+)", line):
            words = shlex.split(call.replace('"', "").replace("'", ""))
            yield words[0], words[1:]


def wrong_commands(name: str, text: str) -> list[str]:
    wrong = []
    for command, arguments in commands(text):
        if command in OWN_OPTIONS:
            continue
        if command not in SHOWN:
            wrong.append(f"lacquer {command}")
            continue
        shown = [SHOWN[command], *getattr(SHOWN[command], "commands", {}).values()]  # of a group of commands, all
        options = {option for one in shown for each in one.params for option in each.opts} | {"--help"}
        wrong += [f"lacquer {command} {word}" for word in arguments if word.startswith("--") and word not in options]
        known = {"run": preset_files(), "sweep": sweep_files()}.get(command, {})
        first = arguments[0] if arguments else "-"
        if known and re.fullmatch(r"[a-z][\w-]*", first) and first not in known:
            wrong.append(f"lacquer {command} {first}")
    return wrong


def is_key(key: str) -> bool:
    known = known_keys()
    tables = any(name.startswith(f"{key}.") for name in known)
    return key in known or tables or any(name.endswith(".") and key.startswith(name) for name in known)


def wrong_keys(name: str, text: str) -> list[str]:
    tables = "|".join({key.partition(".")[0] for key in known_keys() if "." in key})
    typed = re.findall(r"--set ([\w.-]+)=", text)
    named = re.findall(rf"`((?:{tables})\.[a-z][a-z-]*)(?: = [^`]*)?`", text)
    files = {Path(path).name for path in TRACKED} | {"privacy.json", "data.digest"}
    return sorted(key for key in {*typed, *named} - files if not is_key(key))


def wrong_targets(name: str, text: str) -> list[str]:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    calls = [line.split() for line in code(text) if line.startswith("make ")]
    words = [word for call in calls for word in call[1:] if re.fullmatch(r"[a-z][a-z0-9-]*", word)]
    return sorted({f"make {word}" for word in words} - {f"make {target}" for target in targets})


CHECKS = (wrong_paths, wrong_modules, wrong_benchmarks, wrong_commands, wrong_keys, wrong_targets)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_a_document_names_exists(name: str, check: Callable[[str, str], list[str]]) -> None:
    assert check(name, DOCUMENTS[name]) == []


@pytest.mark.parametrize(
    ("check", "text", "found"),
    [
        (wrong_paths, "see client/waves.py", ["client/waves.py"]),
        (wrong_paths, "[there](docs/nowhere.md) and `passes.py`", ["docs/nowhere.md", "docs/nowhere.md", "passes.py"]),
        (wrong_modules, "`python -m simulations.nothing`", ["simulations.nothing"]),
        (wrong_modules, "`python -m simulations.benchmarks company`", ["simulations.benchmarks company"]),
        (
            wrong_benchmarks,
            "`python -m simulations.benchmarks engine.guard --fast`",
            ["engine.guard --fast: No such option '--fast'."],
        ),
        (wrong_commands, "```\n.venv/bin/lacquer site x.toml  # once\n```", ["lacquer site"]),
        (wrong_commands, "`lacquer plan --cap 3`", ["lacquer plan --cap"]),
        (wrong_commands, "`lacquer run no-such-preset`", ["lacquer run no-such-preset"]),
        (wrong_keys, "--set privacy.epsilom=3 and `site.spam`", ["privacy.epsilom", "site.spam"]),
        (wrong_targets, "`make test-slow`", ["make test-slow"]),
    ],
)
def test_the_checks_find_what_is_wrong(check: Callable[[str, str], list[str]], text: str, found: list[str]) -> None:
    assert check("README.md", text) == found


def test_the_checks_look_at_something() -> None:
    text = "\n".join(DOCUMENTS.values())
    assert len(DOCUMENTS) > 10
    assert len(list(commands(text))) > 50
    assert len(re.findall(rf"(?:{FOLDERS})/[\w/.*-]+", text)) > 150


SOURCES = [name for name in TRACKED if name.endswith(".py") and name.partition("/")[0] in FOLDERS.split("|")[:5]]


def wrong_files(text: str) -> list[str]:
    """Files with a folder that a source's prose names, whole or from within its package, and that are not there."""
    named = set(re.findall(r"(?<![\w/.-])[a-z_]+/[\w/]+\.(?:py|md|toml)\b", text))
    return sorted(file for file in named if not any(f"/{known}".endswith(f"/{file}") for known in TRACKED))


def test_sources_name_files_that_exist() -> None:
    of_others = {"urllib3/util/url.py"}
    wrong = {name: wrong_files((ROOT / name).read_text(encoding="utf-8")) for name in SOURCES}
    assert {name: found for name, found in wrong.items() if set(found) - of_others} == {}
    assert wrong_files('"""As in ``aggregation/individual.py``; see docs/nowhere.md."""') == [
        "aggregation/individual.py",
        "docs/nowhere.md",
    ]


def messages() -> Iterator[str]:
    """The texts of the sources' strings, with a blank for whatever is put into them."""
    for name in SOURCES:
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            match node:
                case ast.JoinedStr(values=values):
                    yield "".join(value.value if isinstance(value, ast.Constant) else " " for value in values)  # type: ignore[misc]
                case ast.Constant(value=str(text)):
                    yield text


def unknown_messages(page: str) -> list[str]:
    """Messages in the first column of a page's tables that no source says; dots stand for names and numbers."""
    known = list(messages())
    quoted = re.findall(r"^\| `(.+?)` \| [^|]+ \|$", page, re.MULTILINE)
    patterns = {
        text: re.compile(".*".join(map(re.escape, re.split(r"\s*\.\.\.\s*", text))), re.DOTALL) for text in quoted
    }
    return [text for text, pattern in patterns.items() if not any(map(pattern.search, known))]


def test_troubleshooting_quotes_messages_that_there_are() -> None:
    page = DOCUMENTS["docs/troubleshooting.md"]
    assert len(re.findall(r"^\| `", page, re.MULTILINE)) > 15
    assert unknown_messages(page) == []
    assert unknown_messages("| `there is no collumn` | a |\n") == ["there is no collumn"]


def test_the_diagrams_are_drawn_as_their_script_draws_them() -> None:
    written = runpy.run_path(str(ROOT / "docs/diagrams.py"))["drawn"]()
    assert {name: (ROOT / "docs" / name).read_text(encoding="utf-8") == text for name, text in written.items()} == (
        dict.fromkeys(written, True)
    )


def test_every_method_has_a_page_with_its_reference_and_guarantee() -> None:
    methods = {name for _, kind in MADE["KINDS"].values() for name in kind}
    pages = MADE["method_pages"]()
    assert {name for text in pages.values() for name in re.findall(r"## Options: `(.+)`", text)} <= methods
    assert [name for name, text in pages.items() if not re.search(r"^## References?$", text, re.MULTILINE)] == []
    assert [name for name, text in pages.items() if "\n## Guarantee\n" not in text] == []
    measured = set(MADE["MEASURED"])
    assert measured <= methods
    assert all((ROOT / "docs" / page).is_file() for _, pages in MADE["MEASURED"].values() for page in pages.split())
    assert "| `rldp`, far | `rl` | 2 | perplexity" in pages["rl"], "the numbers of a method come from the results"


def test_the_site_lists_refusals_from_the_source() -> None:
    found = runpy.run_path(str(ROOT / "docs/generated.py"))["refusals"]()
    assert found == sorted(found, key=str.casefold)
    for said in (
        "--tries and --draw need --private",
        "privacy.unit must be 'client' with privacy.trust = 'secagg'",
        "configuration file ... does not exist",
        "clients = 0 takes as many as data.client-column names; it needs data.partition = 'natural' and records in a "
        "file or on the hub",
    ):
        assert said in found
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "server/config").glob("*.py")]
    assert len(found) > sum(text.count("raise ") for text in sources)


def test_every_page_is_in_the_contents() -> None:
    contents = ("docs/index.md", f"{APPENDIX}README.md")
    listed = {
        (ROOT / page).parent / link for page in contents for link in re.findall(r"\]\(([^)]+)\)", DOCUMENTS[page])
    }
    pages = {name for name in DOCUMENTS if name.startswith("docs/") and name != contents[0]}
    assert pages - {str(path.relative_to(ROOT)) for path in listed if path.resolve() == path} == set()


def test_the_documentation_can_be_read() -> None:
    """At most 20,000 words: what has a letter or a digit. Results, history, forms and a model's card are apart."""
    apart = (APPENDIX, "CHANGELOG.md", ".github/", "client/models/lacquer_small/")
    words = {name: len(re.findall(r"\S*\w\S*", text)) for name, text in DOCUMENTS.items() if not name.startswith(apart)}
    assert sum(words.values()) <= 20_000, sorted(words.items(), key=lambda page: -page[1])[:10]


def test_the_least_noise_costs_what_the_page_says() -> None:
    weakest = epsilon([(Poisson(1.0, 1000), WEAKEST_NOISE_MULTIPLIER, 1)], 1e-5)
    assert "ε > 19 at δ = 10⁻⁵" in DOCUMENTS["docs/guarantee.md"]
    assert "has epsilon 19.13 at delta 1e-5" in (ROOT / "privacy/commitment.py").read_text()
    assert abs(weakest - 19.13) < 0.005


def test_the_transcripts_show_the_commands_of_their_script() -> None:
    shown = re.findall(r"^\$ (.*)$", DOCUMENTS["docs/results/transcripts.md"], re.MULTILINE)
    assert [re.sub(r"\bruns/[\w-]+", "RUN", line) for line in shown] == [
        line for task in TASKS for line in task.commands
    ], "run `python docs/tools/transcripts.py docs/results/transcripts.md`"
    assert max(len(task.commands) for task in TASKS) <= 3


TOUR = DOCUMENTS["docs/guarantee.md"].partition("## What to read")[2].partition("\n## ")[0]


def points_of(heading: str) -> list[str]:
    """Points of the list below a heading in bold, each as one line."""
    points = TOUR.partition(f"**{heading}**")[2].partition("\n\n")[2].partition("\n\n")[0]
    return [" ".join(point.split()) for point in re.split(r"^(?:\d+\.|-) ", points, flags=re.MULTILINE)[1:]]


def test_what_is_for_the_owner_alone_is_named() -> None:
    """One list says it in the report of every run and here."""
    paragraph = DOCUMENTS["docs/start.md"].partition("**Do not share**")[2].partition("\n\n")[0]
    assert {found.rstrip("/") for found in re.findall("`(.+?)`", paragraph)} == set(names.FOR_THE_OWNER)
    assert set(names.FOR_THE_OWNER) <= set(page._FILES)


def test_the_lines_that_spare_reading_are_there() -> None:
    points = points_of("What need not be read")
    assert len(points) > 5
    for point in points:
        file, text = re.findall(r"`([^`]+)`", point)[-2:]
        assert text in (ROOT / file).read_text(encoding="utf-8"), point
