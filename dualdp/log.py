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
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from dualdp import _validate
from dualdp.ledger.ledger import Ledger

Batch = TypeVar("Batch")
UNPROTECTED = "unprotected_"
OWN = ("step", "epsilon")


def statistics(
    norms: ArrayLike, *, max_grad_norm: float, sum_norm: float, noise_norm: float
) -> dict[str, float]:
    """Return statistics for the choice of clipping bound and noise; epsilon does not cover them.

    Args:
        norms: (n,) L2 norms of the examples' gradients.
        max_grad_norm: C of the step.
        sum_norm: L2 norm of the clipped sum.
        noise_norm: expected L2 norm of the noise: its standard deviation times the square root of
            the number of parameters.

    Returns:
        `unprotected_clip_fraction`, share of the examples above C; `unprotected_median_norm`;
        `unprotected_signal_to_noise`, sum_norm / noise_norm. Without examples the first two are 0.
    """
    norms = np.asarray(norms, dtype=np.float64)
    norms = norms if norms.size else np.zeros(1)
    return {
        "unprotected_clip_fraction": float(np.mean(~(norms <= max_grad_norm))),
        "unprotected_median_norm": float(np.median(norms)),
        "unprotected_signal_to_noise": sum_norm / noise_norm if noise_norm else float("inf"),
    }


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
        _require_ledger(ledger)
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
        if self._file.closed:
            raise ValueError("The log is closed. Write before close(), or open another.")
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


def progress(
    batches: Iterable[Batch], ledger: Ledger, *, delta: float | None = None
) -> Iterator[Batch]:
    """Iterate over a private loader with a progress bar that shows the epsilon spent so far.

    Args:
        batches: loader; its length, if any, is the length of the bar.
        ledger: `Ledger` of the engine.
        delta: float, for epsilon; None for the plan's.

    Yields:
        The batches of the loader.
    """
    _require_ledger(ledger)
    from rich import progress as rich

    def epsilon() -> str:
        return f"epsilon of one {ledger.plan.unit} {ledger.get_epsilon(delta):.3f}"

    columns = rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn()
    total = len(batches) if isinstance(batches, Sized) else None
    with rich.Progress(*columns, rich.TextColumn("{task.description}")) as bar:
        task = bar.add_task(epsilon(), total=total)
        for batch in batches:
            yield batch
            bar.update(task, advance=1, description=epsilon())


def _require_ledger(ledger: object) -> None:
    if not isinstance(ledger, Ledger):
        raise TypeError(f"ledger is {_validate.kind(ledger)}. Expected engine.ledger.")


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
