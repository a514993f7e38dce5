"""The ``[data]`` table of a run, and what else decides a prepared data set.

Nothing here needs numpy or torch: a command that only reads settings starts at once.
"""

import codecs
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from client.settings import Count, CountOrAuto, Options, Positive, Rate, Table, cache_folder

NOTES = "notes"
"""The source that is generated."""

Task = Literal["classification", "causal-lm", "summarisation", "instruction", "preference"]
ANSWERS = ("summarisation", "instruction")
"""Tasks whose records hold a prompt and an answer."""
MaxLength = Annotated[int, Field(ge=4, le=4096)]


class Reading(Table):
    """The settings by which records are read out of a file.

    The part of ``[data]`` that nodes with records of their own are sent.

    Attributes:
        text_column: column of the texts, the prompts or the conversations.
        text_pair_column: column of the second texts, the summaries or the answers; empty for none.
        label_column: column of the labels; a language model needs none.
        client_column: column that names the client of a record (``partition = "natural"``); empty for none.
        unit_column: column that names the unit of privacy of a record (a patient, a document); empty makes every record
            a unit.
        least_words: fewest words of a record; shorter records are left out, public ones too, except those of the test
            source.
        separator: character between the cells of a CSV file; empty takes a comma, or a tab in a file named .tsv.
        columns: names of the columns of a CSV file without a header, separated by commas; empty reads the first line as
            header.
        encoding: encoding of a CSV file, by Python's name, such as latin-1.
    """

    text_column: Annotated[str, Field(min_length=1)] = "text"
    text_pair_column: str = ""
    label_column: str = "label"
    client_column: str = ""
    unit_column: str = ""
    least_words: CountOrAuto = 0
    separator: str = ""
    columns: str = ""
    encoding: Annotated[str, Field(min_length=1)] = "utf-8"

    @field_validator("separator")
    @classmethod
    def _one_character(cls, separator: str) -> str:
        if len(separator.encode()) > 1:
            raise ValueError(f"must be one character, got {separator!r}")
        return separator

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, name: str) -> str:
        try:
            codecs.lookup(name)
        except LookupError:
            said = f"{name!r} is no encoding that Python knows; try utf-8, latin-1, cp1252 or utf-16"
            raise ValueError(said) from None
        return name


class DataSettings(Reading):
    """The source of the records and how they become clients, a public validation set and a test set.

    Attributes:
        held_by: holder of the clients' records: this server, which simulates the clients, or the nodes of a deployment.
            With ``nodes`` every node is one client and reads records of its own, in columns of these names; ``source``
            and the sources below then hold public records only, the validation and the test set.
        nodes: number of nodes in a deployment whose nodes hold many clients each, named by ``client_column``; 0 makes
            every node one client.
        source: source of the records: ``notes`` (generated), ``parquet:PATH``, ``csv:PATH``, ``jsonl:PATH``,
            ``json:PATH`` or a hub id.
        validation_source: source of the public validation records, in the same syntax; empty takes them out of
            `source`, whose held-out people are then as public as they are. Its columns have the same names.
        test_source: source of the test set, in the same syntax; empty takes test records out of `source`.
        partition: way in which records become clients, see docs/data.md. ``repeated`` measures speed: any number of
            clients share the records.
        partition_options: options of a partitioner of flwr-datasets, by name.
        dirichlet_alpha: concentration of the label skew; small values give every client few labels.
        validation_records: size of the public validation set; of `validation_source` at most so many, drawn by the
            seed.
        test_records: size of a test set that is taken out of `source`.
        test_limit: most records of `test_source` that are tested on, the same ones for every seed; 0 tests on all.
        train_records: most records dealt to the clients, drawn by the seed; 0 deals all.
        records_per_client: mean number of generated notes of a client; with the ``repeated`` partition, the records of
            each client.
        canaries: number of secrets planted into the training records for audits, see docs/data.md.
        canary_kind: form of the planted secrets.
        canary_copies: number of records that hold the same secret.
        sensitive: treatment of sensitive spans in the training records: none, redaction, or weights of their tokens.
        detector: detector of the sensitive spans, see docs/atdp.md.
        mask: text that replaces a redacted span.
        other_weight: weight of the tokens outside sensitive spans, where tokens are weighted.
        cache: folder of prepared data sets; empty takes ``$XDG_CACHE_HOME/lacquer`` or ``~/.cache/lacquer``.
    """

    held_by: Literal["server", "nodes"] = "server"
    nodes: CountOrAuto = 0
    source: Annotated[str, Field(min_length=1)] = NOTES
    validation_source: str = ""
    test_source: str = ""
    partition: Literal["dirichlet", "iid", "natural", "pathological", "shard", "repeated"] = "dirichlet"
    partition_options: Options = Field(default_factory=dict)
    dirichlet_alpha: Positive = 1.0
    validation_records: Count = 1000
    test_records: Count = 1000
    test_limit: CountOrAuto = 0
    train_records: CountOrAuto = 0
    records_per_client: Count = 20
    canaries: CountOrAuto = 0
    canary_kind: Literal["six-digit", "secret-id", "id-record"] = "six-digit"
    canary_copies: Count = 10
    sensitive: Literal["none", "weights", "redaction"] = "none"
    detector: str = "regex"
    mask: str = "<MASK>"
    other_weight: Rate = 0.2
    cache: str = ""


class DataSpec(DataSettings):
    """Everything that decides the content of a prepared data set: ``[data]``, and what it takes of the rest of a run.

    Attributes:
        tokenizer: name of the base model whose tokenizer is used, see :func:`client.models.base.load_base`.
        clients: logical clients; 0 takes as many as the client column names (``partition = "natural"``).
        seed: of the generated notes, the held-out rows and the partition.
        task: ``"classification"``; without labels ``"causal-lm"``, ``"summarisation"`` (the summary of ``text_column``
            is in ``text_pair_column``), ``"instruction"`` (:mod:`client.data.conversations`) and ``"preference"``
            (:mod:`client.data.columns.preferences`).
        chat_template: in Jinja, for conversations; empty takes the tokenizer's.
        max_length: tokens of a record beyond this are cut off (and counted).
        whole_units: units are dealt to clients whole; else one may have records at several.
    """

    tokenizer: Annotated[str, Field(min_length=1)]
    clients: CountOrAuto
    seed: CountOrAuto = 0
    task: Task = "classification"
    chat_template: str = ""
    max_length: MaxLength = 128
    whole_units: bool = False

    @property
    def public_only(self) -> "DataSpec":
        """The settings for the public source alone, without clients and units, where the nodes hold the records."""
        if self.held_by != "nodes":
            return self
        least = 0 if self.source == NOTES else self.least_words
        whose = "" if self.nodes else self.client_column
        common = {"clients": 1, "client_column": whose, "unit_column": "", "partition_options": {}}
        return self.replace(**common, partition="iid", least_words=least)

    @property
    def cache_folder(self) -> Path:
        """The folder in which prepared data sets are kept."""
        return Path(self.cache).expanduser() if self.cache else cache_folder()

    def identity(self) -> dict[str, Any]:
        """The settings that decide the content, without where it is kept and who else has records."""
        counted = self.partition == "natural" and self.source != NOTES  # by the source, not by the settings
        unnamed = set() if self.validation_source else {"validation_source"}  # so that older data keep their names
        return self.model_dump(exclude={"cache", "held_by", "nodes"} | ({"clients"} if counted else set()) | unnamed)

    @property
    def chat(self) -> bool:
        """Whether records are conversations."""
        return self.task == "instruction"
