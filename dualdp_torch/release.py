# SPDX-License-Identifier: Apache-2.0
"""How the clipped sum of a step is completed and sealed, before any noise is drawn."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from dualdp import exactness
from dualdp.ledger import Ledger
from dualdp.sealing import Seal
from dualdp.twin import Twin, news, num_lines

from .distributed import Group, Reduction, fingerprints
from .rules.base import Tensor
from .sharded import Shards

Sums = dict[str, Tensor]
Counts = tuple[int, ...]
Parts = Callable[[], Iterable[Any]]


def _parts(sums: Sums, shards: Shards | None) -> Parts:
    """() -> what the ledger keeps a digest of: the sums, or a digest of all their pieces."""
    if shards is not None:
        digest = shards.digest(sums)  # by all processes together
        return lambda: [digest]
    return lambda: (total.detach().cpu().contiguous().numpy() for total in sums.values())


def _sealed(ledger: Ledger, step: int, parts: Parts, counts: Counts, stack: str) -> Seal:
    """The seal of a recorded step whose sums and counts are those of the whole logical batch."""
    named = dict(zip(("num_below", "num_rows"), counts, strict=False))
    return ledger.seal(step, parts, stack=stack, **named)


class Alone:
    """The release of a process that trains alone.

    Args:
        ledger: of the run.
        shards: of a model in pieces.
    """

    is_alone = True

    def __init__(self, ledger: Ledger, shards: Shards | None = None) -> None:
        self._ledger, self._shards = ledger, shards
        self._had_others = Group.current() is not None

    def begin(self, step: int) -> None:
        """Refuse to train alone on data that other processes train on, too.

        Raises:
            RuntimeError: a process group came up after the set-up.
        """
        if not self._had_others and Group.current() is not None:
            raise RuntimeError(
                "A process group was initialised after make_private, so each process would train "
                "a model of its own on the same data and account only that one. Call "
                "init_process_group before make_private."
            )

    def agree(self, step: int, failure: Exception | None) -> None:
        """Nobody else needs to be asked: what a check finds is raised where it is found."""

    def formed(self, name: str, total: Tensor) -> None:
        """Nothing needs to be sent."""

    def __call__(
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
            step: of the run.
            sums: name -> clipped sum.
            counts: with an adaptive bound, examples below it and examples in all.
            stack: what decides the normals beside the key.
            is_checked: what several processes add up is compared with what each of them had.
            has_passed: the gradients of this step agreed with the definition, which is noted.

        Returns:
            The sums that noise is added to, and the numbers of the noise.
        """
        if has_passed:
            self._ledger.check_passed(step)
        self._ledger.record(step)
        return sums, _sealed(self._ledger, step, _parts(sums, self._shards), counts, stack)


class Together:
    """The release of one of several processes: one sum, one record, one seal.

    Rank 0 records the step before sums are reduced, and seals it before any process draws noise;
    the others follow its ledger by a twin.

    Args:
        ledger: of the run on rank 0, its `Twin` on the others.
        group: the processes.
        parameters: name -> parameter of this process, compared where it is whole.
        choices: as in `PrivateStep`; what rank 0 chose is taken over.
        shards: of a model in pieces, whose sums come reduced, each process' own piece.

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

    def agree(self, step: int, failure: Exception | None) -> None:
        """Stop if a check has failed on any process, all of them with its error.

        Args:
            step: of the run.
            failure: what was found on this process.

        Raises:
            ExactnessError: a spot check failed.
            RuntimeError: a process is lost, or at another step.
            ValueError: a loss was refused, or parameters differ between processes.
        """
        ledger, place = self._ledger, f"step {step}"
        ours = fingerprints(self._parameters.values())
        told = num_lines(ledger), _word(ours), failure
        lines, words, failures = zip(*self._group.gather(place, told), strict=True)
        for error in (failure, *failures):
            if error is not None:
                raise error from None
        hint = "Give all the same optimizer and learning rates, and change parameters nowhere else."
        self._compare(words, "parameters before " + place, self._parameters, ours, hint)
        self._told = min(lines[1:])

    def begin(self, step: int) -> None:
        """Record the step, on which all agree.

        Raises:
            AccountingError: it may not be run.
        """
        self._ledger.record(step)
        self._reduction = Reduction(self._group, f"step {step}", self._parameters)

    def formed(self, name: str, total: Tensor) -> None:
        """A sum of this process is complete, so that it can be sent while others are formed."""
        if self._shards is None:
            self._reduction.add(name, total)

    def __call__(
        self,
        step: int,
        sums: Sums,
        *,
        counts: Counts = (),
        stack: str,
        is_checked: bool = False,
        has_passed: bool = False,
    ) -> tuple[Sums, Seal]:
        """As `Alone`, after `begin`; the sums that come back are those of all processes.

        Raises:
            ExactnessError: they are not what the processes had, added up.
            RuntimeError: a process is lost.
            ValueError: sums differ between processes.
        """
        group, ledger, place = self._group, self._ledger, f"step {step}"
        totals = group.count(f"the counts of {place}", *counts) if counts else ()
        if self._shards is None:
            own, sums = sums, self._reduction.finish(sums)
            if is_checked:
                self._check_reduction(step, own, sums)
        if has_passed:
            ledger.check_passed(step)
        parts, shown = _parts(sums, self._shards), sums if self._shards is None else {}
        reduced = fingerprints(shown.values())

        def closed() -> Any:
            seal = None
            if group.is_first:
                seal = _sealed(ledger, step, parts, totals, stack)
            chosen = {k: way for k, way in self._choices.items() if k not in self._known}
            return seal and news(ledger, self._told, seal), _word(reduced), chosen

        found, words, chosen = zip(*group.together(f"the seal of {place}", closed), strict=True)
        self._compare(words, "sums of " + place, shown, reduced, "A device or a link is faulty.")
        for theirs in reversed(chosen):
            self._choices.update(theirs)
        self._known.update(self._choices)
        if isinstance(ledger, Twin):
            return sums, ledger.follow(found[0])
        return sums, Seal(*found[0]["seal"])

    def _check_reduction(self, step: int, own: Sums, total: Sums) -> None:
        """Compare reduced sums with those of each process, in one direction that nobody planned.

        Raises:
            ExactnessError: they are not their sum; on all processes alike.
        """
        told = _projected(own, step), _projected(total, step)
        owns, totals = zip(*self._group.gather(f"the sums of step {step}", told), strict=True)
        for parts, reduced in zip(zip(*owns, strict=True), zip(*totals, strict=True), strict=True):
            if len({total.along for total in reduced}) > 1:
                continue  # other bits on other processes, which the seal names
            size = sum(part.length for part in parts)
            error = abs(reduced[0].along - sum(part.along for part in parts)) / (size or 1)
            tolerance = min(exactness.TOLERANCE[part.precision] for part in parts)
            if not error <= tolerance and math.isfinite(size):
                told_error = exactness.power_of_ten(error)
                raise exactness.ExactnessError(
                    "A spot check failed: the sum over the processes differs from what each of "
                    f"them had, added up, by {told_error} of it (parameter {parts[0].name!r}). "
                    "Nothing was released for this batch. Report it, with the backend of the "
                    "process group and the version of torch.",
                    relative_error=told_error,
                    unprotected_details={"error": error},
                )

    def _compare(
        self, words: Iterable[str], what: str, names: Iterable[str], ours: list[int], hint: str
    ) -> None:
        """Refuse tensors whose bits differ between processes, by name."""
        if len(set(words)) > 1:
            self._group.same(what, dict(zip(names, ours, strict=True)), hint, shown=False)


class _Projection(NamedTuple):
    """A tensor as two numbers: how far it goes in a direction, and its length."""

    name: str
    precision: str
    along: float
    length: float


def _projected(sums: Sums, step: int) -> list[_Projection]:
    """Each sum in a direction of its own, drawn from the step: the same on all processes."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for name, total in sums.items():
        signs = torch.randint(2, total.shape, generator=generator, dtype=torch.int8)
        signs = (2 * signs - 1).to(total)
        along, length = (total * signs).sum(dtype=torch.float64), torch.linalg.vector_norm(total)
        precision = str(total.dtype).removeprefix("torch.")
        found.append(_Projection(name, precision, float(along), float(length)))
    return found


def _word(numbers: list[int]) -> str:
    """A short word that stands for many numbers."""
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()
