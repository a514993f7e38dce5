"""Everything that is installed is locked by its hash, and what is installed can be listed and audited."""

import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

from simulations.tools.advisories import is_affected, read_advisories

ROOT = Path(__file__).parents[1]
NAME = re.compile(r"[A-Za-z0-9._-]+")
INSTALL = re.compile(
    r"\b(?:uv )?pip3?\s+(?:install|wheel|sync)\b|-m pip (?:install|wheel)|\buvx\b|\bpipx\b|\buv (?:tool|run|sync|add)\b"
)


def canonical(requirement):
    return re.sub(r"[-_.]+", "-", NAME.match(requirement)[0]).lower()


def locked(name):
    """Lines of a lock by the package's name: the pin, and its hashes."""
    blocks = re.split(r"(?m)^(?=[A-Za-z0-9])", (ROOT / name).read_text())[1:]
    return {canonical(block): block for block in blocks}


LOCK, CPU = locked("requirements.lock"), locked("torch-cpu.lock")


def commands(text):
    """Commands of a script, continued lines joined and comments left out."""
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [part for line in lines if not line.lstrip().startswith("#") for part in re.split(r"; |&&", line)]


def installers():
    paths = [ROOT / "Makefile", *(ROOT / ".ci").iterdir(), *(ROOT / ".github/workflows").iterdir()]
    paths += [path for path in (ROOT / "docker").rglob("*") if path.suffix == ".sh" or path.name.endswith("Dockerfile")]
    return [path for path in paths if path.is_file()]


def unverified(line):
    """Whether a command installs, or may build with, files of no known hash."""
    if not INSTALL.search(line):
        return False
    local = "--no-deps --no-build-isolation" in line
    return not local and "--require-hashes" not in line


def test_every_requirement_of_make_ci_and_the_images_is_locked_with_hashes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    makefile = (ROOT / "Makefile").read_text()
    workflows = (ROOT / ".github/workflows/ci.yml").read_text()
    extras = set(re.findall(r"--extra (\w+)", makefile)) | set(re.findall(r"make extra-(\w+)", workflows))
    listed = re.search(r"(?m)^EXTRAS = (.+)$", makefile)[1].split()
    assert extras == {"offline", "chat", "dev", "docs", "tracking", "mutation"}
    assert extras <= set(listed)
    needed = [
        *project["project"]["dependencies"],
        *project["build-system"]["requires"],
        "uv",
        "editables",
        "setuptools",
    ]
    for extra in listed:
        needed += project["project"]["optional-dependencies"][extra]
    for names in runpy.run_path(str(ROOT / "docker/requirements.py"))["NAMED_NOWHERE"].values():
        needed += names
    for names in re.findall(r"\$\(PICK\) (.+) >", makefile):
        needed += names.split()
    assert {canonical(line) for line in needed} - LOCK.keys() == set()
    assert {"ray", "torch", "triton", "nvidia-cudnn-cu13", "grpcio", "pip-audit"} <= LOCK.keys()


def test_every_entry_is_one_version_with_hashes_and_names_no_host():
    for name, block in [*LOCK.items(), *CPU.items()]:
        assert re.match(r"[A-Za-z0-9._-]+==[^\s;]+( ; .+)? \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+\Z", block), (
            name
        )
    text = (ROOT / "requirements.lock").read_text() + (ROOT / "torch-cpu.lock").read_text()
    assert len(re.findall(r"(?m)^[A-Za-z0-9]", text)) == len(LOCK) + len(CPU), "a package stands twice"
    assert not re.search(r"//|@|--(extra-)?index|--find-links", text)


def test_the_lock_holds_the_versions_of_the_constraints():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    held = {name: re.search(r"==([^\s;]+)", block)[1] for name, block in LOCK.items()}
    wrong = {name: pin for name, pin in pins.items() if held.get(canonical(name), pin) != pin}
    assert wrong == {}, "run `make lock`"
    assert re.search(r"==(\S+)", CPU["torch"])[1] == held["torch"] + "+cpu"


def test_no_command_installs_files_of_no_known_hash():
    text = {path.relative_to(ROOT).as_posix(): path.read_text() for path in installers()}
    assert {"Makefile", ".ci/run", "docker/Dockerfile", ".github/workflows/release.yml"} <= text.keys()
    found = [(name, line.strip()) for name, content in text.items() for line in commands(content) if unverified(line)]
    makes = [line for name, line in found if name == "Makefile"]
    # What the two other definitions add to it is asserted below; no rule uses it otherwise.
    # The second is of `try-%`: what is not locked, in an environment of its own that nothing else uses.
    assert len(makes) == 2
    assert makes[0].startswith("UV = ")
    assert "--python build/$@/bin/python" in makes[1]
    assert re.findall(r"(?m)^(\w+) = \$\(UV\) (\S+ \S+)", text["Makefile"]) == [
        ("LOCKED", "--require-hashes --no-build-isolation"),
        ("LOCAL", "--no-deps --no-build-isolation"),
    ]
    assert text["Makefile"].count("$(UV)") == 2
    others = [(name, line) for name, line in found if name != "Makefile"]
    assert others == [
        (
            ".github/workflows/ci.yml",
            '- run: .venv/bin/python -m pip install --upgrade "flwr[simulation]" flwr-datasets',
        )
    ]


@pytest.mark.parametrize(
    "line",
    [
        "pip install torch",
        "uv pip install -c hashes.txt x",
        "python3 -m pip install -e '.[dev]'",
        "uvx ruff",
        "pip wheel .",
    ],
)
def test_an_unverified_install_is_seen(line):
    assert unverified(line)
    assert not unverified("uv pip install --require-hashes -c requirements.lock x")


def test_what_the_lock_does_not_hold_is_refused_by_name():
    pick = runpy.run_path(str(ROOT / "docker/locked.py"))["locked_lines"]
    lock = (ROOT / "requirements.lock").read_text()
    assert pick(lock, ["Tomli_W>=1.0", "", "typer"]) == LOCK["tomli-w"] + LOCK["typer"]
    with pytest.raises(SystemExit, match="the lock holds no left-pad"):
        pick(lock, ["typer", "left.pad>=1"])


def test_actions_of_the_workflows_are_pinned_by_commit():
    used = [
        use for path in (ROOT / ".github/workflows").iterdir() for use in re.findall(r"uses: (.+)", path.read_text())
    ]
    assert len(used) > 10
    assert [use for use in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v[\d.]+", use)] == []


@pytest.mark.nightly  # cyclonedx reads and validates for a minute and more
def test_the_bill_of_materials_is_valid_and_names_what_is_installed(tmp_path):
    bill = tmp_path / "bill.json"
    command = [
        sys.executable,
        "-m",
        "cyclonedx_py",
        "environment",
        "--validate",
        "--output-reproducible",
        "--of",
        "JSON",
    ]
    subprocess.run([*command, "-o", str(bill), sys.executable], check=True, timeout=240)
    content = json.loads(bill.read_text())
    assert content["bomFormat"] == "CycloneDX"
    names = {canonical(part["name"]): part["version"] for part in content["components"]}
    assert {"torch", "flwr", "ray", "lacquer-dp"} <= names.keys()
    wrong = {name for name, version in names.items() if name in LOCK and f"=={version.split('+')[0]}" not in LOCK[name]}
    assert wrong - {"pip", "setuptools"} == set(), "installed is what is locked"


ADVISORY = {
    "id": "MADE-UP-1",
    "summary": "made up",
    "affected": [
        {
            "package": {"name": "Jinja2", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "3.1.5"}, {"introduced": "4"}]}],
            "versions": ["3.1.9"],
        }
    ],
}


@pytest.mark.parametrize(
    ("version", "hit"), [("3.1.4", True), ("3.1.5", False), ("3.1.9", True), ("3.1.10", False), ("4.0", True)]
)
def test_a_version_is_affected_within_a_range_or_by_name(version, hit):
    assert is_affected(ADVISORY["affected"][0], Version(version)) == hit


@pytest.mark.parametrize(("version", "code"), [("3.1.4", 1), ("3.1.6", 0)])
def test_pip_audit_asks_an_exported_folder_of_advisories(tmp_path, version, code):
    (tmp_path / "MADE-UP-1.json").write_text(json.dumps(ADVISORY))
    lock = tmp_path / "a.lock"
    lock.write_text(f"jinja2=={version} --hash=sha256:{'0' * 64}\n")
    command = [sys.executable, "-m", "simulations.tools.advisories", str(lock), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == code, done.stderr
    assert ("MADE-UP-1" in done.stdout) == bool(code)
    assert "No known vulnerabilities found" in done.stderr or code


def test_a_folder_without_advisories_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no advisory"):
        read_advisories(tmp_path)
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a\.json is no advisory"):
        read_advisories(tmp_path)
