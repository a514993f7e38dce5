"""The rows of a sweep as it goes on: from its results file, from completed run folders, from cells that end now."""

from pathlib import Path

from server.config import ConfigError
from simulations.sweep_file import Cell
from simulations.sweep_results import Row, read_results, row, write_results
from simulations.sweep_runner import finished_folder


class Store:
    """The results file of a sweep and what is known beyond it.

    A row counts for a cell if its digest is the cell's. Cells that are the same run, such as the floor of two tables,
    share their row. Rows of cells that the sweep no longer has, or has changed, stay until something replaces them.

    Args:
        name: of the sweep.
        folder: where its run folders are; completed ones without a row are taken in.
        file: of the results; need not exist.
        cells: all of the sweep.

    Raises:
        ConfigError: the file holds something else.
    """

    def __init__(self, name: str, folder: Path, file: Path, cells: list[Cell]) -> None:
        self.folder, self.file = folder, file
        self._name, self._cells = name, cells
        self._rows: dict[str, Row] = {}
        self._take_file()
        known = {entry["digest"] for entry in self._rows.values()}
        for cell in cells:
            if cell.digest not in known and (found := finished_folder(cell, folder)) is not None:
                self._rows[cell.key] = row(cell, found)
                known.add(cell.digest)
        for entry in list(self._rows.values()):
            self._share(entry)

    @property
    def done(self) -> set[str]:
        """The keys of the cells that have a row of theirs."""
        return {cell.key for cell in self._cells if self._has(cell)}

    def add(self, new: Row) -> list[Row]:
        """Keep the row of a cell that has ended; the rows that were missing until now, its own and shared ones."""
        before = self.done
        self._rows[new["cell"]] = new
        self._share(new)
        self.save()
        return [self._rows[key] for key in sorted(self.done - before)]

    def save(self) -> None:
        """Write the file, with what another sweep may have added to it meanwhile."""
        self._take_file()
        if self._rows:
            write_results(self.file, self._name, list(self._rows.values()))

    def _has(self, cell: Cell) -> bool:
        return cell.key in self._rows and self._rows[cell.key]["digest"] == cell.digest

    def _take_file(self) -> None:
        digests = {cell.key: cell.digest for cell in self._cells}
        try:
            rows = read_results(self.file)
        except ValueError as error:
            raise ConfigError(f"--results: {error}") from None
        for entry in rows:
            known = self._rows.get(entry["cell"])
            if known is None or known["digest"] != digests.get(entry["cell"]):
                self._rows[entry["cell"]] = entry

    def _share(self, entry: Row) -> None:
        for cell in self._cells:
            if cell.digest == entry["digest"] and not self._has(cell):
                place = {"cell": cell.key, "grid": cell.grid, "variant": cell.variant, "axes": dict(cell.axes)}
                self._rows[cell.key] = {**entry, **place}
