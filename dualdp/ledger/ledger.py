# SPDX-License-Identifier: Apache-2.0
"""`Ledger`: append-only record of a run's releases, the only input of its accountant."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

from dualdp import _validate
from dualdp._validate import AccountingError, newer
from dualdp._version import __version__
from dualdp.accountants import require_bound
from dualdp.exactness import ExactnessError
from dualdp.ledger import release_record
from dualdp.ledger.contents import Contents
from dualdp.ledger.hash_chain import Chain, Record, parse, read_text
from dualdp.ledger.release_record import SCHEME, Arrays, Seal
from dualdp.plan import accounting
from dualdp.plan.correlated.noise import START, Path, as_path, extended
from dualdp.plan.plan import PrivacyPlan, require_plan
from dualdp.plan.schedules import AdaptiveNorm
from dualdp.randomness import run_registry
from dualdp.randomness.universal_hash import Hashed

FORMAT = "dualdp_ledger"
VERSION = 1


@dataclass(frozen=True)
class Idle:
    """State between two steps: the next step may be recorded, or the run saved."""

    step: int  # the next one
    branch: int  # of the key, if the step has no release on record
    bound: float  # max_grad_norm of the step, if it is adaptive
    path: Path = START  # branches of the steps before this one


@dataclass(frozen=True)
class Recorded(Idle):
    """State of a step that is on record and not sealed: its sum is being computed.

    `sealed_before` has the branches on which the step was sealed before, in a resumed run; a sum
    with the digest of one of these seals is a replay.
    """

    sealed_before: frozenset[int] = frozenset()


class Ledger:
    """Append-only record that accounts each release of a plan before it happens.

    A step is `record`ed before anything is computed from the data, and `seal`ed once its clipped
    sum is known and before noise is added. A run resumed from a checkpoint older than the ledger
    repeats some steps. If the sum has the recorded digest, the same noise gives the same release,
    which costs nothing. Any other sum gets a new branch of the key, and two releases on one draw
    are accounted together (`dualdp.plan.accounting`). `chain` holds the lines of the record.

    Args:
        plan: `PrivacyPlan` of the run; the record contains only the hash of its key.
        accountant: name of the accountant, or None for the plan's.
        path: path of a new file; None keeps the record in memory.

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
        require_plan(plan)
        require_bound(accountant or plan.accountant)
        name = accounting.account(plan, [], accountant).name
        header = {
            FORMAT: VERSION,
            "plan": json.loads(plan.to_json()),
            "accountant": name,
            "version": __version__,
        }
        self._set(plan, name, Chain([header]), Idle(0, 0, plan.max_grad_norm_at(0)))
        self._read()
        if path is not None:
            self.chain.write_to(path)

    def _set(
        self, plan: PrivacyPlan, accountant: str, chain: Chain, state: Idle, resumed: bool = False
    ) -> None:
        """Set all attributes, of a new run or of a resumed one."""
        self.plan, self._accountant, self.chain, self._state = plan, accountant, chain, state
        self._is_resumed, self._pid = resumed, os.getpid()
        self._is_current = False  # True if `_contents` covers the chain

    def _read(self) -> Contents:
        """Contents of the chain, recomputed if an interrupt left them out of date."""
        if not self._is_current:
            self._contents = Contents(self.plan, self._accountant, self.chain.records[1:])
            self._is_current = True
        return self._contents

    def __len__(self) -> int:
        """Return the number of releases."""
        return len(self.entries)

    @property
    def entries(self) -> list[Record]:
        """Recorded releases, in order."""
        return self._read().entries

    @property
    def accountant(self) -> Any:
        """Accountant with all recorded releases."""
        return self._read().accountant

    @property
    def position(self) -> int:
        """Number of the next step."""
        return self._state.step

    @property
    def last_check(self) -> int | None:
        """Step of the last spot check that passed."""
        return self._read().last_check

    @property
    def failed_check(self) -> Record | None:
        """Record of a spot check that failed, or None."""
        return self._read().failed_check

    @property
    def end(self) -> int | None:
        """First step that may not run: the end of the plan or of its target epsilon."""
        return self._read().end_from(self.position)

    @property
    def max_grad_norm(self) -> float:
        """C of the step `position`: one value for clipper, noise and record."""
        if not self.plan.is_adaptive:
            return self.plan.max_grad_norm_at(self.position)
        return _validate.positive("max_grad_norm", self._state.bound)

    def record(self, step: int) -> Record:
        """Account one release and append it, before it is computed.

        Args:
            step: int, equal to `position`; a step that was recorded and not sealed, because its
                computation failed, may be recorded again.

        Returns:
            The entry: step, branch, max_grad_norm, and the arguments of `accountant.step`.

        Raises:
            AccountingError: the step is out of order, past the plan, or past its target epsilon; or
                the run belongs to another process.
        """
        self.expect(_validate.integer("step", step))
        state, contents = self._state, self._read()
        releases = contents.of_step.get(step, [])
        entry = releases[-1] if releases else self._release(step, state.branch)
        if not isinstance(state, Recorded):
            branches = [int(earlier["branch"]) for earlier in releases]
            sealed = frozenset(b for b in branches if (step, b) in contents.seals)
            self._state = Recorded(state.step, state.branch, state.bound, state.path, sealed)
        return entry

    def expect(self, step: int) -> None:
        """Raise as `record` would, and write nothing."""
        self._require_run()
        state = self._state
        if isinstance(state, Recorded) and state.step == step:
            return
        if step != state.step or isinstance(state, Recorded):
            raise AccountingError(
                f"step={step} came after {state.step} recorded releases. Expected "
                f"step={state.step}; a step is released once, in order."
            )
        contents = self._read()
        if step in contents.of_step:  # accounted already, if it is a replay
            return
        end = contents.end_from(step)
        if end is None or step < end:
            return
        if step == self.plan.num_steps:
            raise AccountingError(
                f"step={step} is past the plan's num_steps={self.plan.num_steps}. Plan more steps, "
                "or num_steps=None for an open-ended run."
            )
        release_record.planned(self.plan, step)  # raises for a schedule that is out of range
        raise AccountingError(contents.over_budget(f"step={step}"))

    def steps_ahead(self, num_steps: int) -> range:
        """Return the next steps of a loop without seals, if all of them may be recorded.

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
        if first in self._read().of_step:
            raise AccountingError(
                f"Step {first} was released before, after the checkpoint was written, and a loop "
                "of your own does not show whether it would be the same release again. Expected "
                "the last checkpoint of the run, or make_private, whose step tells."
            )
        return range(first, first + num_steps)

    def _require_run(self) -> None:
        """Raise in a process that does not own the run, or if the key has another run."""
        if self._pid != os.getpid():
            raise AccountingError(run_registry.forked(self._pid))
        if not run_registry.is_known(self):
            self.plan.claim(self, recorder="Ledger", source="", resumed=self._is_resumed)

    def _entry(self, step: int, branch: int) -> Record:
        """Release of a step, as it is recorded."""
        key = {"step": step, "branch": branch, "max_grad_norm": self.max_grad_norm}
        return {**key, **release_record.planned(self.plan, step)}

    def _release(self, step: int, branch: int) -> Record:
        """Append a release, accounted alone or together with the others on the same draw."""
        entry = self._entry(step, branch)
        self._append({"kind": "release", **entry})
        return entry

    def _append(self, record: Record) -> None:
        """Account a release and append its record, or append a record without privacy cost."""
        contents = self._read()
        self._is_current = False
        spent = contents.spent_with(record) if record["kind"] == "release" else None
        self.chain.append(record)
        contents.add(record, spent)
        self._is_current = True

    def seal(
        self,
        step: int,
        parts: Arrays | Callable[[], Arrays] | None,
        *,
        hashes: Callable[[bytes], list[Hashed]] | None = None,
        stack: str = "",
        num_below: int | None = None,
        num_rows: int | None = None,
    ) -> Seal:
        """Fix the numbers of a recorded release, after its clipped sum and before its noise.

        Args:
            step: int, the step recorded last.
            parts: clipped sums in a fixed order, at least one array, or a function that returns
                them; it is called only if the record is in a file (without one, no step can be
                repeated). None for a loop that can't show them: a repeated step then counts as
                another release.
            hashes: callable from a secret to the universal hashes of `parts`, formed on the devices
                where they lie; None to form them here. `parts` is then called only for a step that
                dualdp 0.1.0 sealed.
            stack: str, generator of the noise with its version, such as "torch 2.13.0".
            num_below: number of examples with a norm of at most C, for an adaptive bound.
            num_rows: number of examples in the batch, for an adaptive bound.

        Raises:
            AccountingError: the step was not recorded before.
            TypeError: an adaptive bound without its counts.
            ValueError: `parts` holds no array.
        """
        self._require_run()
        if not isinstance(self._state, Recorded) or self._state.step != step:
            raise AccountingError(f"step={step} was not recorded. Call record(step) before seal.")
        if self.plan.is_adaptive and (num_below is None or num_rows is None):
            raise TypeError(
                "num_below and num_rows are missing. Expected both with an adaptive max_grad_norm: "
                "the number of examples below the bound, and of all in the batch."
            )
        if parts is not None and not callable(parts):
            parts = list(parts)
            if not parts:
                raise ValueError(
                    "parts holds no array. Expected the clipped sums; None says that they can't be "
                    "shown."
                )
        counts = num_below, num_rows
        facts: tuple[Any, ...] = (step, stack, self.plan.noise, self.max_grad_norm, counts)
        if self.plan.is_correlated:  # the same sum after other noise is another release
            facts += (self._state.path,)

        @cache
        def digest(scheme: str | None) -> str | None:
            if parts is None or self.chain.path is None:
                return None
            return release_record.digest(self.plan, facts, parts, hashes, scheme)

        written = digest(SCHEME)
        sealed = self._replayed(self._state, digest)
        is_replay = sealed is not None
        if sealed is None:
            branch = self._free_branch(self._state)
            sealed = {"step": step, "branch": branch, "digest": written, "scheme": SCHEME}
            path = extended(self._state.path, step, branch)
            if self.plan.is_correlated and path != START:
                sealed["path"] = [list(pair) for pair in path]
            if self._is_other_generator(stack):
                sealed["stack"] = stack
            if self.plan.is_adaptive:
                sealed["noisy_fraction"] = release_record.noisy_fraction(
                    self.plan, step, branch, num_below, num_rows
                )
            self._append({"kind": "seal", **sealed})
        seal = self._seal_of(sealed, is_replay=is_replay)
        self._advance(sealed)
        return seal

    def _is_other_generator(self, stack: str) -> bool:
        """Return True for the first generator of correlated noise, and for another than before.

        Noise of earlier steps is then drawn anew, and this step takes back other noise than they
        had, which costs no more (docs/accounting.md, 2.11).
        """
        plan = self.plan
        return plan.is_correlated and plan.noise == "fast" and self._read().stack != stack

    def _replayed(
        self, state: Recorded, digest: Callable[[str | None], str | None]
    ) -> Record | None:
        """Seal of an identical earlier release of the recorded step, or None.

        `digest` maps the scheme of a seal to the digest of the sum by that scheme.
        """
        contents = self._read()
        for entry in contents.of_step[state.step]:
            branch = int(entry["branch"])
            sealed = contents.seals.get((state.step, branch))
            if sealed is None or sealed["digest"] != digest(sealed.get("scheme")):
                continue
            # A seal of an interrupted call in this run was never returned, so no noise was added.
            if sealed["digest"] is not None or branch not in state.sealed_before:
                return sealed
        return None

    def _free_branch(self, state: Recorded) -> int:
        """Branch for a sum that was not released before, with its release on record."""
        contents = self._read()
        releases = contents.of_step[state.step]
        for entry in releases:
            branch = int(entry["branch"])
            # Recorded and never sealed: no noise was added yet.
            unsealed = (state.step, branch) not in contents.seals
            if unsealed and entry["max_grad_norm"] == self.max_grad_norm:
                return branch
        branch = state.branch
        if branch in [int(entry["branch"]) for entry in releases]:
            branch = 1 + max(int(entry["branch"]) for entry in contents.entries)
        self._release(state.step, branch)
        return branch

    def _seal_of(self, sealed: Record, *, is_replay: bool) -> Seal:
        """Numbers of the release with this seal, at the current bound."""
        step, branch, bound = int(sealed["step"]), int(sealed["branch"]), self.max_grad_norm
        stddev, size = self.plan.draw_stddev(step, bound), self.plan.expected_batch_size_at(step)
        path = extended(self._state.path, step, branch)
        return Seal(step, branch, bound, stddev, size, is_replay, path)

    def _advance(self, sealed: Record) -> None:
        """Move to the step after a sealed one."""
        step, branch, bound = int(sealed["step"]), int(sealed["branch"]), self._state.bound
        if isinstance(self.plan.max_grad_norm, AdaptiveNorm):
            bound = self.plan.max_grad_norm.following(bound, float(sealed["noisy_fraction"]))
        path = extended(self._state.path, step, branch)
        self._state = Idle(step + 1, branch, bound, path)
        run_registry.sealed(self, step, path if self.plan.is_correlated else branch)

    def __reduce__(self) -> Any:
        raise TypeError(
            "A ledger can't be copied: each copy would hand out the same noise. Use one for one "
            "run, or its to_json()."
        )

    def get_epsilon(self, delta: float | None = None, *, accept_unverified: bool = False) -> float:
        """Return the epsilon spent so far.

        Args:
            delta: float in (0, 1); None for the plan's.
            accept_unverified: bool, True to return epsilon even if a spot check failed.

        Raises:
            AccountingError: a spot check failed in this run, or noise was asked for that belongs to
                no release on record.
        """
        run_registry.require_recorded(self)
        if self.failed_check is not None and not accept_unverified:
            since = self.failed_check["last_passed"]
            raise AccountingError(
                f"A spot check failed at step {self.failed_check['step']} (relative error "
                f"{self.failed_check['relative_error']}), so what this run released is not vouched "
                f"for {'from its beginning' if since is None else f'since step {since}'}. Expected "
                'a new run with method="loop" or a corrected model; accept_unverified=True says '
                "what epsilon would be if all gradients had been right."
            )
        return float(self.accountant.get_epsilon(delta=self.plan.delta if delta is None else delta))

    def note(self, **facts: Any) -> None:
        """Record a public fact about the run, such as the names of unprotected quantities."""
        self._append({"kind": "note", **facts})

    def bind_users(self, digest: str | None) -> None:
        """Record whose rows the run draws, once; refuse those of other users in a resumed run.

        Args:
            digest: keyed digest of the rows of each user, see `rows_digest`; None for examples.

        Raises:
            ValueError: the run began with another one.
        """
        known = self._read().users
        if digest is not None and known is None:
            self.note(users=digest)
        elif digest != known:
            raise ValueError(
                "users is not what this run began with, by the keyed hash in its ledger. Expected "
                "the same id of the user for each row of the same data."
            )

    @property
    def check_rate(self) -> float | None:
        """Share of steps that are checked, as recorded; None if not recorded."""
        return self._read().check_rate

    def check_passed(self, step: int) -> None:
        """Record that the gradients of a step passed a spot check (`dualdp.exactness`)."""
        self.note(check={"step": step, "passed": True})

    def check_failed(self, step: int, error: ExactnessError) -> None:
        """Record a failed spot check; `get_epsilon` raises from now on by default."""
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
        """Record, once per reason, that some numbers of this run can't be checked."""
        if reason not in self._read().impossible:
            self.note(check_impossible=reason)

    @property
    def path(self) -> str | None:
        """Path of the record's file, or None."""
        return self.chain.path

    @property
    def num_lines(self) -> int:
        """Number of lines of the record."""
        return len(self.chain)

    def write_to(self, path: str | os.PathLike[str]) -> None:
        """Write the record to a new file and append to that file from now on."""
        self.chain.write_to(path)

    def sync(self) -> None:
        """Flush the record to the disk, as is done before a checkpoint is written."""
        self.chain.sync()

    def discard(self) -> None:
        """Close the file, and delete it if nothing was recorded."""
        path = self.path
        self.chain.close()
        if path is not None and not self.entries:
            os.unlink(path)

    def close(self) -> None:
        """Release the file, so that another run may continue it."""
        self.chain.close()

    def to_json(self) -> str:
        """Return the record: a line of JSON for the plan and for each entry, chained by hashes."""
        return self.chain.text()

    def state(self) -> dict[str, Any]:
        """Return the state of the run as plain data; `resume` needs it and the ledger's file.

        Returns:
            `position`, `branch` and `max_grad_norm` of the next step, `num_lines` of the record so
            far, the `hash` of the last line, and with correlated noise the `path`: the branches of
            the steps so far.

        Raises:
            AccountingError: a step is recorded and not released.
        """
        state = self._state
        if isinstance(state, Recorded):
            raise AccountingError(
                f"step={state.step} is recorded but not released yet. Save between two steps."
            )
        return {
            "position": state.step,
            "branch": state.branch,
            "max_grad_norm": state.bound,
            "num_lines": len(self.chain),
            "hash": self.chain.last_hash,
            **({"path": [list(pair) for pair in state.path]} if self.plan.is_correlated else {}),
        }

    @staticmethod
    def read(source: str | os.PathLike[str]) -> list[Record]:
        """Return the records of a ledger's text or file, after verifying their chain.

        Args:
            source: text of `to_json`, or the path of a file.

        Returns:
            The header, then records of the kinds "release", "seal", "resume" and "note".

        Raises:
            OSError: the file can't be read.
            ValueError: a line is broken, edited, missing or out of order, or it is no ledger.
        """
        return read_records(*read_text(source))

    @classmethod
    def resume(
        cls, plan: PrivacyPlan, state: Mapping[str, Any], path: str | os.PathLike[str]
    ) -> Self:
        """Continue a run from a saved state and the file, which also has the later releases.

        Args:
            plan: `PrivacyPlan` with its key.
            state: mapping of `Ledger.state`, or of dualdp 0.1.0, which held the ledger's text.
            path: path of the run's file.

        Raises:
            ValueError: the state is broken, of another plan, or the file does not continue it.
        """
        chain = Chain.open(path)
        try:
            ledger = cls._resumed(plan, state, chain)
            # The random token distinguishes this run from one that resumes a copy of the file.
            opened = {"position": ledger.position, "opened": secrets.token_hex(8)}
            ledger._append({"kind": "resume", **opened})
        except BaseException:
            chain.close()
            raise
        return ledger

    @classmethod
    def _resumed(cls, plan: PrivacyPlan, state: Mapping[str, Any], chain: Chain) -> Self:
        """Ledger of a chain that continues a saved state."""
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
        require_bound(header["accountant"])
        ledger = cls.__new__(cls)
        position = Idle(
            _validate.integer("position", state["position"]),
            _validate.integer("branch", state["branch"]),
            _validate.positive("max_grad_norm", state["max_grad_norm"]),
            as_path(state["path"]) if plan.is_correlated else START,
        )
        accountant = accounting.account(plan, [], header["accountant"]).name
        ledger._set(plan, accountant, chain, position, resumed=True)
        steps = len(ledger._read().of_step)
        if ledger.position > steps:
            raise ValueError(
                f"The saved position {ledger.position} is past the {steps} steps of the ledger. "
                "Expected the ledger of the same run."
            )
        return ledger


def read_records(text: str, name: str) -> list[Record]:
    """Return the records of a ledger's text, as `Ledger.read` does."""
    records = parse(text, name)
    _require_header(records, name)
    return records


def saved_lines(state: Mapping[str, Any]) -> tuple[int, str]:
    """Return the number of lines in a saved state, and the hash of the last."""
    if "text" in state:  # of dualdp 0.1.0
        saved = Chain(parse(str(state["text"]), "The saved ledger"))
        return len(saved), saved.last_hash
    return _validate.integer("num_lines", state["num_lines"]), str(state["hash"])


def _require_header(records: list[Record], name: str) -> None:
    """Raise unless the first record is the header of a ledger of this version."""
    found = records[0].get(FORMAT) if records else None
    if isinstance(found, int) and found > VERSION:
        raise ValueError(newer(name, "ledger", found, VERSION))
    if found != VERSION:
        raise ValueError(f"{name} is not a ledger. Expected a file or text that dualdp wrote.")


def claimed(ledger: Ledger, **claim: Any) -> Ledger:
    """Return the ledger of a run after the run has claimed the plan's key.

    If that is refused the ledger is closed, and the file of a new one deleted. `claim` holds the
    keyword arguments of `PrivacyPlan.claim`.
    """
    try:
        ledger.plan.claim(ledger, **claim)
    except BaseException:
        if claim.get("resumed"):
            ledger.close()
        else:
            ledger.discard()
        raise
    return ledger
