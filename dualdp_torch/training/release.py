# SPDX-License-Identifier: Apache-2.0
"""Release of a step's clipped sum: reduction, record and seal, before any noise is drawn."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from dualdp import exactness
from dualdp.ledger.follower import FollowerLedger, seal_message
from dualdp.ledger.ledger import Ledger
from dualdp.ledger.release_record import Seal
from dualdp_torch.parallel.fsdp import Shards
from dualdp_torch.parallel.process_group import Group, Reduction, fingerprints
from dualdp_torch.parallel.sum_hash import hash_sums
from dualdp_torch.parallel.tensor_parallel import TensorParallel
from dualdp_torch.rules.base import Tensor

Sums = dict[str, Tensor]


class Releaser:
    """One sum, one record and one seal of a step, also in a run of several processes.

    Of these, rank 0 records the step before sums are reduced, and seals it before any process draws
    noise; the other ranks follow with ledgers in memory. Parameters are compared between processes
    unless sharded; sums of a sharded model are reduced already. Those of a tensor parallel model
    (`split`) are sums over the whole batch on every process.

    Guarantees:
        No process draws noise before the release is recorded and sealed in the ledger of rank 0.
            [test_the_ledger_is_sealed_before_any_rank_draws_noise]
        Processes whose parameters or sums differ stop.  [test_what_differs_between_ranks_is_named]
    """

    def __init__(
        self,
        ledger: Ledger,
        group: Group | None,
        parameters: Mapping[str, Tensor],
        shards: Shards | None,
        split: TensorParallel | None = None,
    ) -> None:
        self._ledger, self._group, self._shards, self._split = ledger, group, shards, split
        compared = parameters if split is None else split.whole
        self._parameters = {} if shards is not None else compared
        self._reduces = group is not None and shards is None and split is None
        self._had_others = Group.current() is not None

    def begin(self, step: int, failure: Exception | None) -> None:
        """Record the step of several processes, after all of them have agreed on it.

        Raises:
            AccountingError: the step may not be run.
            ExactnessError: a spot check failed, here (`failure`) or on another process.
            RuntimeError: a process is lost, at another step, or was not there at set-up.
            ValueError: a loss was refused, or parameters differ between processes.
        """
        ledger, group, at = self._ledger, self._group, f"step {step}"
        if group is None:
            if not self._had_others and Group.current() is not None:
                raise RuntimeError(
                    "A process group was initialised after make_private, so each process would "
                    "train a model of its own on the same data and account only that one. Call "
                    "init_process_group before make_private."
                )
            return
        ours = fingerprints(self._parameters.values())
        message = ledger.num_lines, _sha256(ours), failure
        lines, digests, failures = zip(*group.gather(at, message), strict=True)
        for error in (failure, *failures):
            if error is not None:
                raise error from None
        hint = "Give all the same optimizer and learning rates, and change parameters nowhere else."
        _compare(group, digests, "parameters before " + at, self._parameters, ours, hint)
        self._num_known = min(lines[1:])  # lines that the ledgers of all other ranks have
        ledger.record(step)
        self._reduction = Reduction(group, at, self._parameters)

    def send(self, name: str, total: Tensor) -> None:
        """Start to reduce a complete sum of this process while other sums are being formed."""
        if self._reduces:
            self._reduction.add(name, total)

    def finish(
        self,
        step: int,
        sums: Sums,
        *,
        counts: tuple[int, ...],
        stack: str,
        is_checked: bool,
        has_passed: bool,
    ) -> tuple[Sums, Seal]:
        """Return the sums over all processes, to which noise is added, and the seal of the step.

        Args:
            step: index of the step.
            sums: mapping from parameter name to clipped sum.
            counts: with an adaptive bound, number of examples within it and number of examples.
            stack: str, software and devices that the noise depends on in addition to the key.
            is_checked: bool, True if reduced sums are compared with each process's own.
            has_passed: bool, True if a spot check of this step passed, which the ledger notes.

        Raises:
            ExactnessError: they are not what the processes had, added up.
            RuntimeError: a process is lost.
            ValueError: sums differ between processes.
        """
        group, ledger, at = self._group, self._ledger, f"step {step}"
        pieces = self._shards or self._split
        if self._split is not None:
            self._split.group.require_same(f"the counts of {at}", counts, shown=False)
        elif group is not None and counts:
            counts = tuple(map(sum, zip(*group.gather(f"the counts of {at}", counts), strict=True)))
        if group is not None and self._reduces:
            own, sums = sums, self._reduction.finish(sums)
            if is_checked:
                self._check_reduction(group, step, own, sums)
        if has_passed:
            ledger.check_passed(step)
        facts: dict[str, Any] = dict(zip(("num_below", "num_rows"), counts, strict=False))
        facts |= {"stack": stack, "hashes": partial(hash_sums, sums=sums.values())}
        if pieces is not None:  # a collective, on all processes
            secret = ledger.plan.root.require_secret().step_secret("digest", step)
            hashes = pieces.hashes(secret, sums)
            facts["hashes"] = lambda _: hashes
        data = partial(_on_host, sums)
        if group is None:
            ledger.record(step)
            return sums, ledger.seal(step, data, **facts)
        compared = {name: total for name, total in sums.items() if name in self._parameters}
        reduced = fingerprints(compared.values())

        def seal() -> Any:
            message = None
            if group.is_first:
                sealed = ledger.seal(step, data, **facts)
                message = seal_message(ledger, self._num_known, sealed)
            return message, _sha256(reduced)

        messages, digests = zip(*group.gather_results(f"the seal of {at}", seal), strict=True)
        hint = "A device or a link is faulty."
        _compare(group, digests, "sums of " + at, compared, reduced, hint)
        if isinstance(ledger, FollowerLedger):
            return sums, ledger.follow(messages[0])
        return sums, Seal(*messages[0]["seal"])

    def _check_reduction(self, group: Group, step: int, own: Sums, total: Sums) -> None:
        """Compare the reduced sums with each process's own sums, along one random direction."""
        message = _projected(own, step), _projected(total, step)
        owns, totals = zip(*group.gather(f"the sums of step {step}", message), strict=True)
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


def _on_host(sums: Sums) -> list[Any]:
    """Sums as NumPy arrays."""
    return [total.detach().cpu().contiguous().numpy() for total in sums.values()]


def _compare(
    group: Group,
    digests: Iterable[str],
    what: str,
    names: Iterable[str],
    ours: list[int],
    hint: str,
) -> None:
    """Refuse tensors whose bits differ between processes; the error names the first."""
    if len(set(digests)) > 1:
        group.require_same(what, dict(zip(names, ours, strict=True)), hint, shown=False)


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
