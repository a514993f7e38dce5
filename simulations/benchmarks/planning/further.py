"""What comes after a first run: going on from its adapter, its best round, heads of one's own, texts by votes.

Run: `python -m simulations.benchmarks planning.further FOLDER`, where FOLDER holds ``shakespeare_roles`` and
``clinc150``. Two hours of one core; what is done is skipped. Asked before the runs, three seeds each:

    going on   the roles of Shakespeare's plays in two halves, by a hash of their names. Does the second half, at
               epsilon 4, end with a lower test loss from the adapter of the first half's run, also at epsilon 4, than
               from the base model? Each person is in one run, and pays once.
    best       the second half from the base model with a server rate ten times as large: what does
               ``evaluation.keep = "best"`` give on test records, beside the last round?
    heads      CLINC150, labels of clients skewed (Dirichlet 0.1), epsilon 4. 200 clients train on, on their own
               records, from the public start, which needs no privacy, from a run with one head for all, and from one
               with local heads; they are judged on test records of their own labels.
    votes      14,000 people vote with one utterance to an assistant each, at epsilon 4. The writer is
               lacquer-small after ten passes over 300 public utterances. lacquer-small itself is then trained on 1,000
               of its texts: without votes, of Aug-PE, of POPri; what perplexity do real test utterances have?
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import typer
from torch import Tensor

from client.data.prepare import prepare
from client.data.prepared import PreparedData
from client.data.records import Records
from client.data.sources import Texts
from client.data.tokenise import tokenise
from client.engine.engine import Engine, build_engine
from client.engine.local_training import LocalTraining
from client.models.base import load_base
from client.models.export import write_language_model
from client.models.lora import LoraSpec, adapter_layout, initial_adapter, merge_adapter
from client.models.tasks import make_task
from client.record_level.preferred_texts import TEXTS
from client.record_level.statistics import Source
from client.record_level.synthetic_texts import Synthesis
from client.worker import local_seed
from privacy.randomness.rng import simulation_generator
from server.config.load import parse, read, with_overrides
from server.config.schema import RunConfig
from server.evaluation import evolution
from server.evaluation.finished import FinishedRun, read_finished
from server.run_folder.names import RESULTS_FILE
from server.runs.assembly import data_spec
from server.runs.public_data import public_start
from simulations.benchmarks.harness.markdown import Columns, Row, grouped, mean_text, provenance, table
from simulations.benchmarks.harness.results import say, write
from simulations.engines.inprocess import run_inprocess
from simulations.presets.asked import Asked, count_clients
from simulations.presets.load import preset_files

ROLES: dict[str, Any] = {
    "rounds": 15, "clients": 0, "sampling-rate": 0.1, "privacy.epsilon": 4.0, "privacy.delta": 1e-4,
    "strategy.controller": "fixed", "strategy.controller-options": {"clip-norm": 0.3},
    "strategy.optimizer": "fedadam", "strategy.optimizer-options": {"learning-rate": 0.01},
    "strategy.aggregation": "ffa", "model.name": "lacquer-small", "model.task": "causal-lm",
    "model.targets": "q_proj,v_proj", "model.rank": 8, "model.layers": 2, "model.alpha": 16.0, "model.max-length": 48,
    "data.client-column": "client_id", "data.partition": "natural", "data.validation-records": 300,
    "data.test-records": 300, "local.optimizer": "sgd", "local.learning-rate": 0.3, "local.batch-size": 8,
    "local.max-steps": 2,
}  # fmt: skip
"""The recipe of docs/results/personal.md."""
FIRST, FROM_BASE = "first half, from the base model", "second half, from the base model"
LAST, BEST = "rate times ten, last round", "rate times ten, best round"
LARGE_RATE = {"strategy.optimizer-options": {"learning-rate": 0.1}}
HEADS: dict[str, Any] = {
    "data.dirichlet-alpha": 0.1, "public.warm-start-epochs": 10, "public.warm-start-factors": "both",
    "model.max-length": 32,
}  # fmt: skip
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "one head for all": {"strategy.aggregation": "ffa"},
    "local heads": {"strategy.aggregation": "local-heads", "strategy.aggregation-options": {"factors": "b"}},
}
OWN = LocalTraining(optimizer="adamw", learning_rate=0.005, batch_size=8, epochs=5)
CLIENTS, FURTHER = 200, 20
"""Clients that train on alone, and test records that judge each of them."""
TEXTS_ASKED, GENERATIONS, LONGEST = 1000, 4, 32
SPEC = LoraSpec(8, 16.0, ("q_proj", "v_proj"))
OPENINGS = ("Can you", "What is", "How do I", "I want to", "Please", "Tell me")
"""Public beginnings of what people say to an assistant."""


def main(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of the data sets.")],
    output: Annotated[Path, typer.Option(help="Where run folders go.")] = Path("runs/further"),
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 3,
    parts: Annotated[str, typer.Option(help="Of going-on, best, heads and votes, separated by commas.")] = "",
) -> None:
    """Run what is missing, note each row in OUTPUT/rows, then write simulations/benchmarks/results/further.json."""
    torch.set_num_threads(1)
    data, place = folder.resolve(), output.resolve()
    (place / "rows").mkdir(parents=True, exist_ok=True)
    ways = {"going-on": go_on, "best": keep_best, "heads": train_heads, "votes": vote}
    for part in parts.split(",") if parts else ways:
        for seed in range(seeds):
            note = place / "rows" / f"{part}-{seed}.json"
            if not note.is_file():
                note.write_text(
                    json.dumps([{"part": part, "seed": seed, **row} for row in ways[part](data, place, seed)])
                )
            say(note.read_text())
    rows = [row for note in sorted((place / "rows").glob("*.json")) for row in json.loads(note.read_text())]
    write("further", {"rows": rows, "clients": CLIENTS, "further_records": FURTHER, "texts": TEXTS_ASKED})


def finished(place: Path, base: str | None, settings: Mapping[str, Any]) -> FinishedRun:
    """One run in this folder, made now if it is not there."""
    if not (place / RESULTS_FILE).is_file():
        place.mkdir(parents=True)
        own = {"engine.kind": "inprocess", "engine.workers": 1}
        table = read(preset_files()[base]) if base else {}
        config = parse(with_overrides(table, {**settings, **own}))
        run_inprocess(count_clients(Asked(config)).run, place)
    return read_finished(place)


def go_on(data: Path, place: Path, seed: int) -> Iterator[dict[str, Any]]:
    """The second half of the roles, from the first half's adapter and without it."""
    first, second = (_half(data / "shakespeare_roles" / "all.parquet", place, number) for number in (0, 1))
    earlier = finished(place / f"first-{seed}", None, {**ROLES, "seed": seed, "data.source": f"parquet:{first}"})
    yield {"way": FIRST, **_measured(earlier)}
    later = {**ROLES, "seed": seed, "data.source": f"parquet:{second}"}
    for way, name, more in (
        (FROM_BASE, "alone", {}),
        ("second half, from the first half's adapter", "from", {"model.adapter": str(earlier.folder)}),
    ):
        yield {"way": way, **_measured(finished(place / f"{name}-{seed}", None, {**later, **more}))}


def keep_best(data: Path, place: Path, seed: int) -> Iterator[dict[str, Any]]:
    """The second half of the roles at a rate that is too large, its last round and its best."""
    second = _half(data / "shakespeare_roles" / "all.parquet", place, 1)
    run = {**ROLES, **LARGE_RATE, "seed": seed, "data.source": f"parquet:{second}"}
    for way, name in ((LAST, "last"), (BEST, "best")):
        yield {"way": way, **_measured(finished(place / f"{name}-{seed}", None, {**run, "evaluation.keep": name}))}


def _half(whole: Path, place: Path, number: int) -> Path:
    """Write the roles whose name has this last bit of its hash, once."""
    file = place / f"roles-{number}.parquet"
    if not file.is_file():
        table = pq.read_table(whole)
        names = table["client_id"].to_pylist()
        kept = [hashlib.sha256(str(name).encode()).digest()[-1] % 2 == number for name in names]
        pq.write_table(table.filter(pa.array(kept)), file)
    return file


def _measured(run: FinishedRun) -> dict[str, Any]:
    names = ("start_validation_loss", "validation_loss", "test_loss", "rounds_done", "seconds")
    return {**{name: run.results[name] for name in names}, "epsilon": run.statement["epsilon"]}


def train_heads(data: Path, place: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Accuracy of clients on further records of their labels, before and after they train on alone."""
    files = {f"data.{key}": f"parquet:{data / 'clinc150' / file}" for key, file in
             (("source", "train.parquet"), ("test-source", "test.parquet"))}  # fmt: skip
    for number, (way, more) in enumerate(AGGREGATIONS.items()):
        name = f"heads-{way.replace(' ', '-')}-{seed}"
        run = finished(place / name, "compare-clinc150", {**files, **HEADS, **more, "seed": seed})
        engine, adapter = run.engine()
        engine.train_factors("b")
        prepared = prepare(data_spec(run.config))
        if number == 0:
            start = public_start(run.folder)
            assert start is not None, "of a run with a warm start"
            yield {"way": "public start", "epsilon": 0.0, **_own_accuracy(engine, start, prepared, seed)}
        measured = _own_accuracy(engine, adapter, prepared, seed)
        yield {"way": way, "epsilon": run.statement["epsilon"], **measured}


def _own_accuracy(engine: Engine, adapter: Tensor, data: PreparedData, seed: int) -> dict[str, Any]:
    """Mean accuracy of clients on test records of their own labels, from an adapter and after training on alone."""
    draw = simulation_generator(seed, "further-records")
    assert data.test.labels is not None, "of a classification"
    of_label = np.asarray(data.test.labels)
    scores = list[tuple[float, float]]()
    for number in draw.choice(data.num_clients, size=CLIENTS, replace=False).tolist():
        own = data.client(number)
        labels = np.asarray(own.labels)
        found = [draw.choice(np.flatnonzero(of_label == label)) for label in draw.choice(labels, size=FURTHER)]
        further = data.test.select(np.array(found))
        change = engine.train_all(adapter, [own], OWN, [local_seed(seed, 0, number)])[0]
        values = engine.layout.trainable_values(adapter) + change.to(adapter)
        alone = engine.layout.with_trainable(adapter, values)
        scores.append((engine.evaluate(adapter, further).accuracy, engine.evaluate(alone, further).accuracy))
    before, after = np.array(scores).mean(axis=0).tolist()
    spread = float(np.array(scores)[:, 1].std(ddof=1) / np.sqrt(len(scores)))
    return {"before": before, "alone": after, "alone_error": spread}


def vote(data: Path, place: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Perplexity of test utterances under a model that was trained on synthetic ones, by each way to make them."""
    config = parse(with_overrides({}, {
        "clients": 14000, "model.name": str(_public_writer(data, place)), "model.targets": "q_proj,v_proj",
        "model.task": "causal-lm", "model.max-length": LONGEST,
        "data.source": f"parquet:{data / 'clinc150' / 'train.parquet'}", "data.text-column": "text", "seed": seed,
        "data.test-source": f"parquet:{data / 'clinc150' / 'test.parquet'}", "data.train-records": 14000,
        "data.partition": "iid", "data.validation-records": 100, "data.test-limit": 1000,
        "privacy.delta": 1e-6, "local.preference.beta": 0.1,
    }))  # fmt: skip
    test = pq.read_table(data / "clinc150" / "test.parquet")["text"].to_pylist()[:1000]
    synthesis = Synthesis(TEXTS_ASKED, LONGEST, OPENINGS, form="continuation")
    loss = _loss_after(_public(data), test, seed)
    yield {"way": "the 300 public utterances", "epsilon": 0.0, "test_loss": loss}
    writer = evolution.public_writer(config, synthesis)
    first = evolution.decoded_texts(writer.synthesiser.tokenizer, writer.first())
    loss = _loss_after(first, test, seed)
    yield {"way": "texts without votes", "epsilon": 0.0, "test_loss": loss, "examples": first[:5]}
    for method in evolution.WAYS:
        texts = _voted(config, synthesis, method, place / f"votes-{method}-{seed}")
        loss = _loss_after(texts, test, seed)
        yield {"way": method, "epsilon": 4.0, "test_loss": loss, "examples": texts[:5]}
    real = pq.read_table(data / "clinc150" / "train.parquet")["text"].to_pylist()
    chosen = simulation_generator(seed, "further-real").choice(len(real), size=TEXTS_ASKED, replace=False)
    loss = _loss_after([real[i] for i in chosen], test, seed)
    yield {"way": "as many private records, no guarantee", "epsilon": None, "test_loss": loss}


def _public(data: Path) -> list[str]:
    texts: list[str] = pq.read_table(data / "clinc150" / "validation.parquet")["text"].to_pylist()
    return texts[:: len(texts) // 300][:300]


def _public_writer(data: Path, place: Path) -> Path:
    """Write a model that public utterances have taught to write such, as a folder of transformers, once."""
    folder = place / "writer"
    if not folder.is_dir():
        _, vector = _trained(_public(data), 10, 0)
        model, tokenizer = load_base("lacquer-small", "causal-lm")
        write_language_model(merge_adapter(model, SPEC, vector), tokenizer, "causal-lm", folder)
    return folder


def _voted(config: RunConfig, synthesis: Synthesis, method: str, place: Path) -> list[str]:
    source = Source.of(prepare(data_spec(config)), config.privacy.unit, config.model.name)
    votes = synthesis.samples // TEXTS if method == "popri" else 1
    price = evolution.price_votes(
        source, config, 4.0, config.privacy.delta, samples=synthesis.samples, generations=GENERATIONS, votes=votes
    )
    writer = (
        evolution.preferring_writer(config, synthesis, price.noise)
        if method == "popri"
        else evolution.public_writer(config, synthesis)
    )
    place.mkdir(parents=True)
    embed = evolution.sentence_embedding()
    file = evolution.evolve(source, price, writer, embed, place, "text", config.model.name, tell=say)
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


def _loss_after(texts: list[str], test: list[str], seed: int) -> float:
    """Mean loss of a token of real test texts after lacquer-small was trained on texts."""
    engine, vector = _trained([text for text in texts if text.strip()], 5, seed)
    return float(engine.evaluate(vector, _records(test)).loss)


def _trained(texts: list[str], epochs: int, seed: int) -> tuple[Engine, Tensor]:
    model, _ = load_base("lacquer-small", "causal-lm")
    start = initial_adapter(adapter_layout(model, SPEC), model, seed)
    engine = build_engine(model, SPEC, make_task("causal-lm"), precision="fp32")
    local = LocalTraining(optimizer="adamw", learning_rate=0.005, batch_size=16, epochs=epochs)
    (change,) = engine.train_all(start, [_records(texts)], local, [seed])
    return engine, start + change


def _records(texts: list[str]) -> Records:
    return tokenise(Texts(texts), None, load_base("lacquer-small", "causal-lm")[1], "causal-lm", LONGEST).records


def going_on(results: Row) -> str:
    """One table: perplexities of the halves, and how much each run beats the second half's from the base model."""
    rows = [row for part in ("going-on", "best") for row in results["rows"] if row["part"] == part]
    alone = {row["seed"]: row["test_loss"] for row in rows if row["way"] == FROM_BASE}
    last = {row["seed"]: row["test_loss"] for row in rows if row["way"] == LAST}

    def lower(some: list[Row]) -> str:
        beside = last if some[0]["way"] == BEST else alone
        if some[0]["way"] in (FIRST, FROM_BASE, LAST):
            return ""
        return mean_text([beside[row["seed"]] - row["test_loss"] for row in some], 3)

    columns: Columns = {
        "run": lambda row: row["way"],
        "before round 1": lambda row: mean_text([math.exp(one["start_validation_loss"]) for one in row["rows"]], 1),
        "test perplexity": lambda row: mean_text([math.exp(one["test_loss"]) for one in row["rows"]], 1),
        "test loss lower by, nats": lambda row: lower(row["rows"]),
        "seeds": lambda row: str(len(row["rows"])),
    }
    return table(_ways(rows), columns) + provenance(results)


def own_heads(results: Row) -> str:
    """One table: accuracy of clients on further records, before and after they train on alone."""
    columns: Columns = {
        "from": lambda row: row["way"],
        "ε": lambda row: f"{row['rows'][0]['epsilon']:.2f}" if row["rows"][0]["epsilon"] else "none is needed",
        "accuracy": lambda row: mean_text([100 * one["before"] for one in row["rows"]]) + " %",
        "after training alone": lambda row: (
            f"{mean_text([100 * one['alone'] for one in row['rows']])} % "
            f"(one seed's clients: ± {196 * row['rows'][0]['alone_error']:.1f})"
        ),
        "seeds": lambda row: str(len(row["rows"])),
    }
    return table(_ways([row for row in results["rows"] if row["part"] == "heads"]), columns) + provenance(results)


def votes(results: Row) -> str:
    """One table: perplexity of real utterances after training on synthetic ones."""
    columns: Columns = {
        "trained on": lambda row: row["way"],
        "ε": lambda row: {None: "no guarantee", 0.0: "none is needed"}.get(row["rows"][0]["epsilon"], "4"),
        "test perplexity": lambda row: mean_text([math.exp(one["test_loss"]) for one in row["rows"]], 1),
        "one of the texts": lambda row: (
            " ".join(row["rows"][0]["examples"][0].split()) if row["rows"][0].get("examples") else ""
        ),
        "seeds": lambda row: str(len(row["rows"])),
    }
    return table(_ways([row for row in results["rows"] if row["part"] == "votes"]), columns) + provenance(results)


def _ways(rows: list[Row]) -> list[Row]:
    return [{"way": way, "rows": found} for way, found in grouped(rows, lambda row: str(row["way"])).items()]


if __name__ == "__main__":
    typer.run(main)
