# SPDX-License-Identifier: Apache-2.0
"""Which rows need an explanation: dualdp is not the fastest exact system, or misses its aim.

Such a row is marked in every table that shows it, with a link to the page of `profile` that says
where the time goes.
"""

from __future__ import annotations

from collections.abc import Iterable

from dualdp_bench import profile, results
from dualdp_bench.results import Row
from dualdp_bench.systems import AUTO, NON_PRIVATE

OURS = "dualdp:"
#: Stack -> workload -> how many times the non-private step we set out to take at most.
AIMS: dict[str, dict[str, float]] = {
    "torch": {
        "mlp": 1.15,
        "mnist": 1.35,
        "cifar10": 1.35,
        "embed": 1.6,
        "lstm": 1.6,
        "gpt": 1.12,
        "resnet18_gn": 1.5,
        "vit_tiny": 1.4,
    },
    "jax": {
        "mlp": 1.3,
        "mnist": 1.4,
        "cifar10": 1.8,
        "embed": 2.0,
        "lstm": 1.4,
        "gpt": 1.0,
        "resnet18_gn": 1.8,
    },
}


def reasons(row: Row, rows: Iterable[Row]) -> list[str]:
    """What there is to explain about a row of ours, beside all rows of its file."""
    if row.system != AUTO or not row.seconds or row.quantity not in ("gradient", "update", "epoch"):
        return []
    found = []
    others = [one for one in rows if _is_beside(one, row) and one.seconds < row.seconds]
    if others:
        best = min(others, key=lambda one: one.seconds)
        found.append(f"{best.system} takes {best.seconds / row.seconds:.2f} of its time")
    aim = AIMS.get(row.stack, {}).get(row.workload)
    measured = row.suite == "run" and row.quantity == "gradient"
    if measured and aim and row.ratio and row.ratio > aim:
        found.append(f"the aim is {aim:g}")
    return found


def _is_beside(other: Row, row: Row) -> bool:
    """Whether that is an exact system of someone else, timed at the same point."""
    same = ("suite", "stack", "workload", "options", "batch", "quantity", "axis")
    return (
        bool(other.seconds)
        and other.system != NON_PRIVATE
        and not other.system.startswith(OURS)
        and all(getattr(other, name) == getattr(row, name) for name in same)
    )


def remark(row: Row, rows: Iterable[Row], folder: str) -> str | None:
    """The sentence under a table that explains a row, with its link; None for most rows.

    Args:
        row: of any system.
        rows: of the file.
        folder: where the results lie, seen from the page that shows the table.
    """
    found = reasons(row, rows)
    if not found:
        return None
    page = profile.path_of(row.workload, row.stack)
    command = f"profile --backend {row.stack} --workload {row.workload}"
    explained = (results.FOLDER / page).exists()
    why = f"[where the time goes]({folder}/{page})" if explained else f"see `{command}`"
    name = row.workload if row.axis is None else f"{row.workload}, {row.axis} {row.at:g}"
    return f"{row.system} on {name}: {' and '.join(found)}; {why}"
