"""A finished run as its user has it: settings, results, guarantee, and the model that its adapter makes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privacy.errors import CorruptRun
from server.config.schema import RunConfig
from server.run_folder.names import ADAPTER_FOLDER, shell_quoted
from server.run_folder.verify import VerifiedRun, refusal_of_no_run, verify_run

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from client.engine.engine import Engine


class NotFinished(ValueError):
    """A folder without the adapter of a run that has ended."""


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended: its settings, results, guarantee and adapter.

    Attributes:
        folder: the run's.
        results: content of results.json.
        verified: the run's files, in agreement with each other.
    """

    folder: Path
    config: RunConfig
    results: Mapping[str, Any]
    verified: VerifiedRun

    @cached_property
    def statement(self) -> Mapping[str, Any]:
        """The guarantee of the run as its ledger gives it, in the form of privacy.json.

        Raises:
            CorruptRun: privacy.json says something else.
        """
        found = self.verified.statement()
        assert found is not None, "a run that has ended has a privacy.json"
        return found

    @property
    def adapter(self) -> Path:
        """The folder of the adapter, with PEFT's files."""
        return self.folder / ADAPTER_FOLDER

    @property
    def task(self) -> str:
        """The task that the adapter was trained for, as ``model.task`` names it."""
        return self.config.model.task

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the classes in the order of the outputs; empty for a language model."""
        return tuple(self.results["label_names"])

    @property
    def most_tokens(self) -> int:
        """The default for the most new tokens of an answer: what a record had room for."""
        return self.config.evaluation.rouge_tokens or self.config.model.max_length // 2

    @property
    def dtype(self) -> "torch.dtype":
        """The type of the weights that the run ended with."""
        import torch

        return torch.bfloat16 if self.config.engine.precision == "bf16-model" else torch.float32

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Load the base model's tokenizer, with the chat template of the run."""
        from client.data.chat import template_of
        from client.models.base import load_tokenizer

        tokenizer: Any = load_tokenizer(self.config.model.name)
        if self.task == "instruction" or (self.task == "preference" and self.config.model.chat_template):
            tokenizer.chat_template = template_of(tokenizer, self.config.model.chat_template)
        found: PreTrainedTokenizerBase = tokenizer
        return found

    def language_model(self, *, adapted: bool = True) -> Any:
        """Load the base model for evaluation, with the adapter on it unless `adapted` is False."""
        import torch
        from peft import PeftModel

        from client.models.base import load_base

        model: Any = load_base(self.config.model.name, self.task, dtype=self.dtype)[0]
        if adapted:
            model = PeftModel.from_pretrained(model, self.adapter).eval()
        return model.to("cuda" if torch.cuda.is_available() else "cpu")

    def engine(self) -> "tuple[Engine, torch.Tensor]":
        """Build an engine on the base model with the run's settings, and load the adapter.

        Returns:
            the engine, and the adapter as the full float32 vector that it takes.
        """
        import torch

        from client.engine.engine import build_engine
        from client.models.base import load_base
        from client.models.lora import adapter_layout, load_peft, read_spec
        from client.models.tasks import make_task

        labels, settings = len(self.label_names), self.config.engine
        model, _ = load_base(self.config.model.name, self.task, labels or None)
        spec = read_spec(self.adapter)
        vector = load_peft(self.adapter, adapter_layout(model, spec))
        engine = build_engine(
            model,
            spec,
            make_task(self.task, labels, **dict(self.config.local.preference)),
            sequential=settings.sequential,
            token_budget=settings.token_budget or None,
            precision=settings.precision,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )
        return engine, vector


def read_finished(folder: Path) -> FinishedRun:
    """Read and verify a run that has ended.

    Raises:
        NotFinished: the folder is no run's, or the run has not ended.
        ConfigError, CorruptRun: a file of it cannot be read.
    """
    if refusal := refusal_of_no_run(folder):
        raise NotFinished(refusal)
    run = verify_run(folder)
    if run.results is None or run.config is None:
        raise NotFinished(
            f"{folder} has no adapter: the run has not ended. Go on with it by `lacquer resume {shell_quoted(folder)}`"
        )
    if not (folder / ADAPTER_FOLDER / "adapter_config.json").is_file():
        file = folder / ADAPTER_FOLDER / "adapter_config.json"
        raise CorruptRun(f"{file} is missing, though the run has ended; restore it")
    return FinishedRun(folder, run.config, run.results, run)
