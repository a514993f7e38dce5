"""Answers of a finished run: as transformers and PEFT give them, of every task that writes, in turns, and refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from client.generation import Decoding
from server.evaluation.finished import read_finished
from simulations.cli.app import app
from simulations.cli.model.generate import Writer, chat
from tests.cases.finished_runs import run_of_every_task

MakeRun = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """A finished run of a task, made once, with steps so long that every answer changes, whatever the noise."""
    return run_of_every_task(tmp_path_factory.mktemp("generate"), **{"strategy.optimizer-options.learning-rate": 20.0})


def lacquer(*words: str, input: str | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", *words], input=input)


def by_peft(run: Path, messages: list[dict[str, str]], *, adapted: bool) -> str:
    """What somebody gets who has the adapter, transformers and PEFT."""
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    model: Any = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    if adapted:
        model = PeftModel.from_pretrained(model, run / "adapter").eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(run / "adapter")
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        found = model.generate(**tokens, max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(found[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def test_an_answer_is_what_peft_and_the_chat_template_give(made: MakeRun) -> None:
    run = made("instruction")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "aaaa number 2?"}]
    found = set()
    for adapted in (True, False):
        words = ["--prompt", "aaaa number 2?", "--system", "Be brief.", *([] if adapted else ["--base"])]
        result = lacquer(str(run), *words)
        assert result.exit_code == 0, result.output
        assert result.stdout.strip() == by_peft(run, messages, adapted=adapted)
        found.add(result.stdout)
    assert len(found) == 2


def test_several_prompts_know_nothing_of_each_other(made: MakeRun) -> None:
    run = str(made("instruction"))
    alone = lacquer(run, "--prompt", "Second?").stdout.strip()
    both = lacquer(run, "--prompt", "First?", "--prompt", "Second?").stdout
    assert both.startswith("> First?\n")
    assert both.rstrip().endswith(f"> Second?\n{alone}".rstrip())


def test_answers_for_programs(made: MakeRun) -> None:
    run = str(made("instruction"))
    alone = lacquer(run, "--prompt", "Second?").stdout.removesuffix("\n")
    first, second = json.loads(lacquer(run, "--prompt", "First?", "--prompt", "Second?", "--json").stdout)
    assert first["prompt"] == "First?"
    assert second == {"prompt": "Second?", "answer": alone}
    refused = lacquer(run, "--json")
    assert refused.exit_code == 2
    assert "--json needs --prompt" in refused.stderr


def writer_of(run: Path, **options: Any) -> Writer:
    return Writer.of(read_finished(run), Decoding(**{"longest": 8, **options}), "", adapted=True)


def test_a_chat_keeps_its_turns_until_it_is_told_to_forget(made: MakeRun) -> None:
    run, shown = made("instruction"), list[str]()
    writer = writer_of(run)
    chat(writer, _lines("One?", "Two?"), shown.append)
    first, second = (turn["content"] for turn in writer.said if turn["role"] == "assistant")
    so_far = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": first}]
    assert first == by_peft(run, so_far[:1], adapted=True)
    assert second == by_peft(run, [*so_far, {"role": "user", "content": "Two?"}], adapted=True)
    assert "".join(shown).split() == f"{first} {second}".split()  # as it came, in pieces
    chat(writer, _lines("/reset", "One?", ""), shown.append)
    assert [turn["content"] for turn in writer.said] == ["One?", first]


def _lines(*texts: str) -> Callable[[], str | None]:
    remaining = list(texts)
    return lambda: remaining.pop(0) if remaining else None


def test_the_oldest_turns_give_way_and_a_question_too_long_is_refused_in_the_chat(made: MakeRun) -> None:
    writer, shown = writer_of(made("instruction")), list[str]()
    room = int(writer.model.config.max_position_embeddings)
    chat(writer, _lines(*["y" * (room // 3)] * 4), shown.append)
    assert len(writer.said) in (2, 4)
    chat(writer, _lines("y" * room, "Still?"), shown.append)
    assert "it needs at least 1 and" in "".join(shown)
    assert writer.said[-2]["content"] == "Still?"


def test_samples_follow_the_seed_and_no_two_answers_share_one(made: MakeRun) -> None:
    def answers(seed: int) -> list[str]:
        writer = writer_of(made("instruction"), temperature=1.0, seed=seed, longest=12)
        found = []
        for _ in range(2):
            found.append(writer.answer("?"))
            writer.reset()
        return found

    assert answers(1) == answers(1) != answers(2)
    assert len(set(answers(1))) == 2


def test_a_chat_reads_lines_where_there_is_no_terminal(made: MakeRun) -> None:
    result = lacquer(str(made("instruction")), input="One?\n/reset\nOne?\n")
    assert result.exit_code == 0
    first, second = result.stdout.split("\n")[:2]
    assert first == second


def test_a_text_goes_on_and_a_summary_is_asked_for_as_it_was_trained(made: MakeRun) -> None:
    from client.generation import summaries

    for task in ("causal-lm", "summarisation"):
        run = made(task)
        finished = read_finished(run)
        model, tokenizer = finished.language_model(), finished.tokenizer()
        if task == "summarisation":
            wanted = summaries(model, tokenizer, ["A long text."], Decoding(longest=8))[0]
        else:
            ids: Any = tokenizer("A long text.", add_special_tokens=False, return_tensors="pt")["input_ids"]
            ids = torch.cat([torch.tensor([[tokenizer.bos_token_id]]), ids], 1) if tokenizer.bos_token_id else ids
            found = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
            wanted = str(tokenizer.decode(found, skip_special_tokens=True)).strip()
        result = lacquer(str(run), "--prompt", "A long text.")
        assert result.stdout.strip() == wanted
        assert lacquer(str(run), "--prompt", "a", "--system", "b").exit_code == 2


def test_what_writes_nothing_is_refused(made: MakeRun, tmp_path: Path) -> None:
    classes = lacquer(str(made("classification")), "--prompt", "a")
    assert classes.exit_code == 2
    assert "it has 2 classes. Classify with `lacquer predict`; the card" in classes.stderr
    assert "no run folder" in lacquer(str(tmp_path), "--prompt", "a").stderr
    (tmp_path / "config.toml").write_text((made("instruction") / "config.toml").read_text())
    unfinished = lacquer(str(tmp_path), "--prompt", "a")
    assert unfinished.exit_code == 2
    assert "the run has not ended" in unfinished.stderr
