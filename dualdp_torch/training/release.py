# SPDX-License-Identifier: Apache-2.0
"""Release of a step's clipped sum: reduction, record and seal, before any noise is drawn."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from dualdp import exactness
from dualdp.ledger.follower import FollowerLedger, seal_message
from dualdp.ledger.ledger import Ledger
from dualdp.ledger.release_record import Seal
from dualdp_torch.parallel.fsdp import Shards
from dualdp_torch.parallel.process_group import Group, Reduction, fingerprints
from dualdp_torch.rules.base import Tensor

Sums = dict[str, Tensor]
Counts = tuple[int, ...]
Digested = Callable[[], Iterable[Any]]


def _digested(sums: Sums, shards: Shards | None) -> Digested:
    """Return a function for the data that the seal digests: the sums, or a digest of all shards."""
    if shards is not None:
        digest = shards.digest(sums)  # a collective: called now, on all processes
        return lambda: [digest]
    return lambda: (total.detach().cpu().contiguous().numpy() for total in sums.values())


def _sealed(ledger: Ledger, step: int, data: Digested, counts: Counts, stack: str) -> Seal:
    """Seal a recorded step, given the sums and counts of the whole logical batch."""
    named = dict(zip(("num_below", "num_rows"), counts, strict=False))
    return ledger.seal(step, data, stack=stack, **named)


class LocalRelease:
    """Release in a run of a single process."""

    is_alone = True

    def __init__(self, ledger: Ledger, shards: Shards | None = None) -> None:
        self._ledger, self._shards = ledger, shards
        self._had_others = Group.current() is not None

    def begin(self, step: int, failure: Exception | None) -> None:
        """Refuse to train alone on data that other processes train on, too."""
        if not self._had_others and Group.current() is not None:
            raise RuntimeError(
                "A process group was initialised after make_private, so each process would train "
                "a model of its own on the same data and account only that one. Call "
                "init_process_group before make_private."
            )

    def send(self, name: str, total: Tensor) -> None:
        """Do nothing: there is no other process to send to."""

    def finish(
        self,
        step: int,
        sums: Sums,
        *,
        counts: Counts = (),
        stack: str,
        is_checked: bool = False,
        has_passed: bool = False,
    ) -> tuple[Sums, Seal]:
        """Record the step, then seal it.

        Args:
            step: index of the step.
            sums: mapping from parameter name to clipped sum.
            counts: with an adaptive bound, number of examples within it and number of examples.
            stack: str, software and devices that the noise depends on in addition to the key.
            is_checked: bool, True if reduced sums are compared with each process's own.
            has_passed: bool, True if a spot check of this step passed, which the ledger notes.

        Returns:
            the sums that noise is added to, and the seal of the step.
        """
        if has_passed:
            self._ledger.check_passed(step)
        self._ledger.record(step)
        return sums, _sealed(self._ledger, step, _digested(sums, self._shards), counts, stack)


class GroupRelease:
    """Release of one of several processes: one sum, one record, one seal.

    Rank 0 records the step before sums are reduced, and seals it before any process draws noise;
    the other ranks follow with ledgers in memory.

    Parameters are compared between processes unless sharded; sums of a sharded model are reduced
    already. `choices` is the table of `choices.of_run`, to which choices of rank 0 are added.

    Guarantees:
        No process draws noise before the release is recorded and sealed in the ledger of rank 0.
            [test_the_ledger_is_sealed_before_any_rank_draws_noise]
        Processes whose parameters or sums differ stop.  [test_what_differs_between_ranks_is_named]
    """

    is_alone = False

    def __init__(
        self,
        ledger: Ledger,
        group: Group,
        parameters: Mapping[str, Tensor],
        choices: dict[str, str],
        shards: Shards | None = None,
    ) -> None:
        self._ledger, self._group, self._shards = ledger, group, shards
        self._parameters = {} if shards is not None else parameters
        self._choices = choices
        self._known: set[str] = set(choices)

    def begin(self, step: int, failure: Exception | None) -> None:
        """Record the step, after all processes have agreed on it.

        Raises:
            AccountingError: the step may not be run.
            ExactnessError: a spot check failed, here (`failure`) or on another process.
            RuntimeError: a process is lost, or at another step.
            ValueError: a loss was refused, or parameters differ between processes.
        """
        ledger, at = self._ledger, f"step {step}"
        ours = fingerprints(self._parameters.values())
        message = ledger.num_lines, _sha256(ours), failure
        lines, digests, failures = zip(*self._group.gather(at, message), strict=True)
        for error in (failure, *failures):
            if error is not None:
                raise error from None
        hint = "Give all the same optimizer and learning rates, and change parameters nowhere else."
        self._compare(digests, "parameters before " + at, self._parameters, ours, hint)
        self._num_known = min(lines[1:])  # lines that the ledgers of all other ranks have
        ledger.record(step)
        self._reduction = Reduction(self._group, at, self._parameters)

    def send(self, name: str, total: Tensor) -> None:
        """Start to reduce a complete sum of this process while other sums are being formed."""
        if self._shards is None:
            self._reduction.add(name, total)

    def finish(
        self,
        step: int,
        sums: Sums,
        *,
        counts: Counts = (),
        stack: str,
        is_checked: bool = False,
        has_passed: bool = False,
    ) -> tuple[Sums, Seal]:
        """Return the sums over all processes and the seal; arguments as in `LocalRelease`.

        Raises:
            ExactnessError: they are not what the processes had, added up.
            RuntimeError: a process is lost.
            ValueError: sums differ between processes.
        """
        group, ledger, at = self._group, self._ledger, f"step {step}"
        totals = group.count(f"the counts of {at}", *counts) if counts else ()
        if self._shards is None:
            own, sums = sums, self._reduction.finish(sums)
            if is_checked:
                self._check_reduction(step, own, sums)
        if has_passed:
            ledger.check_passed(step)
        data, compared = _digested(sums, self._shards), sums if self._shards is None else {}
        reduced = fingerprints(compared.values())

        def seal() -> Any:
            message = None
            if group.is_first:
                sealed = _sealed(ledger, step, data, totals, stack)
                message = seal_message(ledger, self._num_known, sealed)
            chosen = {k: m for k, m in self._choices.items() if k not in self._known}
            return message, _sha256(reduced), chosen

        found = group.gather_results(f"the seal of {at}", seal)
        messages, digests, chosen = zip(*found, strict=True)
        self._compare(digests, "sums of " + at, compared, reduced, "A device or a link is faulty.")
        for theirs in reversed(chosen):
            self._choices.update(theirs)
        self._known.update(self._choices)
        if isinstance(ledger, FollowerLedger):
            return sums, ledger.follow(messages[0])
        return sums, Seal(*messages[0]["seal"])

    def _check_reduction(self, step: int, own: Sums, total: Sums) -> None:
        """Compare the reduced sums with each process's own sums, along one random direction."""
        message = _projected(own, step), _projected(total, step)
        owns, totals = zip(*self._group.gather(f"the sums of step {step}", message), strict=True)
        for each, reduced in zip(zip(*owns, strict=True), zip(*totals, strict=True), strict=True):
            if len({total.along for total in reduced}) > 1:
                continue  # bits differ between processes: `_compare` reports it by name
            size = sum(own.length for own in each)
            error = abs(reduced[0].along - sum(own.along for own in each)) / (size or 1)
            tolerance = min(exactness.TOLERANCE[own.precision] for own in each)
            if not error <= tolerance and math.isfinite(size):
                size_of_error = exactness.power_of_ten(error)
                raise exactness.ExactnessError(
                    "A spot check failed: the sum over the processes differs from what each of "
                    f"them had, added up, by {size_of_error} of it (parameter {each[0].name!r}). "
                    "Nothing was released for this batch. Report it, with the backend of the "
                    "process group and the version of torch.",
                    relative_error=size_of_error,
                    unprotected_details={"error": error},
                )

    def _compare(
        self, digests: Iterable[str], what: str, names: Iterable[str], ours: list[int], hint: str
    ) -> None:
        """Refuse tensors whose bits differ between processes; the error names the first."""
        if len(set(digests)) > 1:
            self._group.require_same(what, dict(zip(names, ours, strict=True)), hint, shown=False)


class _Projection(NamedTuple):
    """Length of a tensor and of its projection on one direction."""

    name: str
    precision: str
    along: float
    length: float


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


def _sha256(numbers: list[int]) -> str:
    """SHA-256 of a list of integers, in hex."""
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()
