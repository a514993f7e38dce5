"""Public docstrings that begin in mid-sentence, and public functions that are named by one participle or adjective.

Run: `python -m simulations.benchmarks harness.docstrings [PACKAGE ...]`; without a package, those of :data:`FINISHED`.

The first sentence of a docstring must stand alone: a sentence led by a verb, or a noun phrase. Grammar is not parsed;
the rule names the openings that only make sense after another sentence. Functions take a verb with an object or the
noun they return. Properties may be adjectives; names and docstrings that begin with an underscore are not read.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from simulations.benchmarks.harness.results import ROOT, say

FINISHED: tuple[str, ...] = ("client", "docker", "privacy", "server", "strategies")
"""Packages that this check found nothing in; `make check` keeps them so."""
LEAST_WORDS = 4

OPENERS = frozenset(
    "above after against also although an-other and as at because before behind below beside between beyond both but by"
    " during else for from hence her his how if in inside instead into its like nor not of on once only or otherwise"
    " over per since so than that their them then there therefore these they this those though thus to together twice"
    " under unless until upon via what when where which while who whom whose why with within without yet".split()
)
"""Words that lead on from something said before; "whether" is none: it says what a bool means."""
PHRASES = (
    "the same",
    "the inverse",
    "the rest",
    "the other",
    "the others",
    "the second",
    "the first of",
    "it is",
    "it was",
)
"""Noun phrases that refer back."""

ADJECTIVES = frozenset(
    "alike alone apart but begun bound broken built chosen clean clear done drawn driven empty even fit flat found free"
    " fresh frozen given gone grown held hidden kept known left lost made met moot new odd old outer own paid proven"
    " ready ripe same seen sent set-up shown spent split-up spoken stale stuck sure taken thrown told torn true unfit"
    " weak whole won worn written wrong".split()
)
"""Participles and adjectives that their ending does not tell."""
ENDINGS = re.compile(r"[a-z]{2,}(?:ed|ing|able|ible|ful|ous|less)$")
NOUNS = frozenset(
    "accounting bed debugging embed encoding exceed feed finding heading need padding proceed sampling seed setting"
    " sibling speed spelling string succeed table training warning enable disable variable binding listing".split()
)
"""Words with such an ending that are nouns or verbs."""


class Finding(NamedTuple):
    """One line of the list: where, the name it is about, and what is wrong."""

    path: Path
    line: int
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name}: {self.text}"


def first_sentence(docstring: str) -> str:
    """The docstring in one line, up to its first full stop or semicolon that a blank follows."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[.;])\s", paragraph)[0].rstrip(".;")


def fault_of_docstring(docstring: str) -> str:
    """Why the first sentence does not stand alone, in a few words; empty if nothing speaks against it."""
    sentence = first_sentence(docstring)
    words = sentence.split()
    if len(words) < LEAST_WORDS:
        return f"fewer than {LEAST_WORDS} words"
    first = words[0].rstrip(",:")
    plain = re.fullmatch(r"(?:A|[A-Z][\w'’/-]+|[`0-9].*)", first)
    if not plain:
        return "begins with a symbol or a small letter"
    if re.fullmatch(r"[A-Z]\w*(?:Error|Exception)", first):
        return "begins with an exception, not with what is done"
    if first.lower() in OPENERS or re.fullmatch(r"(?!apply|multiply|reply)[a-z]+ly", first.lower()):
        return f'begins in mid-sentence ("{first}")'
    if phrase := next((each for each in PHRASES if re.match(rf"{each}\b", sentence.lower())), ""):
        return f'refers back ("{phrase}")'
    if first.lower().endswith("ed") and words[1] in OPENERS | {"a", "an", "the"} and first.lower() not in NOUNS:
        return f'begins with a participle ("{first}")'
    return ""


def is_bare(name: str) -> bool:
    """Whether a function's name is one participle or adjective and nothing else."""
    return name in ADJECTIVES or (name not in NOUNS and ENDINGS.fullmatch(name) is not None)


def findings_of(path: Path, tree: ast.Module) -> list[Finding]:
    """All findings in one module, in the order of its lines; `path` is only shown."""
    found = [Finding(path, 1, "module", fault)] if (fault := _fault(tree)) else []
    for node, name in _public(tree, ""):
        if fault := _fault(node):
            found.append(Finding(path, node.lineno, name, fault))
        if not isinstance(node, ast.ClassDef) and not _is_property(node) and is_bare(node.name):
            found.append(Finding(path, node.lineno, name, "a function named by a bare participle or adjective"))
    return found


def _public(node: ast.AST, prefix: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not child.name.startswith("_"):
                yield child, prefix + child.name
                if isinstance(child, ast.ClassDef):
                    yield from _public(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try):
            yield from _public(child, prefix)


def _fault(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    docstring = ast.get_docstring(node)
    if not docstring or not (fault := fault_of_docstring(docstring)):
        return ""
    return f"{fault}: {first_sentence(docstring)}"


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(each) or ".setter" in ast.unparse(each) for each in node.decorator_list)


def main(packages: Annotated[list[str] | None, typer.Argument(help="folders of the repository")] = None) -> None:
    """List what is wrong, one finding a line; exit code 1 if there is any."""
    paths = [path for name in packages or FINISHED for path in sorted((ROOT / name).rglob("*.py"))]
    found = [each for path in paths for each in findings_of(path.relative_to(ROOT), ast.parse(path.read_text("utf-8")))]
    for each in found:
        say(str(each))
    if found:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
