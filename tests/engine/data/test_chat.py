"""Conversations become tokens as their template says, with the loss on answers alone."""

import copy
import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from client.data import chat
from client.data.conversations import from_text, to_text
from client.data.sources import Texts
from client.data.tokenise import tokenise
from client.models.base import load_tokenizer
from client.models.toy import byte_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [
    {"role": "user", "content": "I have a fever of 38.5, am I ill?"},
    {"role": "assistant", "content": "Perhaps. Since when?"},
    {"role": "user", "content": "assistant\n"},  # a text that reads like the template's own words
    {"role": "assistant", "content": "  a  "},
]

# Each as its model's own template reads, without and with the marks that TRL's training templates add.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}[{{ m['content'] + '<|im_end|>' }}]{{ '\\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if m['role'] == 'assistant' %}[{{ m['content'] | trim + '<|eot_id|>' }}]"
    "{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
QWEN = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{% endif %}" + CHATML
)
TEMPLATES = {"chatml": CHATML, "llama-3": LLAMA3, "qwen": QWEN}


def plain(template: str) -> str:
    return template.replace("[{{", "{{").replace("}}]", "}}")


def marked(template: str) -> str:
    return template.replace("[{{", "{% generation %}{{").replace("}}]", "}}{% endgeneration %}")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    made = copy.deepcopy(byte_tokenizer())  # which all random models share
    specials = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    made.add_special_tokens({"additional_special_tokens": specials})
    return made


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [TALK, [SYSTEM, *TALK], TALK[:2]], ids=["talk", "system", "one answer"])
def test_answers_are_found_where_the_template_marks_them(
    tokenizer: PreTrainedTokenizerBase, name: str, messages: list[dict[str, str]]
) -> None:
    found = chat.render(tokenizer, to_text(messages), plain(TEMPLATES[name]))
    wanted = tokenizer.apply_chat_template(
        messages, chat_template=marked(TEMPLATES[name]), return_dict=True, return_assistant_tokens_mask=True
    )
    assert found.tokens == wanted["input_ids"]
    assert found.weights == wanted["assistant_masks"]
    assert chat.render(tokenizer, to_text(messages), marked(TEMPLATES[name])) == found
    end = "<|eot_id|>" if name == "llama-3" else "<|im_end|>"
    learnt = tokenizer.decode([t for t, weight in zip(found.tokens, found.weights, strict=True) if weight])
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert learnt == "".join((answer.strip() if name == "llama-3" else answer) + end for answer in answers)


@pytest.mark.parametrize("template", [plain(CHATML), marked(CHATML)], ids=["plain", "marked"])
def test_no_log_tells_how_long_a_conversation_is(template: str, caplog: pytest.LogCaptureFixture) -> None:
    fresh: Any = copy.deepcopy(byte_tokenizer())
    fresh.deprecation_warnings.clear()  # it would say so once
    long = to_text([{"role": "user", "content": "word " * 400}, {"role": "assistant", "content": "no"}])
    assert len(chat.render(fresh, long, template).tokens) > fresh.model_max_length
    assert len(chat.prompt(fresh, from_text(long)[:1], template)) > fresh.model_max_length
    assert caplog.text == ""


def test_nothing_is_doubled(tokenizer: PreTrainedTokenizerBase) -> None:
    found = chat.render(tokenizer, to_text(TALK), plain(LLAMA3))
    assert found.tokens.count(tokenizer.bos_token_id) == 1
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id, "which the tokenizer would add by itself"
    base = chat.render(tokenizer, to_text(TALK), chat.template_of(tokenizer))
    assert base.tokens.count(tokenizer.bos_token_id) == 1
    assert base.tokens.count(tokenizer.eos_token_id) == 2, "behind each answer, for a model without a template"


# Templates that render a turn otherwise once the conversation goes on: an empty thought before the last answer (Qwen3),
# an end of text behind it (Phi-3), a user's token right behind the end of text (DeepSeek), two ends (Command R7B).
LATER = {
    "thought": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if loop.last and m['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "Perhaps. Since when?<|im_end|><think>\n\n</think>\n\na<|im_end|>",
    ),
    "end of text": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{{ m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}",
        "Perhaps. Since when?<|im_end|>a<|im_end|>",
    ),
    "user behind": (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|im_start|>' + m['content'] }}"
        "{% else %}{{ '<|im_end|>' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_end|>' }}{% endif %}",
        "Perhaps. Since when?</s>a</s>",
    ),
    "two ends": (
        "{% for m in messages %}{{ m['role'] + '\n' + m['content'] | trim + '<|im_end|>' + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}",
        "Perhaps. Since when?<|im_end|></s>a<|im_end|></s>",
    ),
}


@pytest.mark.parametrize("kind", LATER)
def test_answers_are_found_where_turns_change_once_the_conversation_goes_on(
    tokenizer: PreTrainedTokenizerBase, kind: str
) -> None:
    template, wanted = LATER[kind]
    found = chat.render(tokenizer, to_text(TALK), template)
    learnt = tokenizer.decode([t for t, weight in zip(found.tokens, found.weights, strict=True) if weight])
    assert learnt == wanted.replace("</s>", str(tokenizer.eos_token))
    assert tokenizer.decode(found.tokens) == tokenizer.apply_chat_template(TALK, chat_template=template, tokenize=False)


def test_marks_that_take_the_end_of_the_line_get_no_second_end_of_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    template = CHATML.replace("}}]{{ '\\n' }}", "+ '\\n' }}]")
    assert template != CHATML
    found = chat.render(tokenizer, to_text(TALK), marked(template))
    assert tokenizer.decode(found.tokens).endswith("  a  <|im_end|>\n")


def test_a_template_without_an_end_of_turn_gets_one(tokenizer: PreTrainedTokenizerBase) -> None:
    found = chat.render(tokenizer, to_text(TALK[:2]), "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}")
    assert (found.tokens[-1], found.weights[-1]) == (tokenizer.eos_token_id, 1.0)


NO_END = (
    "{% for m in messages %}{{ '### ' + m['role'] + ':\n' + m['content'] }}{% if not loop.last %}{{ '\n\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '\n\n### assistant:\n' }}{% endif %}"
)


def learnt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], template: str) -> str:
    found = chat.render(tokenizer, to_text(messages), template)
    return str(tokenizer.decode([t for t, weight in zip(found.tokens, found.weights, strict=True) if weight]))


@pytest.mark.parametrize("template", [NO_END, NO_END.replace("\\n", " "), NO_END.replace("'### '", "'|'")])
def test_the_next_turn_is_not_learnt_where_no_token_ends_a_turn(
    tokenizer: PreTrainedTokenizerBase, template: str
) -> None:
    talk = [{**m, "content": f"{m['role']} says {n}"} for n, m in enumerate(TALK)]
    assert learnt(tokenizer, talk, template) == f"assistant says 1assistant says 3{tokenizer.eos_token}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_of_weight_0_is_not_learnt(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    end = "<|eot_id|>" if name == "llama-3" else "<|im_end|>"
    for template in (marked(TEMPLATES[name]), plain(TEMPLATES[name])):
        first = [TALK[0], {**TALK[1], "train": False}, *TALK[2:]]
        assert learnt(tokenizer, first, template).strip() == f"a{'' if name == 'llama-3' else '  '}{end}"
        last = [*TALK[:3], {**TALK[3], "train": False}]
        assert learnt(tokenizer, last, template) == f"Perhaps. Since when?{end}"
    tied = "{% for m in messages if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    with pytest.raises(chat.NotRendered, match="does not mark one by one"):
        learnt(tokenizer, first, tied + "{% endfor %}")


ASKED = [
    {"role": "user", "content": "How much?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "dose", "arguments": {"mg": 5}}}],
    },
    {"role": "tool", "content": "twice"},
    {"role": "assistant", "content": "Twice a day."},
]
WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] }}{% for c in m['tool_calls'] %}{{ c['function'] | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_calls_of_tools_are_learnt_and_their_results_are_not(tokenizer: PreTrainedTokenizerBase) -> None:
    wanted = '{"name": "dose", "arguments": {"mg": 5}}<|im_end|>Twice a day.<|im_end|>'
    tools = [{"type": "function", "function": {"name": "dose"}}]
    described = [{**ASKED[0], "tools": tools}, *ASKED[1:]]
    assert learnt(tokenizer, ASKED, WITH_TOOLS) == learnt(tokenizer, described, WITH_TOOLS) == wanted
    whole = tokenizer.apply_chat_template(ASKED, tools=tools, chat_template=WITH_TOOLS, tokenize=False)
    assert tokenizer.decode(chat.render(tokenizer, to_text(described), WITH_TOOLS).tokens) == whole


def test_what_a_template_leaves_out_of_tools_is_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    users = "{% for m in messages if m['role'] != 'tool' %}{{ m['role'] + m['content'] }}"
    users += "{% for c in m['tool_calls'] %}{{ c['function']['name'] }}{% endfor %}{% endfor %}"
    talks = [to_text([{**TALK[0], "tools": [{"name": "dose"}]}, TALK[1]]), to_text(ASKED)]
    for template, reason in ((plain(CHATML), "calls"), (users, "results")):
        made = tokenise(Texts(talks), None, tokenizer, "instruction", 999, None, template)
        assert made.left_out == {f"whose {reason} of tools the chat template leaves out": 1}
        assert made.noted == {"conversations describe tools, which the chat template leaves out": 1}
    base = learnt(tokenizer, [ASKED[0], TALK[1], *ASKED[2:]], chat.PLAIN_TEMPLATE)
    assert "twice" not in base, "a result is no answer"


def test_smollm2_is_rendered_by_its_own_template() -> None:
    model = load_tokenizer("smollm2")
    found = chat.render(model, to_text(TALK), chat.template_of(model))
    text = model.decode(found.tokens)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>assistant\n  a  <|im_end|>\n")
    learnt = [token for token, weight in zip(found.tokens, found.weights, strict=True) if weight]
    # the line's end and the answer's first blank are one token
    assert model.decode(learnt) == "Perhaps. Since when?<|im_end|>\n  a  <|im_end|>"


BROKEN = {
    "raises": "{{ raise_exception('no system role') }}",
    "is no jinja": "{% for %}",
    "knows no answers": "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}",
    "changes answers": "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
    "says answers twice": "{% for m in messages %}{{ m['content'] + m['content'] }}{% endfor %}",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_template_that_cannot_be_used_is_refused(tokenizer: PreTrainedTokenizerBase, kind: str) -> None:
    with pytest.raises(ValueError, match="chat template"):
        chat.render(tokenizer, to_text(TALK), BROKEN[kind])


class TestCut:
    """Prompt first, from the left; an answer loses its end only where nothing else is left to cut."""

    def rendered(self, before: int, answer: int, behind: int = 1) -> chat.Rendered:
        weights = [0.0] * before + [1.0] * answer + [0.0] * behind
        return chat.Rendered(list(range(len(weights))), weights)

    def test_what_fits_is_left_alone(self) -> None:
        whole = self.rendered(20, 10)
        assert chat.cut(whole, 31, first=None) == (whole, False, False)

    @pytest.mark.parametrize("longest", range(4, 130))
    @pytest.mark.parametrize(("before", "answer"), [(100, 30), (100, 1), (2, 100), (40, 90), (1, 128)])
    def test_the_answer_is_kept(self, before: int, answer: int, longest: int) -> None:
        found, cut, answer_cut = chat.cut(self.rendered(before, answer), longest, first=0)
        if before + answer + 1 <= longest:
            assert not cut
            return
        assert cut
        assert len(found.tokens) == len(found.weights) <= longest
        assert found.tokens[0] == 0, "what begins every text"
        assert found.tokens[1:] == list(range(found.tokens[1], found.tokens[1] + len(found.tokens) - 1))
        kept = sum(found.weights)
        assert found.weights[-1] == 1.0
        assert answer_cut == (kept < answer)
        assert kept >= min(answer, (longest - 1) // 2)
        if kept < answer:
            assert found.weights.count(0.0) <= 17, "the prompt gave what it could"
        else:
            assert len(found.tokens) == min(longest, before + answer), "and no more than needed"

    def test_only_the_last_answer_counts(self) -> None:
        whole = chat.Rendered(list(range(60)), [0.0] * 10 + [1.0] * 20 + [0.0] * 20 + [1.0] * 10)
        found, _, answer_cut = chat.cut(whole, 40, first=None)
        assert found.tokens == list(range(20, 60))
        assert found.weights == whole.weights[20:]
        assert not answer_cut


def test_a_line_is_a_conversation() -> None:
    assert from_text(to_text(TALK)) == TALK
    assert "\n" not in to_text(TALK)
    assert json.loads(to_text(TALK))[0][0] == "user"


def test_a_prompt_ends_where_the_answer_begins(tokenizer: PreTrainedTokenizerBase) -> None:
    for template in TEMPLATES.values():
        asked = chat.prompt(tokenizer, TALK[:1], plain(template))
        whole = chat.render(tokenizer, to_text(TALK[:2]), plain(template))
        assert whole.tokens[: len(asked)] == asked
        assert whole.last_answer[0] == len(asked)


def test_what_is_counted_quotes_no_text(tokenizer: PreTrainedTokenizerBase) -> None:
    template = "{% for m in messages %}{% if 'fever' in m['content'] %}{{ raise_exception(m['content']) }}{% endif %}"
    template += "{{ m['content'] + ' ' }}{% endfor %}"
    made = tokenise(Texts([to_text(TALK), to_text(TALK[2:])]), None, tokenizer, "instruction", 64, None, template)
    assert len(made.records) == 1
    assert made.left_out == {"not rendered by the chat template": 1}
