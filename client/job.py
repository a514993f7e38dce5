"""What a node must know to train, constant over the run: sent as canonical JSON, read once per process."""

import json
from dataclasses import asdict, dataclass

from client.lora import LoraSpec
from client.own_data import Reading
from client.training import LocalTraining


@dataclass(frozen=True)
class Job:
    """A run as its nodes see it.

    Attributes:
        model: name of the base model, see :func:`client.models.load_base`.
        task: one of :data:`client.tasks.TASKS`.
        num_labels: classes; 0 for a language model.
        balance: ``"none"`` or ``"prior"``, see :class:`client.tasks.SequenceClassification`.
        spec: adapters and heads.
        local: local training.
        data: folder of the prepared data set (simulation), see :func:`client.data.prepare`.
        seed: of the simulation randomness.
        sequential: train clients one by one with plain PEFT.
        precision: see :class:`client.cohort.CohortEngine`.
        token_budget: 0 takes the engine's default.
        prefix_cache_mb: memory for the prefix cache, 0 for none.
        reading: how nodes read records of their own (deployment); None where `data` holds everybody's.
        fingerprint: of the server's base model, see :func:`client.model_files.fingerprint`, for nodes with a copy of
            their own; empty in a simulation.
    """

    model: str
    task: str
    num_labels: int
    balance: str
    spec: LoraSpec
    local: LocalTraining
    data: str
    seed: int
    sequential: bool = False
    precision: str = "auto"
    token_budget: int = 0
    prefix_cache_mb: int = 0
    reading: Reading | None = None
    fingerprint: str = ""

    def to_json(self) -> str:
        """Canonical JSON: equal jobs give equal text."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "Job":
        """The inverse of :meth:`to_json`; ValueError for anything else."""
        try:
            values = json.loads(text)
            spec, local, reading = values.pop("spec"), values.pop("local"), values.pop("reading", None)
            for name in ("targets", "heads", "layers"):
                spec[name] = None if spec[name] is None else tuple(spec[name])
            local["betas"] = tuple(local["betas"])
            if reading is not None:
                reading = Reading(**{**reading, "labels": tuple(reading["labels"])})
            return Job(spec=LoraSpec(**spec), local=LocalTraining(**local), reading=reading, **values)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"job is not one of this version ({type(error).__name__}: {error})") from error
