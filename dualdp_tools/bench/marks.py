# SPDX-License-Identifier: Apache-2.0
"""Marks on rows where dualdp is not the fastest exact system, or misses its target.

Such a row is marked in every table that shows it, with a link to its page of `profile`.
"""

from __future__ import annotations

from collections.abc import Iterable

from dualdp_tools.bench import profile, results
from dualdp_tools.bench.results import Row, table_name
from dualdp_tools.bench.systems import AUTO, NON_PRIVATE

OURS = "dualdp:"
#: Stack -> workload -> target time on a CPU, as a multiple of the non-private step's.
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


def reasons(row: Row, rows: Iterable[Row], device_type: str = "cpu") -> list[str]:
    """Return the reasons to mark a row of dualdp, given all rows of its file."""
    if row.system != AUTO or not row.seconds or row.quantity not in ("gradient", "update", "epoch"):
        return []
    found = []
    others = [one for one in rows if _is_beside(one, row) and one.seconds < row.seconds]
    if others:
        best = min(others, key=lambda one: one.seconds)
        found.append(f"{best.system} takes {best.seconds / row.seconds:.2f} of its time")
    aim = AIMS.get(table_name(row.stack, device_type), {}).get(row.workload)
    measured = row.suite == "run" and row.quantity == "gradient"
    if measured and aim and row.ratio and row.ratio > aim:
        found.append(f"the aim is {aim:g}")
    return found


def _is_beside(other: Row, row: Row) -> bool:
    """True if `other` is a private system of another library, timed at the same point."""
    same = ("suite", "stack", "workload", "options", "batch", "quantity", "axis")
    return (
        bool(other.seconds)
        and not other.system.startswith(NON_PRIVATE)
        and not other.system.startswith(OURS)
        and all(getattr(other, name) == getattr(row, name) for name in same)
    )


def remark(row: Row, rows: Iterable[Row], folder: str, device_type: str = "cpu") -> str | None:
    """Return the remark under a table that explains a row, with a link, or None."""
    found = reasons(row, rows, device_type)
    if not found:
        return None
    page = profile.path_of(row.workload, row.stack, device_type)
    command = profile.command(row.workload, row.stack, device_type)
    explained = (results.FOLDER / page).exists()
    why = f"[where the time goes]({folder}/{page})" if explained else f"see `{command}`"
    name = row.workload if row.axis is None else f"{row.workload}, {row.axis} {row.at:g}"
    text = f"{row.system} on {name}: {' and '.join(found)}"
    return text if row.suite == "finetuning" else f"{text}; {why}"  # its models have no profile
