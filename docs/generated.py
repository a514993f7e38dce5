"""What the site takes from the code: settings from the schema, methods from their docstrings, the Python interface."""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from server.config.reference import Setting, meanings, settings
from server.config.rules import RULES
from strategies import AGGREGATIONS, CONTROLLERS, OPTIMIZERS

KINDS: dict[str, tuple[str, Mapping[str, str]]] = {
    "controller": ("Controllers: clipping and noise of the next round", CONTROLLERS),
    "optimizer": ("Server optimizers: the step", OPTIMIZERS),
    "aggregation": ("LoRA aggregations: what of the adapter is trained", AGGREGATIONS),
}
NO_CHOICE = "No choice of aggregation differs significantly on SST-2: choose by cost."
NO_CHOICE_OF_SITES = "No difference from `ffa` was found over four sites."
MEASURED = {
    "fixed": (
        "Hard to beat where its threshold is tuned for free; far behind where nobody tuned it (significant).",
        "dp-lac.md rldp.md",
    ),
    "dp-lac": (
        "The best in the mean on classifiers that nobody tuned, and no significant difference where a good threshold "
        "is known; on a language model behind methods that paid for their tuning under FedAvg, ahead of them under "
        "server Adam, and there behind `automatic` at equal ε.",
        "dp-lac.md",
    ),
    "dp-clac": ("Below DP-LAC in the mean, not significantly.", "dp-lac.md"),
    "quantile": (
        "Near DP-LAC where its start was tuned, behind on CLINC150; far behind from a start of 8 (both significant).",
        "dp-lac.md",
    ),
    "dynamic": (
        "From a threshold far off it is ahead of a fixed one (significant, but from a large one at ε = 0.5).",
        "rldp.md dp-lac.md",
    ),
    "automatic": (
        "As good as a tuned fixed threshold; ahead of DP-LAC on the language model: under FedAvg although it paid for "
        "its tuning, under server Adam at equal ε, with nothing to tune.",
        "dp-lac.md rldp.md",
    ),
    "psac": ("No difference from a tuned fixed threshold was found.", "rldp.md dp-lac.md"),
    "dc-sgd-p": (
        "Ahead of a fixed threshold far off (significant); behind a tuned one in the mean.",
        "rldp.md dp-lac.md",
    ),
    "dc-sgd-e": (
        "Ahead of a fixed threshold that is far too large (significant at ε = 2), far behind one that is too small, to "
        "which it moves away; no difference where it is tuned.",
        "rldp.md dp-lac.md",
    ),
    "rl": ("No gain over a tuned fixed threshold, and behind it at ε = 4 and 8 (significant).", "rldp.md"),
    "adaclip": ("Behind a fixed threshold, with a deviation per value far behind (significant).", "rldp.md"),
    "geoclip": ("Far behind a fixed threshold on the language model (significant).", "comparisons.md"),
    "percentile": ("Behind a tuned fixed threshold at every ε tried, significantly above 0.5.", "dp-adam-ac.md"),
    "rise-reset": ("No better at forgetting than noise that reads no record.", "atdp.md"),
    "fedadam": ("No verdict of its own.", "dp-adam-ac.md"),
    "fedadamw": ("No verdict of its own.", "dp-adam-ac.md"),
    "fedavg": ("No verdict of its own.", "comparisons.md"),
    "fedavgm": ("No verdict of its own.", "comparisons.md"),
    "local-heads": ("Not better than one head for all, in one run on skewed labels.", "results/further.md"),
    **dict.fromkeys(("fedex", "flora", "fedgsa"), (NO_CHOICE_OF_SITES, "comparisons.md")),
    **dict.fromkeys(("plain", "ffa", "rolora", "fedsvd", "dp-dylora", "zero-pad"), (NO_CHOICE, "comparisons.md")),
}
"""What was found of a method, and the pages that say so; the numbers are those of :data:`COMPARED`."""
RESULTS = Path(__file__).resolve().parents[1] / "simulations/benchmarks/results"
COMPARED = {
    "controller": ("controllers", "dp-lac-diabetes", "rldp", "records-diabetes", "records-diabetes-why"),
    "aggregation": ("lora", "methods"),
}
"""Result files whose rows say how a method of a kind did. `fixed` and `plain` are in all of them, to compare with."""
PARTS = re.compile(r"(?:^|(?<=\. ))(References?|Guarantee|Deviations)\b([^:\n]*):[ \n]", re.MULTILINE)
ROLE = re.compile(r":\w+:`~?([^`]*)`")


def settings_tables() -> str:
    """Every setting, a section for each table of a configuration file."""
    tables: dict[str, list[Setting]] = {}
    for one in settings():
        tables.setdefault(one.key.rpartition(".")[0], []).append(one)
    return "\n".join(_settings_table(name, found) for name, found in tables.items())


def _settings_table(name: str, found: Iterable[Setting]) -> str:
    heading = f"## `[{name}]`" if name else "## The run"
    rows = [(f"`{one.key}`{{.key}}", _default(one.default), _cell(_values(one)), _cell(one.meaning)) for one in found]
    return f"{heading}\n\n{_table(('setting', 'default', 'values', 'meaning'), rows)}\n"


def _values(one: Setting) -> str:
    return one.limits if "|" in one.limits else f"{one.type} {one.limits}"


def method_pages() -> dict[str, str]:
    """The page of every module of methods, by file name without its ending: what its docstring says, as Markdown."""
    pages = {}
    for kind, (_, methods) in KINDS.items():
        for module, names in _by_module(methods).items():
            pages[names[0]] = _method_page(kind, module, {name: methods[name] for name in names})
    return pages


def methods_index() -> str:
    """A table of all methods with the first sentence of each page, and the tree of the pages."""
    parts = []
    for heading, methods in KINDS.values():
        rows = []
        for module, names in _by_module(methods).items():
            lead = (inspect.getdoc(importlib.import_module(module)) or "").partition("\n\n")[0]
            links = ", ".join(f"[`{name}`](methods/{names[0]}.md)" for name in names)
            rows.append((links, _cell(lead)))
        parts.append(f"## {heading}\n\n{_table(('name', 'what it does'), rows)}\n")
    tree = "\n".join(f"methods/{name}" for name in method_pages())
    return "\n".join(parts) + f"\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n"


def _by_module(methods: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, place in methods.items():
        found.setdefault(place.partition(":")[0], []).append(name)
    return found


def _method_page(kind: str, module: str, places: Mapping[str, str]) -> str:
    text = inspect.getdoc(importlib.import_module(module)) or ""
    start, *rest = PARTS.split(text)
    first, *others = places
    choose = f'{kind} = "{first}"' + "".join(f'  # or "{name}"' for name in others)
    parts = [f"# {', '.join(f'`{name}`' for name in places)}", _markdown(start)]
    parts.append(f"```toml\n[strategy]\n{choose}\n```")
    for heading, condition, body in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        said = f"{condition.strip(' ,')}: {body}" if condition.strip(" ,") else body
        parts += [f"## {heading}", _markdown(said[0].upper() + said[1:])]
    parts += [_options(name, kind, place) for name, place in places.items()]
    parts += ["## Measured", _measured(kind, places), f"Source: `{module.replace('.', '/')}.py`"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _measured(kind: str, names: Iterable[str]) -> str:
    lines, rows = [], []
    for name in names:
        verdict, pages = MEASURED.get(name, ("", ""))
        links = ", ".join(f"[](../{page})" for page in pages.split())
        own = [] if name in ("fixed", "plain") else list(_numbers(kind, name))
        found = " ".join(part for part in (verdict, links) if part) or ("No verdict yet." if own else "Not measured.")
        lines.append(f"- `{name}`: {found}")
        rows += own
    head = ("results", "variant", "ε", "test, mean over seeds", "seeds")
    return "\n".join(lines) + (f"\n\n{_table(head, rows)}" if rows else "")


def _numbers(kind: str, name: str) -> Iterator[tuple[str, ...]]:
    """What the committed results hold of a method: a row for each variant, at each epsilon and value of other axes."""
    for file in COMPARED.get(kind, ()):
        groups: dict[tuple[str, ...], list[Mapping[str, object]]] = {}
        for cell in json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["cells"]:
            if cell[kind] == name:
                axes = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in cell["axes"].items()
                                 if key != "privacy.epsilon")  # fmt: skip
                variant = ", ".join(part for part in (f"`{cell['variant']}`", axes) if part)
                groups.setdefault((f"`{file}`, {cell['grid']}", variant, f"{cell['epsilon']:g}"), []).append(cell)
        for group, cells in groups.items():
            perplexities = [cell["test_perplexity"] for cell in cells if cell.get("test_perplexity") is not None]
            accuracies = [cell["test_accuracy"] for cell in cells if cell["test_accuracy"] is not None]
            if perplexities:
                yield *group, f"perplexity {_mean(perplexities):.3g}", str(len(perplexities))
            elif accuracies:
                yield *group, f"accuracy {100 * _mean(accuracies):.1f} %", str(len(accuracies))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _options(name: str, kind: str, place: str) -> str:
    module, _, cls = place.partition(":")
    method = getattr(importlib.import_module(module), cls)
    known = meanings(method)
    rows = [
        (f"`{field.name.replace('_', '-')}`{{.key}}", _default(field.default), _cell(known.get(field.name, "")))
        for field in dataclasses.fields(method)
    ]
    table = _table(("option", "default", "meaning"), rows)
    return f"## Options: `{name}`\n\n`strategy.{kind}-options`:\n\n{table}" if rows else ""


def _markdown(text: str) -> str:
    """Prose of a docstring: indented formulas become blocks, the other characters stand for themselves."""
    parts = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if block.startswith("    "):
            parts.append(f"```text\n{textwrap.dedent(block)}\n```")
        else:
            parts.append(_plain(block))
    return "\n\n".join(parts)


def _plain(text: str) -> str:
    text = ROLE.sub(r"``\1``", text)
    pieces = re.split(r"(``.+?``)", text, flags=re.DOTALL)
    escaped = [piece if piece.startswith("``") else re.sub(r"([*<\[\]|$])", r"\\\1", piece) for piece in pieces]
    return "\n".join(_apart("".join(escaped).replace("``", "`").splitlines()))


def _apart(lines: Iterable[str]) -> Iterator[str]:
    """A list of a docstring stands apart from the prose around it."""
    before = ""
    for line in lines:
        item, of_list = line.startswith("- "), before.startswith(("- ", "  "))
        if before and line and ((item and not of_list) or (of_list and not item and not line.startswith("  "))):
            yield ""
        yield line
        before = line


def _cell(text: str) -> str:
    return _plain(" ".join(text.split()))


def _default(value: object) -> str:
    return "" if value is None else f"`{json.dumps(value, ensure_ascii=False)}`".replace("|", "\\|")


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


API = {
    "Runs": ("simulations.api", "run load_run compare RunResult Compared"),
    "What callbacks see": ("server.run_folder.round_record", "RoundRecord"),
    "Controllers": ("strategies.controllers.controller", "Controller RunInfo PublicSignals InitialRelease"),
    "Plans": ("privacy.contribution", "Plan"),
    "Clip maps": ("privacy.clipping", "FlatClip PerAdapterClip"),
    "Queries": ("privacy.queries", "NormBit"),
    "Releases": ("privacy.mechanism", "Release"),
    "Server optimizers": ("strategies.optimizers.optimizer", "Optimizer ServerStep"),
    "LoRA aggregations": ("strategies.aggregations.aggregation", "Aggregation Adapters Rewritten"),
    "Checks for methods": (
        "strategies.conformance",
        "check_controller check_optimizer check_aggregation ConformanceError",
    ),
}
"""What a program or a method of one's own may use: a heading, a module, its names."""


def api_directives() -> str:
    """Directives for autodoc, a section for each part of the interface."""
    parts = []
    for heading, (module, names) in API.items():
        parts.append(f"## {heading}\n\n`{module}`\n")
        for name in names.split():
            kind = "autoclass" if inspect.isclass(getattr(importlib.import_module(module), name)) else "autofunction"
            members = "\n   :members:" if kind == "autoclass" else ""
            parts.append(f"```{{eval-rst}}\n.. {kind}:: {module}.{name}{members}\n```\n")
    return "\n".join(parts)


REFUSING = ("server/config", "server/run_folder", "simulations", "client/data", "client/models", "client/record_level")
"""Folders whose refusals a user meets."""


def refusals() -> list[str]:
    """Messages of refusals as the source has them, in alphabetical order; values that are filled in are "..."."""
    root = RESULTS.parents[2]
    files = [file for folder in REFUSING for file in sorted((root / folder).rglob("*.py"))]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files if "benchmarks" not in file.parts]
    calls = [call for tree in trees for node in ast.walk(tree) if isinstance(call := _refusing(node), ast.Call)]
    found = {_message(call.args[0]) for call in calls if call.args}
    found |= {re.sub(r"{[^}]*}", "...", rule.says) for rule in RULES}
    return sorted((text for text in found if len(text.replace("...", "").split()) > 2), key=str.casefold)


def _refusing(node: ast.AST) -> ast.AST | None:
    """What is raised; or what is noted as wrong, to be raised with the rest."""
    if isinstance(node, ast.Raise):
        return node.exc
    noted = isinstance(node, ast.Call) and ast.unparse(node.func) in ("wrong.append", "problems.append")
    return node if noted else None


def _message(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return " ".join(str(node.value).split())
    if isinstance(node, ast.JoinedStr):
        parts = (str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
        return " ".join("".join(parts).split())
    return ""


def refusals_list() -> str:
    """A section for the page of refusals: also those that explain themselves."""
    lines = "\n".join(f"- `{text.replace('`', chr(39))}`" for text in refusals())
    return f"## Refusals from A to Z\n\nIn alphabetical order, from the source; `...` stands for a value.\n\n{lines}\n"


def write_method_pages(folder: Path) -> None:
    """Write those pages that are not there as they should be, and remove all others."""
    folder.mkdir(exist_ok=True)
    pages = {folder / f"{name}.md": text for name, text in method_pages().items()}
    for path in set(folder.glob("*.md")) - set(pages):
        path.unlink()
    for path, text in pages.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
