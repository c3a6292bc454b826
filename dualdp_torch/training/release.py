# SPDX-License-Identifier: Apache-2.0
"""Release of a step's clipped sum: sums of all processes, the record, bits of the noise."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from dualdp import exactness
from dualdp.ledger.ledger import Ledger, Release
from dualdp.randomness import noise_bits
from dualdp_torch.parallel.fsdp import Shards
from dualdp_torch.parallel.process_group import Group, Reduction, fingerprints
from dualdp_torch.rules.base import Tensor

Sums = dict[str, Tensor]


class Releaser:
    """One sum, one record and one draw of bits a step, also in a run of several processes.

    Of these, rank 0 records the step when all have agreed on it and the sums are reduced, and sends
    the bits of the noise in the same message; the others record it in ledgers in memory. Parameters
    are compared between processes unless sharded, whose sums are reduced already.

    Guarantees:
        No process draws noise before the release is recorded in the ledger of rank 0.
            [test_the_ledger_is_written_before_any_rank_draws_noise]
        A check that fails on one process stops all before the record.
            [test_what_differs_between_ranks_is_named]
        Processes whose parameters differ stop.  [test_what_differs_between_ranks_is_named]
    """

    def __init__(
        self,
        ledger: Ledger,
        group: Group | None,
        parameters: Mapping[str, Tensor],
        shards: Shards | None,
    ) -> None:
        self._ledger, self._group = ledger, group
        self._parameters = {} if shards is not None else parameters
        self._reduction: Reduction | None = None
        self._had_others = Group.current() is not None

    def begin(self, step: int, failure: Exception | None, has_passed: bool) -> bool:
        """Agree on a step that all processes have checked, and begin to reduce its sums.

        Returns:
            True if a spot check of the step passed, here (`has_passed`) or on another process.

        Raises:
            AccountingError: the step may not be released.
            ExactnessError: a spot check failed, here (`failure`) or on another process.
            RuntimeError: a process is lost, at another step, or was not there at set-up.
            ValueError: a loss was refused, or parameters differ between processes.
        """
        group, at = self._group, f"step {step}"
        if group is None:
            if not self._had_others and Group.current() is not None:
                raise RuntimeError(
                    "A process group was initialised after make_private, so each process would "
                    "train a model of its own on the same data and account only that one. Call "
                    "init_process_group before make_private."
                )
            return has_passed
        ours = fingerprints(self._parameters.values())
        digest = hashlib.sha256(json.dumps(ours).encode()).hexdigest()
        message = digest, failure, has_passed
        digests, failures, passed = zip(*group.gather(at, message), strict=True)
        for error in (failure, *failures):
            if error is not None:
                raise error from None
        if len(set(digests)) > 1:
            group.require_same(
                "parameters before " + at,
                dict(zip(self._parameters, ours, strict=True)),
                "Give all the same optimizer and learning rates, and change parameters nowhere "
                "else.",
                shown=False,
            )
        self._ledger.require(step)
        self._reduction = Reduction(group, at, self._parameters)
        return any(passed)

    def send(self, name: str, total: Tensor) -> None:
        """Start to reduce a complete sum of this process while other sums are being formed."""
        if self._reduction is not None and self._parameters:
            self._reduction.add(name, total)

    def reduced(self, step: int, sums: Sums, *, is_checked: bool) -> Sums:
        """Return the sums over all processes.

        With `is_checked` they are compared with what each process had.

        Raises:
            ExactnessError: they are not what the processes had, added up.
            RuntimeError: a process is lost.
        """
        if self._reduction is None or not self._parameters:
            return sums
        reduction, self._reduction = self._reduction, None
        total = reduction.finish(sums)
        if is_checked and self._group is not None:
            _check_reduction(self._group, step, sums, total)
        return total

    def record(self, step: int, counts: tuple[int, int] | None) -> tuple[Release, bytes]:
        """Record the step and return its release and the bits of its noise.

        Args:
            step: index of the step.
            counts: with an adaptive bound, the number of examples within it, and of all, here.

        Raises:
            AccountingError: the step may not be released.
            RuntimeError: a process is lost, or rank 0 could not record the step.
        """
        group, ledger, at = self._group, self._ledger, f"step {step}"
        if group is not None and counts is not None:
            below, rows = zip(*group.gather(f"the counts of {at}", counts), strict=True)
            counts = sum(below), sum(rows)

        def first() -> tuple[Release, float | None, bytes]:
            fraction = None if counts is None else ledger.noisy_fraction(*counts)
            release = ledger.record(step, noisy_fraction=fraction)
            return release, fraction, noise_bits(ledger.plan.seed, step)

        if group is None:
            release, _, bits = first()
            return release, bits
        release, fraction, bits = group.word(f"the record of {at}", first)
        if not group.is_first:
            release = ledger.record(step, noisy_fraction=fraction)
        return release, bits


class _Projection(NamedTuple):
    """Length of a tensor and of its projection on one direction."""

    name: str
    precision: str
    along: float
    length: float


def _check_reduction(group: Group, step: int, own: Sums, total: Sums) -> None:
    """Compare the reduced sums with each process's own sums, along one random direction."""
    message = _projected(own, step), _projected(total, step)
    owns, totals = zip(*group.gather(f"the sums of step {step}", message), strict=True)
    for each, reduced in zip(zip(*owns, strict=True), zip(*totals, strict=True), strict=True):
        size = sum(own.length for own in each)
        along = sum(own.along for own in each)
        errors = [abs(found.along - along) / (size or 1) for found in reduced]
        tolerance = min(exactness.TOLERANCE[own.precision] for own in each)
        if math.isfinite(size) and not all(error <= tolerance for error in errors):
            size_of_error = exactness.power_of_ten(sum(errors))
            raise exactness.ExactnessError(
                "A spot check failed: the sum over the processes differs from what each of "
                f"them had, added up, by {size_of_error} of it (parameter {each[0].name!r}). "
                "Nothing was released for this batch. Report it, with the backend of the "
                "process group and the version of torch.",
                relative_error=size_of_error,
                unprotected_details={"errors": errors},
            )


def _projected(sums: Sums, step: int) -> list[_Projection]:
    """Projection of each sum on random signs drawn from the step, the same on all processes."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for name, total in sums.items():
        signs = torch.randint(2, total.shape, generator=generator, dtype=torch.int8)
        signs = (2 * signs - 1).to(total)
        along, length = (total * signs).sum(dtype=torch.float64), torch.linalg.vector_norm(total)
        precision = str(total.dtype).removeprefix("torch.")
        found.append(_Projection(name, precision, float(along), float(length)))
    return found
