"""What the site takes from the code: settings from the schema, methods from their docstrings, the Python interface."""

import dataclasses
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from server.config.reference import Setting, meanings, settings
from strategies import AGGREGATIONS, CONTROLLERS, OPTIMIZERS

KINDS: dict[str, tuple[str, Mapping[str, str]]] = {
    "controller": ("Controllers: clipping and noise of the next round", CONTROLLERS),
    "optimizer": ("Server optimizers: the step", OPTIMIZERS),
    "aggregation": ("LoRA aggregations: what of the adapter is trained", AGGREGATIONS),
}
NO_CHOICE = "No choice of aggregation differs significantly on SST-2: choose by cost."
MEASURED = {
    "fixed": (
        "Hard to beat where its threshold is tuned for free; far behind where nobody tuned it (significant).",
        "dp-lac.md rldp.md",
    ),
    "dp-lac": (
        "The best in the mean on classifiers that nobody tuned, and no significant difference where a good threshold "
        "is known; on a language model behind methods that paid for their tuning.",
        "dp-lac.md",
    ),
    "dp-clac": ("Below DP-LAC in the mean, not significantly.", "dp-lac.md"),
    "quantile": (
        "Near DP-LAC where its start was tuned, behind on CLINC150; far behind from a start of 8 (both significant).",
        "dp-lac.md",
    ),
    "dynamic": ("From a threshold far off it is ahead of a fixed one (significant).", "rldp.md dp-lac.md"),
    "automatic": (
        "As good as a tuned fixed threshold; ahead of DP-LAC on the language model although it paid for its tuning.",
        "dp-lac.md rldp.md",
    ),
    "psac": ("No difference from a tuned fixed threshold was found.", "rldp.md dp-lac.md"),
    "dc-sgd-p": (
        "Ahead of a fixed threshold far off (significant); behind a tuned one in the mean.",
        "rldp.md dp-lac.md",
    ),
    "dc-sgd-e": (
        "The best found from a threshold far off (significant); no difference where it is tuned.",
        "rldp.md dp-lac.md",
    ),
    "rl": ("No gain over a tuned fixed threshold, and behind it at ε = 4 and 8 (significant).", "rldp.md"),
    "adaclip": ("Behind a fixed threshold, with a deviation per value far behind (significant).", "rldp.md"),
    "percentile": ("Behind a tuned fixed threshold at every ε that was tried.", "dp-adam-ac.md"),
    "rise-reset": ("No better at forgetting than noise that reads no record.", "atdp.md"),
    "fedadam": ("", "dp-adam-ac.md"),
    "fedadamw": ("", "dp-adam-ac.md"),
    "fedavg": ("", "comparisons.md"),
    "fedavgm": ("", "comparisons.md"),
    **dict.fromkeys(("plain", "ffa", "rolora", "fedsvd", "dp-dylora", "zero-pad"), (NO_CHOICE, "comparisons.md")),
}
"""What was found of a method, without numbers, and the pages with them; a method that has no row has no result."""
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
    parts += ["## Measured", _measured(places), f"Source: `{module.replace('.', '/')}.py`"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _measured(names: Iterable[str]) -> str:
    lines = []
    for name in names:
        verdict, pages = MEASURED.get(name, ("", ""))
        links = ", ".join(f"[](../{page})" for page in pages.split())
        found = " ".join(part for part in (verdict, links) if part)
        lines.append(f"- `{name}`: {found}" if found else f"- `{name}` has no page of measured results.")
    return "\n".join(lines)


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


def write_method_pages(folder: Path) -> None:
    """Write those pages that are not there as they should be, and remove all others."""
    folder.mkdir(exist_ok=True)
    pages = {folder / f"{name}.md": text for name, text in method_pages().items()}
    for path in set(folder.glob("*.md")) - set(pages):
        path.unlink()
    for path, text in pages.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
