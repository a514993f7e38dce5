"""A site in a federation: its own ledger over the rounds, its own refusals, and what it sends is checked."""

import json
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from client.data.local import ReadSettings
from client.engine.local_training import LocalTraining
from client.models.lora import LoraSpec
from client.node import refuse_unless_for
from client.record_level.messages import SiteReply, SiteRequest
from client.record_level.participant import OperatorLimits, refused_unread, state_folder, take_part
from client.record_level.settings import RecordLevelSettings
from client.record_level.state import HEAD, LEDGER, READING, SECRET, STATE, commit_reading
from client.worker import Job
from privacy import durable
from privacy.errors import CorruptRun
from privacy.ledger.ledger import Ledger
from strategies.messages.records import BadMessage
from tests.cases.record_level import PRIVATE, engine, records, vector

JOB = Job(
    model="random:bert",
    task="classification",
    num_labels=2,
    spec=LoraSpec(2, 2.0, ("query",)),
    local=LocalTraining(),
    data="",
    seed=0,
)
SITE = RecordLevelSettings(**PRIVATE | {"controller": "percentile", "controller_options": {"query-noise": 8.0}})


def request(steps: int, round: int = 1, site: RecordLevelSettings = SITE) -> SiteRequest:
    made = SiteRequest(round, vector().float().numpy(), steps, 0, site, "{}", "")
    return SiteRequest.from_records(made.to_records())


@pytest.fixture(scope="module")
def made():
    return engine()


def test_the_ledger_lives_across_rounds_and_ends_participation(tmp_path, made):
    data = records()
    replies = [take_part(request(3, round), data, made, tmp_path / "site") for round in (1, 2, 3)]
    assert [reply.steps for reply in replies] == [3, 1, 0]  # four steps were committed
    assert replies[0].refused == ""
    assert "budget is spent" in replies[1].refused
    assert "budget is spent" in replies[2].refused
    assert len(replies[2].update) == 0
    assert np.linalg.norm(replies[0].update) > 0
    ledger = Ledger.open(tmp_path / "site" / LEDGER, read_only=True)
    assert [event.round for event in ledger.events] == [1, 2, 3, 4]
    assert replies[0].epsilon == ledger.epsilon_guaranteed() <= 4.0
    assert replies[0].population == 12


def test_the_controller_goes_on_where_the_last_round_left_it(tmp_path, made):
    data, thresholds = records(), []
    for round in (1, 2):
        take_part(request(2, round), data, made, tmp_path / "site")
        thresholds.append((tmp_path / "site" / "silo.json").read_text())
    assert '"clip_rate": -1.0' not in thresholds[0]
    assert thresholds[0] != thresholds[1]


def test_a_site_draws_whole_units_only(tmp_path, made):
    asked = SITE.replace(unit="group:patient", sampling_level="example", records_per_unit=2)
    reply = take_part(request(2, site=asked), records(units=[0] * 6 + [1] * 6), made, tmp_path / "site")
    assert "draws whole units" in reply.refused
    assert not (tmp_path / "site").exists()


def test_the_units_of_a_site_are_its_patients_and_not_their_records(tmp_path):
    asked, three = SITE.replace(unit="group:patient"), records(units=[0, 1, 2] * 4)
    reply = take_part(request(1, site=asked.replace(batch_size=4)), three, None, tmp_path / "site")
    assert reply.refused == "this site has fewer than 4 units"
    assert reply.population == 0


RISING = SITE.replace(controller="rise-reset", controller_options={"clip-norm": 0.1})


def test_steps_of_rising_noise_that_a_killed_round_took_stay_spent(tmp_path, made):
    """Their charges are in the ledger, and the state of the site is that from before the round."""
    take_part(request(1, site=RISING), records(), made, tmp_path / "site")
    before = (tmp_path / "site" / STATE).read_bytes()
    take_part(request(2, site=RISING), records(), made, tmp_path / "site")
    (tmp_path / "site" / STATE).write_bytes(before)
    assert take_part(request(4, site=RISING), records(), made, tmp_path / "site").steps == 1


def charged(folder) -> int:
    return len(Ledger.open(folder / LEDGER, read_only=True).charges)


def test_a_site_that_lost_its_ledger_starts_no_new_budget(tmp_path, made):
    """Neither from what is left of the folder, nor from a state that was robbed of the ledger's head."""
    take_part(request(2), records(), made, tmp_path / "site")
    (tmp_path / "site" / LEDGER).unlink()
    secret = (tmp_path / "site" / SECRET).read_bytes()
    with pytest.raises(CorruptRun, match=r"ledger\.jsonl is missing.*what it has spent is unknown\. Restore"):
        take_part(request(2), records(), made, tmp_path / "site")
    change_state(tmp_path / "site", lambda document: document.pop(HEAD))
    with pytest.raises(CorruptRun, match="lacks head; restore"):
        take_part(request(2), records(), made, tmp_path / "site")
    (tmp_path / "site" / STATE).unlink()
    with pytest.raises(CorruptRun, match=r"ledger\.jsonl is missing, though sampling\.key"):
        take_part(request(2), records(), made, tmp_path / "site")
    assert not (tmp_path / "site" / LEDGER).exists()
    assert (tmp_path / "site" / SECRET).read_bytes() == secret


def test_a_ledger_put_back_to_an_older_copy_is_noticed_before_anything_is_charged(tmp_path, made):
    folder = tmp_path / "site"
    take_part(request(1), records(), made, folder)
    shutil.copy(folder / LEDGER, tmp_path / "older")
    take_part(request(2, 2), records(), made, folder)
    document = json.loads((folder / STATE).read_text())
    with Ledger.open(folder / LEDGER, read_only=True) as ledger:
        assert document[HEAD] == ledger.head
    shutil.copy(tmp_path / "older", folder / LEDGER)
    with pytest.raises(CorruptRun, match="rolled back or truncated; restore it"):
        take_part(request(1, 3), records(), made, folder)
    assert charged(folder) == 1


def test_charges_behind_the_head_that_was_kept_are_those_of_a_killed_round(tmp_path, made):
    """And a site that died between its ledger and the first head goes on, as does one that died before its ledger."""
    folder = tmp_path / "site"
    take_part(request(1), records(), made, folder)
    before = (folder / STATE).read_bytes()
    take_part(request(1, 2), records(), made, folder)
    (folder / STATE).write_bytes(before)
    assert take_part(request(1, 2), records(), made, folder).steps == 1
    assert charged(folder) == 3
    change_state(folder, lambda document: document.update({HEAD: None}))
    assert take_part(request(1, 3), records(), made, folder).steps == 1
    change_state(folder, lambda document: document.update({HEAD: None}))
    (folder / LEDGER).unlink()  # as if it had never been made
    assert take_part(request(1), records(), made, folder).steps == 1
    assert charged(folder) == 1


@pytest.mark.parametrize("head", ["", "3", "three:lines", 3, ["1:" + "0" * 64], "0:" + "0" * 64, "1:" + "0" * 63])
def test_a_head_that_is_none_is_refused_in_words(tmp_path, made, head):
    take_part(request(1), records(), made, tmp_path / "site")
    change_state(tmp_path / "site", lambda document: document.update({HEAD: head}))
    with pytest.raises(CorruptRun, match=r"'head' of .*silo\.json must be LINES:HASH .* got .*; restore it"):
        take_part(request(1), records(), made, tmp_path / "site")
    assert charged(tmp_path / "site") == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "must hold a JSON object"),
        ("null", "must hold a JSON object"),
        ('{"silo": 3}', "must hold a JSON object with the site's settings"),
        ('{"silo": {}}', "lacks controller, head, multipliers, population"),
        ("{", "cannot be read"),
    ],
)
def test_a_state_that_is_none_is_refused_in_words(tmp_path, made, text, reason):
    take_part(request(1), records(), made, tmp_path / "site")
    (tmp_path / "site" / STATE).write_text(text)
    with pytest.raises(CorruptRun, match=rf"silo\.json {reason}.*; restore it"):
        take_part(request(1), records(), made, tmp_path / "site")
    assert charged(tmp_path / "site") == 1


def test_the_name_of_a_new_sites_folder_is_on_the_disk_before_its_ledger(tmp_path, made, monkeypatch):
    synced, sync = [], durable.sync
    monkeypatch.setattr(durable, "sync", lambda path: (synced.append(path), sync(path)))
    take_part(request(1), records(), made, tmp_path / "sites" / "3")
    first = synced.index(tmp_path / "sites" / "3")
    assert {tmp_path, tmp_path / "sites"} <= set(synced[:first])
    synced.clear()
    commit_reading(tmp_path / "other", None, "record")
    assert synced.index(tmp_path) < synced.index(tmp_path / "other")
    (tmp_path / "other" / READING).write_text("[]")
    with pytest.raises(CorruptRun, match=r"reading\.json must hold a JSON object, .*; restore it"):
        commit_reading(tmp_path / "other", None, "record")


def change_state(folder, change) -> None:
    document = json.loads((folder / STATE).read_text())
    change(document)
    (folder / STATE).write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"epsilon": 8.0}, "epsilon"), ({"steps": 40}, "steps"), ({"batch_size": 6}, "batch_size")],
)
def test_another_promise_than_the_ledgers_is_refused(tmp_path, made, change, reason):
    take_part(request(1), records(), made, tmp_path / "site")
    reply = take_part(request(1, site=SITE.replace(**change)), records(), made, tmp_path / "site")
    assert reply.steps == 0
    assert f"other settings ({reason})" in reply.refused


def test_more_than_the_operator_allows_is_refused_before_anything_is_written(tmp_path, made):
    void = SITE.replace(noise="insecure-zero", not_private="test")
    for site, terms, reason in (
        (SITE, OperatorLimits(epsilon=3.0), "an epsilon of at most 3"),
        (SITE, OperatorLimits(delta=1e-9), "a delta of at most 1e-09"),
        (SITE, OperatorLimits(unit="group:patient_nbr"), "protects group:patient_nbr, not record"),
        (SITE.replace(unit="group:visit"), OperatorLimits(unit="group:patient_nbr"), "not group:visit"),
        (SITE.replace(unit="group:visit"), OperatorLimits(), "for group:visit is asked for, but .* grouped by ''"),
        (
            SITE.replace(controller="subprocess:Popen"),
            OperatorLimits(methods=("my:Own",)),
            "if its operator names them",
        ),
        (void, OperatorLimits(epsilon=100.0), "has none: test"),
        (void, OperatorLimits(), "has none"),
    ):
        asked = replace(request(1, site=site), job=JOB.to_json())
        assert re.search(reason, refused_unread(asked, terms, tmp_path / "site"))
    few = take_part(request(1), records(3), made, tmp_path / "site")
    assert "fewer than 4 units" in few.refused
    assert few.population == 0
    assert not (tmp_path / "site").exists()
    with pytest.raises(BadMessage, match="site-state"):
        state_folder({"data": "jsonl:x"})


def test_the_server_cannot_change_how_records_are_read(tmp_path):
    def asked(**changes):
        reading = ReadSettings(task="classification", max_length=8, labels=("a", "b")).replace(**changes)
        return replace(request(1), job=JOB.replace(reading=reading).to_json())

    assert refused_unread(asked(), OperatorLimits(), tmp_path / "site") == ""
    assert refused_unread(asked(), OperatorLimits(), tmp_path / "site") == ""
    said = refused_unread(asked(least_words=5, text_column="diagnosis"), OperatorLimits(), tmp_path / "site")
    assert "least_words, text_column changed" in said
    grouped = asked(unit_column="patient")
    (tmp_path / "site" / READING).unlink()
    assert (
        refused_unread(replace(grouped, site=SITE.replace(unit="group:patient")), OperatorLimits(), tmp_path / "site")
        == ""
    )
    assert "first request; unit changed" in refused_unread(
        grouped, OperatorLimits(), tmp_path / "site"
    )  # of single records
    (tmp_path / "site" / READING).unlink()  # its operator's to do
    assert refused_unread(asked(least_words=5), OperatorLimits(), tmp_path / "site") == ""


@pytest.mark.parametrize(
    ("settings", "answered"),
    [
        ({}, {"sum", "site"}),
        ({"epsilon-limit": 2.0, "site-state": "x"}, {"site"}),
        ({"privacy-unit": "record"}, {"site"}),
        ({"identity": "x", "federation": "y", "site-state": "x"}, {"secure"}),
        ({"identity": "x", "delta-limit": 1e-6}, set()),
    ],
)
def test_a_node_answers_what_its_operator_set_it_up_for(settings, answered):
    for kind in ("sum", "site", "secure"):
        if kind in answered or not settings:
            refuse_unless_for(kind, settings)
        else:
            with pytest.raises(BadMessage, match="this node answers requests for"):
                refuse_unless_for(kind, settings)


def test_terms_come_from_the_nodes_settings():
    assert OperatorLimits.of({"data": "jsonl:x"}) == OperatorLimits(math.inf, 1.0, "")
    said = {"epsilon-limit": 2, "delta-limit": 1e-6, "privacy-unit": "group:patient_nbr"}
    assert OperatorLimits.of(said) == OperatorLimits(2.0, 1e-6, "group:patient_nbr")
    assert OperatorLimits.of(said).refusal(SITE.replace(epsilon=2.0, delta=1e-6, unit="group:patient_nbr")) == ""
    limits = ({"epsilon-limit": "two"}, {"epsilon-limit": 0.0}, {"delta-limit": math.nan})
    for wrong in (*limits, {"privacy-unit": "group:"}, {"privacy-unit": "patient_nbr"}):
        with pytest.raises(BadMessage, match=next(iter(wrong))):
            OperatorLimits.of(wrong)


def test_a_reply_is_checked():
    good = SiteReply(2, np.ones(5, np.float32), 3, "", 1.0, 10, 0.9)
    read = SiteReply.from_records(good.to_records(), 2, 5, 3)
    assert (read.steps, read.population, read.noise_multiplier) == (3, 10, 0.9)
    for bad, size in (
        (replace(good, round=1), 5), (good, 6), (replace(good, steps=4), 5), (replace(good, steps=0), 5),
        (replace(good, update=np.full(5, math.nan, np.float32)), 5), (replace(good, refused="x" * 2000), 5),
    ):  # fmt: skip
        with pytest.raises(BadMessage):
            SiteReply.from_records(bad.to_records(), 2, size, 3)
