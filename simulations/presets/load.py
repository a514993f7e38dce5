"""Reading what a person types: a preset or a file, settings on top, paths made absolute."""

import difflib
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from server.config.load import ConfigError, load
from server.config.saved_adapter import adopt_form
from server.config.schema import RunConfig

PRESETS = Path(__file__).parent


PURPOSES = {
    "To begin with": ("quickstart", "site-quickstart", "sites", "secure-sums", "chat", "preference"),
    "Public data sets": (
        "sst2", "sst2-aligned", "wikitext2", "chat-dialogues", "site-diabetes", "site-samsum", "sites-pubmed",
        "preference-e2e",
    ),
    "The papers": ("dp-lac", "rldp", "dp-adam-ac", "atdp", "pe-sgd"),
    "In phases": ("dp-atdp",),
    "Comparisons, papers": (
        "compare-notes", "compare-sst2", "compare-sst2-67k", "compare-mnli", "compare-clinc150", "compare-diabetes",
        "site-diabetes-paper", "pe-sgd-paper",
    ),
}  # fmt: skip
"""Presets by what they are for, in the order in which they are listed."""


def preset_files() -> dict[str, Path]:
    """The presets by name, in the order of :data:`PURPOSES`."""
    found = {file.stem: file for folder in (PRESETS, PRESETS / "phases") for file in folder.glob("*.toml")}
    return {name: found[name] for names in PURPOSES.values() for name in names}


def describe(file: Path, lines: int | None = None) -> str:
    """The description of a preset: the comment lines it begins with but that of its time, or so many of them."""
    begun = itertools.takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    comment = (line for line in begun if not line.startswith("# Time:"))
    return " ".join(line.removeprefix("#").strip() for line in itertools.islice(comment, lines))


def find(name: str) -> Path:
    """Find the file of a preset or of a path; errors as of :func:`named_file`."""
    return named_file(name, preset_files(), "preset")


def named_file(name: str, known: Mapping[str, Path], kind: str) -> Path:
    """Find the file that ``known`` has under a name, or that lies at a path.

    Raises:
        ConfigError: neither, with the names there are.
    """
    if name in known:
        return known[name]
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise ConfigError(f"configuration file {name} does not exist")
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
    raise ConfigError(f"no {kind} is called {name!r}; {hint} (a file's name ends in .toml)")


def configure(name: str, settings: Sequence[str], overrides: Mapping[str, Any], folder: Path) -> RunConfig:
    """Read preset or file ``name`` with ``settings`` ("key=value") and ``overrides`` on top.

    Relative paths are those of ``folder``; the result has absolute ones, for workers run elsewhere.

    Raises:
        ConfigError: naming every wrong key.
    """
    chosen = dict(parse_setting(setting) for setting in settings)
    return absolute_paths(load(find(name), {**chosen, **overrides}), folder)


def parse_setting(setting: str) -> tuple[str, str | int | float | bool]:
    """Split ``"privacy.epsilon=2"`` into a key and a value of TOML's types; what is none of them is a string.

    A key that holds text takes its value as it stands: ``name=2`` is the name "2".
    """
    key, equals, text = setting.partition("=")
    key, text = key.strip(), text.strip()
    if not equals or not key:
        raise ConfigError(f"--set {setting}: must be key=value, such as --set privacy.epsilon=2")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = _number(text)
    if not isinstance(value, str | int | float | bool):
        raise ConfigError(f"--set {setting}: must be one text, number or boolean, got {type(value).__name__}")
    if not isinstance(value, str) and _kind(key) is str:
        value = text
    return key, value


def _number(text: str) -> float | str:
    """Read ``.5`` and ``1.`` as the numbers they are to people, but not to TOML."""
    try:
        return float(text)
    except ValueError:
        return text


def _kind(key: str) -> Any:
    """The type of a configuration key; None for an unknown one."""
    model: Any = RunConfig
    for part in key.split("."):
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return None
        field = model.model_fields.get(part.replace("-", "_"))
        if field is None:
            return None
        model = field.annotation
    return model


def absolute_paths(config: RunConfig, folder: Path, here: Path | None = None) -> RunConfig:
    """A copy of the configuration with every path in it absolute.

    Args:
        config: whose relative paths start at ``folder``.
        folder: absolute.
        here: where the output goes instead, if its path is relative, and where a policy is looked for first.
    """
    from client.data.sources import PATH_KINDS  # loads numpy and pyarrow, which `lacquer --help` need not pay for

    def absolute(path: str, start: Path = folder) -> str:
        return str((start / Path(path).expanduser()).resolve()) if path else path

    def source(text: str) -> str:
        kind, colon, path = text.partition(":")
        return f"{kind}:{absolute(path)}" if colon and kind in PATH_KINDS else text

    data, model = config.data, config.model
    if (folder / Path(model.name).expanduser()).is_dir():
        model = model.replace(name=absolute(model.name))
    if model.adapter:
        model = adopt_form(model.replace(adapter=absolute(model.adapter)), config.model.model_fields_set)
    places = {name: source(getattr(data, name)) for name in ("source", "validation_source", "test_source")}
    data = data.replace(**places, cache=absolute(data.cache))
    privacy = config.privacy.replace(account=absolute(config.privacy.account))
    strategy, policy = config.strategy, str(config.strategy.controller_options.get("policy", ""))
    for start in (here or folder, folder) if policy else ():  # of the controller rl: a file, or the name of one
        if (start / Path(policy).expanduser()).is_file():
            found = {**strategy.controller_options, "policy": absolute(policy, start)}
            strategy = strategy.replace(controller_options=found)
            break
    output = absolute(config.output, here or folder)
    return config.replace(output=output, data=data, model=model, privacy=privacy, strategy=strategy)
