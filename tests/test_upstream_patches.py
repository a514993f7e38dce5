"""The patches of docs/upstream apply to the installed Flower; a later one that has them makes them needless."""

import shutil
import subprocess
from pathlib import Path

import flwr
import pytest

PATCHES = sorted((Path(__file__).parents[1] / "docs" / "upstream").glob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_a_patch_applies(patch: Path, tmp_path: Path) -> None:
    where = next(line.split("/", 1)[1] for line in patch.read_text().splitlines() if line.startswith("--- "))
    copy = tmp_path / where
    copy.parent.mkdir(parents=True)
    shutil.copy(Path(flwr.__file__).parent / Path(where).relative_to("framework/py/flwr"), copy)
    before = copy.read_text()
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)
    assert copy.read_text() != before
    compile(copy.read_text(), str(copy), "exec")


def test_each_is_explained() -> None:
    page = (PATCHES[0].parent / "README.md").read_text()
    assert len(PATCHES) == 4
    assert all(f"]({patch.name})" in page for patch in PATCHES)
