"""The data block: what was read, what was left out and why, and what every part holds, in rows for people."""

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from server.config.schema import RunConfig
from server.run_folder.data_facts import DataFacts
from simulations.report.notation import number_text, percent_text

_SOURCES = {"generated": "generated"} | {
    key: f"in data.{key}" for key in ("source", "validation-source", "test-source")
}
_HELD_OUT = {"train": "validation or test", "validation": "test"}
_REMEDIES = {"train": "data.train-records", "test": "data.test-limit"}


def data_rows(facts: DataFacts, config: RunConfig) -> list[tuple[str, str]]:
    """List label and text of every row that has something to say."""
    rows = [("Read", _read(facts)), *((part.capitalize(), _part(facts, config, part)) for part in facts.records)]
    if facts.clients is not None:
        rows.append((_members(config).capitalize(), _clients(facts)))
    return [(label, text) for label, text in rows if text]


def data_table(facts: DataFacts, config: RunConfig) -> RenderableType:
    """Draw the rows for a terminal, under their heading."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for label, text in data_rows(facts, config):
        table.add_row(label.lower(), Text(text))
    return Padding(table, (0, 0, 0, 2))


def _read(facts: DataFacts) -> str:
    read = ", ".join(f"{_records(count)} {_SOURCES.get(name, name)}" for name, count in facts.read.items())
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in facts.left_out.items())
    return f"{read}; left out: {left_out}" if left_out else read


def _part(facts: DataFacts, config: RunConfig, part: str) -> str:
    return "; ".join([_records(facts.records[part]), *_asides(facts, config, part)])


def _asides(facts: DataFacts, config: RunConfig, part: str) -> Iterator[str]:
    if count := facts.duplicates.get(part):
        yield f"{count:,} dropped, since {_HELD_OUT[part]} has the same text"
    if count := facts.not_drawn.get(part):
        yield f"{count:,} more were not drawn ({_REMEDIES[part]})"
    if count := facts.truncated.get(part):
        yield f"{count:,} ({percent_text(count / facts.records[part])}) cut at {config.model.max_length} tokens"
    if part == "validation" and config.public.warm_start_epochs:
        first = round(config.public.training_fraction * facts.records[part])
        yield f"the first {first:,} warm the model up, the other {facts.records[part] - first:,} validate"


def _clients(facts: DataFacts) -> str:
    assert facts.clients is not None
    text = f"{facts.clients:,}"
    if facts.sizes is not None:
        least, median, most = facts.sizes
        each = f"{least:,}" if least == most else f"{least:,} to {most:,}, median {number_text(median)}"
        text += f" with {each} record{'s' * (most > 1)} each"
    if facts.empty_clients:
        text += f"; {facts.empty_clients:,} of them have none"
    return text


def _members(config: RunConfig) -> str:
    return "clients" if config.privacy.unit == "client" else "sites"


def _records(count: int) -> str:
    return f"{count:,} record" if count == 1 else f"{count:,} records"


def shares_cut(facts: DataFacts) -> Mapping[str, float]:
    """The share of records that were cut, of every part."""
    return {part: facts.truncated.get(part, 0) / count for part, count in facts.records.items() if count}
