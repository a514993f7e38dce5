"""Public and private records never meet; a source that would leave none of a part is refused with what to do."""

from pathlib import Path

import pytest

from client.data.spec import DataSpec
from client.data.splits import hold_out


def test_a_source_of_nothing_but_copies_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "films.csv"
    file.write_text("text,label\n" + "good,a\nbad,b\n" * 30)
    spec = DataSpec(
        source=f"csv:{file}",
        tokenizer="none",
        clients=0,
        partition="iid",
        task="classification",
        validation_records=10,
        test_records=10,
    )
    with pytest.raises(ValueError, match=r"data\.source.* every \w+ text .* lower data\.validation-records"):
        hold_out(spec)
