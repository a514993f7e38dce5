"""Public data sets in their published form become the files that presets read, or the refusal names what is missing."""

import csv
import io
import json
import zipfile
from pathlib import Path

import pyarrow.parquet
import pytest

from client.data import sources
from client.data.catalog import corpora
from client.data.catalog.diabetes130 import DRUGS
from client.data.catalog.published import PUBLISHED, convert

ENCOUNTER = {
    "encounter_id": 990017, "patient_nbr": 880023, "race": "AfricanAmerican", "gender": "Female", "age": "[70-80)",
    "weight": "?", "payer_code": "MC", "admission_type_id": 1, "discharge_disposition_id": 6, "admission_source_id": 7,
    "time_in_hospital": 1, "medical_specialty": "Cardiology", "num_lab_procedures": 41, "num_procedures": 1,
    "num_medications": 8, "number_outpatient": 0, "number_emergency": 2, "number_inpatient": 1, "diag_1": "250",
    "diag_2": "401", "diag_3": "?", "number_diagnoses": 2, "max_glu_serum": "None", "A1Cresult": ">8", "change": "Ch",
    "diabetesMed": "Yes", "readmitted": "<30", **dict.fromkeys(DRUGS, "No"),
}  # fmt: skip
IDS = (
    "admission_type_id,description\r\n1,Emergency\r\n,\r\ndischarge_disposition_id,description\r\n6,Home care\r\n,\r\n"
)
IDS += "admission_source_id,description\r\n7, Emergency Room\r\n"
DIALOGUE = {
    "dialogue_id": "1_0",
    "services": ["Hotels_1"],
    "turns": [{"speaker": "USER", "utterance": "A room,\n please"}, {"speaker": "SYSTEM", "utterance": "Yes."}],
}
CHAT = {"id": "1", "dialogue": "Ann: hi\r\nBob: hello", "summary": "They greet."}
INTENTS = {
    "train": [["hello there", "greet"], ["take my card", "pay"]], "val": [["hey", "greet"]], "test": [["bill", "pay"]],
    **{f"oos_{part}": [["what is love", "oos"]] for part in ("train", "val", "test")},
}  # fmt: skip


def table(*rows: dict[str, object]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


REF = 'Blue Spice, "by the river",\nis nice.'
FORMS: dict[str, dict[str, str]] = {
    "diabetes130": {"dataset/diabetic_data.csv": table(ENCOUNTER, ENCOUNTER), "dataset/IDs_mapping.csv": IDS},
    "sst2": {
        "SST-2/train.tsv": 'sentence\tlabel\na "fine film \t1\nso dull\t0\n',
        "SST-2/dev.tsv": "sentence\tlabel\ngood\t1\n",
        "QNLI/train.tsv": "index\tquestion\tsentence\tlabel\n",
    },
    "qnli": {
        "train.tsv": "index\tquestion\tsentence\tlabel\n0\twho?\tI.\tnot_entailment\n",
        "dev.tsv": "index\tquestion\tsentence\tlabel\n0\twho?\tI.\tentailment\n",
    },
    "wikitext2": {f"wiki.{part}.tokens": " \n = Title = \n \n A text . \n" for part in ("train", "valid", "test")},
    "samsum": {f"{part}.json": json.dumps([CHAT]) for part in ("train", "val", "test")},
    "e2e": {
        name: table({"mr": "name[Blue Spice]", "ref": REF})
        for name in ("trainset.csv", "devset.csv", "testset_w_refs.csv", "testset.csv")
    },
    "sgd": {
        f"{part}/{name}.json": json.dumps([DIALOGUE])
        for part in ("train", "dev", "test")
        for name in ("dialogues_001", "dialogues_002", "schema")
    },
    "clinc150": {"data/data_full.json": json.dumps(INTENTS)},
    "pubmed": {"data/pubmed/dev.csv": table({"text": "One, two."}), "data/biorxiv/dev.csv": table({"text": "no"})},
}
FORMS["multiwoz"] = FORMS["sgd"]
FORMS["biorxiv"] = FORMS["pubmed"]
FORMS["congressional"] = {"congressional/test.csv": table({"text": "The hon. member."})}


def write(name: str, place: Path) -> Path:
    for file, text in FORMS[name].items():
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text(text, newline="")
    return place


def rows(file: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = pyarrow.parquet.read_table(file).to_pylist()
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_folder_and_its_archive_become_the_same_files(name: str, tmp_path: Path) -> None:
    place, archive = write(name, tmp_path / "as published"), tmp_path / "published.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for file in FORMS[name]:
            packed.write(place / file, f"top/{file}")
            packed.writestr(f"__MACOSX/top/{Path(file).parent}/._{Path(file).name}", b"\x00\xff")
    folder, other = tmp_path / "data", tmp_path / "other"
    written = convert(name, place, folder)
    assert {file.parent for file in written} == {folder / PUBLISHED[name].folder}
    packed_too = convert(name, archive, other)
    assert [rows(file) for file in written] == [rows(file) for file in packed_too]
    assert list(written.values()) == [len(rows(file)) for file in written]
    with pytest.raises(FileExistsError, match="is there already; remove it, or write elsewhere with --to"):
        convert(name, place, folder)


def test_what_is_written_is_what_the_sources_read(tmp_path: Path) -> None:
    for name in ("diabetes130", "wikitext2", "sgd", "pubmed"):
        convert(name, write(name, tmp_path / name), tmp_path / "data")
    narratives = corpora.read(f"diabetes130:{tmp_path}/data/diabetes130", "data.source").to_pylist()
    assert len(narratives) == 2
    assert (narratives[0]["patient_nbr"], narratives[0]["readmitted"]) == ("880023", "<30")
    conversation, _ = corpora.read(f"sgd:{tmp_path}/data/sgd_dialogues@validation", "data.source").to_pylist()
    assert conversation["messages"] == [
        {"role": "user", "content": "A room, please"},
        {"role": "assistant", "content": "Yes."},
    ]
    assert rows(tmp_path / "data/wikitext2/train.parquet") == [
        {"text": text} for text in ("", " = Title = \n", "", " A text . \n")
    ]
    assert corpora.read(f"abstracts:{tmp_path}/data/pesgd_pubmed", "data.source").to_pylist() == [{"text": "One, two."}]


def test_the_columns_that_presets_name(tmp_path: Path) -> None:
    for name in ("sst2", "qnli", "samsum", "e2e", "clinc150"):
        convert(name, write(name, tmp_path / name), tmp_path)
    assert rows(tmp_path / "glue_sst2/train.parquet") == [
        {"sentence": 'a "fine film', "label": 1},
        {"sentence": "so dull", "label": 0},
    ]
    assert rows(tmp_path / "glue_qnli/train.parquet")[0]["label"] == 1
    assert rows(tmp_path / "samsum/validation.parquet") == [CHAT | {"dialogue": "Ann: hi\nBob: hello"}]
    assert rows(tmp_path / "e2e_nlg/test.parquet") == [{"mr": "name[Blue Spice]", "ref": REF}]
    assert [row["label"] for row in rows(tmp_path / "clinc150/train.parquet")] == [0, 1, 2]


def test_a_missing_data_set_is_named_with_the_command_that_tells_how_it_is_had(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`lacquer data sst2` says .* the folder that holds glue_sst2/"):
        sources.existing_file(f"parquet:{tmp_path}/glue_sst2/train.parquet")
    with pytest.raises(ValueError, match="`lacquer data diabetes130` says how it is had"):
        corpora.read(f"diabetes130:{tmp_path}/diabetes130", "data.source")
    with pytest.raises(ValueError, match="it is relative to where you started"):
        corpora.read(f"diabetes130:{tmp_path}/mine", "data.source")


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("e2e", {"devset.csv": "mr,ref\n"}, r"holds no trainset.csv\. The published form of e2e is had by: git clone"),
        ("e2e", {"a/trainset.csv": "", "b/trainset.csv": ""}, "holds trainset.csv more than once"),
        ("sst2", {"train.tsv": "text\tlabel\nx\t1\n", "dev.tsv": ""}, "not in the published form"),
        ("sst2", {"train.tsv": "sentence\tlabel\nx\tgood\n", "dev.tsv": ""}, "published form .KeyError..good"),
        ("clinc150", {"data_full.json": "{}"}, "not in the published form"),
        ("sgd", {"schema.json": "[]"}, "holds no train/dialogues_001.json"),
        ("pubmed", {"a.txt": ""}, "holds no train.csv or dev.csv or test.csv"),
        ("diabetes130", {"diabetic_data.csv": "a,b\n1\n", "IDs_mapping.csv": IDS}, "not in the published form"),
    ],
)
def test_another_form_is_refused_and_nothing_is_written(
    name: str, files: dict[str, str], message: str, tmp_path: Path
) -> None:
    for file, text in files.items():
        (tmp_path / "given" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "given" / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        convert(name, tmp_path / "given", tmp_path / "data")
    assert not (tmp_path / "data").exists()
    with pytest.raises(ValueError, match="there is no such file or folder"):
        convert(name, tmp_path / "nowhere", tmp_path / "data")
