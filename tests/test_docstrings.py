"""The check of docstrings and names finds what it is for, and leaves sentences alone."""

import ast
from pathlib import Path

import pytest

from simulations.benchmarks.harness.docstrings import fault_of_docstring, findings_of, is_bare


@pytest.mark.parametrize(
    "docstring",
    [
        "Of R: out, in.",
        "K.",
        "The phases without.",
        "The same; where the nodes hold the records, of the public source, which has no clients and no units.",
        "Of releases that are drowned where their sum over the rounds is not, since the model beats its start.",
        "ValueError if the vector is not of this layout.",
        "Checked against what was asked; BadMessage in other words.",
        "P against Q of the module's formula.",
        "Slightly too much noise, by Rényi divergences.",
    ],
)
def test_a_sentence_that_leans_on_another_is_found(docstring: str) -> None:
    assert fault_of_docstring(docstring)


@pytest.mark.parametrize(
    "docstring",
    [
        "Refuse a vector that is not of this layout.",
        "A PCG64 generator for one named substream.\n\nArgs:\n    seed: of the run.",
        "``count`` independent samples, uniform in [0, 1).",
        "Whether the model is quantised, and how.",
        "FedAvg: the released mean update as a pseudo-gradient.",
    ],
)
def test_a_sentence_that_stands_alone_passes(docstring: str) -> None:
    assert not fault_of_docstring(docstring)


def test_a_bare_participle_is_found_and_a_verb_or_noun_is_not() -> None:
    names = "asked apart based but drowned told turned possible seed embed sampling read_seed mean_error".split()
    assert [name for name in names if is_bare(name)] == names[:8]


def test_only_what_is_public_and_no_property_is_listed() -> None:
    source = '''
"""What else."""
class Cohort:
    """Ids of the clients that were drawn."""
    @property
    def paid(self): "Whether the ledger paid for it."
    def drawn(self): "Draw the ids once more."
    def _asked(self): "K."
'''
    found = findings_of(Path("module.py"), ast.parse(source))
    assert [(each.line, each.name) for each in found] == [(1, "module"), (7, "Cohort.drawn")]
