"""Records to try a federation with: one folder of generated clinical notes for every client.

    python -m simulations.tools.sample_records docker/data --clients 3 --records 200

The notes are those of ``data.source = "notes"`` (see :mod:`client.data.catalog.notes`). The server's public ones are
of another seed, and no patient is in two folders.
"""

import argparse
import json
from pathlib import Path

from client.data.catalog import notes

SEED = 1
"""Not 0, the default seed of a run, from which the server's public notes come."""


def write_records(folder: Path, clients: int, records: int) -> list[Path]:
    """Write ``client-K/records.jsonl`` for K = 1 .. clients; columns ``text``, ``label`` and ``patient``."""
    share = -(-records // notes.NOTES_PER_BLOCK) * notes.NOTES_PER_BLOCK  # whole patients
    written = []
    for client in range(clients):
        path = folder / f"client-{client + 1}" / "records.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            {"text": note.text, "label": notes.LABELS[note.label], "patient": note.patient.number}
            for note in notes.generate(records, SEED, client * share)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        written.append(path)
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m simulations.tools.sample_records")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--records", type=int, default=200, help="of each client")
    given = parser.parse_args()
    write_records(given.folder, given.clients, given.records)
