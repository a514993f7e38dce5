"""The packages in numbers, docs/results/structure.md: lines, modules, imports against the layers, circles of files.

Run: `python -m simulations.benchmarks harness.structure [--write | --check]`.

Imports are read from the sources and kept apart: those that run when a module is imported, and those in functions (or
for type checkers only). The layers are those of ``[tool.importlinter]`` in pyproject.toml, which `make check` enforces.
Lines are written with two digits, so that the table changes when a folder does and not with every commit.
"""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from simulations.benchmarks.harness.markdown import markdown
from simulations.benchmarks.harness.results import ROOT, say

PACKAGES = ("privacy", "strategies", "client", "server", "simulations")
BENCHMARKS = "simulations.benchmarks"
DOCUMENT = "docs/results/structure.md"
_BLOCK = re.compile(r"(?<=<!-- structure -->\n).*?(?=<!-- end structure -->)", re.DOTALL)


@dataclass(frozen=True)
class Module:
    """One source file.

    Attributes:
        name: dotted; a package's name for its ``__init__.py``.
        path, lines: of the file.
        imports: modules of ours that are imported together with it.
        later: modules of ours that only its functions, or type checkers, import.
        taken: name -> module of ours, of every name that is imported from a module.
        public: the names of ``__all__``, and those imported under their own name on purpose (``import x as x``).
    """

    name: str
    path: Path
    lines: int
    imports: frozenset[str]
    later: frozenset[str]
    taken: Mapping[str, str]
    public: frozenset[str]

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


def read_modules(root: Path = ROOT, packages: Iterable[str] = PACKAGES) -> dict[str, Module]:
    """Every module of the packages, by its name."""
    paths = {
        path: _name(path.relative_to(root)) for package in packages for path in sorted((root / package).rglob("*.py"))
    }
    names = frozenset(paths.values())
    return {name: _module(name, path, names) for path, name in paths.items()}


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _module(name: str, path: Path, names: frozenset[str]) -> Module:
    text = path.read_text(encoding="utf-8")
    found: dict[bool, set[str]] = {False: set(), True: set()}
    taken: dict[str, str] = {}
    public: set[str] = set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node, late in _statements(ast.parse(text), late=False):
        match node:
            case ast.Import(names=aliases):
                found[late] |= {_known(alias.name, names) for alias in aliases}
            case ast.ImportFrom(module=module, names=aliases, level=level):
                above = package.split(".")[: 1 - level or None] if level else []
                source = ".".join([*above, *([module] if module else [])])
                for alias in aliases:
                    found[late].add(_known(f"{source}.{alias.name}", names))
                    taken[alias.asname or alias.name] = _known(source, names)
                    if alias.name == alias.asname:
                        public.add(alias.name)
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=values) | ast.Tuple(elts=values)):
                public |= {str(value.value) for value in values if isinstance(value, ast.Constant)}
    at_import, later = found[False] - {"", name}, found[True] - {"", name}
    taken = {alias: source for alias, source in taken.items() if source}
    lines = len(text.splitlines())
    return Module(name, path, lines, frozenset(at_import), frozenset(later - at_import), taken, frozenset(public))


def _statements(node: ast.AST, late: bool) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes, and whether they run later than the import of the module."""
    for child in ast.iter_child_nodes(node):
        typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        inner = late or typing or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield child, late
        yield from _statements(child, inner)


def _known(name: str, names: frozenset[str]) -> str:
    """The module that an import of `name` reads: itself or what it is a name in; empty for what is not ours."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name


def circles(imports: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Sets of more than one module each of which reaches all others (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for other in imports.get(name, ()):
            if other not in index:
                visit(other)
            if other in stack:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for name in imports:
        if name not in index:
            visit(name)
    return sorted(found)


def layer_contracts(root: Path = ROOT) -> list[list[list[str]]]:
    """Of every contract its layers, highest first; modules in one layer may not import one another."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return [[layer.split(" | ") for layer in each["layers"]] for each in contracts if each["type"] == "layers"]


def against_layers(imports: Mapping[str, Iterable[str]], layers: list[list[str]]) -> list[tuple[str, str]]:
    """Imports from a lower layer into a higher one, or from a module of a layer into another of the same."""
    rank = {module: number for number, layer in enumerate(layers) for module in layer}

    def place(name: str) -> str:
        while name and name not in rank:
            name = name.rpartition(".")[0]
        return name

    return [
        (name, other)
        for name, others in imports.items()
        for other in sorted(others)
        if (low := place(name)) and (high := place(other)) and low != high and rank[high] <= rank[low]
    ]


def folders(modules: Mapping[str, Module]) -> dict[str, int]:
    """Modules and sub-packages directly in each folder."""
    count = {name: 0 for name, module in modules.items() if module.is_package}
    for name in modules:
        if (parent := name.rpartition(".")[0]) in count:
            count[parent] += 1
    return count


def siblings_named(modules: Mapping[str, Module]) -> list[tuple[str, str]]:
    """Modules, packages apart, that offer a name as their own which another module of ours defines."""
    return sorted(
        (module.name, name)
        for module in modules.values()
        for name in module.public & module.taken.keys()
        if not module.is_package
    )


def mirrored(modules: Mapping[str, Module], root: Path = ROOT) -> dict[str, bool]:
    """Whether the modules of the product, packages apart, have a test at the path that mirrors theirs."""
    return {
        name: (root / "tests" / Path(*name.split("."))).with_name(f"test_{name.rpartition('.')[2]}.py").is_file()
        for name, module in modules.items()
        if not module.is_package and not name.startswith(f"{BENCHMARKS}.") and not name.endswith("__main__")
    }


def report(modules: Mapping[str, Module], contracts: list[list[list[str]]]) -> str:
    """A line per package and sub-package, and what there is of circles and of imports against the layers."""
    counts, lines = folders(modules), []
    for name in sorted(name for name in counts if name.count(".") < 2 or name.startswith(BENCHMARKS)):
        inside = [module for module in modules.values() if _below(module.name, name)]
        largest = max(inside, key=lambda module: module.lines)
        size = sum(module.lines for module in inside)
        file = f"{largest.path.relative_to(ROOT / name.replace('.', '/'))}"
        lines.append((f"`{name.replace('.', '/')}/`", _rounded(size), str(counts[name]), f"`{file}` {largest.lines}"))
    early = {name: module.imports for name, module in modules.items()}
    late = {name: module.later for name, module in modules.items()}
    both = {name: early[name] | late[name] for name in modules}
    up_early, up_late = (sum(len(against_layers(each, layers)) for layers in contracts) for each in (early, late))
    fullest = max(counts, key=lambda name: counts[name])
    longest = max(modules.values(), key=lambda module: module.lines)
    tested = mirrored(modules)
    return (
        f"{markdown(('folder', 'lines, about', 'modules and sub-packages', 'largest file'), lines, 'lrrl')}\n"
        f"Imports against the layers: {up_early} on import, {up_late} in functions. Circles of files: "
        f"{len(circles(early))} on import, {len(circles(both))} with the imports in functions. Largest folder: "
        f"`{fullest.replace('.', '/')}/` ({counts[fullest]}); largest file: `{longest.path.relative_to(ROOT)}` "
        f"({longest.lines} lines). Modules with a test at the mirrored path: {sum(tested.values())} of {len(tested)}.\n"
    )


def _below(module: str, folder: str) -> bool:
    """Whether a module lies in a folder, at any depth; the benchmarks stand for themselves."""
    apart = folder == "simulations" and f"{module}.".startswith(f"{BENCHMARKS}.")
    return f"{module}.".startswith(f"{folder}.") and not apart


def _rounded(lines: int) -> str:
    return f"{int(float(f'{lines:.2g}')):,}"


def main(
    write: Annotated[bool, typer.Option("--write", help=f"put the table into {DOCUMENT}")] = False,
    check: Annotated[bool, typer.Option("--check", help=f"fail if {DOCUMENT} has another table")] = False,
) -> None:
    """Print the table, or keep the one in the documentation."""
    text = report(read_modules(), layer_contracts())
    document = ROOT / DOCUMENT
    before = document.read_text(encoding="utf-8")
    after, count = _BLOCK.subn(lambda _: text, before)
    if (write or check) and not count:
        raise typer.BadParameter(f"{DOCUMENT} has no block <!-- structure --> ... <!-- end structure -->")
    if write:
        document.write_text(after, encoding="utf-8")
    elif check and after != before:
        say(f"{DOCUMENT}: stale; run `python -m simulations.benchmarks harness.structure --write`")
        raise typer.Exit(1)
    elif not check:
        say(text)


if __name__ == "__main__":
    typer.run(main)
