"""Synthetic texts made by the model itself, and a set of them that evolves: PE-SGD's generators and its selection.

RANDOM: the model writes on from a public prompt. VARIATION: it rewrites a seed,

    "instruction"    prompt = instruction with {sample} and a {tone} filled in; the sample is what the model answers
    "continuation"   prompt = a leading share of the seed, drawn for each; the sample is that and its continuation

The first is the paper's and needs a model that follows instructions; the second works with any causal model and is what
a small one is given here. In continuation form a random sample keeps its prompt, which then is the opening of a text.

Next generation: K of the N samples are drawn without replacement with the coefficients' sizes |z_i| as scores, by
softmax(|z|) as in the published code or in proportion to |z| as in the paper; they stay, and each gets L - 1
variations.

Reference: Zou et al., PE-SGD, ICLR 2026; its private evolution is that of Xie et al. 2024 (Aug-PE).
Guarantee: none of its own: prompts are public, the model is made of releases, the scores are released.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from client.data.records import Records
from client.generation import Decoding, continuations
from client.models.lora import LoraSpec, merge_adapter
from privacy import checks
from privacy.randomness.rng import simulation_generator

FORMS = ("continuation", "instruction")
RULES = ("softmax", "proportional")

TONES = (
    "in a professional way",
    "in a concise manner",
    "in a formal style",
    "in a creative style",
    "in a storytelling tone",
    "with rich detail",
    "in plain words",
)


@dataclass(frozen=True)
class Synthesis:
    """The settings by which synthetic texts are made.

    Attributes:
        samples: N.
        variants: L, texts that come of one seed, itself included; K = N / L seeds.
        longest: most tokens of a text, the end-of-text token included.
        openings: public prompts of random samples, one drawn for each.
        form: of variations, one of :data:`FORMS`.
        instruction: of the instruction form, with ``{sample}`` and ``{tone}``.
        tones: public words for ``{tone}``.
        kept: least and largest share of a seed that a continuation keeps.
        rule: how seeds are drawn, one of :data:`RULES`.
    """

    samples: int
    longest: int
    openings: tuple[str, ...]
    variants: int = 2
    form: str = "continuation"
    instruction: str = "{sample}\nBased on the above sample, write another text of its kind {tone}:"
    tones: tuple[str, ...] = TONES
    kept: tuple[float, float] = (0.25, 0.75)
    rule: str = "softmax"
    temperature: float = 1.0
    token_budget: int = 16384

    def __post_init__(self) -> None:
        checks.integer_at_least(1, samples=self.samples, variants=self.variants, token_budget=self.token_budget)
        checks.integer_at_least(8, longest=self.longest)
        checks.one_of(FORMS, form=self.form)
        checks.one_of(RULES, rule=self.rule)
        checks.not_empty(openings=self.openings, tones=self.tones)
        checks.positive(temperature=self.temperature)
        checks.within(0.0, 1.0, least_kept=self.kept[0])
        checks.within(self.kept[0], 1.0, largest_kept=self.kept[1])
        if self.samples % self.variants:
            raise ValueError(f"samples must be a multiple of variants = {self.variants}, got {self.samples}")
        if "{sample}" not in self.instruction:
            raise ValueError(f"instruction must contain {{sample}}, got {self.instruction!r}")
        try:
            self.instruction.format(sample="", tone="")
        except (LookupError, ValueError) as error:
            raise ValueError(
                f"instruction must have no braces but those of {{sample}} and {{tone}}, got {self.instruction!r}; "
                "write {{ and }} for others"
            ) from error

    @property
    def seeds(self) -> int:
        """The number K of seeds."""
        return self.samples // self.variants


def draw_indices(scores: Float[Tensor, " n"], count: int, rule: str, generator: np.random.Generator) -> np.ndarray:
    """Indices of `count` samples drawn one after the other without replacement; scores that are not finite count as 0.

    Gumbel's trick: the largest of log weight + Gumbel noise are such a draw.
    """
    sizes = scores.double().abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).cpu().numpy()
    logarithms = sizes if rule == "softmax" else np.log(np.maximum(sizes, 1e-300))
    return np.sort(np.argsort(-(logarithms + generator.gumbel(size=len(sizes))), kind="stable")[:count])


@dataclass(frozen=True)
class Synthesiser:
    """A base model that writes with any adapter.

    Attributes:
        model: a plain causal model that no engine has taken over; it is not changed.
        spec: where its adapters are.
        device: where texts are written; the model itself stays where it is.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    spec: LoraSpec
    synthesis: Synthesis
    seed: int
    device: str | torch.device = "cpu"

    def initial(self, adapter: Float[Tensor, " size"]) -> Records:
        """D_0: K random samples and L - 1 variations of each."""
        synthesis, model = self.synthesis, self._with(adapter)
        first = self._written(model, self.prompts(synthesis.seeds), synthesis.form == "continuation", 0)
        return self._records(first + self._varied(model, first, 0))

    def prompts(self, count: int, step: int = 0) -> list[list[int]]:
        """The tokens of so many openings, drawn with replacement; the same again for the same step."""
        openings = self.synthesis.openings
        draws = simulation_generator(self.seed, "synthetic openings", *([step] if step else []))
        return [self._tokens(openings[i]) for i in draws.integers(len(openings), size=count)]

    def continue_prompts(self, prompts: list[list[int]], adapter: Float[Tensor, " size"], step: int) -> Records:
        """Write behind each prompt, which stays, by the model with `adapter`."""
        return self._records(self._written(self._with(adapter), prompts, True, step))

    def evolve_texts(
        self, samples: Records, scores: Float[Tensor, " n"], adapter: Float[Tensor, " size"], step: int
    ) -> Records:
        """The next generation: seeds by score, which stay, and their variations by the model with `adapter`."""
        synthesis = self.synthesis
        generator = simulation_generator(self.seed, "synthetic seeds", step)
        seeds = samples.select(draw_indices(scores, synthesis.seeds, synthesis.rule, generator))
        texts = [tokens[:-1].tolist() for tokens in np.split(seeds.tokens, seeds.offsets[1:-1])]
        return self._records(texts + self._varied(self._with(adapter), texts, step))

    def _with(self, adapter: Float[Tensor, " size"]) -> Any:
        return merge_adapter(self.model, self.spec, adapter).to(self.device)

    def _varied(self, model: Any, texts: list[list[int]], step: int) -> list[list[int]]:
        """L - 1 variations of every text."""
        synthesis = self.synthesis
        draws = simulation_generator(self.seed, "synthetic variations", step)
        prompts = []
        for text in texts * (synthesis.variants - 1):
            if synthesis.form == "continuation":
                share = draws.uniform(*synthesis.kept)
                prompts.append(text[: max(1, round(share * len(text)))])
            else:
                words = self.tokenizer.decode(text, skip_special_tokens=True)
                tone = synthesis.tones[draws.integers(len(synthesis.tones))]
                prompts.append(self._tokens(synthesis.instruction.format(sample=words, tone=tone)))
        return self._written(model, prompts, synthesis.form == "continuation", 1 + step) if prompts else []

    def _written(self, model: Any, prompts: list[list[int]], keep: bool, stream: int) -> list[list[int]]:
        """What the model writes behind each prompt, with the prompt where it is kept; never empty."""
        synthesis = self.synthesis
        room = synthesis.longest - 1 - (min(map(len, prompts)) if keep else 0)
        decoding = Decoding(
            max(1, room),
            synthesis.temperature,
            seed=int(simulation_generator(self.seed, "synthetic text", stream).integers(2**31)),
            token_budget=synthesis.token_budget,
        )
        written = continuations(model, self.tokenizer, prompts, decoding)
        texts = [[*prompt, *new] if keep else new for prompt, new in zip(prompts, written, strict=True)]
        return [text[: synthesis.longest - 1] or prompt for text, prompt in zip(texts, prompts, strict=True)]

    def _records(self, texts: Sequence[list[int]]) -> Records:
        """As prepared data has them: with the end-of-text token."""
        end = self.tokenizer.eos_token_id
        return Records.from_lists([[*text[: self.synthesis.longest - 1], end] for text in texts], None, None)

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text, split_special_tokens=True)["input_ids"]
        return tokens[:-1] if tokens and tokens[-1] == self.tokenizer.eos_token_id else tokens
