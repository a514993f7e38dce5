"""On a GPU the engine trains what it trains on a CPU: updates and record gradients, in every form of the base model."""

from dataclasses import replace

import pytest
import torch

from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from tests.cases.cohorts import build, clients, distance, fresh, start

GPU = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LOCAL = LocalTraining(optimizer="adamw", learning_rate=1e-2, batch_size=4, epochs=2)
FORMS = {
    "plain": {},
    "checkpointed": {"checkpoint_blocks": True},
    "prefix": {"prefix_memory": 2**20},
    "int8": {"quantisation": "int8"},
    "nf4": {"quantisation": "nf4"},
}
MODELS = ("bert", "gpt2", "llama", "mistral")


def _trained(name, device, precision, form):
    """Updates and record gradients of four ragged clients."""
    model, spec, task = build(name)
    if form == "prefix":
        spec = replace(spec, layers=(model.config.num_hidden_layers - 1,))
    vector, cohort = start(model, spec), clients((5, 1, 7, 3))
    engine = CohortEngine(fresh(model), spec, task, token_budget=64, precision=precision, device=device, **FORMS[form])
    updates = engine.train_all(vector, cohort, LOCAL, [1, 2, 3, 4])
    rows = torch.zeros(len(cohort[2]), engine.layout.dim)
    for chunk in engine.per_record_gradients(vector, cohort[2]):
        rows[torch.from_numpy(chunk.records)] = chunk.rows.float().cpu()
    return updates.cpu(), rows


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_updates_and_record_gradients_are_those_of_a_cpu(name, form, precision):
    """AdamW divides by the size of a gradient, so it enlarges what rounding does to a small one.

    Llama and Mistral take norms and positions in float32, whatever the precision.
    """
    found, expected = (_trained(name, device, precision, form) for device in (GPU, "cpu"))
    for ours, theirs, tolerance in zip(found, expected, (1e-4, 1e-6), strict=True):
        assert float(theirs.norm()) > 0
        assert distance(ours, theirs) < tolerance
