"""Telemetry: what may be logged, what is on disk, what is read back."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from privacy.errors import CorruptRun
from server.run_folder.round_record import Presence, ReleasedValues, RoundRecord, released_values
from server.run_folder.telemetry import Telemetry, read_metrics, read_status


def record(number: int = 1, **changes: object) -> RoundRecord:
    values: dict[str, object] = {
        "phase": "round",
        "round": number,
        "rounds": 5,
        "epsilon_spent": 0.5 * number,
        "epsilon_budget": 4.0,
        "noise_multiplier": 1.1,
        "expected_cohort": 50.0,
        "seconds": 2.5,
        "clip_bound": 0.25,
        "validation_loss": 0.7,
        "validation_accuracy": 0.8,
    }
    return RoundRecord(**{**values, **changes})  # type: ignore[arg-type]


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    written = [
        record(0, phase="histogram", clip_bound=None, validation_loss=None, validation_accuracy=None),
        record(1, validation_loss=math.inf, extra=released_values({"quantile": 0.5, "ratio": -math.inf})),
        record(2, not_private="noise is off", update_norm=1.5, noise_norm=1.25, signal_estimate=0.0),
        record(3, presence=Presence(3, 2, None, "node 7: not connected")),
    ]
    with Telemetry(tmp_path, tensorboard=False) as telemetry:
        for item in written:
            telemetry.round(item)
    assert read_metrics(tmp_path) == written


def test_a_run_that_begins_once_more_has_one_model_before_its_first_round(tmp_path: Path) -> None:
    start = record(0, phase="start", clip_bound=None)
    for _ in range(2):  # as after a kill before the first checkpoint
        with Telemetry(tmp_path, tensorboard=False) as telemetry:
            telemetry.round(start)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    assert read_metrics(tmp_path) == [start]


def test_how_long_a_round_took_is_told_in_a_file_of_its_own(tmp_path: Path) -> None:
    with Telemetry(tmp_path, tensorboard=False) as telemetry:
        telemetry.round(record(1, seconds=2.5))
        telemetry.round(record(2, seconds=7.5))
    assert "seconds" not in (tmp_path / "metrics.jsonl").read_text()
    assert [item.seconds for item in read_metrics(tmp_path)] == [2.5, 7.5]
    (tmp_path / "times.jsonl").unlink()
    assert [item.seconds for item in read_metrics(tmp_path)] == [0.0, 0.0]
    (tmp_path / "times.jsonl").write_text("{}\n")
    with pytest.raises(CorruptRun, match=r"times.jsonl line 1 holds no time"):
        read_metrics(tmp_path)


def test_every_line_is_standard_json_even_when_a_loss_diverged(tmp_path: Path) -> None:
    with Telemetry(tmp_path, tensorboard=False) as telemetry:
        telemetry.round(record(validation_loss=math.nan))

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["validation_loss"] == "nan"
    assert math.isnan(read_metrics(tmp_path)[0].validation_loss or 0.0)


@pytest.mark.parametrize("raw", [torch.tensor(0.5), np.float32(0.5), np.array([0.5]), 47, True, [0.1, 0.2], "0.5"])
def test_what_clients_send_is_no_released_value(raw: object) -> None:
    with pytest.raises(TypeError, match="norm"):
        released_values({"norm": raw})  # type: ignore[dict-item]


def test_extra_values_pass_through_released_values_only() -> None:
    with pytest.raises(TypeError, match="extra must be ReleasedValues, got dict"):
        record(extra={"client_loss": 0.5})
    with pytest.raises(TypeError, match="released_values"):
        ReleasedValues({"client_loss": 0.5})


@pytest.mark.parametrize("name", ["update_norm", "validation_accuracy", "epsilon_spent", "expected_cohort", "seconds"])
@pytest.mark.parametrize("raw", [torch.tensor(0.5), np.array(0.5), 1, True])
def test_number_fields_take_plain_floats_only(name: str, raw: object) -> None:
    with pytest.raises(TypeError, match=f"{name} must be float"):
        record(**{name: raw})


def test_there_is_no_place_for_a_realised_cohort() -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        record(cohort=47)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"number": 6}, r"round must lie in 0..rounds = 5, got 6"),
        ({"seconds": -1.0}, "seconds must be finite and >= 0, got -1.0"),
        ({"expected_cohort": math.nan}, "expected_cohort must be finite"),
        ({"validation_accuracy": 1.5}, r"validation_accuracy must lie in \[0, 1\], got 1.5"),
        ({"phase": "evaluation"}, "phase must be one of start, histogram, round, got 'evaluation'"),
    ],
)
def test_impossible_numbers_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record(**changes)  # type: ignore[arg-type]


def test_speed_is_that_of_the_expected_cohort() -> None:
    assert record(expected_cohort=50.0, seconds=2.5).clients_per_second == 20.0


def test_a_torn_last_line_is_not_read_and_is_cut_off_on_resume(tmp_path: Path) -> None:
    with Telemetry(tmp_path, tensorboard=False) as telemetry:
        telemetry.round(record(1))
        telemetry.round(record(2))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[-1][:40])
    assert [item.round for item in read_metrics(tmp_path)] == [1, 2]
    with Telemetry(tmp_path, tensorboard=False) as telemetry:
        telemetry.round(record(3))
    assert [item.round for item in read_metrics(tmp_path)] == [1, 2, 3]
    assert len(path.read_text().splitlines()) == 3


def test_a_damaged_line_inside_the_file_is_reported_with_its_number(tmp_path: Path) -> None:
    with Telemetry(tmp_path, tensorboard=False) as telemetry:
        telemetry.round(record(1))
        telemetry.round(record(2))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"round": 1', '"round": 1, "clients": 47'))
    with pytest.raises(CorruptRun, match=r"line 1 .*record"):
        read_metrics(tmp_path)


def test_a_round_done_again_after_a_resume_appears_once(tmp_path: Path) -> None:
    with Telemetry(tmp_path, tensorboard=False) as telemetry:
        for item in (record(1), record(2, epsilon_spent=1.0), record(2, epsilon_spent=1.5), record(3)):
            telemetry.round(item)
    assert [(item.round, item.epsilon_spent) for item in read_metrics(tmp_path)] == [(1, 0.5), (2, 1.5), (3, 1.5)]


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    with Telemetry(tmp_path) as telemetry:
        telemetry.round(record(1, extra=released_values({"quantile": 0.25})))
        telemetry.round(record(2, validation_accuracy=None))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()

    def series(tag: str) -> list[tuple[int, float]]:
        return [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors(tag)]

    assert series("privacy/epsilon_spent") == [(1, 0.5), (2, 1.0)]
    assert series("controller/quantile") == [(1, 0.25)]
    assert series("validation/accuracy") == [(1, pytest.approx(0.8))]


def test_status_is_replaced_whole(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    telemetry = Telemetry(tmp_path, tensorboard=False)
    telemetry.status("preparing", "starting Ray")
    telemetry.status("completed", "all rounds done")
    status = read_status(tmp_path)
    assert status is not None
    assert (status.state, status.message) == ("completed", "all rounds done")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    with pytest.raises(ValueError, match="state must be one of"):
        telemetry.status("done", "")  # type: ignore[arg-type]


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        Telemetry(tmp_path / "absent")
