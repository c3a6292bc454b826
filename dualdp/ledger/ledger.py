# SPDX-License-Identifier: Apache-2.0
"""`Ledger`: append-only record of a run's releases, the only input of its accountant.

    ledger = Ledger(plan, path="run.ledger")
    for step in range(1000):
        ...                                   # sums, then checks
        release = ledger.record(step)         # on record and in the file from here on
        ...                                   # noise of release.draw_stddev, then the update

A file holds one JSON object a line (`dualdp.ledger.chain`):

    {"dualdp_ledger":2, "plan":..., "columns":..., "version":..., "id":...}
    {"r":[step, noise_multiplier, sample_rate]}           a release; the columns are the header's
    {"check":step}                                        a check that passed
    {"check":step, "failed":{...}}                        one that did not
    {"segment":step, "noise_scale":1.0, "id":...}         the run was resumed at this step
    {"note":{...}}                                        a public fact about the run
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np

from dualdp import _validate
from dualdp._validate import AccountingError
from dualdp._version import __version__
from dualdp.accountants.base import Accountant
from dualdp.exactness import ExactnessError
from dualdp.ledger.chain import (
    FORMAT,
    VERSION,
    Chain,
    Record,
    is_text,
    is_torn_release,
    parse,
    read_text,
    require_new,
)
from dualdp.plan import accounting
from dualdp.plan.accounting import WHOLE_PASS, Segment, empty_account, spent_by
from dualdp.plan.plan import PrivacyPlan, checked_step, require_plan
from dualdp.plan.schedules import AdaptiveNorm
from dualdp.randomness import fresh_bits, grid_noise, key_of, normal, seeded_bits

_log = logging.getLogger("dualdp")
COLUMNS = ("step", "noise_multiplier", "sample_rate", "max_grad_norm", "noisy_fraction")


class Release(NamedTuple):
    """Numbers of one release on record, which its noise needs."""

    step: int
    segment: int  # number of the segment; correlated noise begins anew with each
    segment_start: int  # its first step, from which a strategy counts
    max_grad_norm: float  # C that clipped the sum
    noise_multiplier: float  # of the step, scaled where the run was recalibrated
    draw_stddev: float  # of z, gradient units
    expected_batch_size: float  # divisor of the noisy sum


@dataclass(frozen=True)
class State:
    """What the lines of a ledger amount to.

    Attributes:
        num_lines: int, lines that were read.
        segments: releases, as runs of consecutive steps; the last one goes on.
        bound: float, C of the next step if it is adaptive, else that of step 0.
        last_check: int, step of the last check that passed, or None.
        failed_check: mapping with the step of a check that failed, or None.
        notes: public facts.
    """

    num_lines: int
    segments: tuple[Segment, ...]
    bound: float
    last_check: int | None = None
    failed_check: Mapping[str, Any] | None = None
    notes: tuple[Mapping[str, Any], ...] = ()

    def after(self, record: Record, plan: PrivacyPlan) -> State:
        """Return the state with one more line.

        Raises:
            ValueError: the line does not follow from those before it.
        """
        number = self.num_lines + 1
        try:
            changes = self._changes(record, plan)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"Line {number} of the ledger is no record of this plan's run ({error!r}). "
                "Expected the file as dualdp wrote it; restore it from a copy."
            ) from error
        return replace(self, num_lines=number, **changes)

    def _changes(self, record: Record, plan: PrivacyPlan) -> dict[str, Any]:
        """Fields of the state that a line changes, with their new values."""
        if "r" in record:
            step, *values = record["r"]
            *before, last = self.segments
            if step != last.stop:
                raise ValueError(f"step {step} came where {last.stop} was expected")
            released = replace(last, stop=last.stop + 1)
            changes: dict[str, Any] = {"segments": (*before, released)}
            adaptive = plan.max_grad_norm
            # A torn release has no noisy fraction: the bound of the next step then stays as it was.
            if isinstance(adaptive, AdaptiveNorm) and values[3] is not None:
                changes["bound"] = adaptive.following(values[2], values[3])
            return changes
        if "segment" in record:
            start = int(record["segment"])
            if not 0 <= start <= max(segment.stop for segment in self.segments):
                raise ValueError(f"segment {start} begins with no step before it on record")
            scale = _validate.positive("noise_scale", record["noise_scale"])
            bound = float(record.get("max_grad_norm", self.bound))
            return {"segments": (*self.segments, Segment(start, start, scale)), "bound": bound}
        if "failed" in record:
            return {"failed_check": {"step": int(record["check"]), **record["failed"]}}
        if "check" in record:
            return {"last_check": int(record["check"])}
        return {"notes": (*self.notes, dict(record["note"]))}

    def next_release(self, plan: PrivacyPlan, noisy_fraction: float | None = None) -> Record:
        """Return the line of the next release, by the plan."""
        last = self.segments[-1]
        event = accounting.release(plan, last.stop, last.noise_scale)
        values = [last.stop, event["noise_multiplier"], event["sample_rate"]]
        return {"r": [*values, self.bound, noisy_fraction] if plan.is_adaptive else values}

    def torn_release(self, plan: PrivacyPlan, torn: str) -> Record | None:
        """Return the release that a last line without its end counts as; None for another line."""
        may_run = self.segments[-1].stop != plan.num_steps
        return self.next_release(plan) if may_run and is_torn_release(torn) else None


class Ledger:
    """Append-only record of a run, which has each release before its noise is drawn.

    A step is `record`ed once its clipped sum was computed and checked. A failure before that
    releases nothing, and the step may be run again; after it the release counts, whatever comes of
    it, and the run goes on with the next step. A run that is resumed begins a segment, and so does
    the child of a fork: steps that run again are further releases.

    With a `seed` in the plan, noise is no secret, and every epsilon is that of a run whose noise
    were one.

    Args:
        plan: `PrivacyPlan` of the run.
        path: path of a new file, made with the first release, so that a set-up that fails leaves
            none; None keeps the record in memory.

    Guarantees:
        A step is recorded once and in order.  [test_a_step_is_recorded_once]
        A refused step leaves the record as it was.  [test_a_refused_step_changes_nothing]
        All segments are accounted.  [test_steps_that_run_again_are_accounted]
        An interrupt anywhere leaves a ledger that goes on, with each release counted once.
            [test_an_interrupt_at_any_line_counts_no_step_twice]
        A kill at any instant loses no release.  [test_no_kill_loses_a_release]
    """

    def __init__(self, plan: PrivacyPlan, path: str | os.PathLike[str] | None = None) -> None:
        require_plan(plan)
        self.plan, self.chain, self._pid = plan, Chain(), os.getpid()
        self._new_file = None if path is None else require_new(path)
        self._last_state = State(1, (Segment(0, 0),), plan.max_grad_norm_at(0))  # see `_state`
        self._spent = empty_account(plan)
        self._accounted: tuple[Segment, ...] = ()  # the segments that are in `_spent`
        self._last_end: tuple[int, int | None] = 0, None  # number of segments, their `end`
        #: Noise source of an open loop of one's own, and its releases whose noise was not drawn,
        #: by step; see `own_loops`.
        self.source: object = None
        self.unused: dict[int, Release] | None = None
        header = {
            FORMAT: VERSION,
            "plan": json.loads(plan.to_json()),
            "columns": COLUMNS if plan.is_adaptive else COLUMNS[:3],
            "version": __version__,
            "id": secrets.token_hex(8),  # public, tells two runs of one plan apart
        }
        self.chain.append(header)
        if plan.seed is not None:
            _log.warning(
                "seed=%d: this run can be repeated, for tests and comparisons. Its noise is no "
                "secret, and every epsilon is that of a run whose noise were one.",
                plan.seed,
            )

    @classmethod
    def resume(
        cls,
        source: str | os.PathLike[str],
        *,
        plan: PrivacyPlan,
        step: int,
        bound: float | None = None,
        known: tuple[int, str] | None = None,
    ) -> Self:
        """Go on with a run: begin a segment at `step`, beside all releases on record.

        Args:
            source: path of the run's file, which is written on; or the text of `to_json`, to go on
                in memory.
            plan: `PrivacyPlan` of the run.
            step: int, the next step, such as a checkpoint's position.
            bound: C of that step, if it is adaptive.
            known: number of lines of a checkpoint, and the hash of the last of them, with which the
                record has to begin.

        Raises:
            OSError: the file can't be read or written.
            ValueError: the record is broken, of another plan or run, in use, or `step` is past it.

        Guarantees:
            A last line that a crash cut short counts as a release.
                [test_a_torn_last_line_counts_as_a_release]
        """
        require_plan(plan)
        if is_text(source):
            parsed = parse(str(source))
            chain = Chain(parsed.lines)
        else:
            chain, parsed = Chain.open(source)
        try:
            name = chain.path or "The text"
            if parsed.records[0].get("plan") != json.loads(plan.to_json()):
                raise ValueError(
                    f"{name} was written under another plan. Expected the plan of the run."
                )
            num_lines, last_hash = known or (0, chain.hash_at(0))
            if num_lines > len(chain) or chain.hash_at(num_lines) != last_hash:
                raise ValueError(
                    f"{name} does not continue the ledger that was saved. Expected the file of "
                    "the same run."
                )
            ledger = cls(plan)
            ledger.chain = chain
            ledger._go_on(parsed.torn, _validate.integer("step", step), bound)
        except BaseException:
            chain.close()
            raise
        return ledger

    def _go_on(self, torn: str, step: int, bound: float | None) -> None:
        """Count a torn release, and begin the segment of a resumed run."""
        state, plan = self._state, self.plan
        counted = state.torn_release(plan, torn)
        state = state if counted is None else state.after(counted, plan)
        farthest = max(segment.stop for segment in state.segments)
        if step > farthest:
            raise ValueError(
                f"step={step} is past the {farthest} steps on record. Expected the ledger of the "
                "same run."
            )
        bound = _validate.positive("bound", bound) if plan.is_adaptive else None
        if counted is not None:
            self.chain.append(counted)
        self._begin(step, state.segments[-1].noise_scale, bound)
        self._log_steps_left()

    def recalibrate(self) -> None:
        """Begin a segment whose noise is such that all planned steps fit the target epsilon.

        Without a target they fit the plan's epsilon.

        Raises:
            AccountingError: nothing is left to recalibrate; then the record stays as it was.
        """
        self.require_process()
        scale = accounting.recalibrated(self.plan, self.segments, self.position)
        self._begin(self.position, scale, self._state.bound)
        self._log_steps_left()

    def _log_steps_left(self) -> None:
        """Log how far a resumed run goes; a warning if its target ends it before its plan."""
        step, end = self.position, self.end
        if end is not None:
            planned = max(end, self.plan.num_steps or 0)
            said = "The run goes on at step %d: %d steps are left of %d planned. "
            if end < planned:
                said += "No more fit into target_epsilon, unless recalibrate=True raises the noise."
            level = logging.WARNING if end < planned else logging.INFO
            _log.log(level, said, step, max(end - step, 0), planned - step)

    def _begin(self, step: int, noise_scale: float, bound: float | None) -> None:
        """Append the line of a new segment."""
        record: Record = {"segment": step, "noise_scale": noise_scale, "id": secrets.token_hex(8)}
        if self.plan.is_adaptive:
            record["max_grad_norm"] = bound
        self.chain.append(record)
        if self.unused is not None:
            self.unused = {}

    @property
    def _state(self) -> State:
        """What all lines amount to, from the last state that was computed and the lines since."""
        if self._last_state.num_lines < len(self.chain):
            state = self._last_state
            for record in self.chain.records(state.num_lines):
                state = state.after(record, self.plan)
            self._last_state = state
        return self._last_state

    def __len__(self) -> int:
        """Return the number of releases."""
        return sum(segment.stop - segment.start for segment in self._state.segments)

    @property
    def entries(self) -> list[Record]:
        """Recorded releases in order, each a mapping from the columns of the header."""
        released = (record["r"] for record in self.chain.records(1) if "r" in record)
        return [dict(zip(COLUMNS, values, strict=False)) for values in released]

    @property
    def accountant(self) -> Accountant:
        """Accountant with all recorded releases."""
        segments, before = self._state.segments, self._accounted
        if segments == before:
            return self._spent
        if before and self.plan.sampler not in WHOLE_PASS:
            # New releases are added to the same accountant, which keeps its sums over earlier ones.
            last = len(before) - 1
            added = replace(segments[last], start=before[last].stop), *segments[last + 1 :]
            self._accounted = ()  # after an interrupt of `merge` everything is counted anew
            self._spent.merge(spent_by(self.plan, added))
        else:
            self._spent = spent_by(self.plan, segments)
        self._accounted = segments
        return self._spent

    @property
    def position(self) -> int:
        """Number of the next step."""
        return self._state.segments[-1].stop

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Releases on record, as runs of consecutive steps."""
        return self._state.segments

    @property
    def last_check(self) -> int | None:
        """Step of the last check that passed."""
        return self._state.last_check

    @property
    def failed_check(self) -> Mapping[str, Any] | None:
        """Step and error of a check that failed, or None."""
        return self._state.failed_check

    @property
    def end(self) -> int | None:
        """First step that may not run: the end of the plan or of its target epsilon.

        None if there is none. It is computed once a segment, from the planned steps, not from the
        epsilon spent so far.
        """
        segments = self._state.segments
        if self._last_end[0] != len(segments):
            self._last_end = len(segments), accounting.last_affordable(self.plan, segments)
        return self._last_end[1]

    @property
    def max_grad_norm(self) -> float:
        """C of the step `position`: one value for clipper, noise and record."""
        if not self.plan.is_adaptive:
            return self.plan.max_grad_norm_at(self.position)
        return _validate.positive("max_grad_norm", self._state.bound)

    def require(self, step: int) -> None:
        """Raise as `record` would, and write no release.

        Raises:
            AccountingError: the step is out of order, past the plan, or past its target epsilon; or
                this process is a fork of the one that writes the file.
        """
        self.require_process()
        step, end = checked_step(self.plan, step), self.end
        if step != self.position:
            raise AccountingError(
                f"step={step} came after {len(self)} recorded releases. Expected "
                f"step={self.position}; a step is released once, in order."
            )
        if end is not None and step >= end:
            raise AccountingError(
                f"step={step} would exceed target_epsilon={self.plan.target_epsilon}: {len(self)} "
                f"releases have spent {self.accountant.get_epsilon(delta=self.plan.delta):.6g} at "
                f"delta={self.plan.delta}. The run ends here; a larger target needs a new decision "
                "about the data."
            )

    def require_process(self) -> None:
        """Refuse a fork of the process that writes the file; a fork in memory begins a segment.

        Raises:
            AccountingError: another process writes the file.
        """
        if self._pid == os.getpid():
            return
        if self.path is not None:
            raise AccountingError(
                f"This process is a fork of process {self._pid}, which writes {self.path}. "
                "Expected the process that began the run; or a checkpoint, and load_checkpoint "
                "with a copy of the ledger as ledger=, each of which goes on for itself."
            )
        self._begin(self.position, self._state.segments[-1].noise_scale, self._state.bound)
        self._pid = os.getpid()

    def record(self, step: int, *, noisy_fraction: float | None = None) -> Release:
        """Put one release on record, in the file too, before its noise is drawn.

        Args:
            step: int, equal to `position`.
            noisy_fraction: float of `noisy_fraction`, if max_grad_norm is adaptive; else None.

        Returns:
            `Release`; the position has moved on to the next step.

        Raises:
            AccountingError: see `require`.
            OSError: the file can't be written; the step is not on record then.
            TypeError: an adaptive bound without its noisy fraction.
        """
        self.require(step)
        plan, bound = self.plan, self.max_grad_norm
        if plan.is_adaptive:
            if noisy_fraction is None:
                raise TypeError(
                    "noisy_fraction is missing beside an adaptive max_grad_norm. Expected "
                    "ledger.record(step, noisy_fraction=ledger.noisy_fraction(num_below, "
                    "num_rows)), with the counts of the batch."
                )
            noisy_fraction = _validate.real("noisy_fraction", noisy_fraction)
        if self._new_file is not None:
            self.write_to(self._new_file)
        self.chain.append(self._state.next_release(plan, noisy_fraction))
        number, segment = len(self._state.segments) - 1, self._state.segments[-1]
        release = Release(
            step,
            number,
            segment.start,
            bound,
            segment.noise_scale * plan.noise_multiplier_at(step),
            segment.noise_scale * plan.draw_stddev(step, bound),
            plan.expected_batch_size_at(step),
        )
        if self.unused is not None:
            self.unused[step] = release
        return release

    @property
    def waiting(self) -> dict[int, Release]:
        """Releases of a loop of one's own whose noise was not drawn; none from before a fork."""
        self.require_process()
        return self.unused or {}

    def take(self, step: int) -> Release:
        """Return the release of a step for its noise, and take it off `waiting`.

        Raises:
            AccountingError: the step is not on record, or its noise was drawn before.
        """
        release = self.waiting.pop(_validate.integer("step", step), None)
        if release is None:
            raise AccountingError(
                f"step={step} has no release on record whose noise is still to be drawn. Expected "
                "engine.record() before each noisy sum, and the noise of a step once."
            )
        return release

    def steps_ahead(self, num_steps: int) -> range:
        """Return the next steps, if all of them may be recorded.

        Raises:
            AccountingError: one is past the end of the plan or of its target epsilon.
        """
        first, end = self.position, self.end
        if end is not None and first + num_steps > end:
            raise AccountingError(
                f"num_steps={num_steps} after {first} recorded steps is past step {end}, where "
                "the plan or its target epsilon ends. Plan more steps, or num_steps=None for an "
                "open-ended run."
            )
        return range(first, first + num_steps)

    def noisy_fraction(self, num_below: int, num_rows: int) -> float:
        """Return the noisy share of the examples below the adaptive bound, for the next release.

        Each example counts 1/2 or -1/2, so one additional example changes the sum by 1/2, and a
        replaced or zeroed example by 1. The sum is divided by the expected batch size, never by the
        drawn size.

        Args:
            num_below: number of examples of the batch with a norm of at most `max_grad_norm`.
            num_rows: number of examples of the batch.

        Source: Andrew et al. 2021, Algorithm 1.
        """
        plan, step = self.plan, self.position
        if not isinstance(plan.max_grad_norm, AdaptiveNorm):
            raise TypeError(
                f"max_grad_norm={plan.max_grad_norm!r} follows no quantile. Expected a plan with "
                "an AdaptiveNorm."
            )
        bits = fresh_bits() if plan.seed is None else seeded_bits(plan.seed, "count", step)
        size = plan.expected_batch_size_at(step)
        stddev = plan.max_grad_norm.count_stddev(size)
        if plan.noise == "secure":  # the count is a multiple of 1/2
            noise = float(grid_noise.grid_noise(bits, cells=2 * stddev, size=1)[0]) / 2
        else:
            noise = stddev * float(normal(key_of(bits), (), dtype=np.float64))
        return float((num_below - num_rows / 2 + noise) / size + 0.5)

    def check_passed(self, step: int) -> None:
        """Record that the sums of a step passed their check (`dualdp.exactness`)."""
        self.require_process()
        self.chain.append({"check": step})

    def check_failed(self, step: int, error: ExactnessError) -> None:
        """Record a failed check; `get_epsilon` raises from now on by default."""
        self.require_process()
        failed = {
            "last_passed": self.last_check,
            "parameters": list(error.parameters),
            "relative_error": error.relative_error,
        }
        self.chain.append({"check": step, "failed": failed})

    def note(self, **facts: Any) -> None:
        """Record public facts about the run, once: what is on record already is not repeated."""
        self.require_process()
        fresh = json.loads(json.dumps(facts))
        if fresh not in self._state.notes:
            self.chain.append({"note": fresh})

    def get_epsilon(self, delta: float | None = None, *, accept_unverified: bool = False) -> float:
        """Return the epsilon spent so far.

        If the plan has a seed, this is the epsilon of a run whose noise were secret.

        Args:
            delta: float in (0, 1); None for the plan's.
            accept_unverified: bool, True to return epsilon even if a check failed.

        Raises:
            AccountingError: a check failed in this run.
        """
        failed = self.failed_check
        if failed is not None and not accept_unverified:
            since = failed["last_passed"]
            raise AccountingError(
                f"A check failed at step {failed['step']} (relative error "
                f"{failed['relative_error']}), so what this run released is not vouched for "
                f"{'from its beginning' if since is None else f'since step {since}'}. Expected a "
                'new run with method="loop" or a corrected model; accept_unverified=True says '
                "what epsilon would be if all gradients had been right."
            )
        return self.accountant.get_epsilon(delta=self.plan.delta if delta is None else delta)

    @property
    def path(self) -> str | None:
        """Path of the record's file, or None."""
        return self._new_file or self.chain.path

    def write_to(self, path: str | os.PathLike[str]) -> None:
        """Make the record's file, at the ledger's own `path=` or else here, unless it has one."""
        if self.chain.path is None:
            self.chain.write_to(self._new_file or path)
            self._new_file = None

    def close(self) -> None:
        """Release the file, so that another run may go on with it, and end a loop of one's own."""
        self.unused = None
        if self._new_file is not None:  # it was not made yet, and will not be
            self.chain.path, self._new_file = os.path.abspath(self._new_file), None
        self.chain.close()

    def to_json(self) -> str:
        """Return the text of the record: one JSON object a line, chained by hashes."""
        return self.chain.text()

    @staticmethod
    def read(source: str | os.PathLike[str]) -> list[Record]:
        """Return the records of a ledger's text or file, after verifying their chain.

        Args:
            source: text of `to_json`, or the path of a file.

        Raises:
            OSError: the file can't be read.
            ValueError: a line is broken, edited, missing or out of order, or it is no ledger.
        """
        return parse(*read_text(source)).records

    def __repr__(self) -> str:
        epsilon = self.get_epsilon(accept_unverified=True)
        seed = self.plan.seed
        label = "" if seed is None else f" if its noise were secret (seed={seed})"
        return (
            f"<Ledger {self.path or 'in memory'}: {len(self)} releases, epsilon={epsilon:.4g} at "
            f"delta={self.plan.delta:g}{label}>"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A ledger can't be copied, since a copy would not know of later releases. Expected one "
            "ledger for one run; Ledger.resume(ledger.to_json(), ...) goes on with a copy."
        )
