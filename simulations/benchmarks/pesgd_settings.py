"""Settings of the PE-SGD comparison: a file of numbers, read strictly."""

import tomllib
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from client.synthetic import Synthesis


@dataclass(frozen=True)
class Settings:
    """One comparison.

    Attributes:
        model: base model, see :mod:`client.models`.
        rank, alpha, targets: of the adapter.
        longest: tokens of a text, private, synthetic or of the test.
        private: private texts, M; each is a unit.
        test: texts the loss is reported on.
        samples, variants, openings, form, rule: of the synthetic texts, see :class:`client.synthetic.Synthesis`.
        instruction: what asks for a variation, in the instruction form, which needs one; the other has none.
        steps: T.
        batch: expected private texts in a step.
        epsilon, delta: the guarantee.
        directions: k of PDP-SGD and GEP.
        warm_start_epochs, warm_start_learning_rate: training on the first synthetic texts before step 1.
        rates: learning rates that are tried.
        evaluate_at: steps after which the test loss is noted, besides the last.
        token_budget: tokens of a micro-batch.
    """

    model: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    longest: int
    private: int
    test: int
    samples: int
    variants: int
    openings: tuple[str, ...]
    form: str
    rule: str
    steps: int
    batch: int
    epsilon: float
    delta: float
    directions: int
    warm_start_epochs: int
    warm_start_learning_rate: float
    rates: tuple[float, ...]
    evaluate_at: tuple[int, ...]
    token_budget: int
    instruction: str = ""

    def __post_init__(self) -> None:
        if (self.form == "instruction") != bool(self.instruction):
            raise ValueError(
                f"instruction must be set with form = 'instruction' and only there, got {self.instruction!r} with form "
                f"= {self.form!r}"
            )
        _ = self.synthesis

    @property
    def synthesis(self) -> Synthesis:
        """How the texts are made; ValueError for what cannot be."""
        return Synthesis(
            samples=self.samples,
            longest=self.longest,
            openings=self.openings,
            variants=self.variants,
            form=self.form,
            rule=self.rule,
            instruction=self.instruction or Synthesis.instruction,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, lists for tuples; without an instruction where there is none."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {name: value for name, value in values.items() if name != "instruction" or value}


def read_settings(path: Path) -> Settings:
    """Settings from a TOML file; ValueError for a name that is missing or unknown, or a value that cannot be."""
    table = {name.replace("-", "_"): value for name, value in tomllib.loads(path.read_text()).items()}
    names = {item.name for item in fields(Settings)}
    missing = {item.name for item in fields(Settings) if item.default is MISSING} - table.keys()
    if missing or table.keys() - names:
        raise ValueError(f"{path.name}: missing {sorted(missing)}, unknown {sorted(table.keys() - names)}")
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in table.items()}
    try:
        return Settings(**values)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
