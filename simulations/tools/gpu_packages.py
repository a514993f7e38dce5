"""Put the packages that Lacquer needs beside torch into one folder, and install them where no index can be reached.

    python simulations/tools/gpu_packages.py pack build/gpu      # here, in the environment of the checkout
    python simulations/tools/gpu_packages.py install build/gpu   # there, beside a torch that is installed already

Wheels are of this environment's versions, for ``--python`` and Linux on x86-64. Ray is unpacked, stripped of what an
actor never opens (Java, RLlib, the dashboard's pages) and packed by xz. No file is larger than ``--part`` MiB: larger
ones are cut, and joined when they are installed. Uses the standard library alone.
"""

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
THERE = {"torch", "triton", "numpy", "scipy", "pandas", "pyarrow", "scikit-learn", "pillow", "matplotlib", "uv"}
"""What machines for training have, and what Flower names and a run does not open."""
STRIPPED = ("ray/jars/", "ray/rllib/", "ray/dashboard/client/", "ray/cpp/", "ray/tests/")
MIB = 2**20


def needed() -> set[str]:
    """Distributions that Lacquer needs, of this environment, without those that are :data:`THERE`."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        waiting, found = tomllib.load(file)["project"]["dependencies"], set[str]()
    while waiting:
        requirement, _, marker = (part.strip() for part in waiting.pop().partition(";"))
        name = re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()  # type: ignore[index]
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        if name in THERE | found or (extra and extra[1] != "simulation"):  # of flwr[simulation]
            continue
        try:
            waiting += importlib.metadata.requires(name) or []
            found.add(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
    return found


def pack(folder: Path, python: str, part: int) -> None:
    """Download the wheels for another Python, strip Ray, and cut what is too large."""
    folder.mkdir(parents=True, exist_ok=True)
    pins = [f"{name}=={importlib.metadata.version(name)}" for name in sorted(needed())]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        f"--python-version={python}",
    ]
    command += ["--implementation=cp", *(f"--platform=manylinux_2_{minor}_x86_64" for minor in (17, 28, 34))]
    subprocess.run([*command, "--platform=manylinux2014_x86_64", f"--dest={folder}", *pins], check=True)
    for wheel in folder.glob("ray-*.whl"):
        strip(wheel)
    for file in sorted(folder.iterdir()):
        if file.stat().st_size > part * MIB:
            cut(file, part * MIB)
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    print(f"{len(sizes)} files, {sum(sizes.values()) / MIB:.0f} MiB, in {folder}")


def strip(wheel: Path) -> None:
    """Replace a wheel by an archive, packed by xz, of what an actor opens."""
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as whole:
        kept = [name for name in whole.namelist() if not name.startswith(STRIPPED)]
        whole.extractall(scratch, kept)
        for name in kept:  # a zip's permissions are not extracted, and Ray's daemons are programs
            if mode := whole.getinfo(name).external_attr >> 16:
                (Path(scratch) / name).chmod(mode & 0o777)
        with tarfile.open(wheel.with_suffix(".tar.xz"), "w:xz", preset=6) as archive:
            archive.add(scratch, arcname=".")
    wheel.unlink()


def cut(file: Path, size: int) -> None:
    """Replace a file by parts of at most so many bytes."""
    with file.open("rb") as whole:
        for number, content in enumerate(iter(lambda: whole.read(size), b"")):
            file.with_name(f"{file.name}.part{number:02d}").write_bytes(content)
    file.unlink()


def joined(folder: Path, scratch: Path) -> Iterator[Path]:
    """Every file of the folder, cut ones whole again."""
    for file in sorted(folder.iterdir()):
        name, mark, number = file.name.rpartition(".part")
        if not mark:
            yield file
        elif int(number) == 0:
            whole = scratch / name
            with whole.open("wb") as target:
                for piece in sorted(folder.glob(f"{name}.part*")):
                    with piece.open("rb") as source:
                        shutil.copyfileobj(source, target)
            yield whole


def install(folder: Path) -> None:
    """Install what this Python does not have in that version."""
    with tempfile.TemporaryDirectory() as scratch:
        files = list(joined(folder, Path(scratch)))
        wheels = [str(file) for file in files if file.suffix == ".whl"]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        if wheels:
            subprocess.run([*command, *wheels], check=True)
        for archive in (file for file in files if file.name.endswith(".tar.xz")):
            with tarfile.open(archive) as packed:
                packed.extractall(sysconfig.get_path("purelib"), filter="tar")
    print(f"{len(files)} packages are installed beside {sys.executable}")


def main() -> None:
    """Pack or install, as asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("pack", "install"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of Python there")
    parser.add_argument("--part", type=int, default=48, help="MiB of the largest file")
    asked = parser.parse_args()
    if asked.action == "pack":
        pack(asked.folder, asked.python, asked.part)
    elif asked.folder.is_dir() and any(asked.folder.iterdir()):
        install(asked.folder)
    else:
        raise SystemExit(f"{asked.folder} holds no packages; make them where there is a network: make gpu-packages")


if __name__ == "__main__":
    main()
