"""Training of ``lacquer-small``: Llama with grouped-query attention and tied embeddings, from seeded random weights.

Run: `python -m simulations.benchmarks lacquer_small.train --data FOLDER --out FOLDER --minutes 100`.

Text: English novels (ELTeC-eng, 37 novels, public domain) and two thirds of the articles of WikiText-2's training split
(CC BY-SA 3.0; which third is left out and why: :mod:`client.data.catalog.corpora`), as two streams of tokens.

Tokenizer: byte-level BPE. Every digit is a token of its own, so that a number of six digits has six tokens and the
exposure of a secret number can be computed exactly over all numbers of that length. ``<unk>``, which WikiText-2 writes
for rare words, is one token.

Training: hidden matrices with Muon (Jordan et al. 2024, torch.optim.Muon with AdamW's update size, arXiv 2502.16982),
everything else with AdamW. The learning rate follows the wall clock: a linear warm-up over the first 2 % of the time
and a cosine to zero at its end, so a run of any length on any machine anneals fully.

``--ternary`` trains the finished ``lacquer-small`` on with the linear layers of BitNet b1.58 (Ma et al. 2024, arXiv
2402.17764): every weight but the embeddings is -1, 0 or 1 times one scale a matrix, activations have 8 bits, and
gradients pass both roundings straight. The folder loads as ``model.name = "FOLDER"``. The sweep
``records-diabetes-why`` compares it with its full-precision start; it is not part of the package.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow.parquet
import torch
import torch.nn.functional as F
import typer
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import AutoTokenizer, BitNetQuantConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from client.data.catalog import corpora
from client.models.files import LACQUER_SMALL_FOLDER
from privacy.randomness.rng import simulation_generator

NOVELS = "eltec_eng/train.parquet"
ARTICLES = "wikitext2/train.parquet"
EVALUATION = "wikitext2/validation.parquet"


def lines(folder: Path, name: str) -> list[str]:
    """The column ``text`` of a parquet file of `folder`."""
    rows: list[str] = pyarrow.parquet.read_table(folder / name, columns=["text"])["text"].to_pylist()
    return rows


def novels(folder: Path) -> list[str]:
    """Passages of whole paragraphs, about 1,500 characters each."""
    return [text for text in lines(folder, NOVELS) if text.strip()]


def encyclopedia(folder: Path) -> list[str]:
    """Whole articles of WikiText-2 that are not held back."""
    found = corpora.articles(lines(folder, ARTICLES))
    return [article.text for article in corpora.for_pretraining(found)]


@dataclass(frozen=True)
class Stream:
    """Documents as one array, ``<s>`` in front of each and ``</s>`` behind; `starts` are the beginnings of lines."""

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]

    @staticmethod
    def of(texts: Sequence[str], tokenizer: Any) -> "Stream":
        """Tokenise; a line start is the first token after a line break, or the first of a document."""
        begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        pieces: list[int] = []
        starts: list[int] = []
        for text in texts:
            pieces.append(begin)
            for line in text.splitlines(keepends=True):
                starts.append(len(pieces))
                pieces += tokenizer.backend_tokenizer.encode(line, add_special_tokens=False).ids
            pieces.append(end)
        return Stream(np.array(pieces, np.int32), np.array(starts, np.int64))

    def window(self, length: int, draws: np.random.Generator) -> NDArray[np.int64]:
        """``<s>`` and the `length - 1` tokens from a random place: the start of a line in every second window.

        Records of an experiment start with a line, the windows of an evaluation anywhere; the model meets both.
        """
        at = int(draws.integers(1, len(self.tokens) - length))
        if draws.random() < 0.5:
            at = int(self.starts[max(0, int(np.searchsorted(self.starts, at, side="right")) - 1)])
        at = min(at, len(self.tokens) - length)
        return np.concatenate([self.tokens[:1], self.tokens[at : at + length - 1]]).astype(np.int64)


SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def train_tokenizer(texts: Iterable[str], size: int, context: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` entries; ``<s>`` goes in front of every text, nothing behind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin, end = SPECIAL["bos_token"], SPECIAL["eos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A",
        pair=f"{begin} $A {end} $B",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (begin, end)],
    )
    make: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerFast = make(tokenizer_object=tokenizer, model_max_length=context, **SPECIAL)
    return fast


@dataclass(frozen=True)
class Recipe:
    """What is trained and how.

    Attributes:
        minutes: wall time of the training loop.
        steps: most steps; 0 leaves the end to the clock.
        width, layers, heads, groups, hidden, vocabulary, context: the architecture; `groups` key-value heads.
        windows: sequences of `context` tokens per step.
        articles: share of the sequences that come from the encyclopedia; the rest are novels.
        matrix_rate, other_rate: peak learning rates of Muon and of AdamW.
        seed: of the weights and of the windows.
        ternary: from the finished model on, with three values a weight.
    """

    minutes: float
    steps: int = 0
    width: int = 256
    layers: int = 4
    heads: int = 4
    groups: int = 2
    hidden: int = 704
    vocabulary: int = 4096
    context: int = 512
    windows: int = 8
    articles: float = 0.5
    matrix_rate: float = 3e-3
    other_rate: float = 3e-3
    weight_decay: float = 0.05
    warm_up: float = 0.02
    optimizer: str = "muon"
    seed: int = 0
    ternary: bool = False


def new_model(recipe: Recipe, tokenizer: Any) -> LlamaForCausalLM:
    """The untrained model; the global random state is left as it was."""
    config = LlamaConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.groups,
        intermediate_size=recipe.hidden,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return LlamaForCausalLM(config)


def ternary_model() -> LlamaForCausalLM:
    """The finished ``lacquer-small`` in float32 with BitNet's linear layers, to be trained on."""
    layers = BitNetQuantConfig(["lm_head"], linear_class="autobitlinear", quantization_mode="online")
    config: Any = LlamaConfig.from_pretrained(LACQUER_SMALL_FOLDER)
    config.quantization_config = layers.to_dict()
    load: Any = LlamaForCausalLM.from_pretrained
    model: LlamaForCausalLM = load(LACQUER_SMALL_FOLDER, config=config, dtype=torch.float32)
    model.train().requires_grad_(True)
    return model


def train(
    model: LlamaForCausalLM, articles: Stream, novels: Stream, recipe: Recipe, log: Path, save: Any, held: Tensor
) -> None:
    """Train in place until the time is over; a line of `log` every 20 steps, `save(model)` every ten minutes.

    `held` are windows of the validation text `[n, context]`, on which the loss is logged every 200 steps.
    """
    draws = simulation_generator(recipe.seed, "pretraining windows")
    optimizers = _optimizers(model, recipe)
    began = saved = time.monotonic()
    step, recent = 0, list[float]()
    with log.open("w") as file:
        while (progress := _progress(elapsed := time.monotonic() - began, step, recipe)) < 1:
            rate = schedule(progress, recipe.warm_up)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * group["peak"]
            loss = step_loss(model, _windows(articles, novels, recipe, draws))
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step, recent = step + 1, [*recent, float(loss.detach())]
            if step % 20 == 0 or _progress(time.monotonic() - began, step, recipe) >= 1:
                line: dict[str, float] = {
                    "step": step,
                    "seconds": round(elapsed, 1),
                    "tokens": step * recipe.windows * recipe.context,
                    "cpu_seconds": round(time.process_time(), 1),
                    "loss": round(float(np.mean(recent)), 4),
                    "rate": rate,
                }
                recent = []
                if step % 200 == 0:
                    with torch.no_grad():
                        parts = [float(step_loss(model, part)) for part in torch.split(held, recipe.windows)]
                    line["validation"] = round(float(np.mean(parts)), 4)
                file.write(json.dumps(line) + "\n")
                file.flush()
            if time.monotonic() - saved > 600:
                save(model)
                saved = time.monotonic()


def step_loss(model: Any, windows: Tensor) -> Tensor:
    """Mean cross-entropy of the next token; matrix products in bfloat16, the loss in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=windows, use_cache=False).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden)
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def schedule(progress: float, warm_up: float) -> float:
    """Share of the peak learning rate at `progress` in [0, 1]."""
    if progress < warm_up:
        return progress / warm_up
    return 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))


def _progress(seconds: float, step: int, recipe: Recipe) -> float:
    """Share of the time, or of the steps, that is over."""
    return max(seconds / (60 * recipe.minutes), step / recipe.steps if recipe.steps else 0.0)


def _windows(articles: Stream, novels: Stream, recipe: Recipe, draws: np.random.Generator) -> Tensor:
    rows = [
        (articles if draws.random() < recipe.articles else novels).window(recipe.context, draws)
        for _ in range(recipe.windows)
    ]
    return torch.from_numpy(np.stack(rows))


def _optimizers(model: nn.Module, recipe: Recipe) -> Sequence[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = recipe.optimizer == "muon"
    adam = torch.optim.AdamW(
        [{"params": others if muon else others + matrices, "peak": recipe.other_rate}],
        betas=(0.9, 0.98),
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    if not muon:
        return [adam]
    groups: Any = [{"params": matrices, "peak": recipe.matrix_rate}]
    return [torch.optim.Muon(groups, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"), adam]


def main(
    data: Annotated[Path, typer.Option(help="Folder that holds eltec_eng/ and wikitext2/.")],
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")],
    minutes: Annotated[float, typer.Option(help="Wall time of the training loop.")] = 100.0,
    optimizer: Annotated[str, typer.Option(help="muon or adamw")] = "muon",
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    steps: Annotated[int, typer.Option(help="Most steps; 0 leaves the end to the clock.")] = 0,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    ternary: Annotated[
        bool, typer.Option("--ternary", help="Train the finished model on with three values a weight.")
    ] = False,
) -> None:
    """Train on the CPU; the weights so far are saved every ten minutes."""
    torch.set_num_threads(threads)
    recipe = Recipe(
        minutes=minutes, steps=steps, optimizer=optimizer, matrix_rate=rate, other_rate=rate, ternary=ternary
    )
    out.mkdir(parents=True, exist_ok=True)
    texts, passages = encyclopedia(data), novels(data)
    if ternary:
        tokenizer = AutoTokenizer.from_pretrained(LACQUER_SMALL_FOLDER)
    else:
        tokenizer = train_tokenizer([*texts, *passages], recipe.vocabulary, recipe.context)
    tokenizer.save_pretrained(out)
    articles, prose = (Stream.of(part, tokenizer) for part in (texts, passages))
    held_out = corpora.articles(lines(data, EVALUATION))
    validation = Stream.of([article.text for article in held_out], tokenizer)
    rows = min(32, len(validation.tokens) // recipe.context)
    held = torch.from_numpy(validation.tokens[: rows * recipe.context].astype("int64")).view(rows, recipe.context)
    facts = {**asdict(recipe), "tokens_articles": len(articles.tokens), "tokens_novels": len(prose.tokens)}
    (out / "recipe.json").write_text(json.dumps(facts, indent=1))

    def save(model: Any) -> None:
        copy = type(model)(model.config)
        copy.load_state_dict(model.state_dict())
        copy.to(torch.bfloat16).save_pretrained(out / "new")
        for path in (out / "new").iterdir():
            os.replace(path, out / path.name)

    model = ternary_model() if ternary else new_model(recipe, tokenizer)
    train(model, articles, prose, recipe, out / "training.jsonl", save, held)
    save(model)


if __name__ == "__main__":
    typer.run(main)
