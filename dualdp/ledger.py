# SPDX-License-Identifier: Apache-2.0
"""The append-only record of what a run has released; the accountant reads nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from dualdp import _validate, sealing, spending
from dualdp._validate import AccountingError
from dualdp.chain import Chain, Record, parse
from dualdp.exactness import ExactnessError
from dualdp.schedules import AdaptiveNorm
from dualdp.sealing import Arrays, Seal

if TYPE_CHECKING:
    from dualdp.plan import PrivacyPlan

FORMAT = "dualdp_ledger"
VERSION = 1


class Ledger:
    """Records each release of a plan before it happens, and accounts it.

    A step is `record`ed before anything is computed from the data, and `seal`ed once its clipped
    sum is known and before noise is added. A run that goes on from a checkpoint older than the
    ledger runs some steps again. Where the sum has the digest of the recorded one, the same noise
    gives the same release, which costs nothing. Any other sum gets a new branch of the key, and
    what was released twice on one draw is accounted as such (`dualdp.spending`).

    Args:
        plan: the run; only its hash of the key enters the record.
        accountant: name of the accountant, or None for the plan's.
        path: a new file to write to; None keeps the record in memory.

    Guarantees:
        A step is recorded once and in order, so no noise key is used for two releases.
            [test_a_step_is_recorded_once]
        A refused step leaves the record as it was.  [test_refused_step_changes_nothing]
        A step that is run again repeats its noise only if its sum is the same.
            [test_a_changed_step_gets_a_new_branch]
        Both releases of a step that was run twice are accounted.
            [test_both_branches_are_accounted]
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        accountant: str | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self._begin(plan, accountant)
        self._chain = Chain([self._header()])
        if path is not None:
            self._chain.write_to(path)
        self._end = spending.last_affordable(plan, self.accountant, 0)

    def _begin(self, plan: PrivacyPlan, accountant: str | None) -> None:
        """The state before the first step."""
        self.plan = plan
        self.entries: list[Record] = []
        self.position = 0
        self.accountant = spending.account(plan, [], accountant)
        self._branch = 0
        self._bound = plan.max_grad_norm_at(0)
        self._open: tuple[int, bool] | None = None  # step that was recorded, whether anew
        self._of_step: dict[int, list[Record]] = {}
        self._seals: dict[tuple[int, int], Record] = {}
        self.last_check: int | None = None
        self.failed_check: Record | None = None
        self._impossible: set[str] = set()

    def _header(self) -> Record:
        """The first line: what the rest is about."""
        from dualdp import __version__

        return {
            FORMAT: VERSION,
            "plan": json.loads(self.plan.to_json()),
            "accountant": self.accountant.name,
            "version": __version__,
        }

    def __len__(self) -> int:
        """Number of releases."""
        return len(self.entries)

    # ------------------------------------------------------------------ a step

    @property
    def end(self) -> int | None:
        """First step that may not run: the plan's end, or where its target would be exceeded."""
        return self._end

    @property
    def max_grad_norm(self) -> float:
        """C of the step `position`: the one value for clipper, noiser and record."""
        return self._bound if self.plan.is_adaptive else self.plan.max_grad_norm_at(self.position)

    def record(self, step: int) -> Record:
        """Account one release and append it, before it is computed.

        Args:
            step: must be `position`; a step that was recorded and not sealed, since its
                computation failed, may be asked for again.

        Returns:
            The entry: step, branch, max_grad_norm, and what the accountant was told.

        Raises:
            AccountingError: the step is out of order, past the plan, or past its target epsilon.
        """
        if self._open is not None and self._open[0] == step:
            return self._of_step[step][-1]
        self.expect(step)
        earlier = self._of_step.get(step)
        entry = earlier[-1] if earlier else self._release(step, self._branch)
        self._open = step, not earlier
        return entry

    def expect(self, step: int) -> None:
        """Refuse a step that could not be recorded; nothing is written.

        Raises:
            AccountingError: the step is out of order, past the plan, or past its target epsilon.
        """
        if step != self.position:
            raise AccountingError(
                f"step={step} came after {self.position} recorded releases. Expected "
                f"step={self.position}; a step is released once, in order."
            )
        if step not in self._of_step:
            self._refuse_past_the_end(step)

    def _refuse_past_the_end(self, step: int) -> None:
        if self._end is None or step < self._end:
            return
        if step == self.plan.num_steps:
            raise AccountingError(
                f"step={step} is past the plan's num_steps={self.plan.num_steps}. Plan more steps, "
                "or num_steps=None for an open-ended run."
            )
        raise AccountingError(self._over_budget(f"step={step}"))

    def _over_budget(self, what: str) -> str:
        """That something would exceed the target, and what was spent."""
        spent = self.get_epsilon(accept_unverified=True)
        return (
            f"{what} would exceed target_epsilon={self.plan.target_epsilon}: {len(self)} releases "
            f"have spent {spent:.6g} at delta={self.plan.delta}. "
            "The run ends here; a larger target needs a new decision about the data."
        )

    def _release(self, step: int, branch: int) -> Record:
        """Append a release; account it alone, or together with those on the same draw."""
        numbers = spending.release(
            self.plan, self.plan.noise_multiplier_at(step), self.plan.expected_batch_size_at(step)
        )
        entry = {"step": step, "branch": branch, "max_grad_norm": self.max_grad_norm, **numbers}
        again = step in self._of_step
        if again:
            spent = spending.spent_by(self.plan, [*self.entries, entry], self.accountant.name)
            target = self.plan.target_epsilon
            if target is not None and spent.get_epsilon(delta=self.plan.delta) > target:
                raise AccountingError(self._over_budget(f"Running step={step} a second time"))
        else:
            spent = self.accountant
            spent.step(**numbers)
        try:
            self._chain.append({"kind": "release", **entry})
        except OSError:
            self.accountant = spending.spent_by(self.plan, self.entries, spent.name)
            raise
        self.accountant = spent
        self._remember(entry)
        if again:
            self._end = spending.last_affordable(self.plan, spent, len(self._of_step))
        return entry

    def _remember(self, entry: Record) -> None:
        """Keep an entry that the chain has."""
        self.entries.append(entry)
        self._of_step.setdefault(int(entry["step"]), []).append(entry)

    def seal(
        self,
        step: int,
        parts: Arrays | Callable[[], Arrays] = (),
        *,
        stack: str = "",
        num_below: int | None = None,
        num_rows: int | None = None,
    ) -> Seal:
        """Fix the numbers of a recorded release, after its clipped sum and before its noise.

        Args:
            step: the one that was recorded last.
            parts: the clipped sums in a fixed order, or a function to them, which is called only
                if the record is in a file (without one, no step can be run again).
            stack: which generator the noise comes from, with its version, such as "torch 2.13.0".
            num_below: with an adaptive bound, how many examples have a norm of at most C.
            num_rows: with an adaptive bound, how many examples the batch holds.

        Raises:
            AccountingError: the step was not recorded before.
            TypeError: an adaptive bound without its counts.
        """
        if self._open is None or self._open[0] != step:
            raise AccountingError(f"step={step} was not recorded. Call record(step) before seal.")
        if self.plan.is_adaptive and (num_below is None or num_rows is None):
            raise TypeError(
                "num_below and num_rows are missing. An adaptive max_grad_norm needs the number "
                "of examples below the bound, and of all in the batch."
            )
        bound, counts = self.max_grad_norm, (num_below, num_rows)
        digest = None
        if self._chain.path is not None:
            facts = (step, stack, self.plan.noise, bound, counts)
            digest = sealing.digest(self.plan, facts, parts() if callable(parts) else parts)
        is_new = self._open[1] and (step, self._branch) not in self._seals
        found = None if is_new else self._replayed(step, digest)
        sealed = found or self._sealed(step, is_new, digest, *counts)
        stddev = self.plan.noise_multiplier_at(step) * bound
        size = self.plan.expected_batch_size_at(step)
        self._advance(sealed)
        return Seal(step, int(sealed["branch"]), bound, stddev, size, found is not None)

    def _sealed(
        self,
        step: int,
        is_new: bool,
        digest: str | None,
        num_below: int | None,
        num_rows: int | None,
    ) -> Record:
        """Append the seal of a release that was not made before, on a branch of its own."""
        branch = self._branch
        if not is_new:
            branch = self._branch_again(step)
        sealed: Record = {"step": step, "branch": branch, "digest": digest}
        if self.plan.is_adaptive:
            sealed["noisy_fraction"] = sealing.noisy_fraction(
                self.plan, step, branch, num_below, num_rows
            )
        self._chain.append({"kind": "seal", **sealed})
        self._seals[step, branch] = sealed
        return sealed

    def _advance(self, sealed: Record) -> None:
        """Go to the step after a sealed one."""
        self._branch, self._open = int(sealed["branch"]), None
        self.position = int(sealed["step"]) + 1
        if isinstance(self.plan.max_grad_norm, AdaptiveNorm):
            fraction = float(sealed["noisy_fraction"])
            self._bound = self.plan.max_grad_norm.following(self._bound, fraction)

    def _branch_again(self, step: int) -> int:
        """The branch of a step that runs again with another sum; its release is on record then."""
        for entry in self._of_step[step]:
            branch = int(entry["branch"])
            # Recorded and never sealed: no noise was added, so the release is yet to be made.
            unsealed = (step, branch) not in self._seals
            if unsealed and entry["max_grad_norm"] == self.max_grad_norm:
                return branch
        taken = [int(entry["branch"]) for entry in self._of_step[step]]
        branch = self._branch
        if branch in taken:
            branch = 1 + max(int(entry["branch"]) for entry in self.entries)
        self._release(step, branch)
        return branch

    def _replayed(self, step: int, digest: str | None) -> Record | None:
        """The seal of the very same release, if it was made before."""
        for entry in self._of_step[step]:
            sealed = self._seals.get((step, entry["branch"]))
            if digest is not None and sealed is not None and sealed["digest"] == digest:
                return sealed
        return None

    def __reduce__(self) -> Any:
        raise TypeError(
            "A ledger can't be copied: each copy would hand out the same noise. Use one for one "
            "run, or its to_json()."
        )

    # ------------------------------------------------------------------ reading and going on

    def get_epsilon(self, delta: float | None = None, *, accept_unverified: bool = False) -> float:
        """Epsilon spent so far.

        Args:
            delta: in (0, 1); None for the plan's.
            accept_unverified: a run in which a spot check failed has an answer, too.

        Raises:
            AccountingError: a spot check failed in this run.
        """
        if self.failed_check is not None and not accept_unverified:
            raise AccountingError(unverified(self.failed_check))
        return float(self.accountant.get_epsilon(delta=self.plan.delta if delta is None else delta))

    def note(self, **facts: Any) -> None:
        """Write down a public fact about the run, such as which unprotected numbers were logged."""
        self._chain.append({"kind": "note", **facts})

    # ------------------------------------------------------------------ spot checks

    def check_passed(self, step: int) -> None:
        """Write down that the numbers of a step agreed with the definition (`dualdp.exactness`)."""
        self.note(check={"step": step, "passed": True})
        self.last_check = step

    def check_failed(self, step: int, error: ExactnessError) -> None:
        """Write down that they did not; epsilon is not vouched for from here on."""
        found = {
            "step": step,
            "passed": False,
            "last_passed": self.last_check,
            "parameters": list(error.parameters),
            "relative_error": error.relative_error,
        }
        self.failed_check = found
        self.note(check=found)

    def check_impossible(self, reason: str) -> None:
        """Write down, once, why some numbers of this run can't be checked."""
        if reason not in self._impossible:
            self._impossible.add(reason)
            self.note(check_impossible=reason)

    def _read_check(self, note: Record) -> None:
        """Take over what a note says of a check, if it is one of those above."""
        found = note.get("check")
        if isinstance(found, dict) and found.get("passed"):
            self.last_check = int(found["step"])
        elif isinstance(found, dict):
            self.failed_check = found
        if "check_impossible" in note:
            self._impossible.add(str(note["check_impossible"]))

    @property
    def path(self) -> str | None:
        """The file of the record, if there is one."""
        return self._chain.path

    def write_to(self, path: str | os.PathLike[str]) -> None:
        """Put the record into a new file and go on there."""
        self._chain.write_to(path)

    def sync(self) -> None:
        """Bring the record to the disk; a checkpoint does so before it is written."""
        self._chain.sync()

    def discard(self) -> None:
        """Take back a ledger in which nothing was recorded, with its file."""
        path = self.path
        self._chain.close()
        if path is not None and not self.entries:
            os.unlink(path)

    def close(self) -> None:
        """Give the file back, so that another run may go on with it."""
        self._chain.close()

    def to_json(self) -> str:
        """The whole record: a line of JSON for the plan and for each entry, chained by hashes."""
        return self._chain.text()

    def state(self) -> dict[str, Any]:
        """What `resume` needs, as plain data."""
        if self._open is not None:
            raise AccountingError(
                f"step={self._open[0]} is recorded but not released yet. Save between two steps."
            )
        return {
            "text": self.to_json(),
            "position": self.position,
            "branch": self._branch,
            "max_grad_norm": self._bound,
        }

    @staticmethod
    def read(source: str | os.PathLike[str]) -> list[Record]:
        """The records of a ledger's text, or of its file, once their chain is proved whole.

        Args:
            source: text of `to_json`, or the path of a file.

        Returns:
            The header, then records of the kinds "release", "seal", "resume" and "note".

        Raises:
            ValueError: a line is broken, edited, missing or out of order, or it is no ledger.
        """
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        name = "The text" if is_text else os.fspath(source)
        if is_text:
            text = str(source)
        else:
            with open(source, encoding="utf-8", errors="replace") as file:
                text = file.read()
        return _checked(parse(text, name), name)

    @classmethod
    def resume(
        cls,
        plan: PrivacyPlan,
        state: Mapping[str, Any],
        path: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Go on from a saved state; the file knows what was released after it.

        Args:
            plan: with its key.
            state: of `Ledger.state`.
            path: the run's file; None only for a run whose record never was in one.

        Raises:
            ValueError: the state is broken, of another plan, or the file does not continue it.
        """
        saved = _checked(parse(str(state["text"]), "The saved ledger"), "The saved ledger")
        chain = Chain(saved) if path is None else Chain.open(path)
        try:
            if chain.records[: len(saved)] != saved:
                raise ValueError(
                    f"{chain.path} does not continue the ledger that was saved. Expected the file "
                    "of the same run."
                )
            header = chain.records[0]
            if header["plan"] != json.loads(plan.to_json()):
                raise ValueError(
                    "The saved ledger was written under another plan. Expected the plan of the run."
                )
            ledger = cls.__new__(cls)
            ledger._begin(plan, header["accountant"])
            ledger._restore(chain, state)
        except BaseException:
            chain.close()
            raise
        return ledger

    def _restore(self, chain: Chain, state: Mapping[str, Any]) -> None:
        """Take over the records of a chain, and the position of a saved state."""
        self._chain = chain
        for record in chain.records:
            entry = {name: value for name, value in record.items() if name != "kind"}
            if record.get("kind") == "release":
                self._remember(entry)
            elif record.get("kind") == "seal":
                self._seals[int(entry["step"]), int(entry["branch"])] = entry
            elif record.get("kind") == "note":
                self._read_check(entry)
        self.position = _validate.integer("position", state["position"])
        self._branch = _validate.integer("branch", state["branch"])
        self._bound = _validate.positive("max_grad_norm", state["max_grad_norm"])
        if self.position > len(self._of_step):
            raise ValueError(
                f"The saved position {self.position} is past the {len(self._of_step)} steps of the "
                "ledger. Expected the ledger of the same run."
            )
        self.accountant = spending.spent_by(self.plan, self.entries, self.accountant.name)
        ran_again = len(self.entries) > len(self._of_step)
        start = (
            (self.accountant, len(self._of_step))
            if ran_again
            else (spending.account(self.plan, [], self.accountant.name), 0)
        )
        self._end = spending.last_affordable(self.plan, *start)
        self._chain.append({"kind": "resume", "position": self.position})


def unverified(failed: Record) -> str:
    """The sentence about a run in which a spot check failed."""
    since = failed["last_passed"]
    return (
        f"A spot check failed at step {failed['step']} (relative error "
        f"{failed['relative_error']}), so what this run released is not vouched for "
        f"{'from its beginning' if since is None else f'since step {since}'}. Expected a new run "
        'with method="loop" or a corrected model; accept_unverified=True says what epsilon would '
        "be if all gradients had been right."
    )


def _checked(records: list[Record], name: str) -> list[Record]:
    """The records, if the first one is the header of a ledger.

    Raises:
        ValueError: it is not.
    """
    if not records or records[0].get(FORMAT) != VERSION:
        raise ValueError(
            f"{name} is not a ledger of this version. Expected a file or text that dualdp wrote."
        )
    return records
