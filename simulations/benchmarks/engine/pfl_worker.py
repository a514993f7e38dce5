"""Rounds of DP-FedAvg by pfl-research, on request: run by `against_pfl.py` in an environment of pfl's own.

What a user of pfl-research 0.6 writes: a `PyTorchModel` around PEFT, a `FederatedDataset`, `SimulatedBackend`,
`FederatedAveraging`, the central Gaussian mechanism. One line on standard input asks for one round, the answer is one
line of JSON with its CPU seconds; `mean` asks for a round without clipping or noise and writes the mean update.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]  # in its own environment
from pfl.aggregate.weighting import WeightByUser  # type: ignore[import-not-found]
from pfl.algorithm.base import NNAlgorithmParams  # type: ignore[import-not-found]
from pfl.algorithm.federated_averaging import FederatedAveraging  # type: ignore[import-not-found]
from pfl.data.dataset import Dataset  # type: ignore[import-not-found]
from pfl.data.federated_dataset import FederatedDataset  # type: ignore[import-not-found]
from pfl.data.sampling import get_user_sampler  # type: ignore[import-not-found]
from pfl.hyperparam import NNTrainHyperParams  # type: ignore[import-not-found]
from pfl.metrics import Weighted  # type: ignore[import-not-found]
from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]
from pfl.privacy.gaussian_mechanism import GaussianMechanism  # type: ignore[import-not-found]
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.nn import functional as F

WRAPPER = "pfl_module."


class Adapted(nn.Module):
    """PEFT's model with the two methods pfl asks for. A batch is cut to its longest record first: less to compute."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pfl_module = model

    def loss(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        longest = int(mask.sum(dim=1).max())
        output = self.pfl_module(input_ids=ids[:, :longest], attention_mask=mask[:, :longest])
        logits = output if isinstance(output, Tensor) else output.logits
        return F.cross_entropy(logits.float(), labels)

    @torch.no_grad()
    def metrics(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Any]:
        return {"loss": Weighted(float(self.loss(ids, mask, labels)) * len(ids), len(ids))}


class Rounds:
    """One resident pfl model; every call trains all clients once."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.settings = settings
        base = torch.load(folder / "base.pt", weights_only=False)
        model = get_peft_model(base, LoraConfig(**settings["lora"])).eval()
        start = torch.load(folder / "start.pt")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(start[plain_name(name)])
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.model = PyTorchModel(
            Adapted(model),
            torch.optim.SGD,
            torch.optim.SGD(parameters, lr=1.0),
            amp_dtype=torch.bfloat16 if settings["amp"] else None,
        )
        clients = {str(i): Dataset(tuple(c), user_id=str(i)) for i, c in enumerate(torch.load(folder / "clients.pt"))}
        users = FederatedDataset(clients.__getitem__, get_user_sampler("minimize_reuse", list(clients)))
        gaussian = GaussianMechanism(settings["bound"], settings["noise_multiplier"])
        private = [WeightByUser(), CentrallyAppliedPrivacyMechanism(gaussian)]
        self._private = SimulatedBackend(users, users, postprocessors=private)
        self._plain = SimulatedBackend(users, users, postprocessors=[WeightByUser()])
        self._algorithm = FederatedAveraging()
        self._clients = len(clients)
        self._done = 0

    def run(self, *, private: bool = True) -> None:
        """One central iteration over all clients, without evaluation (but for the very first, as pfl has it)."""
        self._done += 1
        parameters = NNAlgorithmParams(
            central_num_iterations=self._done,
            evaluation_frequency=10**9,
            train_cohort_size=self._clients,
            val_cohort_size=None,
        )
        training = NNTrainHyperParams(
            local_batch_size=self.settings["batch_size"],
            local_num_epochs=1,
            local_learning_rate=self.settings["learning_rate"],
        )
        self._algorithm.run(parameters, self._private if private else self._plain, self.model, training)

    def mean_update(self) -> dict[str, Tensor]:
        """Mean of all clients' updates at the present adapter."""
        before = {name: p.detach().clone() for name, p in self.model.variable_map.items()}
        self.run(private=False)
        return {plain_name(name): p.detach() - before[name] for name, p in self.model.variable_map.items()}


def plain_name(name: str) -> str:
    """PEFT's name of a parameter in a state dict."""
    return name.removeprefix(WRAPPER).replace(".default", "").replace(".modules_to_save", "")


def main(folder: Path, settings: dict[str, Any]) -> None:
    """Answer requests until standard input ends."""
    torch.set_num_threads(1)
    np.random.seed(0)
    rounds = Rounds(folder, settings)
    for request in sys.stdin:
        if request.strip() == "mean":
            torch.save(rounds.mean_update(), folder / "mean.pt")
            answer: dict[str, float] = {}
        else:
            began = time.process_time()
            rounds.run()
            answer = {"seconds": time.process_time() - began}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
