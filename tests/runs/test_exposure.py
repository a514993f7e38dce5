"""Exposure: ranks of planted secrets among all numbers, exactly, and among a sample."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from client.data.canaries import KINDS, secrets
from client.models.base import load_base, load_tokenizer
from simulations.audit import exposure


@pytest.fixture(scope="module")
def model():
    return load_base("random:llama", "causal-lm")


def test_the_tree_gives_every_number_its_log_probability(model, monkeypatch):
    monkeypatch.setattr(exposure, "ROWS", 30)
    language_model, tokenizer = model
    prefix, rows = exposure.split_tokens(tokenizer, "six-digit", list("0123456789"))
    digits = [row[0] for row in rows]
    scores = exposure.all_numbers(language_model, prefix, digits, 3)
    numbers = [[digits[int(d)] for d in f"{number:03}"] for number in range(1000)]
    np.testing.assert_allclose(scores, exposure.log_probabilities(language_model, prefix, numbers), atol=1e-5)
    assert np.exp(scores).sum() < 1


def test_log_probabilities_multiply_along_the_secret(model):
    language_model, tokenizer = model
    prefix, (short, long) = exposure.split_tokens(tokenizer, "secret-id", ["A7", "A7Q"])
    one, two = exposure.log_probabilities(language_model, prefix, [short, long])
    (last,) = exposure.log_probabilities(language_model, [*prefix, *short], [long[2:]])
    assert two == pytest.approx(one + last, abs=1e-5)


@pytest.fixture(scope="module")
def gpt2():
    """A small model of random weights, and a tokenizer that cuts texts in GPT-2's way."""
    known = [KINDS["six-digit"].text(secret) for secret in secrets("six-digit", 200, 3)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        known,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|endoftext|>")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=400, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    ).eval()
    return model, tokenizer


def _nats(model, tokens):
    """log P of a row of tokens behind its first, one at a time."""
    chances = model(input_ids=torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    return sum(float(chances[at, token]) for at, token in enumerate(tokens[1:]))


@torch.no_grad()
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_secrets_whose_first_token_holds_the_blank_in_front_are_ranked_like_all_others(gpt2, kind):
    language_model, tokenizer = gpt2
    if kind == "six-digit":
        assert tokenizer.tokenize("My ID is ")[-1] == "Ġ"
        assert tokenizer.tokenize("My ID is 341752")[3].startswith("Ġ3")
    candidates = secrets(kind, 40, 0)
    prefix, rows = exposure.split_tokens(tokenizer, kind, candidates)
    whole = [tokenizer(KINDS[kind].prefix + secret)["input_ids"] for secret in candidates]
    assert [prefix + row for row in rows] == whole
    assert tokenizer.decode(prefix) == KINDS[kind].prefix.rstrip()
    assert kind != "six-digit" or len({len(row) for row in rows}) > 1  # scores are sums, whatever their terms
    # the scores are those of the whole canaries, less one constant: the prefix they share
    scores = exposure.log_probabilities(language_model, prefix, rows)
    by_hand = [_nats(language_model, tokens) - _nats(language_model, prefix) for tokens in whole]
    np.testing.assert_allclose(scores, by_hand, atol=1e-5)
    found = exposure.planted_exposures(language_model, tokenizer, kind, candidates[:3], candidates[3:])
    above = [sum(other > score for other in by_hand[3:]) for score in by_hand[:3]]
    assert [one.bits for one in found] == pytest.approx([-np.log2((count + 1) / 38) for count in above])


def test_nothing_of_the_prefix_is_scored_where_tokens_end_with_it():
    """The committed rows of docs/results/atdp.md: ``lacquer-small`` scores the ten characters and nothing else."""
    tokenizer = load_tokenizer("lacquer-small")
    candidates = secrets("id-record", 50, 0)
    prefix, rows = exposure.split_tokens(tokenizer, "id-record", candidates)
    assert tokenizer.decode(prefix, skip_special_tokens=True) == "secret_id="
    assert [tokenizer.decode(row) for row in rows] == candidates


def test_one_cut_for_all_candidates(gpt2):
    """Where some candidates join the prefix's end and others do not, the joined ones decide for all."""
    _, tokenizer = gpt2
    joined = exposure.split_tokens(tokenizer, "six-digit", ["341752", "\t41752"])
    assert tokenizer.decode(joined[0]) == "My ID is"
    assert [tokenizer.decode(row) for row in joined[1]] == [" 341752", " \t41752"]
    with pytest.raises(ValueError, match="secrets must be non-empty"):
        exposure.split_tokens(tokenizer, "six-digit", [])

    class OneToken:
        eos_token_id = None

        def __call__(self, text, **options):
            return {"input_ids": [len(text)]}

    with pytest.raises(ValueError, match="no token in common"):
        exposure.split_tokens(OneToken(), "six-digit", ["341752"])


def test_exact_exposure_is_the_rank():
    scores = np.array([0.1, 0.9, 0.5, 0.5, 0.2, 0.3, 0.0, 0.7])
    bits = [found.bits for found in exposure.exact_exposures(scores, [1, 7, 2, 6])]
    assert bits == pytest.approx([3.0, 2.0, 3 - np.log2(3), 0.0])


def test_sampled_exposure_covers_the_exact_one():
    draws = np.random.default_rng(0)
    scores = draws.normal(size=4096)
    planted = np.argsort(scores)[[0, 1000, 2048, 3500, 4000, 4090]]
    truth = exposure.exact_exposures(scores, planted)
    covered = 0
    for _ in range(50):
        sample = scores[draws.choice(4096, 500, replace=False)]
        found = exposure.sampled_exposures(scores[planted], sample, 4096)
        covered += sum(one.low <= true.bits <= one.high for one, true in zip(found, truth, strict=True))
        assert max(one.bits for one in found) <= np.log2(501)
    assert covered >= 0.95 * 300
    best = exposure.sampled_exposures(np.array([9.0]), scores[:500], 4096)[0]
    assert best.high == 12.0
    assert 6.5 < best.low < best.bits == pytest.approx(np.log2(501))


def test_mean_and_its_interval():
    values = [exposure.Exposure(bits, bits, bits) for bits in (1.0, 2.0, 3.0, 6.0)]
    mean = exposure.mean_interval(values)
    assert (mean.bits, mean.high - mean.bits) == (
        3.0,
        pytest.approx(3.182 * np.std([1, 2, 3, 6], ddof=1) / 2, rel=1e-3),
    )
    draws = np.random.default_rng(1)
    inside = 0
    for rows in draws.exponential(size=(100, 40)):
        interval = exposure.mean_interval([exposure.Exposure(bits, bits, bits) for bits in rows])
        inside += interval.low <= 1 <= interval.high
    assert inside >= 85
    with pytest.raises(ValueError, match="canaries"):
        exposure.mean_interval(values[:1])
