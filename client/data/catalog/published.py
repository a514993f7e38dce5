"""Public data sets as their publishers give them, turned into the parquet files that presets and sweeps read.

A place is a folder, an archive (zip), or one file of the data set. Nothing is fetched: :data:`PUBLISHED` has the
command that fetches each, for a person to run.
"""

import csv
import io
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.parquet

Read = Callable[[], bytes]
Tables = dict[str, pyarrow.Table]

OUT_OF_SCOPE = "oos"
"""The intent of CLINC150 that is none; its label comes after all others."""
_COUNTS = (
    "encounter_id", "patient_nbr", "admission_type_id", "discharge_disposition_id", "admission_source_id",
    "time_in_hospital", "num_lab_procedures", "num_procedures", "num_medications", "number_outpatient",
    "number_emergency", "number_inpatient", "number_diagnoses",
)  # fmt: skip
"""Columns of Diabetes 130 that are numbers; all others are texts, also where every cell is a number."""


@dataclass(frozen=True)
class Place:
    """Files of a data set in its published form.

    Attributes:
        files: by their paths inside the folder or archive.
        path: of the folder, archive or file, for errors.
    """

    path: Path
    files: Mapping[str, Read]

    @classmethod
    def of(cls, path: Path) -> "Place":
        """The files of a folder, an archive or one file; ValueError if there is nothing."""
        if path.is_dir():
            found: dict[str, Read] = {
                file.relative_to(path).as_posix(): file.read_bytes for file in sorted(path.rglob("*")) if file.is_file()
            }
        elif path.is_file() and zipfile.is_zipfile(path):
            archive = zipfile.ZipFile(path)
            found = {name: partial(archive.read, name) for name in archive.namelist() if not name.endswith("/")}
        elif path.is_file():
            found = {path.name: path.read_bytes}
        else:
            raise ValueError(f"{path}: there is no such file or folder")
        return cls(path, {name: read for name, read in found.items() if not name.rpartition("/")[2].startswith(".")})

    def text(self, *names: str) -> str:
        """The text of the first of these names, each the end of a path, that the place has once.

        Raises:
            ValueError: it has none of them, or several files that end so.
        """
        for name in names:
            found = [path for path in self.files if f"/{path}".endswith(f"/{name}")]
            if len(found) > 1:
                raise ValueError(f"{self.path} holds {name} more than once: {', '.join(found[:3])}; name one folder")
            if found:
                return self.files[found[0]]().decode("utf-8-sig")
        raise ValueError(f"{self.path} holds no {' or '.join(names)}")


def _glue(place: Place, folder: str, columns: tuple[str, ...], labels: tuple[str, ...]) -> Tables:
    """Tab-separated files without quoting; a label is written as a number or a name."""
    tables, numbers = {}, {label: number for number, label in enumerate(labels)}
    for part, name in (("train", "train.tsv"), ("validation", "dev.tsv")):
        lines = io.StringIO(place.text(f"{folder}/{name}", name))
        rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
        texts = {column: [row[column].rstrip() for row in rows] for column in columns}
        tables[part] = pyarrow.table(
            {**texts, "label": pyarrow.array([numbers[row["label"]] for row in rows], pyarrow.int8())}
        )
    return tables


def _samsum(place: Place) -> Tables:
    parts = {"train": "train.json", "validation": "val.json", "test": "test.json"}
    return {
        part: pyarrow.table(
            {
                column: [row[column].replace("\r\n", "\n") for row in json.loads(place.text(name))]
                for column in ("id", "dialogue", "summary")
            }
        )
        for part, name in parts.items()
    }


def _e2e(place: Place) -> Tables:
    parts = {"train": "trainset.csv", "validation": "devset.csv", "test": "testset_w_refs.csv"}
    return {part: _csv(place.text(name), ("mr", "ref")) for part, name in parts.items()}


def _abstracts(place: Place, folder: str) -> Tables:
    """The parts that are there: PE-SGD's repository has no training texts for some."""
    parts = {"train": "train.csv", "validation": "dev.csv", "test": "test.csv"}
    found = {}
    for part, name in parts.items():
        if any(f"/{path}".endswith(f"/{name}") for path in place.files):
            found[part] = _csv(place.text(f"{folder}/{name}", name), ("text",))
    if not found:
        raise ValueError(f"{place.path} holds no {' or '.join(parts.values())}")
    return found


def _csv(text: str, columns: tuple[str, ...]) -> pyarrow.Table:
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    return pyarrow.table({column: [row[column] for row in rows] for column in columns})


def _dialogues(place: Place) -> Tables:
    """Schema-Guided Dialogue, and MultiWOZ from 2.2 on, which has its form."""
    tables = {}
    for part, folder in (("train", "train"), ("validation", "dev"), ("test", "test")):
        names = sorted(path for path in place.files if _is_dialogue(path, folder))
        if not names:
            raise ValueError(f"{place.path} holds no {folder}/dialogues_001.json")
        rows = [row for name in names for row in json.loads(place.files[name]().decode("utf-8"))]
        tables[part] = pyarrow.table(
            {
                "dialogue_id": [row["dialogue_id"] for row in rows],
                "services": [row["services"] for row in rows],
                "num_turns": pyarrow.array([len(row["turns"]) for row in rows], pyarrow.int16()),
                "text": ["\n".join(map(_turn, row["turns"])) for row in rows],
            }
        )
    return tables


def _is_dialogue(path: str, folder: str) -> bool:
    *folders, name = path.split("/")
    return folders[-1:] == [folder] and name.startswith("dialogues_") and name.endswith(".json")


def _turn(turn: Mapping[str, str]) -> str:
    return f"{turn['speaker'].upper()}: {' '.join(turn['utterance'].split())}"


def _diabetes130(place: Place) -> Tables:
    text = place.text("diabetic_data.csv")
    header = text.partition("\n")[0].strip().split(",")
    types = {name: pyarrow.int64() if name in _COUNTS else pyarrow.string() for name in header}
    convert = pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=False)
    full = pyarrow.csv.read_csv(io.BytesIO(text.encode()), convert_options=convert)
    rows, field = [], ""
    for number, description in csv.reader(io.StringIO(place.text("IDs_mapping.csv", "IDS_mapping.csv"))):
        if description == "description":
            field = number
        elif number:
            rows.append((field, int(number), description.strip()))
    columns = zip(*rows, strict=True)
    return {"full": full, "ids_mapping": pyarrow.table(list(map(list, columns)), ["field", "id", "description"])}


def _clinc150(place: Place) -> Tables:
    data = json.loads(place.text("data_full.json"))
    names = sorted({intent for _, intent in data["train"]})
    numbers = {name: number for number, name in enumerate([*names, OUT_OF_SCOPE])}
    return {
        part: pyarrow.table(
            {
                "text": [text for text, _ in rows],
                "label": pyarrow.array([numbers[intent] for _, intent in rows], pyarrow.int16()),
                "intent": [intent for _, intent in rows],
            }
        )
        for part, rows in (
            (part, [*data[name], *data[f"{OUT_OF_SCOPE}_{name}"]])
            for part, name in (("train", "train"), ("validation", "val"), ("test", "test"))
        )
    }


def _wikitext2(place: Place) -> Tables:
    """A row per line; blank ones are empty, the others keep their ends."""
    parts = {"train": "wiki.train.tokens", "validation": "wiki.valid.tokens", "test": "wiki.test.tokens"}
    return {
        part: pyarrow.table({"text": [line if line.strip() else "" for line in _lines(place.text(name))]})
        for part, name in parts.items()
    }


def _lines(text: str) -> Iterable[str]:
    return io.StringIO(text, newline="\n")


@dataclass(frozen=True)
class Published:
    """A data set: the folder that presets look for, what reads its published form, and the command that fetches it."""

    folder: str
    tables: Callable[[Place], Tables]
    fetch: str


PUBLISHED: dict[str, Published] = {
    "diabetes130": Published(
        "diabetes130", _diabetes130,
        "curl -Lo diabetes.zip https://archive.ics.uci.edu/static/public/296/"
        "diabetes+130-us+hospitals+for+years+1999-2008.zip",
    ),
    "sst2": Published(
        "glue_sst2", partial(_glue, folder="SST-2", columns=("sentence",), labels=("0", "1")),
        "curl -LO https://dl.fbaipublicfiles.com/glue/data/SST-2.zip",
    ),
    "qnli": Published(
        "glue_qnli",
        partial(_glue, folder="QNLI", columns=("question", "sentence"), labels=("entailment", "not_entailment")),
        "curl -LO https://dl.fbaipublicfiles.com/glue/data/QNLIv2.zip",
    ),
    "wikitext2": Published(
        "wikitext2", _wikitext2, "curl -LO https://wikitext.smerity.com/wikitext-2-v1.zip"
    ),
    "samsum": Published(
        "samsum", _samsum, "curl -LO https://arxiv.org/src/1911.12237v2/anc/corpus.7z     # unpack it"
    ),
    "e2e": Published("e2e_nlg", _e2e, "git clone https://github.com/tuetschek/e2e-dataset"),
    "sgd": Published(
        "sgd_dialogues", _dialogues,
        "git clone https://github.com/google-research-datasets/dstc8-schema-guided-dialogue",
    ),
    "multiwoz": Published(
        "multiwoz_dialogues", _dialogues,
        "git clone https://github.com/budzianowski/multiwoz     # --from multiwoz/data/MultiWOZ_2.2",
    ),
    "clinc150": Published("clinc150", _clinc150, "git clone https://github.com/clinc/oos-eval"),
    **{
        name: Published(
            f"pesgd_{name}", partial(_abstracts, folder=name), "git clone https://github.com/LindaLydia/PE-SGD"
        )
        for name in ("pubmed", "biorxiv", "congressional")
    },
}  # fmt: skip
"""By the name that ``lacquer data`` takes."""


def origin_hint(path: Path) -> str:
    """The hint for a missing path: where one of these data sets is had, or what the path is relative to."""
    for name, published in PUBLISHED.items():
        if published.folder in path.parts:
            return f"`lacquer data {name}` says how it is had; --data names the folder that holds {published.folder}/"
    return "it is relative to where you started"


def convert(name: str, source: Path, folder: Path) -> dict[Path, int]:
    """Write a data set's parquet files into its folder under ``folder``; the rows of each.

    Raises:
        ValueError: the source does not hold the published form, naming what is missing and the command that fetches it.
        FileExistsError: a file is there already.
    """
    published = PUBLISHED[name]
    try:
        tables = published.tables(Place.of(source))
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError, pyarrow.ArrowInvalid) as error:
        raise ValueError(_unlike(name, f"{source} is not in the published form ({error!r})")) from error
    except ValueError as error:
        raise ValueError(_unlike(name, str(error))) from error
    files = {folder / published.folder / f"{part}.parquet": table for part, table in tables.items()}
    for file in files:
        if file.exists():
            raise FileExistsError(f"{file} is there already; remove it, or write elsewhere with --to")
    written = {}
    for file, table in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        whole: Any = file.with_suffix(".part")
        pyarrow.parquet.write_table(table, whole)
        whole.replace(file)
        written[file] = len(table)
    return written


def _unlike(name: str, what: str) -> str:
    return f"{what}. The published form of {name} is had by: {PUBLISHED[name].fetch}"
