"""What synthetic texts of a private run are worth: a model trained on them alone, beside the private model itself.

Run: `python -m simulations.benchmarks planning.synthetic RUN`, RUN a finished run of a causal language model with a
public start, such as `runs/sweeps/worth/ladder/private/seed=100/attempt-1`. About 20 minutes of one core.

The private adapter writes COUNT texts; the base model is then trained on them, all in one place and without noise,
which costs no further privacy. Beside it: the same from the texts of the public start, which needs no privacy, and from
as many private records themselves, which guarantees nothing. All adapters are judged on the run's test set. Near-copies
of private texts among the synthetic ones are counted against those of test texts.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from client.data.prepare import prepare
from client.data.records import Records
from client.engine.engine import Engine
from client.engine.local_training import LocalTraining
from client.models.base import load_base
from client.models.lora import merge_adapter
from client.worker import make_engine
from privacy.errors import CorruptRun
from server.config.methods import methods
from server.evaluation.finished import FinishedRun, read_finished
from server.evaluation.synthetic import Synthesis, synthesise
from server.runs.assembly import data_spec, make_assembly
from server.runs.public_data import public_first_tokens, public_start, train_without_noise
from simulations.audit.near_copies import near_copies, read_texts
from simulations.benchmarks.harness.markdown import NOT_MEASURED, markdown, provenance
from simulations.benchmarks.harness.results import say, write

NAMES = {
    "base": "base model",
    "public": "public records alone",
    "texts of the public start": "synthetic texts of the public start",
    "private": "the private model itself",
    "texts of the private run": "synthetic texts of the private model",
    "private records": "as many private records, without a guarantee",
}


@dataclass(frozen=True)
class _PublicStart(FinishedRun):
    """A run whose model is what it was before any private record: it writes what needs no privacy."""

    def language_model(self, *, adapted: bool = True) -> Any:
        """Load the base model with the public start in its weights."""
        assembly = make_assembly(self.config, methods(self.config), prepare(data_spec(self.config)))
        model, _ = load_base(self.config.model.name, self.task, dtype=self.dtype)
        return merge_adapter(model, assembly.spec, _start(self)).eval() if adapted else model


def main(
    run_folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A finished run.")],
    count: Annotated[int, typer.Option(min=1, help="Synthetic texts.")] = 2000,
    epochs: Annotated[int, typer.Option(min=1, help="Of the training on them.")] = 5,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 0.005,
    output: Annotated[Path, typer.Option(help="Where the texts go.")] = Path("runs/synthetic"),
) -> None:
    """Write texts, train on them, and write results/synthetic.json."""
    torch.set_num_threads(1)
    run = read_finished(run_folder)
    config, data = run.config, prepare(data_spec(run.config))
    assembly = make_assembly(config, methods(config), data)
    engine = make_engine(assembly.job)
    engine.train_factors("both")
    local = LocalTraining(
        optimizer="adamw", learning_rate=learning_rate, batch_size=config.public.warm_start_batch_size, epochs=epochs
    )
    rows, found = dict[str, Any](), dict[str, Any]()

    def judge(name: str, adapter: Tensor) -> None:
        rows[name] = {"test_loss": engine.evaluate(adapter, data.test).loss}
        say(name, rows[name])

    def train(name: str, records: Records) -> None:
        judge(name, train_without_noise(engine, assembly.start, records, local, config.seed))

    judge("base", assembly.start)
    judge("public", _start(run))
    own, private = run.engine()
    rows["private"] = {"test_loss": own.evaluate(private, data.test).loss}
    say("private", rows["private"])
    asked, begin = Synthesis(count, config.model.max_length, seed=config.seed), public_first_tokens(run.config)
    for name, writer in (("public start", _PublicStart(**vars(run))), ("private run", run)):
        folder = output / name.replace(" ", "-")
        file = synthesise(writer, asked, folder, begin, say)
        texts = read_texts(run, file)
        train(f"texts of the {name}", _records(engine, run, texts))
        found[name] = asdict(near_copies(run, texts))
    chosen = np.random.default_rng(config.seed).choice(len(data.train), size=min(count, len(data.train)), replace=False)
    train("private records", data.train.select(np.sort(chosen)))
    guarantee = {name: run.statement[name] for name in ("epsilon", "delta", "unit", "sentence")}
    settings = {"count": count, "epochs": epochs, "learning_rate": learning_rate, "seed": config.seed}
    source = {"model": config.model.name, "data": Path(config.data.source).name, "test_records": len(data.test)}
    write("synthetic", {**settings, **source, "guarantee": guarantee, "rows": rows, "near_copies": found})


def _start(run: FinishedRun) -> Tensor:
    found = public_start(run.folder)
    if found is None:
        raise CorruptRun(f"{run.folder} has no public start; give a run with public.warm-start-epochs above 0")
    return found


def _records(engine: Engine, run: FinishedRun, texts: list[str]) -> Records:
    """Texts as prepared data has them, with the end-of-text token."""
    tokenizer, most = run.tokenizer(), run.config.model.max_length
    rows = [_with_end(list(tokenizer(text)["input_ids"]), tokenizer.eos_token_id, most) for text in texts]
    return Records.from_lists([row for row in rows if len(row) > 1])


def _with_end(tokens: list[int], end: int, most: int) -> list[int]:
    return tokens[:most] if tokens[-1:] == [end] else [*tokens[: most - 1], end]


def perplexities(results: dict[str, Any]) -> str:
    """One table: test perplexity of every adapter, and near-copies where texts are synthetic."""
    if not results.get("rows"):
        return NOT_MEASURED
    header = ("trained on", "test perplexity", "texts with 8 words in a row of a private text", "of an unseen text")
    lines = []
    for name, words in NAMES.items():
        near = results["near_copies"].get(name.removeprefix("texts of the "), {})
        shares = [f"{near[kind] / near['texts']:.2%}" if near else "" for kind in ("private", "unseen")]
        lines.append((words, f"{np.exp(results['rows'][name]['test_loss']):.2f}", *shares))
    return markdown(header, lines, "lrrr") + provenance(results)


if __name__ == "__main__":
    typer.run(main)
