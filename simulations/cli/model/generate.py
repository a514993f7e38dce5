"""``lacquer generate``: what a run's adapter answers, to prompts or in a chat on the terminal."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulations.cli.exits import refusals
from simulations.cli.progress import say_working

if TYPE_CHECKING:
    from client.generation import Decoding
    from server.evaluation.finished import FinishedRun

RESET = "/reset"


def generate_command(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Answer this and end. Repeatable. Without it, a chat.")
    ] = None,
    system: Annotated[str, typer.Option(help="What a chat template puts before the conversation.")] = "",
    base: Annotated[bool, typer.Option("--base", help="The base model's answers, without the adapter.")] = False,
    tokens: Annotated[
        int, typer.Option(min=0, help="Most tokens of an answer; 0 takes what the run was evaluated with.")
    ] = 0,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the most probable token each time; above 0 samples.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Sample from the most probable tokens of this mass.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the samples.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs; needs --prompt.")] = False,
) -> None:
    """Answer prompts with a run's adapter, or chat with it on the terminal.

    In a chat an empty line or Ctrl-D ends, /reset forgets what was said.
    """
    with refusals(ValueError):
        if as_json and not prompt:
            raise ValueError("--json needs --prompt: a chat on the terminal is for people")
        with say_working("loading the model"):
            from server.evaluation.finished import read_finished

            run = read_finished(run_folder)
            refuse_what_writes_nothing(run, system)
            from client.generation import Decoding

            decoding = Decoding(longest=tokens or run.most_tokens, temperature=temperature, top_p=top_p, seed=seed)
            writer = Writer.of(run, decoding, system, adapted=not base)
        if not prompt:
            chat(writer, _asked, lambda text: typer.echo(text, nl=False))
            return
        answers = []
        for number, text in enumerate(prompt):
            if len(prompt) > 1 and not as_json:
                typer.echo(f"{chr(10) if number else ''}> {text}")
            with say_working("writing the answer"):
                answers.append({"prompt": text, "answer": writer.answer(text)})
            writer.reset()
            if not as_json:
                typer.echo(answers[-1]["answer"])
    if as_json:
        typer.echo(json.dumps(answers, indent=2))


def refuse_what_writes_nothing(run: "FinishedRun", system: str) -> None:
    """Refuse a classifier, and a system prompt where nothing is rendered.

    Raises:
        ValueError: as it says.
    """
    if run.label_names:
        raise ValueError(
            f"{run.folder} has trained a classifier, which writes nothing: it has {len(run.label_names)} classes. "
            f"Classify with `lacquer predict`; the card {run.adapter / 'README.md'} has the Python that classifies a "
            "text, and `lacquer export` makes a model of it that needs no Lacquer"
        )
    if system and run.task != "instruction":
        raise ValueError(f"--system is for conversations; this run has model.task = {run.task!r}, which has none")


@dataclass
class Writer:
    """A model in a conversation, with what was said to it.

    Attributes:
        said: turns of the conversation so far, without the system prompt; of other tasks always empty.
        answers: written so far; each has a seed of its own.
    """

    model: Any
    tokenizer: Any
    task: str
    decoding: "Decoding"
    system: str = ""
    said: list[dict[str, str]] = field(default_factory=list)
    answers: int = 0

    @staticmethod
    def of(run: "FinishedRun", decoding: "Decoding", system: str, *, adapted: bool) -> "Writer":
        """Make the writer of a finished run; without the adapter if not `adapted`."""
        return Writer(run.language_model(adapted=adapted), run.tokenizer(), run.task, decoding, system)

    def answer(self, text: str, write: Callable[[str], None] | None = None) -> str:
        """Answer `text`, continue it or summarise it, as the run's task is.

        Args:
            write: is given the pieces of the answer as they come.

        Raises:
            ValueError: the text leaves no room for an answer, or the chat template cannot render it.
        """
        from client.generation import continuations, text_of

        asked = [*self.said, {"role": "user", "content": text}]
        while len(prompt := self._tokens(asked)) > self._room and len(asked) > 1:
            asked = asked[2:]  # the oldest question with its answer
        streamer = None if write is None else _streamer(self.tokenizer, write)
        decoding = replace(self.decoding, seed=self.decoding.seed + self.answers)
        tokens = continuations(self.model, self.tokenizer, [prompt], decoding, streamer)[0]
        found = text_of(self.tokenizer, tokens)
        self.answers += 1
        if self.task == "instruction":
            self.said = [*asked, {"role": "assistant", "content": found}]
        return found

    def reset(self) -> None:
        """Forget what was said in the conversation."""
        self.said = []

    @property
    def _room(self) -> int:
        from client.models.base import positions

        return positions(self.model) - self.decoding.longest

    def _tokens(self, messages: list[dict[str, str]]) -> list[int]:
        from client.data import chat, tokenise

        if self.task == "instruction":
            first = [{"role": "system", "content": self.system}] if self.system else []
            return chat.prompt(self.tokenizer, [*first, *messages], self.tokenizer.chat_template)
        text = messages[-1]["content"]
        if self.task == "summarisation":
            return tokenise.prompts([text], self.tokenizer, self._room)[0][0]
        tokens: list[int] = self.tokenizer(text, split_special_tokens=True)["input_ids"]
        return tokens[:-1] if tokens and tokens[-1] == self.tokenizer.eos_token_id else tokens  # the text goes on


def chat(writer: Writer, asked: Callable[[], str | None], write: Callable[[str], None]) -> None:
    """Answer what is asked until it is empty or None; ``/reset`` forgets, a refusal is said and ends nothing."""
    while text := asked():
        if text == RESET:
            writer.reset()
            continue
        try:
            writer.answer(text, write)
        except ValueError as error:
            write(str(error))
        write("\n")


def _asked() -> str | None:
    """Read the next line; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _streamer(tokenizer: Any, write: Callable[[str], None]) -> Any:
    """Make a streamer that hands on the text of an answer, word by word."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            write(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
