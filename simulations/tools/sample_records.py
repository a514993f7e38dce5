"""Records to try Lacquer with: one folder of generated clinical notes, or of conversations, for every client.

    python -m simulations.tools.sample_records docker/data --clients 3 --records 200
    python -m simulations.tools.sample_records chats --clients 1 --records 4000 --chat

The notes are those of ``data.source = "notes"`` (see :mod:`client.data.catalog.notes`), the conversations those of it
with ``model.task = "instruction"`` (:mod:`client.data.catalog.consultations`). The server's public ones are of another
seed, and no patient is in two folders.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from client.data.catalog import consultations, notes
from client.data.conversations import from_text

SEED = 1
"""Not 0, the default seed of a run, from which the server's public records come."""


def write_records(folder: Path, clients: int, records: int, chat: bool = False) -> list[Path]:
    """Write ``client-K/records.jsonl`` for K = 1 .. clients.

    Columns ``text``, ``label`` and ``patient``; with `chat` ``messages`` and ``user``, one conversation a user.
    """
    written = []
    for client in range(clients):
        path = folder / f"client-{client + 1}" / "records.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = _conversations(client, records) if chat else _notes(client, records)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        written.append(path)
    return written


def _notes(client: int, count: int) -> list[dict[str, Any]]:
    share = -(-count // notes.NOTES_PER_BLOCK) * notes.NOTES_PER_BLOCK  # whole patients
    return [
        {"text": note.text, "label": notes.LABELS[note.label], "patient": note.patient.number}
        for note in notes.generate(count, SEED, client * share)
    ]


def _conversations(client: int, count: int) -> list[dict[str, Any]]:
    found = consultations.generate(count, 1, SEED, client * count)
    return [{"user": f"user-{one.user}", "messages": from_text(one.text)} for one in found]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m simulations.tools.sample_records")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--records", type=int, default=200, help="of each client")
    parser.add_argument("--chat", action="store_true", help="conversations in place of notes")
    given = parser.parse_args()
    write_records(given.folder, given.clients, given.records, given.chat)
