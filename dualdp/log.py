# SPDX-License-Identifier: Apache-2.0
"""A log of a run to watch and to plot: steps, epsilon, and whatever else is written down.

Numbers computed from the private data, such as losses and gradient norms, are not covered by
epsilon. Their columns are called `unprotected_*`, the ledger notes that they were logged, and a run
with secure noise keeps them out.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from dualdp import _validate
from dualdp.ledger import Ledger

Batch = TypeVar("Batch")
UNPROTECTED = "unprotected_"
OWN = ("step", "epsilon")


class Writer(Protocol):
    """What TensorBoard's `SummaryWriter` offers."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Show one number."""
        ...


def statistics(
    norms: ArrayLike, *, max_grad_norm: float, sum_norm: float, noise_norm: float
) -> dict[str, float]:
    """What one looks at to choose the bound and the noise; none of it is private.

    Args:
        norms: (n,) L2 norms of the examples' gradients.
        max_grad_norm: C of the step.
        sum_norm: L2 norm of the clipped sum.
        noise_norm: expected L2 norm of the noise: its standard deviation times the square root of
            the number of parameters.

    Returns:
        `unprotected_clip_fraction`, share of the examples above C; `unprotected_median_norm`;
        `unprotected_signal_to_noise`, sum_norm / noise_norm. Those of no example are 0.
    """
    norms = np.asarray(norms, dtype=np.float64)
    any_row = norms.size > 0
    return {
        "unprotected_clip_fraction": float(np.mean(~(norms <= max_grad_norm))) if any_row else 0.0,
        "unprotected_median_norm": float(np.median(norms)) if any_row else 0.0,
        "unprotected_signal_to_noise": sum_norm / noise_norm if noise_norm else float("inf"),
    }


class RunLog:
    """A CSV file with a row for each time that `write` is called.

    Args:
        path: a new file.
        ledger: of the engine; step and epsilon come from it.
        writer: shows every number too, such as TensorBoard's `SummaryWriter`.

    Guarantees:
        Which unprotected columns were written stands in the ledger.
            [test_unprotected_columns_are_noted]
        With secure noise no unprotected column is written.  [test_secure_runs_log_no_unprotected]
    """

    def __init__(
        self, path: str | os.PathLike[str], ledger: Ledger, writer: Writer | None = None
    ) -> None:
        self.ledger, self._writer = ledger, writer
        self._columns: list[str] | None = None
        try:
            self._file = Path(path).open("x", newline="", encoding="utf-8")
        except FileExistsError as error:
            raise FileExistsError(
                f"{os.fspath(path)} exists. Expected a new path; a log is never overwritten."
            ) from error

    def write(self, **columns: float) -> dict[str, float]:
        """Add a row: the number of steps taken, the epsilon spent, and these columns.

        Args:
            **columns: finite numbers or nan; the first row decides which there are. Name what was
                computed from the private data `unprotected_*`.

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
        csv.DictWriter(self._file, list(row)).writerow(row)
        self._file.flush()
        if self._writer is not None:
            for name in ("epsilon", *self._columns):
                self._writer.add_scalar(name, row[name], self.ledger.position)
        return row

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def progress(
    batches: Iterable[Batch], ledger: Ledger, *, delta: float | None = None
) -> Iterator[Batch]:
    """A progress bar over a private loader that shows the epsilon spent so far.

    Args:
        batches: the loader; its length, if it has one, is that of the bar.
        ledger: of the engine.
        delta: for epsilon; None for the plan's.

    Yields:
        The batches as they come.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        Remaining(),
        TextColumn("epsilon {task.fields[e]}"),
    )
    total = len(batches) if isinstance(batches, Sized) else None
    with Progress(*columns) as bar:
        task = bar.add_task("", total=total, e=f"{ledger.get_epsilon(delta):.3f}")
        for batch in batches:
            yield batch
            bar.update(task, advance=1, e=f"{ledger.get_epsilon(delta):.3f}")


def _number(name: str, value: Any) -> float:
    """A number, from a scalar of any stack."""
    value = value.item() if hasattr(value, "item") else value
    return float(value) if value != value else _validate.real(name, value)


def read_log(path: str | os.PathLike[str]) -> dict[str, list[float]]:
    """The columns of a log.

    Raises:
        ValueError: the file is no log.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        names = list(rows[0])
        columns = {name: [float(row[name]) for row in rows] for name in names}
        if tuple(names[:2]) != OWN:
            raise ValueError(f"its columns are {names}")
    except (IndexError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{os.fspath(path)} is no log of a run ({error}). Expected a CSV file of "
            "dualdp.log.RunLog with at least one row."
        ) from error
    return columns
