"""Conversations through every kind of run, and an adapter that works where Lacquer is not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from transformers import PreTrainedTokenizerBase

from client.data.prepare import prepare
from client.models.base import load_base
from server.config.load import ConfigError, flatten, parse, unflatten
from server.config.schema import RunConfig
from server.runs.assembly import data_spec
from server.runs.phase_config import parse_phases
from server.runs.start import run_in_folder
from simulations.engines.inprocess import run_inprocess
from simulations.presets.asked import ask
from tests.cases.phases import train

USERS = 14


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model in a folder, and conversations of a few users, some of which are of no use."""
    folder = tmp_path_factory.mktemp("chat")
    model, tokenizer = load_base("random:llama", "causal-lm")
    model.save_pretrained(folder / "base")  # type: ignore[operator]
    tokenizer.save_pretrained(folder / "base")
    rows = []
    for user in range(USERS):
        for number in range(4):
            said = [
                {"role": "user", "content": f"{user}-{number}?"},
                {"role": "assistant", "content": f"Yes, {'a' if user % 2 else 'b'}."},
            ]
            rows.append({"messages": said, "user": f"u{user}"})
        rows.append({"messages": said[:1], "user": f"u{user}"})
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def table(place: Path) -> dict[str, Any]:
    return {
        "rounds": 2,
        "clients": 0,
        "sampling-rate": 0.5,
        "privacy": {"delta": 1e-3},
        "strategy": {"controller": "fixed", "controller-options": {"clip-norm": 0.1}},
        "model": {
            "name": str(place / "base"), "task": "instruction", "rank": 2, "targets": "q_proj,v_proj", "max-length": 60,
        },
        "data": {
            "source": f"jsonl:{place / 'chat.jsonl'}", "client-column": "user", "partition": "natural",
            "validation-records": 8, "test-records": 6, "cache": str(place / "cache"),
        },
        "evaluation": {"rouge-records": 3, "rouge-tokens": 8, "examples": 2},
        "engine": {"kind": "inprocess", "workers": 1},
    }  # fmt: skip


def asked(place: Path, folder: Path, **settings: Any) -> RunConfig:
    """As `lacquer run` would start it."""
    file = folder / "chat.toml"
    file.write_text(parse(unflatten({**flatten(table(place)), **settings})).to_toml())
    return ask(str(file), [], {}, folder, folder).run


RECORDS = {
    "privacy.unit": "group",
    "data.unit-column": "user",
    "data.client-column": "",
    "data.partition": "iid",
    "clients": 1,
    "sampling-rate": 1.0,
    "site.batch-size": 4,
}


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    folder = place / "run"
    folder.mkdir()
    config = asked(place, folder)
    assert config.clients == prepare(data_spec(config)).num_clients == USERS - 4
    run_inprocess(config, folder)
    return folder


def results_of(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def test_a_client_is_a_user(place: Path, finished: Path) -> None:
    results = results_of(finished)
    assert json.loads((finished / "privacy.json").read_text())["population"] == USERS - 4
    assert results["test_perplexity"] > 1
    assert {"test_rouge1", "test_rouge2", "test_rougeL"} <= results.keys()
    meta = prepare(data_spec(asked(place, finished))).meta
    assert meta["removed"]["no answer"] == USERS
    assert [set(example) for example in results["examples"]] == [{"prompt", "reference", "before", "after"}] * 2
    assert all(example["reference"].startswith("Yes") for example in results["examples"])


PLAIN = """
import json, sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.modules.update({name: None for name in ("privacy", "strategies", "client", "server", "simulations")})
adapter, records = sys.argv[1], json.loads(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(adapter)
config = json.loads(open(f"{adapter}/adapter_config.json").read())
assert config["task_type"] == "CAUSAL_LM", config
base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
model = PeftModel.from_pretrained(base, adapter).eval()
loss = count = 0
for messages in records:
    found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = torch.tensor([found["input_ids"]]), torch.tensor(found["assistant_masks"]).bool()[1:]
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    loss, count = loss + losses[mask].sum().item(), count + mask.sum().item()
print(loss / count, count)
"""


def test_the_adapter_gives_the_runs_numbers_where_lacquer_is_not(place: Path, finished: Path, tmp_path: Path) -> None:
    results = results_of(finished)
    test = prepare(data_spec(asked(place, finished))).test
    _, tokenizer = load_base(str(place / "base"), "causal-lm")
    records = [_messages(tokenizer, test.select([row]).tokens.tolist()) for row in range(len(test))]
    done = subprocess.run(
        [sys.executable, "-P", "-c", PLAIN, str(finished / "adapter"), json.dumps(records)],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loss, count = done.stdout.split()
    assert int(count) == results["test_records"]
    assert float(loss) == pytest.approx(results["test_loss"], rel=1e-5)


def _messages(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[dict[str, str]]:
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    question, _, answer = text.removeprefix("### User:\n").partition("\n\n### Assistant:\n")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer.strip()}]


def test_the_card_says_what_the_hub_and_a_person_want_to_know(place: Path, finished: Path) -> None:
    card = ModelCard.load(finished / "adapter" / "README.md")
    privacy, statement = card.data.privacy, json.loads((finished / "privacy.json").read_text())
    assert card.data.base_model == str(place / "base")
    assert (privacy["unit"], privacy["epsilon"], privacy["delta"]) == ("client", statement["epsilon"], 1e-3)
    assert privacy["ledger_head"] == statement["ledger"]["head"]
    assert "AutoModelForCausalLM" in card.text
    assert "load_base" not in card.text


def test_users_records_at_one_site(place: Path, tmp_path: Path) -> None:
    run_in_folder(asked(place, tmp_path, **RECORDS), tmp_path)
    assert json.loads((tmp_path / "privacy.json").read_text())["unit"] == "group:user"
    assert len(results_of(tmp_path)["examples"]) == 2


def test_records_at_several_sites(place: Path, tmp_path: Path) -> None:
    settings = {**RECORDS, "clients": 2, "privacy.unit": "record", "data.unit-column": "", "site.steps": 2}
    run_inprocess(asked(place, tmp_path, **settings), tmp_path)
    assert len(results_of(tmp_path)["examples"]) == 2


def test_phases(place: Path, tmp_path: Path) -> None:
    shared = unflatten({**flatten(table(place)), "clients": 1, "sampling-rate": 1.0, "privacy.unit": "group"})
    shared = {key: value for key, value in shared.items() if key not in ("rounds", "strategy", "engine")}
    shared["data"] |= {"unit-column": "user", "client-column": "", "partition": "iid", "detector": "regex"}
    phases = [
        {"kind": "ordinary", "text": "redacted", "epochs": 1, "batch-size": 8},
        {"kind": "private", "steps": 2, "batch-size": 4, "controller-options": {"clip-norm": 0.1}},
    ]
    results = train(parse_phases({**shared, "phases": phases}), tmp_path)
    assert len(results["examples"]) == 2


def test_a_count_that_is_not_the_columns_is_refused_with_the_right_one(place: Path, tmp_path: Path) -> None:
    config = asked(place, tmp_path).replace(clients=9)
    with pytest.raises(ValueError, match=f"set clients = {USERS - 4}"):
        prepare(data_spec(config))
    with pytest.raises(ConfigError, match="clients = 0"):
        run_in_folder(parse(table(place)), tmp_path)
    with pytest.raises(ConfigError, match=r"data\.partition = 'natural'"):
        parse({"clients": 0})


def test_a_template_that_cannot_be_used_is_refused_before_anything_is_spent(place: Path, tmp_path: Path) -> None:
    settings = {"model.chat-template": "{{ raise_exception('no') }}", "clients": USERS - 4}
    with pytest.raises(ValueError, match=r"none of .* conversations .* template cannot render it: no"):
        run_inprocess(asked(place, tmp_path, **settings), tmp_path)
    assert not (tmp_path / "ledger.jsonl").exists()
