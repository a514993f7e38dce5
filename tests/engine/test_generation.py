"""Adapters added to the weights, continuations and summaries, ROUGE."""

import numpy as np
import pytest
import torch

from client.data.records import Records
from client.engine.cohort import CohortEngine
from client.generation import Decoding, continuations, rouge, summaries, turns_text
from client.models.base import load_base
from client.models.lora import LoraSpec, merge_adapter
from client.models.tasks import make_task
from tests.cases.cohorts import start


@pytest.mark.parametrize(
    ("name", "targets"),
    [("llama-tied", ("q_proj", "lm_head")), ("gpt2", ("c_attn",)), ("qwen2", ("v_proj", "up_proj"))],
)
def test_merged_weights_compute_what_the_adapter_computes(name, targets):
    model, _ = load_base(f"random:{name}", "causal-lm", dtype=torch.float64)
    spec = LoraSpec(2, 4.0, targets)
    vector = start(model, spec)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    ids = np.array([5, 9, 40, 7])
    whole = merge_adapter(model, spec, vector)
    with torch.no_grad():
        logits = whole(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(ids[1:]))
    engine = CohortEngine(model, spec, make_task("causal-lm"), precision="fp64")
    assert engine.evaluate(vector, Records.from_lists([ids])).loss == pytest.approx(float(loss), rel=1e-7)


def test_ternary_weights_take_no_adapter_in():
    model, _ = load_base("random:bitnet-ternary", "causal-lm")
    spec = LoraSpec(2, 4.0, ("q_proj",))
    with pytest.raises(ValueError, match="ternary"):
        merge_adapter(model, spec, start(model, spec))


def test_greedy_continuations_are_the_most_probable_tokens_whatever_the_batch():
    model, tokenizer = load_base("random:llama", "causal-lm")
    draws = np.random.default_rng(0)
    prompts = [draws.integers(3, 200, length).tolist() for length in (9, 2, 5, 5)]
    decoding = Decoding(longest=6)
    found = continuations(model, tokenizer, prompts, decoding)
    for prompt, tokens in zip(prompts, found, strict=True):
        expected = list(prompt)
        for _ in range(6):
            with torch.no_grad():
                following = int(model(input_ids=torch.tensor([expected])).logits[0, -1].argmax())
            if following == tokenizer.eos_token_id:
                break
            expected.append(following)
        assert tokens == expected[len(prompt) :]
    assert continuations(model, tokenizer, prompts, Decoding(longest=6, token_budget=1)) == found
    with pytest.raises(ValueError, match="prompt 1 has 0 tokens"):
        continuations(model, tokenizer, [[5], []], decoding)


def test_samples_follow_their_seed_and_leave_the_global_state():
    model, tokenizer = load_base("random:llama", "causal-lm")
    before = torch.random.get_rng_state()
    first, again, other = (
        continuations(model, tokenizer, [[5, 6]] * 3, Decoding(longest=12, temperature=1.0, seed=seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(before, torch.random.get_rng_state())
    assert first == again != other
    assert len({tuple(row) for row in first}) == 3


def test_summaries_are_asked_for_and_scored():
    model, tokenizer = load_base("random:llama", "causal-lm")
    found = summaries(model, tokenizer, ["A long text. " * 40, "Short."], Decoding(longest=5))
    assert len(found) == 2
    scores = rouge(["the cat sat", "a dog"], ["the cats sat down", "no match here"])
    assert scores["rouge1"] == pytest.approx(3 / 7)  # 3 of 3 and 3 of 4 stems: F1 6/7; the second pair shares nothing
    assert scores["rouge2"] == pytest.approx(2 / 5)
    with pytest.raises(ValueError, match="predictions"):
        rouge([], [])


CHAT = ["<|im_start|>", "<|im_end|>"]
TURNS = [("system", "Be brief."), ("user", "What is it?\nTell me."), ("assistant", "")]


@pytest.mark.parametrize(
    "template",
    [
        lambda role, text: f"<|im_start|>{role}\n{text}" + ("<|im_end|>\n" if text else ""),
        lambda role, text: f"<|im_start|>{role}<|im_end|>\n\n{text}" + ("<|im_end|>" if text else ""),
    ],
)
def test_a_conversation_is_shown_with_its_speakers_and_without_marks(template):
    _, tokenizer = load_base("random:llama", "causal-lm")
    tokenizer.add_special_tokens({"additional_special_tokens": CHAT})
    ids = tokenizer("".join(template(*turn) for turn in TURNS), add_special_tokens=False)["input_ids"]
    assert turns_text(tokenizer, ids) == "System: Be brief.\n\nUser: What is it?\nTell me."
    plain = tokenizer("user of words", add_special_tokens=False)["input_ids"]
    assert turns_text(tokenizer, plain) == "user of words"
