# SPDX-License-Identifier: Apache-2.0
"""CSV log of a run, for monitoring and plots: steps, epsilon, and columns of the user.

Numbers computed from the private data, such as losses and gradient norms, are not covered by
epsilon. Their columns are called `unprotected_*`, the ledger notes that they were logged, and a run
with secure noise omits them.
"""

from __future__ import annotations

import contextlib
import csv
import os
from pathlib import Path
from typing import Any, Self

from dualdp import _validate
from dualdp.ledger.ledger import Ledger

UNPROTECTED = "unprotected_"
OWN = ("step", "epsilon")


class RunLog:
    """CSV file with one row for each call of `write`.

    Args:
        path: path of a new file.
        ledger: `Ledger` of the engine, the source of step and epsilon.

    Guarantees:
        Which unprotected columns were written stands in the ledger.
            [test_unprotected_columns_are_noted]
        With secure noise no unprotected column is written.  [test_secure_runs_log_no_unprotected]
    """

    def __init__(self, path: str | os.PathLike[str], ledger: Ledger) -> None:
        self.ledger = ledger
        self._columns: list[str] | None = None
        if not isinstance(ledger, Ledger):
            raise TypeError(f"ledger is {_validate.kind(ledger)}. Expected engine.ledger.")
        path = _validate.path("path", path)
        expected = "a new path, in a folder that exists; a log is never overwritten"
        with _validate.file_errors("written", path, expected):
            self._file = Path(path).open("x", newline="", encoding="utf-8")

    def write(self, **columns: float) -> dict[str, float]:
        """Add a row: the number of steps taken, the epsilon spent, and these columns.

        Args:
            **columns: numbers or nan; the first row fixes their names. The names of columns
                computed from the private data must begin with `unprotected_`.

        Returns:
            The row as it was written.

        Raises:
            TypeError: a value is no number.
            ValueError: other columns than in the first row, or one of our own names.
        """
        taken = sorted(set(columns) & set(OWN))
        if taken:
            raise ValueError(f"Columns {taken} came. Expected other names; the log writes these.")
        values = {name: _number(name, value) for name, value in columns.items()}
        if self.ledger.plan.noise == "secure":
            values = {n: v for n, v in values.items() if not n.startswith(UNPROTECTED)}
        if self._columns is not None and sorted(self._columns) != sorted(values):
            raise ValueError(
                f"Columns {sorted(values)} came after rows with {sorted(self._columns)}. Expected "
                "the same in every row; write nan where there is no value."
            )
        row = {"step": self.ledger.position, "epsilon": self.ledger.get_epsilon(), **values}
        if self._columns is None:
            self._columns = list(values)
            unprotected = [name for name in values if name.startswith(UNPROTECTED)]
            if unprotected:
                self.ledger.note(unprotected=unprotected)
            csv.writer(self._file).writerow(row)
        csv.writer(self._file).writerow([row[name] for name in (*OWN, *self._columns)])
        self._file.flush()
        return row

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _number(name: str, value: Any) -> float:
    """Float of a scalar of any framework."""
    with contextlib.suppress(AttributeError, RuntimeError, ValueError):  # not of several numbers
        value = value.item()
    return value if isinstance(value, float) and value != value else _validate.real(name, value)


def read_log(path: str | os.PathLike[str]) -> dict[str, list[float]]:
    """Return the columns of a log.

    Raises:
        OSError: the file can't be read.
        ValueError: it is no log.
    """
    path, expected = _validate.path("path", path), "a CSV file of dualdp.log.RunLog"
    try:
        with (
            _validate.file_errors("read", path, expected),
            open(path, newline="", encoding="utf-8") as file,
        ):
            rows = list(csv.DictReader(file))
        if not rows:
            raise ValueError("it has no rows")
        names = list(rows[0])
        columns = {name: [float(row[name]) for row in rows] for name in names}
        if tuple(names[:2]) != OWN:
            raise ValueError(f"its columns are {names}")
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{path} is no log of a run ({error}). Expected {expected} with at least one row."
        ) from error
    return columns
