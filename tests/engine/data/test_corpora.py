"""Named corpora: narratives of encounters, articles, abstracts; units of privacy, planted secrets, summaries."""

import numpy as np
import pandas
import pytest

from client.data import conversations, sources
from client.data.canaries import KINDS, Canaries, plant, secrets
from client.data.catalog import corpora
from client.data.catalog.diabetes130 import DRUGS, diagnosis
from client.data.prepare import prepare
from client.data.sources import Texts
from client.data.spec import DataSpec
from client.data.tokenise import BEFORE_SUMMARY
from client.engine.cohort import CohortEngine
from client.models.base import load_base, load_tokenizer
from client.models.lora import LoraSpec, adapter_layout, initial_adapter
from client.models.tasks import make_task

ENCOUNTER = {
    "encounter_id": 990017,
    "patient_nbr": 880023,
    "race": "AfricanAmerican",
    "gender": "Female",
    "age": "[70-80)",
    "weight": "?",
    "payer_code": "MC",
    "admission_type_id": 1,
    "discharge_disposition_id": 6,
    "admission_source_id": 7,
    "time_in_hospital": 1,
    "medical_specialty": "Cardiology",
    "num_lab_procedures": 41,
    "num_procedures": 1,
    "num_medications": 8,
    "number_outpatient": 0,
    "number_emergency": 2,
    "number_inpatient": 1,
    "diag_1": "250.83",
    "diag_2": "V58",
    "diag_3": "?",
    "number_diagnoses": 2,
    "max_glu_serum": "None",
    "A1Cresult": ">8",
    "change": "Ch",
    "diabetesMed": "Yes",
    "readmitted": "<30",
    **dict.fromkeys(DRUGS, "No"),
    "metformin": "Steady",
    "insulin": "Up",
}
UNKNOWN = ENCOUNTER | {
    "patient_nbr": 880024,
    "race": "?",
    "gender": "Unknown/Invalid",
    "admission_type_id": 6,
    "discharge_disposition_id": 18,
    "admission_source_id": 17,
    "medical_specialty": "?",
    "number_emergency": 0,
    "number_inpatient": 0,
    "diag_1": "?",
    "diag_2": "?",
    "A1Cresult": "None",
    "diabetesMed": "No",
    "readmitted": "NO",
    "metformin": "No",
    "insulin": "No",
}
MAPPING = [
    ("admission_type_id", 1, "Emergency"),
    ("admission_type_id", 6, "NULL"),
    ("discharge_disposition_id", 6, "Discharged to home with home health service"),
    ("discharge_disposition_id", 18, "NULL"),
    ("admission_source_id", 7, " Emergency Room"),
    ("admission_source_id", 17, "NULL"),
]


@pytest.fixture(scope="module")
def hospital(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diabetes130")
    rows = [ENCOUNTER, UNKNOWN]
    rows += [ENCOUNTER | {"patient_nbr": 1000 + number // 2, "num_medications": number} for number in range(200)]
    pandas.DataFrame(rows).to_parquet(folder / "full.parquet")
    pandas.DataFrame(MAPPING, columns=["field", "id", "description"]).to_parquet(folder / "ids_mapping.parquet")
    return folder


def test_narrative_says_what_the_row_says(hospital):
    table = corpora.read(f"diabetes130:{hospital}", "data.source")
    assert table["text"][0].as_py() == (
        "African American female patient aged 70 to 80. Emergency admission (emergency room) to Cardiology, 1 day in "
        "hospital. There were 41 laboratory tests, 1 other procedure and 8 medications. In the year before: 2 "
        "emergency visits, 1 inpatient visit. Diagnoses: 250.83 (diabetes), V58 (supplementary factor); 2 in all. "
        "HbA1c >8. Diabetes medication was changed: metformin unchanged, insulin increased. Discharged to home with "
        "home health service. The patient was readmitted within 30 days."
    )
    assert table["text"][1].as_py() == (
        "Patient aged 70 to 80. Admission, 1 day in hospital. There were 41 laboratory tests, 1 other procedure and "
        "8 medications. No visits in the year before. No diabetes medication. The patient was not readmitted."
    )
    assert not any(str(identifier) in "".join(table["text"].to_pylist()) for identifier in (990017, 880023))
    assert [diagnosis(code) for code in ("8", "428", "786", "999", "E885")] == [
        "8 (infection)",
        "428 (circulatory disease)",
        "786 (respiratory disease)",
        "999 (injury or poisoning)",
        "E885 (external cause)",
    ]


def test_no_patient_is_in_two_parts(hospital):
    parts = {
        part: corpora.read(f"diabetes130:{hospital}@{part}", "data.source")["patient_nbr"].to_pylist()
        for part in ("train", "eval", "attack")
    }
    assert sum(map(len, parts.values())) == 202
    patients = {part: set(of) for part, of in parts.items()}
    assert {part: len(of) for part, of in patients.items()} == {"train": 74, "eval": 8, "attack": 20}
    assert len(set.union(*patients.values())) == 102


def test_patients_are_units_and_never_on_both_sides(hospital, tmp_path):
    spec = DataSpec(
        tokenizer="random:llama",
        clients=1,
        source=f"diabetes130:{hospital}@train",
        unit_column="patient_nbr",
        task="causal-lm",
        partition="iid",
        validation_records=20,
        test_records=10,
        max_length=64,
        canaries=3,
        canary_copies=2,
        cache=str(tmp_path),
    )
    data = prepare(spec)
    site = data.client(0)
    assert site.units is not None
    assert data.validation.units is None
    assert sum(data.meta["records"].values()) == len(corpora.read(spec.source, "data.source")) + 6
    sizes = np.bincount(site.units)  # patients have two encounters here, but for the first two of the table
    assert 6 <= (sizes == 1).sum() <= 8  # every copy of a canary is a unit of its own
    assert (sizes == 2).sum() == (len(site) - (sizes == 1).sum()) / 2 > 50
    chosen = site.select([3, 1])
    assert chosen.units.tolist() == [site.units[3], site.units[1]]


def test_dialogues_are_conversations(tmp_path):
    text = "USER: A table for two: today.\nSYSTEM: Where?\nUSER: Sino.\nSYSTEM: It is booked."
    frame = pandas.DataFrame({"dialogue_id": ["1_0"], "services": [["Restaurants_1"]], "text": [text]})
    frame.to_parquet(tmp_path / "train.parquet")
    reading = sources.Reading(label_column="", client_column="dialogue_id")
    read = sources.read(f"sgd:{tmp_path}", reading, task="instruction")
    assert read.clients == ["1_0"]
    assert [(turn["role"], turn["content"]) for turn in conversations.from_text(read.texts[0])] == [
        ("user", "A table for two: today."),
        ("assistant", "Where?"),
        ("user", "Sino."),
        ("assistant", "It is booked."),
    ]
    frame.assign(text="Hello").to_parquet(tmp_path / "test.parquet")
    with pytest.raises(ValueError, match=r"does not hold the files of sgd.*Hello"):
        corpora.read(f"sgd:{tmp_path}@test", "data.source")


def test_articles_of_wikitext(tmp_path):
    body = " A paragraph that is long enough to be a record , " + "more " * 20 + "text . \n"
    names = [f"Article {number}" for number in range(30)]
    lines = []
    for name in names:
        lines += ["", f" = {name} = \n", "", body, "", " = = Section = = \n", "", " short line \n", body, " = = \n"]
    pandas.DataFrame({"text": lines}).to_parquet(tmp_path / "train.parquet")
    found = corpora.articles(lines)
    assert [article.title for article in found] == names
    assert found[0].paragraphs == [body.strip(), "short line", body.strip()]
    assert found[0].text.startswith(" = Article 0 = \n A paragraph")
    everything = corpora.read(f"wikitext2:{tmp_path}@train", "data.source")
    assert len(everything) == 60
    private = set(corpora.read(f"wikitext2:{tmp_path}@held-back", "data.source")["article"].to_pylist())
    public = {article.title for article in corpora.for_pretraining(found)}
    assert {name.partition(" ")[2] for name in private} == set(names) - public
    assert 3 <= len(private) <= 20
    with pytest.raises(ValueError, match="before the first article"):
        corpora.articles(["no title \n"])


def test_abstracts_are_read_once(tmp_path):
    pandas.DataFrame({"text": ["b", "a "]}).to_parquet(tmp_path / "1.parquet")
    pandas.DataFrame({"text": ["a", "", "c"]}).to_parquet(tmp_path / "2.parquet")
    assert corpora.read(f"abstracts:{tmp_path}", "data.source")["text"].to_pylist() == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("diabetes130:/nowhere", "there is no folder /nowhere"),
        ("wikitext2:{}@dev", "no part 'dev'; the parts are train, validation, test, held-back"),
        ("abstracts:{}@train", "abstracts has no parts"),
        ("diabetes130:{}", "does not hold the files of diabetes130"),
        ("abstracts:{}", "holds no texts"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path, source, message):
    with pytest.raises(ValueError, match=message):
        corpora.read(source.format(tmp_path), "data.source")


def test_canaries_are_planted_where_they_say():
    texts = Texts([f"text {number}" for number in range(50)], units=[str(number // 5) for number in range(50)])
    six = Canaries("six-digit", count=4, copies=3, seed=1)
    planted = plant(texts, six)
    assert planted.texts[:50] == texts.texts
    assert planted.texts[50:] == [f"My ID is {secret}." for secret in six.secrets for _ in range(3)]
    assert len(set(planted.units[50:])) == 12
    ids = Canaries("secret-id", count=4, copies=3, seed=1)
    appended = plant(texts, ids)
    assert appended.units == texts.units
    changed = [text for text, before in zip(appended.texts, texts.texts, strict=True) if text != before]
    assert sorted(text.partition(" secret_id=")[2] for text in changed) == sorted(ids.secrets * 3)
    assert all(len(secret) == 10 and set(secret) <= set(KINDS["secret-id"].alphabet) for secret in ids.secrets)
    assert secrets("six-digit", 4, 1) == six.secrets != secrets("six-digit", 4, 2)
    assert not set(secrets("six-digit", 100, 1, "others")) & set(six.secrets)
    with pytest.raises(ValueError, match="do not fit into 50"):
        plant(texts, Canaries("secret-id", count=51))
    with pytest.raises(ValueError, match="canaries_kind must be"):
        Canaries("iban", count=1)


def test_summaries_alone_are_learnt(tmp_path):
    frame = pandas.DataFrame({"dialogue": ["A: hi\nB: hello " + "x" * 80] * 4 + ["short"] * 9, "summary": ["Hi."] * 13})
    frame["dialogue"] += [str(number) for number in range(13)]
    frame.to_parquet(tmp_path / "chats.parquet")
    spec = DataSpec(
        tokenizer="random:llama",
        clients=2,
        source=f"parquet:{tmp_path / 'chats.parquet'}",
        text_column="dialogue",
        text_pair_column="summary",
        task="summarisation",
        partition="iid",
        validation_records=2,
        test_records=1,
        max_length=48,
        cache=str(tmp_path),
    )
    data, tokenizer = prepare(spec), load_tokenizer(spec.tokenizer)
    for index in range(len(data.train)):
        record = data.train.select([index])
        assert len(record.tokens) <= 48
        learnt = record.tokens[record.token_weights > 0]
        assert tokenizer.decode(learnt) == " Hi.</s>"
        assert tokenizer.decode(record.tokens[record.token_weights == 0]).endswith(BEFORE_SUMMARY)
    assert sum(data.meta["truncated"].values()) == 4
    model, _ = load_base(spec.tokenizer, spec.task)
    adapters = LoraSpec(1, 1.0, ("q_proj",))
    vector = initial_adapter(adapter_layout(model, adapters), model, seed=0)
    engine = CohortEngine(model, adapters, make_task(spec.task))
    assert engine.evaluate(vector, data.validation).count == data.predicted_tokens("validation", 0, 2) == 8 + 2
