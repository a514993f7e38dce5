"""The list of settings is that of the configuration: every key, with its default, its limits and a meaning."""

from server.config.load import flatten, known_keys
from server.config.reference import json_schema, settings
from server.config.schema import RunConfig

FOUND = {setting.key: setting for setting in settings()}


def test_every_key_is_listed_with_its_default_and_a_meaning() -> None:
    assert list(FOUND) == [key.rstrip(".") for key in known_keys()]
    defaults = flatten(RunConfig().to_table())
    assert {key: one.default for key, one in FOUND.items() if one.default is not None} == defaults
    short = {key: one.meaning for key, one in FOUND.items() if len(one.meaning) < 12 or one.meaning.endswith(":")}
    assert short == {}


def test_limits_and_choices_are_those_that_are_checked() -> None:
    assert FOUND["sampling-rate"].limits == "> 0, <= 1"
    assert FOUND["privacy.unit"].limits == "client | record | group"
    assert FOUND["privacy.secagg.modulus-bits"].limits == "16 | 24 | 32"
    assert (FOUND["rounds"].type, FOUND["privacy.epsilon"].type) == ("integer", "number")
    assert FOUND["strategy.controller-options"].type == "options"


def test_the_line_of_a_setting_is_its_first_sentence() -> None:
    assert FOUND["clients"].line == "Number of clients"
    assert FOUND["clients"].meaning.startswith("Number of clients; 0 takes as many as")


def test_the_schema_names_and_explains_every_key() -> None:
    schema = json_schema()
    rate = schema["properties"]["sampling-rate"]
    assert (rate["exclusiveMinimum"], rate["maximum"]) == (0, 1)
    assert rate["description"] == "Probability with which each client takes part in a round."
    epsilon = schema["$defs"]["Privacy"]["properties"]["epsilon"]
    assert epsilon["description"].startswith("Epsilon of the whole run")
    assert schema["additionalProperties"] is False
