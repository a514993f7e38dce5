"""Pre-training of the small base model, in miniature: it trains, saves, packs, and its card tells the truth."""

import json
import math

import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import load_file

from client.data.prepared import sha256
from client.models.base import load_base
from simulations.benchmarks.lacquer_small import package, train
from simulations.benchmarks.lacquer_small.package import perplexity

LINES = ["", " = Town = \n", "", " The town lies on a river and has 12 bridges . \n", " The river is long . \n"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    data, out = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("model")
    titles = [f"Town {number}" for number in range(30)]
    lines = [line.replace("Town", title) for title in titles for line in LINES]
    for name, texts in (
        (train.ARTICLES, lines),
        (train.EVALUATION, lines[:60]),
        (train.NOVELS, ["It was a dark night , and the river rose . \nNobody slept ."] * 40),
    ):
        (data / name).parent.mkdir(exist_ok=True)
        pandas.DataFrame({"text": texts}).to_parquet(data / name)
    small = {"width": 32, "layers": 1, "heads": 2, "groups": 1, "hidden": 48, "vocabulary": 320, "context": 16}
    patch = pytest.MonkeyPatch()
    patch.setattr(train, "Recipe", lambda **given: Recipe(**given, **small, windows=4))
    train.main(data, out, minutes=30, steps=50, optimizer="muon", rate=3e-3, threads=torch.get_num_threads())
    patch.undo()
    return data, out


Recipe = train.Recipe


def test_it_learns_and_is_packed_with_a_true_card(folders, tmp_path, monkeypatch):
    data, out = folders
    log = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
    assert log[0]["loss"] > log[-1]["loss"] > 0
    assert [line["step"] for line in log] == [20, 40, 50]
    assert log[-1]["rate"] < 0.01
    package.main(out, data, tmp_path / "packed")
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    assert {values.dtype for values in stored.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in stored  # tied
    hashes: dict[str, dict[str, str]] = {}
    exec((tmp_path / "packed" / "__init__.py").read_text(), hashes)
    assert hashes["SHA256"] == {name: sha256(tmp_path / "packed" / name) for name in package.FILES}
    monkeypatch.setattr("client.models.files.LACQUER_SMALL_FOLDER", tmp_path / "packed")
    monkeypatch.setattr("client.models.lacquer_small.SHA256", hashes["SHA256"])
    model, tokenizer = load_base("lacquer-small", "causal-lm")
    quality = perplexity(model, tokenizer, train.lines(data, train.EVALUATION), context=16)
    assert f"**{quality.per_token:.1f} per token, {quality.per_word:.1f} per" in (
        " ".join((tmp_path / "packed" / "README.md").read_text().split())
    )
    with (tmp_path / "packed" / "tokenizer.json").open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match=r"tokenizer\.json has SHA-256"):
        load_base("lacquer-small", "causal-lm")


def test_perplexity_scores_every_token_once_with_at_least_half_a_window(folders):
    model, tokenizer = load_base(str(folders[1]), "causal-lm")
    lines = ["The town lies on a river . \n", "It has 12 bridges , and the river is long . \n"]
    stream = [token for line in lines for token in tokenizer(line, add_special_tokens=False)["input_ids"]]
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([[tokenizer.bos_token_id, *stream]])).logits[0, :-1].log_softmax(-1)
    expected = -float(whole[torch.arange(len(stream)), torch.tensor(stream)].mean())
    found = perplexity(model, tokenizer, lines, context=len(stream) + 1)
    assert (found.tokens, found.words) == (len(stream), 7 + 11 + 2)
    assert found.per_token == pytest.approx(math.exp(expected), rel=1e-5)
    assert found.per_word == pytest.approx(math.exp(expected * len(stream) / found.words), rel=1e-5)
    total = 0.0
    for start in range(0, len(stream) - 7 + 4, 4):  # context 8: a window holds 7 tokens of the stream, 4 of them new
        part = stream[start : start + 7]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[tokenizer.bos_token_id, *part]])).logits[0, :-1].log_softmax(-1)
        losses = -logits[torch.arange(len(part)), torch.tensor(part)]
        total += float((losses if start == 0 else losses[3:]).sum())
    short = perplexity(model, tokenizer, lines, context=8, batch=2)
    assert short.per_token == pytest.approx(math.exp(total / len(stream)), rel=1e-5)


def test_digits_stay_apart_and_windows_begin_as_they_should(folders):
    _, tokenizer = load_base(str(folders[1]), "causal-lm")
    tokens = tokenizer.tokenize("My ID is 341752.")
    assert tokens[-7:] == ["3", "4", "1", "7", "5", "2", "."]
    assert tokenizer.decode(tokenizer("Señor 12 <unk> !\n")["input_ids"], skip_special_tokens=False) == (
        "<s>Señor 12 <unk> !\n"
    )
    stream = train.Stream.of(["One line .\nAnother line .\n", "A second text ."], tokenizer)
    draws = np.random.default_rng(0)
    windows = [stream.window(6, draws) for _ in range(50)]
    assert all(window[0] == tokenizer.bos_token_id and len(window) == 6 for window in windows)
    starts = {int(stream.tokens[start]) for start in stream.starts}
    assert sum(int(window[1]) in starts for window in windows) >= 20


def test_rate_rises_then_falls_to_zero():
    rates = [train.schedule(progress, 0.02) for progress in (0.0, 0.01, 0.02, 0.51, 1.0)]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0], abs=0.01)
