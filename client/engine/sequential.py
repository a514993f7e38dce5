"""Plain PEFT: the oracle of the cohort engine, and the way for adapters that it cannot stack.

`SequentialEngine` trains one client after the other: same interface and same numbers as
`client.engine.cohort.CohortEngine`. The adapter of each client is copied in place into one resident PEFT model; nothing
is rebuilt.

`OpacusEngine` takes the gradients of single records from that model by hooks. ``opacus.GradSampleModule`` (Yousefpour
et al. 2021, arXiv 2109.12298v4) keeps the input of every trained layer and makes the gradient of each record from it
and the gradient of the layer's output, in one backward pass over a whole micro-batch. It knows every adapter that is
made of linear layers, stacked by our engine or not, and is the slower and larger of the two ways:
`docs/results/engine.md` has the numbers. What it computes is the same, tested against it.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from peft import get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn

from client.data.records import Records
from client.engine.batching import Pool, local_steps, micro_batches
from client.engine.cohort import RecordGradients
from client.engine.local_training import ADAM_BETAS, ADAM_EPS, LocalTraining
from client.engine.references import References
from client.engine.slots import Updates
from client.engine.stacked_model import UnsupportedAdapter
from client.models.base import positions
from client.models.frozen.bitnet import is_ternary
from client.models.lm_head import Predictions, run
from client.models.lora import LoraSpec, matches, peft_config
from client.models.tasks import Metrics, Preference, Task
from privacy import checks
from strategies.adapter.layout import PEFT_PREFIX, AdapterLayout, Entry
from strategies.adapter.residual import check_residual, pairs

if TYPE_CHECKING:
    from opacus import GradSampleModule


class SequentialEngine:
    """PEFT on `model`, which it takes over. Knows DoRA, trained biases, embedding adapters and adapter dropout.

    Dropout needs PEFT's training mode and torch's global generator, so it is refused: results would not be repeatable.

    Attributes:
        model: the PEFT model.
        trained: its trained parameters, in the order of the layout.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: LoraSpec,
        task: Task,
        *,
        token_budget: int = 2048,
        precision: str = "fp32",
        device: str | torch.device = "cpu",
    ) -> None:
        if spec.dropout:
            raise ValueError(f"dropout must be 0, got {spec.dropout}: its masks would make results unrepeatable")
        if precision not in ("auto", "fp32", "fp64"):
            raise ValueError(f"precision of the sequential engine must be 'fp32' or 'fp64', got {precision!r}")
        self.device = torch.device(device)
        self.precision = "fp64" if precision == "fp64" else "fp32"
        self.task = task
        self.spec = spec
        self.token_budget = token_budget
        self._dtype = torch.float64 if precision == "fp64" else torch.float32
        self._pad = getattr(model.config, "pad_token_id", None) or 0
        self.longest = positions(model)
        model.requires_grad_(False)
        self.model = get_peft_model(model, peft_config(spec), autocast_adapter_dtype=False)
        self.model.to(self.device, self._dtype).eval()
        self._tensors = _adapter_tensors(self.model)
        self.layout = _layout(self._tensors, spec)
        self._loaded: dict[str, Tensor] = {}
        self._residual: Tensor | None = None
        self._references = References(task, self._start_margins)
        self.train_factors(spec.train)

    def train_factors(self, train: str) -> None:
        """Train `"both"` factors, or only `"a"` or `"b"`, from now on."""
        self.layout = self.layout.training(train)
        self.trained = []
        for entry in self.layout.entries:
            self._tensors[entry.name].requires_grad_(entry.trainable)
            if entry.trainable:
                self.trained.append(self._tensors[entry.name])

    @torch.no_grad()
    def set_residual(self, residual: Tensor | None) -> None:
        """Set the residual as `CohortEngine.set_residual` does. ValueError if a weight holds no floats."""
        self._residual = residual
        for path, loaded in self._loaded.items():
            self._base_layer(path).weight.copy_(loaded)
        if residual is None:
            return
        check_residual(residual, self.layout)
        layers = {pair: self._base_layer(pair.a.pair) for pair in pairs(self.layout)}
        for pair, layer in layers.items():
            if not layer.weight.is_floating_point() or is_ternary(layer):
                raise ValueError(f"{pair.a.pair} has a weight of {layer.weight.dtype}, which takes no residual")
        for pair, layer in layers.items():
            if pair.a.pair not in self._loaded:
                self._loaded[pair.a.pair] = layer.weight.detach().clone()
            added = pair.of(residual).to(layer.weight)
            layer.weight += added if isinstance(layer, nn.Linear) else added.T  # GPT-2's Conv1D stores [in, out]

    @torch.no_grad()
    def _start_margins(self, pool: Pool, rows: np.ndarray) -> np.ndarray:
        """The margins of pairs under the base as it was loaded, without adapter."""
        assert isinstance(self.task, Preference), "others have none"
        residual, found = self._residual, np.zeros(len(rows))
        self.set_residual(None)
        try:
            with self.model.disable_adapter():
                for number, row in enumerate(rows):
                    batch = pool.batch(np.array([row]), self._pad, self.device)
                    logits = self._logits(batch.input_ids, batch.attention_mask)
                    found[number] = float(self.task.margins(logits, batch))
        finally:
            self.set_residual(residual)
            for entry in self.layout.entries:  # PEFT switches all of them on again
                self._tensors[entry.name].requires_grad_(entry.trainable)
        return found

    def _base_layer(self, path: str) -> Any:
        """The frozen layer below an adapter."""
        layer: Any = self.model.get_submodule(PEFT_PREFIX + path)
        return layer.get_base_layer()

    def train(
        self, start: Tensor, clients: Sequence[Records], local: LocalTraining, seeds: Sequence[int]
    ) -> Iterator[Updates]:
        """Train as `CohortEngine.train` does, one client per chunk."""
        checks.same_length(clients=clients, seeds=seeds)
        origin = self.layout.trainable_values(start.to(self.device, self._dtype))
        for index, (records, seed) in enumerate(zip(clients, seeds, strict=True)):
            pool, optimizer = self._pool(records), _optimizer(local, self.trained)
            self.load(start)
            offsets = self._offsets(records)
            for rows in local_steps(local, len(records), seed):
                optimizer.zero_grad()
                self.record_losses(pool, rows, offsets).mean().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            trained = torch.cat([t.detach().reshape(-1) for t in self.trained])
            yield Updates(np.array([index]), (trained - origin).cpu()[None])

    def train_all(
        self, start: Tensor, clients: Sequence[Records], local: LocalTraining, seeds: Sequence[int]
    ) -> Float[Tensor, "clients dim"]:
        """`train`, gathered into one tensor in the order of `clients`."""
        rows = [updates.deltas for updates in self.train(start, clients, local, seeds)]
        return torch.cat(rows) if rows else torch.zeros(0, self.layout.dim)

    def losses(self, vector: Tensor, clients: Sequence[Records]) -> Float[Tensor, " clients"]:
        """Compute losses as `CohortEngine.losses` does."""
        candidates = self.layout.trainable_values(vector).expand(len(clients), 1, -1)
        return self.candidate_losses(vector, candidates, clients)[:, 0]

    @torch.no_grad()
    def candidate_losses(self, base: Tensor, candidates: Tensor, clients: Sequence[Records]) -> Tensor:
        """Compute losses as `CohortEngine.candidate_losses` does."""
        if len(candidates) != len(clients):
            raise ValueError(f"candidates must have one row per client ({len(clients)}), got {len(candidates)}")
        result = torch.zeros(candidates.shape[:2], dtype=torch.float64)
        for i, records in enumerate(clients):
            pool, offsets = self._pool(records), self._offsets(records)
            for j, candidate in enumerate(candidates[i]):
                self.load(self.layout.with_trainable(base, candidate))
                pieces = self._pieces(pool)
                total = sum(float(self.record_losses(pool, rows, offsets).double().sum()) for rows in pieces)
                result[i, j] = total / max(1, len(records))
        return result

    @torch.no_grad()
    def evaluate(self, vector: Tensor, records: Records) -> Metrics:
        """Evaluate as `CohortEngine.evaluate` does."""
        pool, totals = self._pool(records), self.task.no_totals()
        self.load(vector)
        for rows in self._pieces(pool):
            batch = pool.batch(rows, self._pad, self.device)
            totals += self.task.totals(self._logits(batch.input_ids, batch.attention_mask), batch).cpu()
        return self.task.metrics(totals)

    def per_record_gradients(self, vector: Tensor, records: Records) -> Iterator[RecordGradients]:
        """Compute what `CohortEngine.per_record_gradients` does, by autograd one record at a time."""
        return self.cohort_record_gradients(vector, [records])

    def cohort_record_gradients(
        self, base: Tensor, clients: Sequence[Records], vectors: Tensor | None = None
    ) -> Iterator[RecordGradients]:
        """Compute what `CohortEngine.cohort_record_gradients` does, by autograd one record at a time."""
        for client, records in enumerate(clients):
            pool = self._pool(records)
            self.load(base if vectors is None else self.layout.with_trainable(base, vectors[client].to(base)))
            for row in range(len(records)):
                loss = self.record_losses(pool, np.array([row]), None).sum()
                gradients = torch.autograd.grad(loss, self.trained)
                flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
                yield RecordGradients(np.array([client]), np.array([row]), flat[None], loss.detach()[None])

    def load(self, full: Tensor) -> None:
        """Put a full adapter vector into the model."""
        with torch.no_grad():
            for name, values in self.layout.tensors(full).items():
                self._tensors[name].copy_(values)

    def _pool(self, records: Records) -> Pool:
        """One client's records, with what their loss needs of the start model."""
        pool = Pool([records], self.longest)
        self._references.add_to(pool)
        return pool

    def _pieces(self, pool: Pool) -> Iterator[np.ndarray]:
        """The rows of every micro-batch."""
        budget = self.token_budget // self.task.texts_each
        return (piece.rows for piece in micro_batches(pool.lengths, budget, longest=self.longest))

    def _offsets(self, records: Records) -> Tensor | None:
        labels = None if records.labels is None else torch.from_numpy(np.array(records.labels))
        offsets = self.task.logit_offsets(labels)
        return None if offsets is None else offsets.to(self.device, self._dtype)

    def record_losses(self, pool: Pool, rows: np.ndarray, offsets: Tensor | None) -> Tensor:
        """Training loss of every row, differentiable, in one padded batch."""
        batch = pool.batch(rows, self._pad, self.device)
        if offsets is not None:
            batch = replace(batch, logit_offsets=offsets.expand(len(rows), -1))
        return self.task.per_record_loss(self._logits(batch.input_ids, batch.attention_mask), batch)

    def _logits(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor | Predictions:
        return run(self.model.get_base_model(), input_ids, attention_mask)


def _adapter_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every adapter parameter under its state-dict name, in the model's own order, heads last."""
    names = {id(tensor): name for name, tensor in _state(model).items()}
    found = {names[id(p)]: p for p in model.parameters() if id(p) in names}
    is_head = {name: ".lora_" not in name for name in found}
    return {name: found[name] for name in sorted(found, key=lambda name: is_head[name])}


def _state(model: nn.Module) -> dict[str, Tensor]:
    # keep_vars: the parameters themselves, so that they can be found by identity
    state: dict[str, Tensor] = get_peft_model_state_dict(model, state_dict=model.state_dict(keep_vars=True))
    return state


def _layout(tensors: dict[str, nn.Parameter], spec: LoraSpec) -> AdapterLayout:
    entries, offset = [], 0
    for name, tensor in tensors.items():
        path = name.removeprefix(PEFT_PREFIX)
        if ".lora_" in path:
            pair, kind = path.split(".lora_", 1)
            factor = {"A": "A", "B": "B", "e": "A" if "embedding_A" in kind else "B", "m": "B"}[kind[0]]
        else:
            pair, factor = _head_of(path, spec), "head"
        entries.append(Entry(name, tuple(tensor.shape), offset, factor, pair))
        offset += tensor.numel()
    return AdapterLayout(tuple(entries))


def _head_of(path: str, spec: LoraSpec) -> str:
    """The head module a parameter belongs to; its own module if it is a trained bias of the base."""
    parts = path.split(".")[:-1]
    prefixes = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return next((prefix for prefix in prefixes if matches(prefix, spec.heads)), prefixes[-1])


def _optimizer(local: LocalTraining, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if local.optimizer == "adamw":
        return torch.optim.AdamW(
            parameters, lr=local.learning_rate, betas=ADAM_BETAS, eps=ADAM_EPS, weight_decay=local.weight_decay
        )
    momentum = local.momentum if local.optimizer == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=local.learning_rate, momentum=momentum, weight_decay=local.weight_decay)


class OpacusEngine:
    """Gradients of single records, and evaluation; takes `model` over.

    Raises:
        UnsupportedAdapter: a trained part of the model is no layer that Opacus has a rule for (DoRA, embeddings).
    """

    def __init__(
        self,
        model: nn.Module,
        spec: LoraSpec,
        task: Task,
        *,
        token_budget: int = 2048,
        precision: str = "fp32",
        device: str | torch.device = "cpu",
    ) -> None:
        self.token_budget = token_budget
        self._plain = SequentialEngine(model, spec, task, token_budget=token_budget, precision=precision, device=device)
        self._hooks = self._hooked()

    @property
    def layout(self) -> AdapterLayout:
        """The place of each adapter value."""
        return self._plain.layout

    def train_factors(self, train: str) -> None:
        """Train `"both"` factors, or only `"a"` or `"b"`, from now on."""
        if self.layout != self.layout.training(train):
            self._hooks.remove_hooks()
            self._plain.train_factors(train)
            self._hooks = self._hooked()

    def evaluate(self, vector: Tensor, records: Records) -> Metrics:
        """Evaluate as `CohortEngine.evaluate` does."""
        return self._plain.evaluate(vector, records)

    def per_record_gradients(self, vector: Tensor, records: Records) -> Iterator[RecordGradients]:
        """Compute what `CohortEngine.per_record_gradients` does."""
        self._plain.load(vector)
        pool = Pool([records], self._plain.longest)
        for rows in (piece.rows for piece in micro_batches(pool.lengths, self.token_budget, longest=pool.longest)):
            losses = self._plain.record_losses(pool, rows, None)
            with warnings.catch_warnings():  # the first adapted layer's input needs no gradient, and torch says so
                warnings.filterwarnings("ignore", message="Full backward hook is firing")
                losses.sum().backward()  # type: ignore[no-untyped-call]
            found = torch.cat([_of_records(p, len(rows)) for p in self._plain.trained], dim=1)
            self._hooks.zero_grad(set_to_none=True)
            yield RecordGradients(np.zeros(len(rows), dtype=np.int64), rows, found, losses.detach())

    def _hooked(self) -> "GradSampleModule":
        from opacus import (
            GradSampleModule,  # not in the image of nodes, which may train one record at a time all the same
        )

        for path, module in self._plain.model.named_modules():
            trained = any(p.requires_grad for p in module.parameters(recurse=False))
            if trained and not isinstance(module, nn.Linear):
                raise UnsupportedAdapter(f"{path} is a {type(module).__name__}; Opacus needs trained layers Linear")
            module.training = trained  # its hooks work in this mode only; everything around stays as it is
        return GradSampleModule(self._plain.model, loss_reduction="sum")


def _of_records(parameter: nn.Parameter, records: int) -> Tensor:
    """What the hooks left on one parameter, ``[records, values]``; 0 where the loss does not reach it."""
    found = getattr(parameter, "grad_sample", None)
    if found is None:
        return parameter.new_zeros(records, parameter.numel())
    total: Tensor = torch.stack(found).sum(dim=0) if isinstance(found, list) else found
    return total.detach().reshape(records, -1)
