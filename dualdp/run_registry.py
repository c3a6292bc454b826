# SPDX-License-Identifier: Apache-2.0
"""Registry of a process: who records the run of a key, and who draws its noise.

A secret key has one run, of which one ledger keeps the record and one caller draws the noise: an
engine's own step, one `add_noise(plan)`, or `noisy_mean`. Noise is handed out for releases on
record only, each once. A plan with a seed may be run as often as one likes: each ledger begins
another run of it, within which the same rules hold; without a ledger its noise is free.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dualdp._validate import AccountingError
from dualdp.randomness import used_keys

if TYPE_CHECKING:
    from dualdp.ledger import Ledger
    from dualdp.plan import PrivacyPlan
    from dualdp.randomness import RootKey

#: The source of the noise of a run that `make_private` set up.
OWN_STEP = "the engine's own step"
_OWN_LOOP = (
    "For a loop of your own set up the run by engine.make_loader(plan=...) and call "
    "engine.record() before each release."
)


@dataclass
class Run:
    """The run of one key, as this process knows it.

    Attributes:
        pid: process that began it.
        recorder: that keeps the record; "" while nobody does.
        source: that draws the noise; "" while nobody has.
        caller: the object that draws it.
        ledger: of the run, if it is still there.
        waiting: step -> branch of releases on record whose noise was not handed out yet.
        end: first step that was not on record when the run was begun or a step was sealed last.
        missing: steps whose noise was asked for and which are not on record.
        unrecorded: step whose noise was handed out while nobody kept a record.
    """

    pid: int
    recorder: str = ""
    source: str = ""
    caller: object = None
    ledger: weakref.ref[Ledger] | None = None
    waiting: dict[int, int] = field(default_factory=dict)
    end: int = 0
    missing: set[int] = field(default_factory=set)
    unrecorded: int | None = None


@dataclass
class HandedOut:
    """Batches that a loop of the user's own was given.

    Attributes:
        first: step of the first one.
        count: steps from there to the last one.
    """

    first: int | None = None
    count: int = 0

    def note(self, step: int) -> None:
        """Note the batch of a step."""
        self.first = step if self.first is None else self.first
        self.count = max(self.count, step + 1 - self.first)

    def require_recorded(self, position: int) -> None:
        """Refuse a loop that took steps and recorded none.

        Args:
            position: of the ledger.

        Raises:
            AccountingError: it did.
        """
        if position == self.first and self.count > 1:
            raise AccountingError(
                f"The loader handed out {self.count} batches, but no release is on record since, "
                "so epsilon would not count them. Call engine.record() before each release."
            )


_lock = threading.RLock()  # callbacks of compiled programs come from threads of their own
_secret: dict[str, Run] = {}  # SHA-256 of a key -> its run
#: Runs of a plan with a seed, by the identity of the object.
_seeded: dict[int, tuple[weakref.ref[PrivacyPlan], list[Run]]] = {}
_recorded: weakref.WeakKeyDictionary[Ledger, Run] = weakref.WeakKeyDictionary()


def begin(
    plan: PrivacyPlan,
    ledger: Ledger | None,
    recorder: str,
    *,
    source: str = "",
    resumed: bool = False,
    follows: bool = False,
) -> None:
    """Take the key of a plan for one run: a second run would repeat the noise of the first.

    Args:
        plan: with its key.
        ledger: of the run.
        recorder: what keeps it, as the user calls it.
        source: what draws the noise, if that is fixed already.
        resumed: this is a run that was begun before, going on with its ledger.
        follows: the run is begun by another process of the same group.

    Raises:
        AccountingError: the key has a run or another source of its noise, in this process or in any
            that left a mark beside the key file or on this machine; or a mark can't be written.
    """
    root = plan.root.require_secret()
    with _lock:
        run = Run(os.getpid(), recorder, source, source or None)
        if ledger is not None:
            run.ledger, run.end = weakref.ref(ledger), ledger.position
        if root.seed is not None:
            _keep_seeded(plan, run)
        else:
            found = _secret.get(root.sha256)
            if not follows:
                _refuse_used(root, found, run, resumed, ledger)
            if found is not None and not found.recorder:  # an add_noise that waits for its record
                run.source, run.caller = found.source, found.caller
            if not follows:
                used_keys.leave(root.sha256, _mark(ledger), is_new=not resumed)
            _secret[root.sha256] = run
        if ledger is not None:
            _recorded[ledger] = run


def _keep_seeded(plan: PrivacyPlan, run: Run) -> None:
    """Make this the latest run of a plan with a seed."""
    key, runs = id(plan), _runs_of_seed(plan)
    alive = [other for other in runs if other.ledger is not None and other.ledger() is not None]
    _seeded[key] = weakref.ref(plan, lambda _: _seeded.pop(key, None)), [*alive, run]


def _runs_of_seed(plan: PrivacyPlan) -> list[Run]:
    """The runs of a plan with a seed, the latest last."""
    ref, runs = _seeded.get(id(plan), (None, []))
    return runs if ref is not None and ref() is plan else []


def _mark(ledger: Ledger | None) -> used_keys.Mark:
    """The text of the marks of a run with this ledger."""
    if ledger is None:
        return used_keys.Mark()
    path = "" if ledger.path is None else os.path.abspath(ledger.path)
    return used_keys.Mark(path, ledger.last_hash)


def _refuse_used(
    root: RootKey, found: Run | None, run: Run, resumed: bool, ledger: Ledger | None
) -> None:
    """Refuse a key that has a run, or whose noise somebody else draws."""
    if root.pid != os.getpid():
        raise AccountingError(
            f"This plan's key came into process {root.pid}, of which this process is a fork; "
            "another fork could begin a run with the same noise. Expected a plan made in this "
            "process, or one whose key file is read here (plan.save_key, PrivacyPlan.from_json)."
        )
    if found is not None and found.source and not found.recorder:
        if run.source or found.unrecorded is not None:  # else it has drawn nothing yet
            raise AccountingError(
                f"The noise of this plan was given to {found.source}, and {run.recorder} would "
                f"use it a second time. Expected one of the two. {_OWN_LOOP}"
            )
    if resumed:
        _refuse_copy(root, ledger)
        return
    user = None
    if found is not None and found.recorder:
        user = f"another run of this process ({found.recorder})"
    elif marks := used_keys.marks(root.sha256):
        path, text = marks[0]
        user = f"a run that left {path}" + (f" and records in {text.ledger}" * bool(text.ledger))
    if user is not None:
        raise AccountingError(
            f"This plan's key was used by {user}; the difference of the two models would show a "
            "gradient without noise. Make a new plan for a new run, or go on with that run by "
            "load_checkpoint."
        )


def _refuse_copy(root: RootKey, ledger: Ledger | None) -> None:
    """Refuse a copy of a run's ledger that lacks where the run was opened last."""
    for path, mark in used_keys.marks(root.sha256):
        if ledger is not None and mark.opened and not ledger.holds(mark.opened):
            raise AccountingError(
                f"{ledger.path or 'The ledger'} does not hold what the run of this key has "
                f"recorded since: {path} says that it went on in "
                f"{mark.ledger or 'a ledger in memory'}. Expected that ledger, so that no noise is "
                "used for two different releases."
            )


# ---------------------------------------------------------------------- the noise of a step


def reserve(plan: PrivacyPlan, source: str, caller: object) -> None:
    """Give the noise of a plan with a secret key to one source, before it draws any.

    Args:
        plan: with its key.
        source: what will draw, as the user calls it.
        caller: the object that will.

    Raises:
        AccountingError: the noise was given to another one.
    """
    root = plan.root.require_secret()
    if root.seed is not None:
        return
    with _lock:
        run = _run_of(plan, 0) or _secret.setdefault(root.sha256, Run(os.getpid()))
        _take(run, source, caller)


def hand_out(
    plan: PrivacyPlan,
    source: str,
    caller: object,
    step: int,
    branch: int | None = None,
    *,
    on_record_only: bool = False,
) -> int | None:
    """Let one source draw the noise of one release, once.

    Args:
        plan: with its key.
        source: what draws, as the user calls it.
        caller: the object that does.
        step: of the release.
        branch: of the release; None for the one on record.
        on_record_only: a secret key that nobody records for is refused at once, not after its
            first step.

    Returns:
        The branch whose noise may be drawn; None where that release is not on record.

    Raises:
        AccountingError: another source has the noise, or it was handed out before, or an earlier
            one is on no record.
    """
    root = plan.root.require_secret()
    with _lock:
        run = _run_of(plan, step)
        if root.seed is not None and (run is None or run.source == OWN_STEP):
            return branch or 0  # a comparison
        if run is None:
            run = _secret.setdefault(root.sha256, Run(os.getpid()))
        _take(run, source, caller)
        if not run.recorder:
            return _unrecorded(root, run, source, step, branch, on_record_only)
        if step in run.waiting and branch in (None, run.waiting[step]):
            return run.waiting.pop(step)
        if step >= run.end:
            run.missing.add(step)
            return None
    raise AccountingError(
        f"The noise of step={step} was handed out before; the difference of the two releases would "
        "show gradients without noise. Expected one draw for each release on record; make a new "
        "plan for a new run."
    )


@contextlib.contextmanager
def drawing(
    plan: PrivacyPlan,
    source: str,
    caller: object,
    step: int,
    branch: int | None = None,
    *,
    on_record_only: bool = False,
) -> Iterator[int | None]:
    """`hand_out`, taken back if the noise could not be made.

    Args:
        plan: as in `hand_out`.
        source: as there.
        caller: as there.
        step: as there.
        branch: as there.
        on_record_only: as there.

    Yields:
        What `hand_out` returns.
    """
    granted = hand_out(plan, source, caller, step, branch, on_record_only=on_record_only)
    try:
        yield granted
    except BaseException:
        with _lock:
            run = _run_of(plan, step)
            if run is not None and run.recorder and granted is not None:
                run.waiting[step] = granted
        raise


def not_recorded(source: str, step: int) -> AccountingError:
    """The error about noise for a release that is not on record."""
    return AccountingError(
        f"{source} was asked for the noise of step={step}, but that release is not on record, so "
        "epsilon would not count it. Call engine.record() before it (Ledger.record and Ledger.seal "
        "in a loop without an engine)."
    )


def _run_of(plan: PrivacyPlan, step: int) -> Run | None:
    """The run of a plan in this process; with a seed the latest that waits for this step's noise.

    Raises:
        AccountingError: it was begun in the process of which this one is a fork.
    """
    root = plan.root.require_secret()
    run = _secret.get(root.sha256)
    if root.seed is not None:
        runs = _runs_of_seed(plan)
        waiting = [other for other in runs if step in other.waiting]
        run = next(reversed(waiting or runs), None)
    if (run is not None and run.pid != os.getpid()) or (
        root.seed is None and root.pid != os.getpid()
    ):
        raise AccountingError(forked(run.pid if run is not None else root.pid))
    return run


def forked(pid: int) -> str:
    """The sentence about a process that would release with the run of another one."""
    return (
        f"This process is a fork of process {pid}, whose run this is: both would use the same "
        "noise. Expected the run to go on in that process, or here from its checkpoint "
        "(load_checkpoint) once it has ended."
    )


def _take(run: Run, source: str, caller: object) -> None:
    """Make this the source of a run's noise.

    Raises:
        AccountingError: there is another one.
    """
    if run.source and run.caller is not caller:
        if run.source == source:
            raise AccountingError(
                f"{source} came twice for one plan, and both would draw the same noise. Expected "
                "one transformation around all parameters, such as "
                "optax.chain(add_noise(plan), optax.multi_transform(...)), or a new plan for a "
                "new run."
            )
        raise AccountingError(
            f"{source} would draw noise that {run.source} of this plan draws already: the same "
            f"numbers twice. Expected one of the two, or a new plan for a new run. {_OWN_LOOP}"
        )
    run.source, run.caller = source, caller


def _unrecorded(
    root: RootKey, run: Run, source: str, step: int, branch: int | None, on_record_only: bool
) -> int | None:
    """The first noise of a secret key that nobody records for; a second is refused."""
    if on_record_only:
        run.missing.add(step)
        return None
    if run.unrecorded is not None:
        raise AccountingError(
            f"The noise of step={run.unrecorded} was drawn by {source} and nobody recorded that "
            f"release, so epsilon would not count it. {_OWN_LOOP}"
        )
    marks = used_keys.marks(root.sha256)
    if marks:
        raise AccountingError(
            f"This plan's key was used by a run that left {marks[0][0]}; its noise is not drawn a "
            "second time. Make a new plan for a new run."
        )
    used_keys.leave(root.sha256, used_keys.Mark(), is_new=True)
    run.unrecorded = step
    return branch or 0


# ---------------------------------------------------------------------- the ledger's side


def mark_new_file(root: RootKey) -> None:
    """Leave the marks of a key that has just been written to a file, if its run has begun.

    Raises:
        AccountingError: a mark can't be written.
    """
    run = _secret.get(root.sha256)
    if run is not None and (run.recorder or run.unrecorded is not None):
        ledger = None if run.ledger is None else run.ledger()
        used_keys.leave(root.sha256, _mark(ledger), is_new=False)


def is_known(ledger: Ledger) -> bool:
    """Whether a run was begun with this ledger."""
    return ledger in _recorded


def draw_by_engine(ledger: Ledger) -> None:
    """Give the noise of a run that goes on to the engine's own step.

    Raises:
        AccountingError: another source has it.
    """
    with _lock:
        _take(_recorded[ledger], OWN_STEP, OWN_STEP)


def sealed(ledger: Ledger, step: int, branch: int) -> None:
    """Note that a release is on record, so that its noise may be drawn."""
    run = _recorded.get(ledger)
    if run is None or run.source == OWN_STEP:  # which draws what it has sealed
        return
    with _lock:
        run.waiting[step], run.end = branch, max(run.end, step + 1)
        run.missing.discard(step)


def require_recorded(ledger: Ledger) -> None:
    """Refuse a ledger that lacks a release whose noise was asked for.

    Raises:
        AccountingError: it does.
    """
    run = _recorded.get(ledger)
    if run is not None and run.missing:
        raise AccountingError(
            f"{run.source} was asked for the noise of step={min(run.missing)}, which is not on "
            "record, so this epsilon would not count it. Call engine.record() before each release."
        )
