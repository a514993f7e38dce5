"""The rules that join settings: each can say its refusal, whatever a configuration has."""

import re

import pytest

from server.config.rules import RULES, Rule
from server.config.schema import RunConfig


@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
def test_every_rule_says_its_refusal_with_the_values_of_the_run(rule: Rule) -> None:
    said = rule.refusal(RunConfig())
    assert re.match(r"[a-z.\[\]\w -]+", said), "a refusal begins with the setting"
    assert "{" not in said
