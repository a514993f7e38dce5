"""The place of an account of a budget: its file, and what the machine that holds it keeps apart from it."""

import hashlib
import math
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from privacy import durable


class At(NamedTuple):
    """The place of an account: its file, this machine's place, and the most epsilon a month (:meth:`Account.open`)."""

    file: Path
    place: Path
    per_month: float = math.inf


@dataclass(frozen=True)
class Place:
    """The folder in which a machine keeps, apart from its accounts, its own secret and each account's last line."""

    folder: Path

    def seat(self) -> str:
        """The digest of this machine's secret, which is made at the first call."""
        file = self.folder / "seat"
        if not file.is_file():
            durable.new_folder(self.folder)
            try:
                durable.write(file, secrets.token_hex(32) + "\n", mode=0o600, new=True)
            except FileExistsError:
                pass  # another process made it at this moment
        return hashlib.sha256(file.read_text(encoding="ascii").strip().encode()).hexdigest()

    def head(self, account: str) -> str | None:
        """The last line of an account that was seen here; None if it never was."""
        file = self._file(account)
        return file.read_text(encoding="ascii").strip() if file.is_file() else None

    def keep_head(self, account: str, head: str) -> None:
        """Remember an account's last line, durably."""
        if self.head(account) != head:
            durable.new_folder(self.folder)
            durable.write(self._file(account), head + "\n", mode=0o600)

    def _file(self, account: str) -> Path:
        return self.folder / f"{hashlib.sha256(account.encode()).hexdigest()[:32]}.head"
