# SPDX-License-Identifier: Apache-2.0
"""The append-only record of what a run has released; the accountant reads nothing else."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from dualdp import _validate, run_registry, sealing, spending
from dualdp._validate import AccountingError, newer
from dualdp.accountants import require_bound
from dualdp.chain import Chain, Record, parse
from dualdp.exactness import ExactnessError
from dualdp.schedules import AdaptiveNorm
from dualdp.sealing import Arrays, Seal

if TYPE_CHECKING:
    from dualdp.plan import PrivacyPlan

FORMAT = "dualdp_ledger"
VERSION = 1


class Position(NamedTuple):
    """The step at which a run is.

    Attributes:
        step: that comes next, or that is recorded and not sealed.
        branch: of the key, for steps that no record has yet.
        bound: max_grad_norm of the step, where it is learned.
        is_open: the step is recorded and not sealed.
        earlier: its branches that were sealed before, in a run that this one goes on with.
    """

    step: int
    branch: int
    bound: float
    is_open: bool = False
    earlier: frozenset[int] = frozenset()


class Reading:
    """Releases, cost and checks that a chain of records adds up to.

    Args:
        plan: of the run.
        accountant: its name.
        records: after the header.

    Attributes:
        entries: the releases, in order.
        of_step: step -> its releases.
        seals: (step, branch) -> what was sealed.
        accountant: has seen all of them.
        end: first step that may not run; None for none before `looked`.
        looked: step at which the end must be looked for again.
        last_check: step of the last spot check that passed.
        failed_check: what the record says of one that failed.
        impossible: reasons why numbers can't be checked.
        check_rate: share of steps that are checked, as it was noted last; None if it never was.
    """

    def __init__(
        self, plan: PrivacyPlan, accountant: str | None, records: Iterable[Record] = ()
    ) -> None:
        self._plan = plan
        self.entries: list[Record] = []
        self.of_step: dict[int, list[Record]] = {}
        self.seals: dict[tuple[int, int], Record] = {}
        self.last_check: int | None = None
        self.failed_check: Record | None = None
        self.impossible: set[str] = set()
        self.check_rate: float | None = None
        for record in records:
            self.take(record)
        self.accountant = spending.spent_by(plan, self.entries, accountant)
        once = len(self.entries) == len(self.of_step)
        fresh = spending.account(plan, [], accountant) if once else self.accountant
        self._look(fresh, 0 if once else len(self.of_step))

    def take(self, record: Record) -> None:
        """Note one record; its cost is the caller's."""
        entry = {name: value for name, value in record.items() if name != "kind"}
        kind = record.get("kind")
        if kind == "release":
            self.entries.append(entry)
            self.of_step.setdefault(int(entry["step"]), []).append(entry)
        elif kind == "seal":
            self.seals[int(entry["step"]), int(entry["branch"])] = entry
        elif kind == "note":
            self._take_note(entry)

    def _take_note(self, note: Record) -> None:
        """Take over what a note says of a spot check."""
        found = note.get("check")
        if isinstance(found, dict) and found.get("passed"):
            self.last_check = int(found["step"])
        elif isinstance(found, dict):
            self.failed_check = found
        if "checks" in note:
            self.check_rate = float(note["checks"])
        if "check_impossible" in note:
            self.impossible.add(str(note["check_impossible"]))

    def spent_with(self, entry: Record) -> Any:
        """An accountant that has seen one more release; ours itself for a new step.

        Raises:
            AccountingError: it has no bound for it, or the release would exceed the target.
        """
        plan, step = self._plan, int(entry["step"])
        if step not in self.of_step:
            told = {k: v for k, v in entry.items() if k not in ("step", "branch", "max_grad_norm")}
            self.accountant.step(**told)
            return self.accountant
        spent = spending.spent_by(plan, [*self.entries, entry], self.accountant.name)
        target = plan.target_epsilon
        if target is not None and spent.get_epsilon(delta=plan.delta) > target:
            raise AccountingError(self.over_budget(f"Running step={step} a second time"))
        return spent

    def add(self, entry: Record, spent: Any) -> None:
        """Note a release and its cost, of `spent_with`."""
        again = int(entry["step"]) in self.of_step
        self.accountant = spent
        self.take({"kind": "release", **entry})
        if again:
            self._look(spent, len(self.of_step))

    def _look(self, spent: Any, position: int) -> None:
        """Find the end of the run, as far ahead as can be seen."""
        self.end, self.looked = spending.last_affordable(self._plan, spent, position)

    def look_again(self, step: int) -> None:
        """Find the end from a step on that the last look did not reach."""
        if step >= self.looked:
            self._look(self.accountant, step)

    def over_budget(self, what: str) -> str:
        """The sentence about something that would exceed the target."""
        delta = self._plan.delta
        return (
            f"{what} would exceed target_epsilon={self._plan.target_epsilon}: "
            f"{len(self.entries)} releases have spent "
            f"{float(self.accountant.get_epsilon(delta=delta)):.6g} at delta={delta}. "
            "The run ends here; a larger target needs a new decision about the data."
        )


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

    Raises:
        AccountingError: the accountant gives no upper bound (`"gdp"`).

    Guarantees:
        A step is recorded once and in order, so no noise key is used for two releases.
            [test_a_step_is_recorded_once]
        A refused step leaves the record as it was.  [test_refused_step_changes_nothing]
        A step that is run again repeats its noise only if its sum is the same.
            [test_a_changed_step_gets_a_new_branch]
        Both releases of a step that was run twice are accounted.
            [test_both_branches_are_accounted]
        An interrupt anywhere leaves a ledger that goes on, with each release counted once.
            [test_an_interrupt_at_any_line_counts_no_step_twice]
        A fork of the process can't go on with it.  [test_a_fork_can_not_release]
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        accountant: str | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self._begin(plan, accountant)
        self._chain = Chain([self._header()])
        self._read()
        if path is not None:
            self._chain.write_to(path)

    def _begin(self, plan: PrivacyPlan, accountant: str | None) -> None:
        """The state before the first step."""
        require_bound(accountant or plan.accountant)
        self.plan, self._pid, self._is_resumed = plan, os.getpid(), False
        self._name = spending.account(plan, [], accountant).name
        self._is_current = False  # chain and reading say the same
        self._position = Position(0, 0, plan.max_grad_norm_at(0))

    def _header(self) -> Record:
        """The first line: what the rest is about."""
        from dualdp import __version__

        return {
            FORMAT: VERSION,
            "plan": json.loads(self.plan.to_json()),
            "accountant": self._name,
            "version": __version__,
        }

    def _read(self) -> Reading:
        """What the record adds up to; read anew where an interrupt came between the two."""
        if not self._is_current:
            self._reading = Reading(self.plan, self._name, self._chain.records[1:])
            self._is_current = True
        return self._reading

    def __len__(self) -> int:
        """Number of releases."""
        return len(self.entries)

    @property
    def entries(self) -> list[Record]:
        """The releases, in order: what was recorded of each."""
        return self._read().entries

    @property
    def accountant(self) -> Any:
        """An accountant that has seen all releases."""
        return self._read().accountant

    @property
    def position(self) -> int:
        """The step that comes next."""
        return self._position.step

    @property
    def last_check(self) -> int | None:
        """Step of the last spot check that passed."""
        return self._read().last_check

    @property
    def failed_check(self) -> Record | None:
        """Facts about a spot check that failed."""
        return self._read().failed_check

    def has_released(self, step: int) -> bool:
        """Whether a release of this step is on record."""
        return step in self._read().of_step

    # ------------------------------------------------------------------ a step

    @property
    def end(self) -> int | None:
        """First step that may not run: the plan's end, or where its target would be exceeded."""
        reading = self._read()
        reading.look_again(self.position)
        return reading.end

    @property
    def max_grad_norm(self) -> float:
        """C of the step `position`: the one value for clipper, noiser and record."""
        if not self.plan.is_adaptive:
            return self.plan.max_grad_norm_at(self.position)
        return _validate.positive("max_grad_norm", self._position.bound)

    def record(self, step: int) -> Record:
        """Account one release and append it, before it is computed.

        Args:
            step: must be `position`; a step that was recorded and not sealed, since its
                computation failed, may be asked for again.

        Returns:
            The entry: step, branch, max_grad_norm, and what the accountant was told.

        Raises:
            AccountingError: the step is out of order, past the plan, or past its target epsilon; or
                the run belongs to another process.
        """
        self.expect(step)
        place, reading = self._position, self._read()
        if place.is_open:
            return reading.of_step[step][-1]
        earlier = reading.of_step.get(step)
        entry = earlier[-1] if earlier else self._release(step, place.branch)
        branches = (int(made["branch"]) for made in earlier or ())
        sealed = frozenset(b for b in branches if (step, b) in reading.seals)
        self._position = place._replace(is_open=True, earlier=sealed)
        return entry

    def expect(self, step: int) -> None:
        """Refuse a step that could not be recorded; nothing is written.

        Raises:
            AccountingError: the step is out of order, past the plan, or past its target epsilon; or
                the run belongs to another process.
        """
        self._require_run()
        place = self._position
        if place.is_open and place.step == step:
            return
        if step != place.step or place.is_open:
            raise AccountingError(
                f"step={step} came after {place.step} recorded releases. Expected "
                f"step={place.step}; a step is released once, in order."
            )
        if not self._read().of_step.get(step):
            self._refuse_past_the_end(step)

    def steps_ahead(self, num_steps: int) -> range:
        """The next steps of a loop that does not show its sums, once all of them may be recorded.

        Raises:
            AccountingError: one is past the end, or was released before this run was resumed.
        """
        first, end = self.position, self.end
        if end is not None and first + num_steps > end:
            raise AccountingError(
                f"num_steps={num_steps} after {first} recorded releases is past step {end}, where "
                "the plan or its target epsilon ends. Plan more steps, or num_steps=None for an "
                "open-ended run."
            )
        if self.has_released(first):
            raise AccountingError(
                f"Step {first} was released before, after the checkpoint was written, and a loop "
                "of your own does not show whether it would be the same release again. Expected "
                "the last checkpoint of the run, or make_private, whose step tells."
            )
        return range(first, first + num_steps)

    def _require_run(self) -> None:
        """Refuse a process to which the run does not belong, or a key that has another run."""
        if self._pid != os.getpid():
            raise AccountingError(run_registry.forked(self._pid))
        if not run_registry.is_known(self):
            self.plan.claim(self, recorder="Ledger", source="", resumed=self._is_resumed)

    def _refuse_past_the_end(self, step: int) -> None:
        """Refuse a step that the plan or its target does not allow."""
        self._read().look_again(step)
        end = self._read().end
        if end is None or step < end:
            return
        if step == self.plan.num_steps:
            raise AccountingError(
                f"step={step} is past the plan's num_steps={self.plan.num_steps}. Plan more steps, "
                "or num_steps=None for an open-ended run."
            )
        self._numbers(step)  # a schedule that has left its range says so
        raise AccountingError(self._read().over_budget(f"step={step}"))

    def _numbers(self, step: int) -> Record:
        """What the accountant is told of the release of a step."""
        plan = self.plan
        noise, size = plan.noise_multiplier_at(step), plan.expected_batch_size_at(step)
        return spending.release(plan, noise, size)

    def _release(self, step: int, branch: int) -> Record:
        """Append a release; account it alone, or together with those on the same draw."""
        numbers = self._numbers(step)
        entry = {"step": step, "branch": branch, "max_grad_norm": self.max_grad_norm, **numbers}
        reading = self._read()
        self._is_current = False
        spent = reading.spent_with(entry)
        self._chain.append({"kind": "release", **entry})
        reading.add(entry, spent)
        self._is_current = True
        return entry

    def _append(self, record: Record) -> None:
        """Append a record that costs nothing."""
        reading = self._read()
        self._is_current = False
        self._chain.append(record)
        reading.take(record)
        self._is_current = True

    def seal(
        self,
        step: int,
        parts: Arrays | Callable[[], Arrays] | None,
        *,
        stack: str = "",
        num_below: int | None = None,
        num_rows: int | None = None,
    ) -> Seal:
        """Fix the numbers of a recorded release, after its clipped sum and before its noise.

        Args:
            step: the one that was recorded last.
            parts: the clipped sums in a fixed order, at least one array, or a function to them,
                which is called only if the record is in a file (without one, no step can be run
                again). None for a loop that can't show them: such a step that is run again is
                taken for another release, and accounted.
            stack: which generator the noise comes from, with its version, such as "torch 2.13.0".
            num_below: with an adaptive bound, how many examples have a norm of at most C.
            num_rows: with an adaptive bound, how many examples the batch holds.

        Raises:
            AccountingError: the step was not recorded before.
            TypeError: an adaptive bound without its counts.
            ValueError: `parts` holds no array.
        """
        self._require_run()
        place = self._position
        if not place.is_open or place.step != step:
            raise AccountingError(f"step={step} was not recorded. Call record(step) before seal.")
        if self.plan.is_adaptive and (num_below is None or num_rows is None):
            raise TypeError(
                "num_below and num_rows are missing. An adaptive max_grad_norm needs the number "
                "of examples below the bound, and of all in the batch."
            )
        bound, counts = self.max_grad_norm, (num_below, num_rows)
        if parts is not None and not callable(parts):
            parts = list(parts)
            if not parts:
                raise ValueError(
                    "parts holds no array. Expected the clipped sums; None says that they can't be "
                    "shown."
                )
        digest = None
        if parts is not None and self._chain.path is not None:
            facts = (step, stack, self.plan.noise, bound, counts)
            digest = sealing.digest(self.plan, facts, parts() if callable(parts) else parts)
        found = self._known_seal(digest)
        sealed = found or self._sealed(digest, *counts)
        stddev = self.plan.noise_multiplier_at(step) * bound
        size = self.plan.expected_batch_size_at(step)
        self._advance(sealed)
        return Seal(step, int(sealed["branch"]), bound, stddev, size, found is not None)

    def _known_seal(self, digest: str | None) -> Record | None:
        """The seal of the very same release, if it was made before."""
        place, reading = self._position, self._read()
        for entry in reading.of_step[place.step]:
            branch = int(entry["branch"])
            sealed = reading.seals.get((place.step, branch))
            # Sealed by a call that was interrupted, it was not returned, so no noise followed.
            is_same = digest is not None or branch not in place.earlier
            if sealed is not None and sealed["digest"] == digest and is_same:
                return sealed
        return None

    def _sealed(self, digest: str | None, num_below: int | None, num_rows: int | None) -> Record:
        """Append the seal of a release that was not made before, on a branch of its own."""
        step, branch = self._position.step, self._free_branch()
        sealed: Record = {"step": step, "branch": branch, "digest": digest}
        if self.plan.is_adaptive:
            sealed["noisy_fraction"] = sealing.noisy_fraction(
                self.plan, step, branch, num_below, num_rows
            )
        self._append({"kind": "seal", **sealed})
        return sealed

    def _advance(self, sealed: Record) -> None:
        """Go to the step after a sealed one."""
        step, branch, bound = int(sealed["step"]), int(sealed["branch"]), self._position.bound
        if isinstance(self.plan.max_grad_norm, AdaptiveNorm):
            bound = self.plan.max_grad_norm.following(bound, float(sealed["noisy_fraction"]))
        self._position = Position(step + 1, branch, bound)
        run_registry.sealed(self, step, branch)

    def _free_branch(self) -> int:
        """The branch for a sum that was not released before; its release is on record then."""
        place, reading = self._position, self._read()
        for entry in reading.of_step[place.step]:
            branch = int(entry["branch"])
            # Recorded and never sealed: no noise was added, so the release is yet to be made.
            unsealed = (place.step, branch) not in reading.seals
            if unsealed and entry["max_grad_norm"] == self.max_grad_norm:
                return branch
        branch = place.branch
        if branch in [int(entry["branch"]) for entry in reading.of_step[place.step]]:
            branch = 1 + max(int(entry["branch"]) for entry in reading.entries)
        self._release(place.step, branch)
        return branch

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
            AccountingError: a spot check failed in this run, or noise was asked for that belongs to
                no release on record.
        """
        run_registry.require_recorded(self)
        if self.failed_check is not None and not accept_unverified:
            raise AccountingError(unverified(self.failed_check))
        return float(self.accountant.get_epsilon(delta=self.plan.delta if delta is None else delta))

    def note(self, **facts: Any) -> None:
        """Write down a public fact about the run, such as which unprotected numbers were logged."""
        self._append({"kind": "note", **facts})

    # ------------------------------------------------------------------ spot checks

    @property
    def check_rate(self) -> float | None:
        """Share of steps that are checked, as the record says; None where it does not."""
        return self._read().check_rate

    def check_passed(self, step: int) -> None:
        """Write down that the numbers of a step agreed with the definition (`dualdp.exactness`)."""
        self.note(check={"step": step, "passed": True})

    def check_failed(self, step: int, error: ExactnessError) -> None:
        """Write down that they did not; epsilon is not vouched for from here on."""
        self.note(
            check={
                "step": step,
                "passed": False,
                "last_passed": self.last_check,
                "parameters": list(error.parameters),
                "relative_error": error.relative_error,
            }
        )

    def check_impossible(self, reason: str) -> None:
        """Write down, once, why some numbers of this run can't be checked."""
        if reason not in self._read().impossible:
            self.note(check_impossible=reason)

    @property
    def path(self) -> str | None:
        """The file of the record, if there is one."""
        return self._chain.path

    @property
    def num_lines(self) -> int:
        """Lines of the record."""
        return len(self._chain)

    @property
    def last_hash(self) -> str:
        """The hash of the last line."""
        return self._chain.last_hash

    def holds(self, chained: str) -> bool:
        """Whether a line of the record has this hash."""
        return self._chain.holds(chained)

    def lines(self, start: int = 0) -> list[str]:
        """The lines of the record from one on, without newlines."""
        return self._chain.lines(start)

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
        """Where the run is, as plain data: with the ledger's file it is all that `resume` needs.

        Returns:
            `position`, `branch` and `max_grad_norm` of the next step, and of the record so far
            `num_lines` and the `hash` of the last line.

        Raises:
            AccountingError: a step is recorded and not released.
        """
        place = self._position
        if place.is_open:
            raise AccountingError(
                f"step={place.step} is recorded but not released yet. Save between two steps."
            )
        return {
            "position": place.step,
            "branch": place.branch,
            "max_grad_norm": place.bound,
            "num_lines": len(self._chain),
            "hash": self.last_hash,
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
        records = parse(text, name)
        _require_header(records, name)
        return records

    @classmethod
    def resume(
        cls, plan: PrivacyPlan, state: Mapping[str, Any], path: str | os.PathLike[str]
    ) -> Self:
        """Go on from a saved state; the file knows what was released after it.

        Args:
            plan: with its key.
            state: of `Ledger.state`, or of dualdp 0.1.0, which held the ledger's text.
            path: the run's file.

        Raises:
            ValueError: the state is broken, of another plan, or the file does not continue it.
        """
        chain = Chain.open(path)
        try:
            ledger = cls._resumed(plan, state, chain)
            # The random word tells this continuation from that of a copy of the file.
            opened = {"position": ledger.position, "opened": secrets.token_hex(8)}
            ledger._append({"kind": "resume", **opened})
        except BaseException:
            chain.close()
            raise
        return ledger

    @classmethod
    def _resumed(cls, plan: PrivacyPlan, state: Mapping[str, Any], chain: Chain) -> Self:
        """The ledger of a chain that continues a saved state."""
        name = chain.path or "The record"
        _require_header(chain.records, name)
        header = chain.records[0]
        count, chained = saved_lines(state)
        if count > len(chain) or chain.hash_at(count) != chained:
            raise ValueError(
                f"{name} does not continue the ledger that was saved. Expected the file of the "
                "same run."
            )
        if header["plan"] != json.loads(plan.to_json()):
            raise ValueError(
                f"{name} was written under another plan. Expected the plan of the run."
            )
        ledger = cls.__new__(cls)
        ledger._begin(plan, header["accountant"])
        ledger._is_resumed, ledger._chain, ledger._is_current = True, chain, False
        ledger._position = Position(
            _validate.integer("position", state["position"]),
            _validate.integer("branch", state["branch"]),
            _validate.positive("max_grad_norm", state["max_grad_norm"]),
        )
        steps = len(ledger._read().of_step)
        if ledger.position > steps:
            raise ValueError(
                f"The saved position {ledger.position} is past the {steps} steps of the ledger. "
                "Expected the ledger of the same run."
            )
        return ledger


def saved_lines(state: Mapping[str, Any]) -> tuple[int, str]:
    """Number of lines that a saved state knows, and the hash of the last."""
    if "text" in state:  # of dualdp 0.1.0
        saved = Chain(parse(str(state["text"]), "The saved ledger"))
        return len(saved), saved.last_hash
    return _validate.integer("num_lines", state["num_lines"]), str(state["hash"])


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


def _require_header(records: list[Record], name: str) -> None:
    """Refuse records whose first one is not the header of a ledger.

    Raises:
        ValueError: it is not, or of a later version.
    """
    found = records[0].get(FORMAT) if records else None
    if isinstance(found, int) and found > VERSION:
        raise ValueError(newer(name, "ledger", found, VERSION))
    if found != VERSION:
        raise ValueError(f"{name} is not a ledger. Expected a file or text that dualdp wrote.")
