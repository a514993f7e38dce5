"""The adapter that a run goes on from: found, verified, kept in the run's folder, and loaded.

``model.adapter`` names the folder of a run (or ``adapter`` in it), which is verified with its ledger; an adapter that
``lacquer export`` wrote, which has none; or one that PEFT saved. A run that has begun reads its own copy only.
"""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from client.models.files import fingerprint, hub_id
from client.models.lora import BASE_DIGEST, LoraSpec, load_peft
from privacy.errors import CorruptRun
from privacy.ledger.account import Account
from privacy.ledger.ledger import Ledger
from server.config.account import account_of
from server.config.load import ConfigError
from server.config.saved_adapter import FORM_FILE, WEIGHTS_FILE, adapter_folder, read_form
from server.config.schema import RunConfig
from server.evaluation.finished import FinishedRun, NotFinished, read_finished
from server.lineage import Ancestor, keep_lineage, ledger_files, read_lineage
from server.run_folder.data_facts import data_digest
from server.run_folder.names import CANARIES_FILE, LEDGER_FILE, PRIVACY_FILE, START_FOLDER
from server.run_folder.verify import read_object, refusal_of_no_run, site_ledgers
from strategies.adapter.layout import AdapterLayout

SHOWN = 2


@dataclass(frozen=True)
class Start:
    """An adapter that a run may go on from.

    Attributes:
        folder: with PEFT's files.
        ancestors: the adapter's lineage and the adapter itself, which is the last.
        ledgers: files of each ancestor's ledgers.
        labels: names of the classes that it tells apart, in their order; empty where that is not known.
    """

    folder: Path
    ancestors: tuple[Ancestor, ...]
    ledgers: tuple[Sequence[Path], ...]
    labels: tuple[str, ...] = ()


def find_start(config: RunConfig) -> Start:
    """Find and verify what ``model.adapter`` names, and look whether the run's account has paid for it.

    Raises:
        ConfigError: no adapter, of an unsupported form, of a run that cannot be verified, with canaries in it, or under
            a loss that compares with another start.
    """
    place = Path(config.model.adapter)
    said = f"model.adapter = {config.model.adapter!r}"
    if config.model.task == "preference" and config.local.preference.loss == "dpo":
        raise ConfigError(
            f"{said} needs another loss than local.preference.loss = 'dpo', which compares with the base model; take "
            "'simpo', or export the run with --merged and name that model by model.name"
        )
    read_form(config.model.adapter)
    inside = place.name == "adapter" and not refusal_of_no_run(place.parent)
    run = place.parent if inside else place
    try:
        found = _of_folder(place) if refusal_of_no_run(run) else _of_run(read_finished(run))
    except (NotFinished, CorruptRun) as error:
        raise ConfigError(f"{said} cannot be verified: {error}") from error
    if (run / CANARIES_FILE).is_file() or (read_object(place / PRIVACY_FILE) or {}).get("canaries"):
        raise ConfigError(f"{said} holds the canaries of an audit and is not for use; give the adapter of another run")
    return _with_account(config, found)


def keep_start(config: RunConfig, folder: Path) -> None:
    """Copy what a new run goes on from into its folder, with its lineage; nothing where it starts from a public base.

    Raises:
        ConfigError: see :func:`find_start`.
    """
    own, start = folder / START_FOLDER, find_start(config) if config.model.adapter else None
    ancestors, ledgers = ((), ()) if start is None else (start.ancestors, start.ledgers)
    base = Path(config.model.name)
    if (base / PRIVACY_FILE).is_file():
        merged = Ancestor("base", base.name, fingerprint(config.model.name))
        if merged.weights not in {ancestor.weights for ancestor in ancestors}:
            ancestors, ledgers = (merged, *ancestors), ((), *ledgers)
    if not ancestors:
        return
    if own.exists():  # of an attempt that committed to nothing
        shutil.rmtree(own)
    own.mkdir(mode=0o700)
    if start is not None:
        for name in (FORM_FILE, WEIGHTS_FILE):
            shutil.copyfile(start.folder / name, own / name)
    keep_lineage(own, ancestors, ledgers)


def load_start(config: RunConfig, spec: LoraSpec, layout: AdapterLayout, folder: Path | None) -> Tensor:
    """Load the adapter that a run goes on from, float32 ``[size]``.

    Args:
        spec, layout: the run's.
        folder: of the run; its own copy is read where it has one.

    Raises:
        ConfigError: the adapter does not fit the run or its base model.
    """
    own = None if folder is None else folder / START_FOLDER
    place = str(own if own is not None and (own / FORM_FILE).is_file() else config.model.adapter)
    said, form = f"model.adapter = {config.model.adapter!r}", read_form(place)
    for key, value, right in (
        ("rank", config.model.rank, form.rank),
        ("alpha", config.model.alpha, form.alpha),
    ):
        if value != right:
            raise ConfigError(f"model.{key} = {value:g} must be {right:g}, that of {said}; set that, or leave it out")
    weights = adapter_folder(Path(place)) / WEIGHTS_FILE
    try:
        with safe_open(weights, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
            _refuse_other_base(config, said, form.base, (file.metadata() or {}).get(BASE_DIGEST, ""))
        _refuse_unfit(said, shapes, {entry.name: entry.shape for entry in layout.entries}, config, spec)
        vector = load_peft(weights.parent, layout)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{said}: {weights} cannot be read: {error}; restore it") from error
    if not torch.isfinite(vector).all():
        raise ConfigError(f"{said}: {weights} holds values that are no numbers; restore it")
    return vector


def refuse_other_labels(config: RunConfig, labels: Sequence[str], folder: Path | None) -> None:
    """Refuse the adapter of a run whose classes are others, or in another order; not looked at once a run has begun.

    Raises:
        ConfigError: naming both.
    """
    if not config.model.adapter or (folder is not None and (folder / START_FOLDER).is_dir()):
        return
    theirs = find_start(config).labels
    if theirs and tuple(labels) != theirs:
        raise ConfigError(
            f"model.adapter = {config.model.adapter!r} tells {', '.join(theirs)} apart, the data have "
            f"{', '.join(labels)}; use data with these labels, or start without it"
        )


def _of_folder(place: Path) -> Start:
    folder = adapter_folder(place)
    exported = (folder / PRIVACY_FILE).is_file()
    return Start(folder, (Ancestor("export" if exported else "adapter", place.name, _digest(folder)),), ((),))


def _of_run(run: FinishedRun) -> Start:
    before, reason = read_lineage(run.folder / START_FOLDER), run.statement["not_private"]
    own = Ancestor("run", run.config.name, _digest(run.adapter), reason, data_digest(run.folder) or "")
    ledgers = [ledger_files(run.folder / START_FOLDER, number) for number in range(len(before))]
    file = run.folder / LEDGER_FILE
    sites = [ledger.path for ledger in site_ledgers(run.folder).values()]
    return Start(run.adapter, (*before, own), (*ledgers, [file] if file.is_file() else sites), run.label_names)


def _with_account(config: RunConfig, start: Start) -> Start:
    if (account := account_of(config)) is None:
        return start
    with Account.open(*account, read_only=True) as held:
        paid = set(held.debits)
    ancestors = []
    for ancestor, files in zip(start.ancestors, start.ledgers, strict=True):
        identities = set()
        for path in files:
            with Ledger.open(path, read_only=True) as ledger:
                tuning = ledger.commitment.tuning
                identities.add(tuning.id if tuning else ledger.run_id)
        debited = None if ancestor.kind != "run" else bool(identities) and identities <= paid
        ancestors.append(replace(ancestor, debited=debited))
    return replace(start, ancestors=tuple(ancestors))


def _refuse_other_base(config: RunConfig, said: str, base: str, digest: str) -> None:
    """Refuse an adapter of another base model; where the adapter holds no digest of its own, the name decides."""
    own = config.model.name
    if digest:
        if digest != (found := fingerprint(own)):
            raise ConfigError(
                f"{said} was trained on {base or 'another model'} (digest {digest[:12]}), and model.name = {own!r} "
                f"has the digest {found[:12]}; set model.name to that base model"
            )
    elif base and base not in (own, hub_id(own), own.partition("@")[0]):
        raise ConfigError(
            f"{said} was trained on {base!r}, and model.name is {own!r}; set model.name to that base model, or correct "
            f"base_model_name_or_path in its {FORM_FILE}"
        )


def _refuse_unfit(
    said: str,
    theirs: dict[str, tuple[int, ...]],
    ours: dict[str, tuple[int, ...]],
    config: RunConfig,
    spec: LoraSpec,
) -> None:
    """Refuse an adapter whose values are not exactly those that the run's adapter has."""
    where = f"model.targets = {config.model.targets!r}, model.layers = {config.model.layers}"
    heads = f" and {', '.join(spec.heads)} in full" if spec.heads else ""
    for one, other, words in ((ours, theirs, "lacks"), (theirs, ours, "has beside them")):
        if missing := [name for name in one if name not in other]:
            raise ConfigError(
                f"{said} does not fit {where}{heads}: it {words} {len(missing)} of {len(one)} tensors, such as "
                f"{', '.join(missing[:SHOWN])}; name the layers that it adapts, or leave them out"
            )
    for name, shape in ours.items():
        if theirs[name] != shape:
            raise ConfigError(
                f"{said}: {name} is {theirs[name]}, the run needs {shape}; take its base model, and as many labels"
            )


def _digest(folder: Path) -> str:
    with (folder / WEIGHTS_FILE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
