"""Synthetic texts by votes of private units, which are all that is asked of them.

A public model writes N texts. In every generation each unit votes: each of its records for the text that lies nearest
by the cosine of sentence embeddings, a record's vote weighing one over the unit's records. The histogram of votes, one
row of length at most 1 a unit, is a Gaussian release of all units, charged before any noise is drawn. What is then made
of the released counts costs nothing more:

    aug-pe   texts with most votes stay and get variations by the model; counts below the threshold count as none
    popri    the model learns to prefer them (:mod:`client.record_level.preferred_texts`). A record votes once behind
             each of K prompts; its votes weigh 1/sqrt(K) each, so that its row is no longer than 1

Reference: Xie et al. 2024, Aug-PE (arXiv 2403.01749), Algorithm 1, without its look-ahead (a text is embedded as it is,
not as the mean of its variations), with seeds drawn without replacement in proportion to their counts.
Guarantee: that of the ledger, for adding or removing one unit. Beyond the votes, the texts are the public model's.
"""

import copy
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from client.data.records import MOST_AT_ONCE, Records
from client.engine.engine import build_engine
from client.generation import text_of
from client.models.files import hub_id
from client.models.lora import LoraSpec, adapter_layout, initial_adapter, save_peft
from client.models.targets import targets_of
from client.models.tasks import make_task
from client.record_level.preferred_texts import PreferringWriter
from client.record_level.statistics import Source
from client.record_level.synthetic_texts import Synthesis, Synthesiser
from privacy import durable
from privacy.accountants import floor_commitment
from privacy.clipping.norms import FlatClip
from privacy.clipping.units import Units
from privacy.commitment import Commitment
from privacy.contribution import Contribution, Plan, contribute
from privacy.events import Poisson
from privacy.ledger.debited import debited_ledger
from privacy.ledger.ledger import Ledger
from privacy.ledger.place import At
from privacy.ledger.statement import privacy_statement
from privacy.mechanism import charged_release
from privacy.randomness.sampling import CohortSampler
from server.config.schema import RunConfig
from server.evaluation.synthetic import TEXTS_FILE, write_card
from server.run_folder.names import ADAPTER_FOLDER, LEDGER_FILE, PRIVACY_FILE

EMBEDDING = "minilm"
MOST_TOKENS = 128
"""Tokens of a text that its embedding sees."""
BATCH_TOKENS = 8192
LABEL = "votes"
OF_VOTES = (
    "The texts are computed of the public model and of noisy counts of votes; the ledger beside them has every charge."
)

WAYS = {
    "aug-pe": ("varied", "Private Evolution, arXiv 2403.01749"),
    "popri": ("tuned", "POPri, arXiv 2504.16438"),
}
"""What is made of the votes: in a word, and by whom."""

Embed = Callable[[Sequence[str]], Float[Tensor, "texts size"]]


@dataclass(frozen=True)
class Evolution:
    """The votes that are asked for, and their price.

    Attributes:
        commitment: all generations.
        noise_multiplier: z of every histogram.
        samples: N.
        generations: histograms that are released, at least 1.
        threshold: noisy counts below it count as none; in units.
        votes: texts that each record votes for; every vote weighs one over the root of it.
    """

    commitment: Commitment
    noise_multiplier: float
    samples: int
    generations: int
    threshold: float
    votes: int = 1

    @property
    def noise(self) -> float:
        """The standard deviation of a released count, in units."""
        return self.noise_multiplier * math.sqrt(self.votes)

    @property
    def plan(self) -> Plan:
        """One release: the mean of rows of votes, none longer than 1."""
        return Plan(FlatClip(1.0, self.samples), self.noise_multiplier)

    @property
    def price(self) -> str:
        """The price in words, before anything is spent."""
        one = self.commitment
        return (
            f"This costs epsilon {one.epsilon:g} at delta {one.delta:g} for each of {one.population:,} "
            f"{one.unit.removeprefix('group:')}s, added to whatever else is done with these data. A count of votes is "
            f"then known to +-{1.96 * self.noise:.2g} {one.unit.removeprefix('group:')}s (95 %), where a "
            f"text has {one.population * self.votes / self.samples:.3g} on average."
        )


def price_votes(
    source: Source, config: RunConfig, epsilon: float, delta: float, *, samples: int, generations: int, votes: int = 1
) -> Evolution:
    """Calibrate the noise of every histogram to a target; nothing is spent.

    The threshold is two standard deviations of the noise; with several votes 0.

    Raises:
        ValueError: numbers that are too small, or a target that no noise keeps.
    """
    if generations < 1:
        raise ValueError(f"generations must be at least 1, got {generations}")
    everyone = Poisson(1.0, len(source), config.unit)
    commitment, z = floor_commitment(epsilon, delta, everyone, generations, label=LABEL)
    return Evolution(commitment, z, samples, generations, 2 * z if votes == 1 else 0.0, votes)


class Writer(Protocol):
    """The interface of what writes texts, and makes better ones of released counts."""

    @property
    def synthesiser(self) -> Synthesiser: ...
    def first(self) -> Records: ...
    def nearest_texts(
        self, records: Float[Tensor, "n size"], texts: Float[Tensor, "samples size"]
    ) -> Int64[np.ndarray, "n votes"]: ...
    def after(self, texts: Records, counts: Float[Tensor, " samples"], step: int) -> Records: ...


@dataclass(frozen=True)
class VaryingWriter:
    """Aug-PE's: the public model writes, and varies what has votes.

    Attributes:
        adapter: of the model that writes; zeros are the public model itself.
    """

    synthesiser: Synthesiser
    adapter: Float[Tensor, " size"]

    def first(self) -> Records:
        """Texts of the model, and variations of them."""
        return self.synthesiser.initial(self.adapter)

    def nearest_texts(
        self, records: Float[Tensor, "n size"], texts: Float[Tensor, "samples size"]
    ) -> Int64[np.ndarray, "n 1"]:
        """The text nearest to each record."""
        return nearest(records, texts)[:, None]

    def after(self, texts: Records, counts: Float[Tensor, " samples"], step: int) -> Records:
        """Texts in proportion to their votes, and variations of them."""
        return self.synthesiser.evolve_texts(texts, counts, self.adapter, step)


def evolve(
    source: Source,
    evolution: Evolution,
    writer: Writer,
    embed: Embed,
    folder: Path,
    column: str,
    name: str,
    account: At | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write the last generation of texts into a folder, with the ledger of the votes and the guarantee.

    The texts of every generation are written as soon as they are there, so an end on the way leaves the last of them;
    its folder is not gone on with.

    Args:
        embed: unit vectors of texts.
        column: name of the texts in the file.
        name: of the public model.
        account: of the data, debited first.
        tell: is given what is done next.

    Returns:
        the path of the texts, a JSON object a line.

    Raises:
        FileExistsError: there is a ledger; nothing is spent twice.
        AccountRefused: the account does not pay.
    """
    tokenizer = writer.synthesiser.tokenizer
    tell(f"writing the first {evolution.samples:,} texts")
    texts = writer.first()
    tell(f"embedding {len(source.records):,} records")
    private = embed(decoded_texts(tokenizer, source.records))
    paid = evolution.commitment
    with debited_ledger(None, lambda: Ledger.create(folder / LEDGER_FILE, paid), account, paid) as ledger:
        durable.write(folder / PRIVACY_FILE, json.dumps(privacy_statement(ledger), indent=2) + "\n")
        _write(folder / TEXTS_FILE, tokenizer, texts, column)
        for step in range(1, evolution.generations + 1):
            tell(f"generation {step} of {evolution.generations}")
            chosen = writer.nearest_texts(private, embed(decoded_texts(tokenizer, texts)))
            texts = writer.after(texts, _released(source, evolution, chosen, ledger, step - 1), step)
            _write(folder / TEXTS_FILE, tokenizer, texts, column)
        statement = privacy_statement(ledger)
        durable.write(folder / PRIVACY_FILE, json.dumps(statement, indent=2) + "\n")
    if isinstance(writer, PreferringWriter):  # it writes more of them at no further price
        place, spec = folder / ADAPTER_FOLDER, writer.synthesiser.spec
        save_peft(place, writer.adapter, writer.engine.layout, spec, base=hub_id(name))
        shutil.copyfile(folder / PRIVACY_FILE, place / PRIVACY_FILE)  # beside it, or it would pass for a public one
    unit = paid.unit.removeprefix("group:")
    way, paper = WAYS["aug-pe" if evolution.votes == 1 else "popri"]
    made = (
        f"{evolution.samples:,} texts that no person wrote, by {name}, a public model, {way} in "
        f"{evolution.generations} generations by votes of private {unit}s ({paper})."
    )
    write_card(folder, name, evolution.samples, statement, [made, OF_VOTES])
    return folder / TEXTS_FILE


def public_writer(config: RunConfig, synthesis: Synthesis) -> VaryingWriter:
    """Load the base model of a run's settings as a writer by Aug-PE.

    Raises:
        ConfigError, ValueError: the model cannot be loaded, or writes nothing.
    """
    spec, synthesiser = _synthesiser(config, synthesis, 1)  # any adapter: it adds nothing
    return VaryingWriter(synthesiser, torch.zeros(adapter_layout(synthesiser.model, spec).size))


def preferring_writer(config: RunConfig, synthesis: Synthesis, noise: float) -> PreferringWriter:
    """Load the base model of a run's settings as a writer by POPri.

    Args:
        noise: standard deviation of a released count, in units.

    Raises:
        ConfigError, ValueError: the model cannot be loaded, or writes nothing.
    """
    spec, synthesiser = _synthesiser(config, synthesis, config.model.rank)
    start = initial_adapter(adapter_layout(synthesiser.model, spec), synthesiser.model, config.seed)
    task = make_task("preference", beta=config.local.preference.beta)
    engine = build_engine(copy.deepcopy(synthesiser.model), spec, task, device=synthesiser.device)
    return PreferringWriter(synthesiser, engine, start, noise)


def _synthesiser(config: RunConfig, synthesis: Synthesis, rank: int) -> tuple[LoraSpec, Synthesiser]:
    model, tokenizer = config.engine.load_rounded(config.model.name, "causal-lm")
    spec = LoraSpec(rank, config.model.alpha, targets_of(model, "auto"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = replace(synthesis, rule="proportional")  # counts are hundreds: their softmax would be the most voted alone
    return spec, Synthesiser(model, tokenizer, spec, chosen, config.seed, device)


def nearest(records: Float[Tensor, "n size"], texts: Float[Tensor, "samples size"]) -> np.ndarray:
    """The index of the text nearest to each record, by the cosine of unit vectors."""
    found = [(part @ texts.T).argmax(dim=1) for part in torch.split(records, MOST_AT_ONCE)]
    return torch.cat(found).cpu().numpy()


def vote_rows(source: Source, chosen: np.ndarray, units: range, samples: int) -> np.ndarray:
    """The votes of some units, a row each, no longer than 1: the mean of its records' rows, 0 where it has none.

    Args:
        chosen: the texts that each record votes for, ``[n, votes]``, different ones.
    """
    rows = np.zeros((len(units), samples))
    for row, unit in zip(rows, units, strict=True):
        own = chosen[source.order[source.starts[unit] : source.stops[unit]]]
        row += np.bincount(own.ravel(), minlength=samples) / (max(len(own), 1) * math.sqrt(chosen.shape[1]))
    return rows


def _released(
    source: Source, evolution: Evolution, chosen: np.ndarray, ledger: Ledger, number: int
) -> Float[Tensor, " samples"]:
    """Charge for one histogram and release it: noisy counts of units, 0 below the threshold."""
    plan, total = evolution.plan, Contribution.zero(evolution.plan)
    for start in range(0, len(source), MOST_AT_ONCE):
        units = range(start, min(start + MOST_AT_ONCE, len(source)))
        rows = vote_rows(source, chosen, units, evolution.samples)
        total = total + contribute(Units(torch.from_numpy(rows)), plan)
    sampling = evolution.commitment.floor[0].sampling
    sampler = CohortSampler.create()
    cohort = sampler.draw(sampling, number, label=LABEL)
    whole = len(source) * math.sqrt(evolution.votes)
    counts = charged_release(total, plan, cohort, ledger=ledger).update.double() * whole
    return torch.where(counts < evolution.threshold, 0.0, counts)


def decoded_texts(tokenizer: Any, records: Records) -> list[str]:
    """The texts of records, by the tokenizer that made them."""
    return [text_of(tokenizer, row.tolist()) for row in np.split(np.asarray(records.tokens), records.offsets[1:-1])]


def _write(file: Path, tokenizer: Any, texts: Records, column: str) -> None:
    rows = ({column: text} for text in decoded_texts(tokenizer, texts))
    durable.write(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def sentence_embedding() -> Embed:
    """Load the public encoder that embeds texts: the mean over the tokens of MiniLM, at length 1."""
    from client.models.base import load_base

    model, tokenizer = load_base(EMBEDDING, "classification", 2)
    encoder: Any = model.encoder
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoder.to(device)

    def embed(texts: Sequence[str]) -> Tensor:
        rows = tokenizer(list(texts), truncation=True, max_length=MOST_TOKENS, split_special_tokens=True)["input_ids"]
        order = np.argsort([len(row) for row in rows], kind="stable")
        found = torch.zeros(len(rows), encoder.config.hidden_size)
        start = 0
        while start < len(order):
            size = max(1, BATCH_TOKENS // max(1, len(rows[order[min(len(order) - 1, start + 255)]])))
            part = order[start : start + min(size, 256)]
            batch = tokenizer.pad({"input_ids": [rows[i] for i in part]}, return_tensors="pt").to(device)
            with torch.no_grad():
                hidden = encoder(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None].to(hidden.dtype)
            mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
            found[torch.from_numpy(part)] = F.normalize(mean, dim=1).cpu().float()
            start += len(part)
        return found

    return embed
