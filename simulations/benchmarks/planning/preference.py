"""What clients teach about pairs of sentences on restaurants (E2E), each client protected: preset ``preference-e2e``.

Run: `python -m simulations.benchmarks planning.preference FOLDER`, where FOLDER holds ``e2e_nlg``.

The start is lacquer-small after three passes over 800 public sentences (E2E's validation split, whose pairs also
validate), a model that can write such sentences. From it runs of DPO at epsilon 8 and 4, and without noise, over seeds.
Measured on 300 test pairs that nothing is chosen by: how often the tuned model's reward is higher for the chosen
sentence (the start is at a half by definition), and how often its mean log-probability a token is, which the start has
too. Then a judge that is a fixed rule: both models write for the same meanings, without sampling. The text that states
more slots wins (:data:`STATED`), and of two that state as many the one with fewer words.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from client.data.catalog.restaurants import Slots, pairs, slots_of
from client.data.prepare import prepare
from client.data.sources import Texts
from client.data.tokenise import tokenise
from client.engine.engine import build_engine
from client.engine.local_training import LocalTraining
from client.generation import Decoding, continuations, text_of
from client.models.base import load_base
from client.models.export import write_language_model
from client.models.lora import LoraSpec, adapter_layout, initial_adapter, merge_adapter
from client.models.tasks import make_task
from privacy.randomness.rng import simulation_generator
from server.config.load import load
from server.evaluation.finished import FinishedRun, read_finished
from server.run_folder.names import RESULTS_FILE
from server.runs.assembly import data_spec
from simulations.benchmarks.harness.markdown import Columns, Row, grouped, mean_text, provenance, table
from simulations.benchmarks.harness.results import say, write
from simulations.engines.inprocess import run_inprocess
from simulations.presets.load import preset_files

WAYS: dict[str, dict[str, Any]] = {
    "without noise": {"privacy.noise": "insecure-zero", "privacy.non-private": True},
    "epsilon 8": {"privacy.epsilon": 8.0},
    "epsilon 4": {"privacy.epsilon": 4.0},
}
SENTENCES, PASSES, LONGEST = 800, 3, 48
MEANINGS = 60
"""Meanings of the test split that both models write for."""

STATED: dict[str, dict[str, str]] = {
    "area": {"riverside": "river", "city centre": r"cent(?:re|er)"},
    "priceRange": {
        "cheap": r"cheap|low(?:er)?[- ]pric|inexpensive", "moderate": r"moderate|average[- ]pric|mid",
        "high": r"high(?:er)?[- ]pric|expensive|high price", "less than £20": r"less than £?20|under £?20|below £?20",
        "£20-25": r"20\D{1,8}25", "more than £30": r"(?:more than|over|above) £?30|high",
    },
    "customer rating": {
        "1 out of 5": r"(?:1|one)(?: out of| star|/)", "3 out of 5": r"(?:3|three)(?: out of| star|/)",
        "5 out of 5": r"(?:5|five)(?: out of| star|/)", "low": r"low|poor|bad", "average": "average|decent",
        "high": r"high|excellent|great",
    },
}  # fmt: skip
"""Regular expressions that a text with this value of a slot matches; other values are to stand in it as they are."""
_FAMILY = re.compile(r"famil|child|kid")
_DENIED = re.compile(r"\b(?:not|no|non|isn't|adult)\b")


def states(slot: str, value: str, text: str) -> bool:
    """Whether a text says the value of a slot, by a fixed rule."""
    text = text.lower()
    if slot == "familyFriendly":
        spoken = _FAMILY.search(text)
        if spoken is None:
            return False
        return bool(_DENIED.search(text[max(0, spoken.start() - 25) :])) == (value == "no")
    return re.search(STATED.get(slot, {}).get(value) or re.escape(value.lower()), text) is not None


def coverage(slots: Slots, text: str) -> float:
    """Share of the slots whose values a text states."""
    return sum(states(slot, value, text) for slot, value in slots.items()) / len(slots)


def main(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of the data sets.")],
    output: Annotated[Path, typer.Option(help="Where run folders go.")] = Path("runs/preference"),
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 3,
    ways: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(WAYS),
) -> None:
    """Run what is missing, then write simulations/benchmarks/results/preference.json from the run folders."""
    torch.set_num_threads(1)
    data = folder.resolve() / "e2e_nlg"
    start = output.resolve() / "start"
    if not start.is_dir():
        make_start(data, start)
    rows, written = list[dict[str, Any]](), dict[str, list[str]]()
    meanings = list(dict.fromkeys(pairs(data, "test")["mr"].to_pylist()))[:: 630 // MEANINGS][:MEANINGS]
    for seed in range(seeds):
        for way in ways.split(","):
            place = output.resolve() / f"{way.replace(' ', '-')}-{seed}"
            run = finished(data, start, place, seed, WAYS[way])
            if not written:
                written["start"] = sentences(run, meanings, adapted=False)
                rows.append({"way": "start", **by_likelihood(run, adapted=False)})
            row = {name: run.results[name] for name in ("test_accuracy", "test_loss", "test_records", "seconds")}
            rows.append({"way": way, "seed": seed, **row, **by_likelihood(run, adapted=True)})
            rows[-1]["within"] = wilson(rows[-1]["test_accuracy"], rows[-1]["test_records"])
            if seed == 0:
                written[way] = sentences(run, meanings, adapted=True)
            say(json.dumps(rows[-1]))
    scores = {
        way: [(coverage(slots_of(mr), text), -len(text.split())) for mr, text in zip(meanings, texts, strict=True)]
        for way, texts in written.items()
    }
    judged = [{"way": way, **beside(found, scores["start"])} for way, found in scores.items()]
    examples = [{"mr": meanings[i], **{way: texts[i] for way, texts in written.items()}} for i in range(3)]
    write("preference", {"rows": rows, "judged": judged, "meanings": len(meanings), "examples": examples})


def make_start(data: Path, place: Path) -> None:
    """Write the public model that all runs start from, as a folder of transformers."""
    model, tokenizer = load_base("lacquer-small", "causal-lm")
    public = pairs(data, "validation").to_pylist()[:: 4672 // SENTENCES][:SENTENCES]
    texts = Texts([row["prompt"] + row["chosen"] for row in public])
    records = tokenise(texts, None, tokenizer, "causal-lm", 128).records
    spec = LoraSpec(16, 32.0, ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
    vector = initial_adapter(adapter_layout(model, spec), model, 0)
    local = LocalTraining(optimizer="adamw", learning_rate=0.003, batch_size=16, epochs=PASSES)
    engine = build_engine(load_base("lacquer-small", "causal-lm")[0], spec, make_task("causal-lm"), precision="fp32")
    (update,) = engine.train_all(vector, [records], local, [0])
    say(f"start: loss {float(engine.losses(vector + update, [records])[0]):.3f} on its own {len(records)} sentences")
    write_language_model(merge_adapter(model, spec, vector + update), tokenizer, "causal-lm", place)


def finished(data: Path, start: Path, place: Path, seed: int, how: dict[str, Any]) -> FinishedRun:
    """One run, made now if it is not there."""
    if not (place / RESULTS_FILE).is_file():
        parts = {"source": "brief-train", "validation-source": "brief-validation", "test-source": "brief-test"}
        sources = {f"data.{key}": f"e2e:{data}@{part}" for key, part in parts.items()}
        own = {"model.name": str(start), "seed": seed, "engine.kind": "inprocess", "engine.workers": 1}
        place.mkdir(parents=True)
        run_inprocess(load(preset_files()["preference-e2e"], {**sources, **own, **how}), place)
    return read_finished(place)


def by_likelihood(run: FinishedRun, *, adapted: bool) -> dict[str, float]:
    """How often the chosen sentence of a test pair has the higher mean log-probability a token."""
    engine, vector = replace(run, config=_simpo(run)).engine()
    test = prepare(data_spec(run.config)).test
    found = engine.evaluate(vector if adapted else torch.zeros_like(vector), test)
    return {"by_likelihood": found.accuracy, "by_likelihood_within": wilson(found.accuracy, found.count)}


def _simpo(run: FinishedRun) -> Any:
    local = run.config.local
    return run.config.replace(local=local.replace(preference=local.preference.replace(loss="simpo")))


def sentences(run: FinishedRun, meanings: Sequence[str], *, adapted: bool) -> list[str]:
    """The first line that a model writes for each meaning, the most probable token each time."""
    model, tokenizer = run.language_model(adapted=adapted), run.tokenizer()
    prompts = [list(row) for row in tokenizer([f"{mr}\n" for mr in meanings], split_special_tokens=True)["input_ids"]]
    prompts = [row[:-1] if row[-1] == tokenizer.eos_token_id else row for row in prompts]
    found = continuations(model, tokenizer, prompts, Decoding(longest=LONGEST))
    return [text_of(tokenizer, tokens).partition("\n")[0] for tokens in found]


def wilson(share: float, count: int) -> float:
    """Half the width of Wilson's 95 % interval, for pairs drawn from all there could be."""
    z = 1.96
    return z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))


def beside(found: Sequence[tuple[float, int]], start: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Mean coverage and words, and what a model wins against the start, a tie counting half; 95 % bootstrap.

    Args:
        found, start: of each meaning the coverage of the text, and less its number of words.
    """
    wins = np.array([(own > other) + 0.5 * (own == other) for own, other in zip(found, start, strict=True)])
    drawn = simulation_generator(0, "preference-bootstrap").integers(len(wins), size=(2000, len(wins)))
    low, high = np.quantile(wins[drawn].mean(axis=1), [0.025, 0.975]).tolist()
    covered, words = np.array(found).mean(axis=0).tolist()
    return {"coverage": covered, "words": -words, "wins": float(wins.mean()), "wins_from": low, "wins_to": high}


def accuracies(results: Row) -> str:
    """A row for the start and for each way of training; intervals are 95 %."""
    judged = {row["way"]: row for row in results["judged"]}
    columns: Columns = {
        "model": lambda row: row["way"].replace("epsilon", "ε ="),
        "reward prefers the chosen": lambda row: _share(row["rows"], "test_accuracy", "within"),
        "so does likelihood": lambda row: _share(row["rows"], "by_likelihood", "by_likelihood_within"),
        "seeds": lambda row: "" if row["way"] == "start" else str(len(row["rows"])),
        "slots stated": lambda row: f"{100 * judged[row['way']]['coverage']:.1f} %",
        "words": lambda row: f"{judged[row['way']]['words']:.1f}",
        "wins against the start": lambda row: "" if row["way"] == "start" else _wins(judged[row["way"]]),
    }
    found = [{"way": way, "rows": rows} for way, rows in grouped(results["rows"], lambda row: row["way"]).items()]
    return table(found, columns) + provenance(results)


def _share(rows: Sequence[Row], key: str, within: str) -> str:
    """A mean over seeds, and the interval of one seed's test pairs."""
    if key not in rows[0]:
        return "50 % by definition"
    return f"{mean_text([100 * row[key] for row in rows])} % (one seed's pairs: ± {100 * rows[0][within]:.1f})"


def _wins(row: Row) -> str:
    return f"{100 * row['wins']:.0f} % ({100 * row['wins_from']:.0f} to {100 * row['wins_to']:.0f})"


if __name__ == "__main__":
    typer.run(main)
