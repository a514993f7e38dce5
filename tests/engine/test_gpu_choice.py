"""A GPU computes in bfloat16 unasked only if others move no bit of a gradient there; what they move is said."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from client.engine.cohort import trial_of
from client.models.frozen import gpu_trial, kernels
from client.models.frozen.batch_invariance import batch_invariance_note
from client.models.frozen.gpu_trial import Outcome, Texts, Trial, choose_on_gpu, first_blocks, moved_by_others
from tests.cases.cohorts import build, threads

WORDS = 50


def trial_with(error: float) -> Trial:
    """Gradients that are their record's own, but for an error that grows with the number of clients."""

    def update(clients: list[Texts]) -> Tensor:
        own = [float(sum(map(sum, client))) for client in clients]
        each = [float(sum(text)) for client in clients for text in client]
        return torch.tensor([*own, *each])[:, None].double() * (1 + error * len(clients))

    return Trial(update, WORDS, longest=64)


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_trial, "_outcomes", {})
    for name in gpu_trial.WORKSPACE:
        monkeypatch.setenv(name, "")  # what a test sets is taken back


@pytest.mark.parametrize(
    ("errors", "asked", "chosen", "moved"),
    [
        ({"bf16": 0.0}, "auto", "bf16", 0.0),
        ({"bf16": 1e-3, "fp32": 0.0}, "auto", "fp32", 0.0),
        ({"bf16": 1e-3, "fp32": 1e-7}, "auto", "fp32", 1e-7),
        ({"bf16-model": 1e-3}, "bf16-model", "bf16-model", 1e-3),
        ({"bf16-model": 0.0}, "bf16-model", "bf16-model", 0.0),
    ],
)
def test_the_precision_is_the_fastest_in_which_others_move_nothing(
    errors: dict[str, float], asked: str, chosen: str, moved: float
) -> None:
    model, _, _ = build("llama")
    tried = []

    def made(small: torch.nn.Module, precision: str) -> Trial:
        tried.append(precision)
        return trial_with(errors[precision])

    for _ in range(2):
        assert choose_on_gpu(model, asked, "a model", made) == chosen
    assert tried == list(errors), "it is tried once in a process"
    outcome = gpu_trial.tried_here()
    assert outcome is not None
    assert outcome.precision == chosen
    assert (outcome.moved == 0) == (moved == 0)
    assert outcome.moved == pytest.approx(moved * 42, rel=0.1), "three clients alone are one each, and 43 at most"
    note = batch_invariance_note(asked, gpu=True, tried=outcome)
    assert (note == ()) == (moved == 0)
    if moved:
        assert f"({chosen})" in note[0]
        assert ("in bfloat16, which was tried first" in note[0]) == (asked == "auto")


def test_what_others_cards_do_is_not_claimed() -> None:
    assert "'auto' takes bfloat16 only where a test on the card" in batch_invariance_note("auto", gpu=True)[0]
    assert batch_invariance_note("auto", tried=Outcome("fp32", 1e-3)) == (), "a CPU trains"


def test_a_card_without_room_for_the_test_computes_in_float32() -> None:
    def full(small: torch.nn.Module, precision: str) -> Trial:
        if precision == "bf16":
            raise torch.OutOfMemoryError("full")
        return trial_with(0.0)

    assert choose_on_gpu(build("llama")[0], "auto", "a model", full) == "fp32"


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_the_engine_itself_is_tried_on_the_first_blocks(name: str) -> None:
    model, spec, task = build(name)
    before = {path: value.clone() for path, value in model.state_dict().items()}
    with threads(1):
        made = trial_of(replace(spec, layers=(0,)), task, torch.device("cpu"), "none")
        assert moved_by_others(made(first_blocks(model), "fp32")) == 0.0
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[path], before[path]) for path in before), "the model is left as it is"


@pytest.mark.skipif(not kernels.has_fast_onednn(), reason="another kernel multiplies here")
def test_the_test_sees_a_kernel_that_sums_by_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = kernels.OneDnnWeight.forward

    def split(self: kernels.OneDnnWeight, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        half = rows.shape[-1] // 2
        if len(rows) < 300:
            return plain(self, x)
        low, high = rows.clone(), rows.clone()
        low[:, half:], high[:, :half] = 0, 0
        return (plain(self, low) + plain(self, high)).view(*x.shape[:-1], -1)  # split-K

    model, spec, task = build("llama")
    monkeypatch.setattr(kernels.OneDnnWeight, "forward", split)
    with threads(1):
        moved = moved_by_others(trial_of(spec, task, torch.device("cpu"), "none")(first_blocks(model), "fp32"))
    assert 0 < moved < 1e-4
