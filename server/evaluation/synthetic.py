"""Texts that a finished run's model writes, in a folder that may be given to others: synthetic text with a guarantee.

Whatever is computed of a private adapter and of public data has the adapter's guarantee (post-processing), however
many texts are written. The folder holds the texts, the run's guarantee, and a card as the hub has them for data sets.

A causal language model goes on from a first token, drawn from the public validation records. Answers and summaries
need prompts, which must be public: a file of them is given.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import DatasetCard, DatasetCardData
from jaxtyping import Integer

from client.generation import Decoding, continuations, text_of
from privacy import durable
from privacy.randomness.rng import simulation_generator
from server.evaluation.card import privacy_block
from server.evaluation.exported import proof_text
from server.evaluation.finished import FinishedRun
from server.run_folder.names import PRIVACY_FILE, STAMP_FILE

TEXTS_FILE = "texts.jsonl"
SETTINGS_FILE = "synthesis.json"
AT_ONCE = 256
"""Texts that are written before they are stored: what an interruption loses at most."""
FIRST_TOKENS = "first tokens of public records"
OF_THE_ADAPTER = "The texts are computed of the adapter and of public data alone, so this holds for any number of them."
NOT_TRUE = "What they say may be false, and they may repeat what the base model or public records hold."


@dataclass(frozen=True)
class Synthesis:
    """The settings by which a run's model writes synthetic texts.

    Attributes:
        count: number of texts, at least 1.
        longest: most tokens of a text, or of an answer to a prompt.
        temperature: above 0; 1 samples from the model as it is.
        top_p: the most probable mass that is sampled from.
        seed: of the samples.
        prompts: public texts that are asked or gone on from, in turn; empty: first tokens of the validation records.
    """

    count: int
    longest: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    prompts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"the number of texts must be at least 1, got {self.count}")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}: else a prompt has one answer")


def read_prompts(file: Path) -> tuple[str, ...]:
    """Read public prompts, one a line.

    Raises:
        ValueError: the file cannot be read, or is empty.
    """
    try:
        found = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read as text in UTF-8 ({error}); give one prompt a line") from error
    if not found:
        raise ValueError(f"{file} has no prompt; give one a line")
    return found


def synthesise(
    run: FinishedRun,
    synthesis: Synthesis,
    folder: Path,
    first_tokens: Integer[np.ndarray, " m"] | None = None,
    tell: Callable[[int], None] = lambda _: None,
) -> Path:
    """Write texts into a folder; one that an interruption has left unfinished is gone on with.

    The texts are the same whether or not they were interrupted. What describes them is written first.

    Args:
        first_tokens: of public records; one is drawn for each text. None where there are prompts.
        tell: is given the number of texts that are stored.

    Returns:
        the path of the texts, one JSON object a line, in the columns of the run's settings.

    Raises:
        ValueError: the run has trained a classifier, prompts are missing or too long, or the folder holds other things.
    """
    refuse_what_cannot_write(run, synthesis)
    settings = {"run": privacy_block(run.statement), "model": run.config.model.name, **asdict(synthesis)}
    written = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    file, noted = folder / TEXTS_FILE, folder / SETTINGS_FILE
    if noted.is_file() and noted.read_text(encoding="utf-8") != written:
        raise ValueError(f"{folder} holds texts of other settings ({noted.name} names them); give a new folder")
    if not noted.is_file():
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty; give a new folder: nothing is overwritten")
        folder.mkdir(parents=True, exist_ok=True)
        describe_texts(run, synthesis, folder)
        durable.write(noted, written)
    done = _keep_whole_parts(file, synthesis.count)
    tell(done)
    if done == synthesis.count:
        return file
    tokenizer, model = run.tokenizer(), run.language_model()
    with file.open("a", encoding="utf-8") as out:
        for start in range(done, synthesis.count, AT_ONCE):
            part = range(start, min(start + AT_ONCE, synthesis.count))
            rows = _part(run, (tokenizer, model), synthesis, first_tokens, part)
            out.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            out.flush()
            tell(part[-1] + 1)
    return file


def refuse_what_cannot_write(run: FinishedRun, synthesis: Synthesis) -> None:
    """Refuse a run that cannot write what is asked.

    Raises:
        ValueError: naming the reason and what helps.
    """
    if run.label_names:
        raise ValueError(
            f"{run.folder} has trained a classifier, which writes nothing; texts need model.task = 'causal-lm'"
        )
    if not synthesis.prompts and run.task != "causal-lm":
        raise ValueError(
            f"a run with model.task = {run.task!r} answers prompts, and has none; give public ones: --prompts FILE"
        )


def _keep_whole_parts(file: Path, count: int) -> int:
    """Cut off what an interruption left of a part; returns the number of texts that stay."""
    if not file.is_file():
        return 0
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    if len(lines) >= count and lines[-1].endswith("\n"):
        return count
    whole = (len(lines) - (not lines[-1].endswith("\n") if lines else 0)) // AT_ONCE * AT_ONCE
    durable.write(file, "".join(lines[:whole]))
    return whole


def _part(
    run: FinishedRun,
    made: tuple[Any, Any],
    synthesis: Synthesis,
    first_tokens: Integer[np.ndarray, " m"] | None,
    part: Sequence[int],
) -> list[dict[str, Any]]:
    """Write the texts with these numbers."""
    tokenizer, model = made
    draws = simulation_generator(synthesis.seed, "synthetic beginnings", part[0])
    seed = int(simulation_generator(synthesis.seed, "synthetic texts", part[0]).integers(2**31))
    if first_tokens is not None:
        asked = [""] * len(part)
        prompts = [[int(token)] for token in draws.choice(first_tokens, size=len(part))]
    else:
        from client.data import chat, tokenise

        asked = [synthesis.prompts[number % len(synthesis.prompts)] for number in part]
        if run.task == "instruction":
            turns = [[{"role": "user", "content": text}] for text in asked]
            prompts = [chat.prompt(tokenizer, each, tokenizer.chat_template) for each in turns]
        elif run.task == "summarisation":
            prompts = tokenise.prompts(asked, tokenizer, _room(model, synthesis))[0]
        else:
            prompts = [_beginning(tokenizer, text) for text in asked]
    goes_on = run.task == "causal-lm"
    new = max(1, synthesis.longest - (min(map(len, prompts)) if goes_on else 0))
    decoding = Decoding(new, synthesis.temperature, synthesis.top_p, seed)
    answers = continuations(model, tokenizer, prompts, decoding)
    texts = [
        text_of(tokenizer, [*prompt, *answer][: max(synthesis.longest, len(prompt) + 1)] if goes_on else answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return [_row(run, question, text) for question, text in zip(asked, texts, strict=True)]


def _room(model: Any, synthesis: Synthesis) -> int:
    from client.models.base import positions

    return positions(model) - synthesis.longest


def _beginning(tokenizer: Any, text: str) -> list[int]:
    """The tokens of the beginning of a text, without an end."""
    tokens: list[int] = tokenizer(text, split_special_tokens=True)["input_ids"]
    return tokens[:-1] if tokens and tokens[-1] == tokenizer.eos_token_id else tokens


def _row(run: FinishedRun, question: str, text: str) -> dict[str, Any]:
    """A text in the columns that the run's settings read."""
    data = run.config.data
    if run.task == "instruction":
        return {
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": text}],
        }
    if run.task == "summarisation":
        return {data.text_column: question, data.text_pair_column: text}
    return {data.text_column: text}


def describe_texts(run: FinishedRun, synthesis: Synthesis, folder: Path) -> None:
    """Write the guarantee, the card and, where the run has none, its stamp, into a folder of synthetic texts."""
    durable.write(folder / PRIVACY_FILE, json.dumps(dict(run.statement), indent=2) + "\n")
    for source in (run.folder / STAMP_FILE, run.adapter / STAMP_FILE):
        if source.is_file():
            shutil.copyfile(source, folder / STAMP_FILE)
    begun = f"{len(synthesis.prompts):,} public prompts, in turn" if synthesis.prompts else FIRST_TOKENS
    made = (
        f"{synthesis.count:,} texts that no person wrote, by the adapter of a run on {run.config.model.name}. They "
        f"begin with {begun}; sampled at temperature {synthesis.temperature:g}, top-p {synthesis.top_p:g}, seed "
        f"{synthesis.seed}."
    )
    write_card(folder, run.config.name, synthesis.count, run.statement, [made, OF_THE_ADAPTER, proof_text(run)])


def write_card(folder: Path, name: str, count: int, statement: Mapping[str, Any], said: Sequence[str]) -> None:
    """Write the card of a folder of synthetic texts, in the hub's form for data sets.

    Args:
        name: of the run, for the title.
        statement: the guarantee, as privacy.json has it.
        said: how they were made, why the guarantee holds for them, who can verify it: a paragraph each.
    """
    header = DatasetCardData(
        pretty_name=f"Synthetic texts of {name}",
        size_categories=_size(count),
        tags=["synthetic"] + (["differential-privacy"] if statement.get("not_private") is None else []),
        configs=[{"config_name": "default", "data_files": TEXTS_FILE}],
        privacy=privacy_block(statement),
    )
    made, *others = said
    lines = "\n\n".join([f"# Synthetic texts of {name}", made, statement["sentence"], *others, NOT_TRUE])
    card = DatasetCard(f"---\n{header.to_yaml()}\n---\n\n{lines}")
    durable.write(folder / "README.md", f"{card}\n")


def _size(count: int) -> str:
    """The hub's word for a number of rows, such as "1K<n<10K"."""
    names = ["n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M"]
    return names[min(len(names) - 1, max(0, len(str(count)) - 3))]
