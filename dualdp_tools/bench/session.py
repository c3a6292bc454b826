# SPDX-License-Identifier: Apache-2.0
"""Settings common to all suites, and the rows of a resumed run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dualdp_tools.bench import layers, measure
from dualdp_tools.bench.measure import Protocol
from dualdp_tools.bench.results import DEVICE_TYPES, Row
from dualdp_tools.bench.systems import AUTO, Stack
from dualdp_tools.bench.workloads import Workload

QUICK = Protocol(rounds=3, patience=0.2)  # of every suite in a quick session
# Layers, sweeps and axes: short, since there are many points.
SHORT = Protocol(patience=0.3, longest=0.5)


@dataclass(frozen=True)
class Session:
    """Settings common to all suites."""

    stack: Stack
    systems: list[str] | None = None  # None: all
    workloads: list[str] | None = None  # None: all of a suite
    batch: int | None = None  # the only batch size, or those of a suite
    protocol: Protocol | None = None  # None: that of the suite
    device: str = "cpu"  # or "cuda"
    quick: bool = False  # small sizes and few points, as a smoke test
    earlier: tuple[Row, ...] = ()  # of a resumed run, whose points are not measured again

    def __post_init__(self) -> None:
        for name in self.workloads or ():
            layers.check(name)
        if self.device not in DEVICE_TYPES:
            raise ValueError(f"device={self.device!r} is not known. Expected 'cpu' or 'cuda'.")
        self.stack.choose(self.systems)

    def wanted(self, name: str) -> bool:
        """Return True if this workload is to be measured."""
        return not self.workloads or name in self.workloads

    def batches(self, usual: tuple[int, ...]) -> tuple[int, ...]:
        """Return the batch sizes of a suite, or the requested one."""
        return (self.batch,) if self.batch else usual

    def thin(self, points: Sequence[Any]) -> Sequence[Any]:
        """Return every second point in JAX on a CPU, since compiling takes seconds per program."""
        return points[::2] if self.stack.name == "jax" and self.size_key == "cpu" else points

    @property
    def without_methods(self) -> list[str]:
        """Names of all systems, of dualdp only the default one."""
        names = self.stack.choose(None)
        return [name for name in names if name == AUTO or not name.startswith("dualdp:")]

    @property
    def size_key(self) -> str:
        """Key of the sizes: "quick", "cpu" or "cuda"."""
        return "quick" if self.quick else self.device

    def earlier_rows(self, suite: str, workload: Workload, **fields: Any) -> list[Row]:
        """Return the rows of an earlier run of a suite and workload that have these fields."""
        fields |= {"suite": suite, "stack": self.stack.name}
        fields |= {"workload": workload.name, "options": workload.options}
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
        """Return the rows of `measure.point`, or those of an earlier run that has this point."""
        options = workload.options
        at = float(n if axis == "batch" else options[axis]) if axis else None
        if earlier := self.earlier_rows(suite, workload, batch=n, axis=axis):
            return earlier
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
