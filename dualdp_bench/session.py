# SPDX-License-Identifier: Apache-2.0
"""What all suites share: whose systems, which points, how long, and what is known already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dualdp_bench import layers, measure
from dualdp_bench.measure import Protocol
from dualdp_bench.results import Row
from dualdp_bench.systems import AUTO, Stack
from dualdp_bench.workloads import Workload

QUICK = Protocol(rounds=3, patience=0.2)  # of any suite, when it is quick
# Layers, sweeps and axes: short, for there are many points.
SHORT = Protocol(patience=0.3, longest=0.5)


@dataclass(frozen=True)
class Session:
    """What all suites share.

    Attributes:
        stack: whose systems.
        systems: names, or None for all.
        workloads: names, or None for all of a suite.
        batch: the only batch size, or None for those of a suite.
        protocol: rounds and warm-up, or None for those of the suite.
        device: "cpu" or "cuda".
        quick: small sizes, few points: shows that everything runs, not how fast it is.
        earlier: rows of a run that goes on: their points are not measured again.
    """

    stack: Stack
    systems: list[str] | None = None
    workloads: list[str] | None = None
    batch: int | None = None
    protocol: Protocol | None = None
    device: str = "cpu"
    quick: bool = False
    earlier: tuple[Row, ...] = ()

    def __post_init__(self) -> None:
        for name in self.workloads or ():
            layers.check(name)
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r} is not known. Expected 'cpu' or 'cuda'.")
        self.stack.choose(self.systems)

    def wanted(self, name: str) -> bool:
        """Whether the workload of that name is to be measured."""
        return not self.workloads or name in self.workloads

    def batches(self, usual: tuple[int, ...]) -> tuple[int, ...]:
        """The batch sizes of a suite, or the one that was asked for."""
        return (self.batch,) if self.batch else usual

    def thin(self, points: Sequence[Any]) -> Sequence[Any]:
        """Every second point in JAX on a processor: each program is compiled, seconds each."""
        return points[::2] if self.stack.name == "jax" and self.place == "cpu" else points

    @property
    def without_methods(self) -> list[str]:
        """All systems, but of ours only the one that people get who choose nothing."""
        names = self.stack.choose(None)
        return [name for name in names if name == AUTO or not name.startswith("dualdp:")]

    @property
    def place(self) -> str:
        """Which sizes: "quick", "cpu" or "cuda"."""
        return "quick" if self.quick else self.device

    def known(self, **fields: Any) -> list[Row]:
        """The rows of an earlier run that have all of these fields."""
        fields["stack"] = self.stack.name
        return [
            row
            for row in self.earlier
            if all(getattr(row, name) == value for name, value in fields.items())
        ]

    def point(
        self,
        workload: Workload,
        n: int,
        suite: str,
        *,
        axis: str | None = None,
        systems: Sequence[str] = (),
        finish: Callable[[Row], Row] = lambda row: row,
        protocol: Protocol | None = None,
        **keywords: Any,
    ) -> list[Row]:
        """`measure.point` with this session's settings.

        Args:
            workload: the model.
            n: examples per step.
            suite: goes into the rows.
            axis: the size that is varied, "batch" or an option of the workload; None without one.
            systems: those of the suite where the session names none; all if it names none either.
            finish: what makes a row of a measured one.
            protocol: the suite's own; a quick session has its own for all.
            **keywords: as in `measure.point`.

        Returns:
            The rows; those of an earlier run where it has this point.
        """
        options = workload.options
        at = float(n if axis == "batch" else options[axis]) if axis else None
        where = {"suite": suite, "workload": workload.name, "options": options, "batch": n}
        if known := self.known(**where, axis=axis):
            return known
        usual = [name for name in self.stack.systems if name in systems]
        rows = measure.point(
            self.stack,
            workload,
            n,
            suite=suite,
            systems=self.systems or usual or None,
            protocol=self.protocol or (QUICK if self.quick else protocol),
            device=self.device,
            **keywords,
        )
        return [finish(replace(row, axis=axis, at=at)) for row in rows]

    def layer(self, workload: Workload, n: int, axis: str | None, systems: Any) -> list[Row]:
        """A point of `layers`."""
        return self.point(
            workload, n, "layers", axis=axis, systems=systems, memory=True, protocol=SHORT
        )
