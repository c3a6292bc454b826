# SPDX-License-Identifier: Apache-2.0
"""Registry of a process: the recorder and the noise source of each key's run.

A secret key has one run. One ledger records it and one caller draws its noise: an engine's own
step, one `add_noise(plan)`, or `noisy_mean`. Noise is drawn only for releases on record, once for
each. A plan with a seed may be run several times: each ledger begins another run, in which the same
rules hold; without a ledger its noise is not restricted.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dualdp import _validate
from dualdp._validate import AccountingError
from dualdp.randomness import used_keys

if TYPE_CHECKING:
    from dualdp.randomness import RootKey

#: Noise source of a run that was set up by `make_private`.
OWN_STEP = "the engine's own step"
_OWN_LOOP = (
    "For a loop of your own set up the run by engine.make_loader(plan=...) and call "
    "engine.record() before each release."
)


class HasRecord(Protocol):
    """Ledger: its chain of lines, and the next step."""

    chain: Any

    @property
    def position(self) -> int: ...  # noqa: D102


@dataclass
class KeyUse:
    """Run of one key in this process: who records it, and who draws its noise."""

    pid: int  # process that began it
    recorder: str = ""  # name of the caller that keeps the record; "" if there is none
    source: str = ""  # name of the noise source; "" if there is none yet
    caller: object = None  # object that draws the noise
    ledger: weakref.ref[HasRecord] | None = None
    waiting: dict[int, Any] = field(default_factory=dict)  # step -> branch or path, not yet drawn
    end: int = 0  # first step without a record when the run was begun or a step was last sealed
    missing: set[int] = field(default_factory=set)  # steps asked for without a record
    unrecorded: int | None = None  # step whose noise was drawn before a recorder existed


_lock = threading.RLock()  # callbacks of compiled programs run in other threads
_secret: dict[str, KeyUse] = {}  # SHA-256 of a key -> its run
#: Runs of a plan with a seed, by the identity of the object.
_seeded: dict[int, tuple[weakref.ref[Any], list[KeyUse]]] = {}
_recorded: weakref.WeakKeyDictionary[HasRecord, KeyUse] = weakref.WeakKeyDictionary()


def begin(
    plan: Any, ledger: HasRecord | None, recorder: str, *, source: str, resumed: bool, follows: bool
) -> None:
    """Reserve the key of a plan for one run; see `PrivacyPlan.claim`."""
    root = plan.root.require_secret()
    with _lock:
        run = KeyUse(os.getpid(), recorder, source, source or None)
        if ledger is not None:
            run.ledger, run.end = weakref.ref(ledger), ledger.position
        if root.seed is not None:
            key, runs = id(plan), _runs_of_seed(plan)
            alive = [r for r in runs if r.ledger is not None and r.ledger() is not None]
            _seeded[key] = weakref.ref(plan, lambda _: _seeded.pop(key, None)), [*alive, run]
        else:
            earlier = _secret.get(root.sha256)
            if not follows:
                _refuse_used(root, earlier, run, resumed, ledger)
            if earlier is not None and not earlier.recorder:  # an add_noise without recorder so far
                run.source, run.caller = earlier.source, earlier.caller
            if not follows:
                used_keys.leave(root.sha256, _mark(ledger), is_new=not resumed)
            _secret[root.sha256] = run
        if ledger is not None:
            _recorded[ledger] = run


def _runs_of_seed(plan: Any) -> list[KeyUse]:
    """Runs of a plan with a seed, the latest last."""
    ref, runs = _seeded.get(id(plan), (None, []))
    return runs if ref is not None and ref() is plan else []


def _mark(ledger: HasRecord | None) -> used_keys.Mark:
    """Marker content for a run with this ledger."""
    if ledger is None:
        return used_keys.Mark()
    chain = ledger.chain
    return used_keys.Mark(os.path.abspath(chain.path) if chain.path else "", chain.last_hash)


def _refuse_used(
    root: RootKey, earlier: KeyUse | None, run: KeyUse, resumed: bool, ledger: HasRecord | None
) -> None:
    """Raise if the key has a run, or its noise another source."""
    if root.pid != os.getpid():
        raise AccountingError(
            f"This plan's key came into process {root.pid}, of which this process is a fork; "
            "another fork could begin a run with the same noise. Expected a plan made in this "
            "process, or one whose key file is read here (plan.save_key, PrivacyPlan.from_json)."
        )
    if earlier is not None and earlier.source and not earlier.recorder:
        if run.source or earlier.unrecorded is not None:  # otherwise no noise was drawn yet
            raise AccountingError(
                f"The noise of this plan was given to {earlier.source}, and {run.recorder} would "
                f"use it a second time. Expected one of the two. {_OWN_LOOP}"
            )
    marks = used_keys.marks(root.sha256)
    if resumed:  # a copy of the run's ledger may lack the line of the run's last opening
        for path, mark in marks:
            if ledger is None or not mark.opened:
                continue
            # A copy of a run that was never resumed has all its lines that are in the mark.
            if not ledger.chain.holds(mark.opened) or ledger.chain.continues_at(mark.ledger):
                raise AccountingError(
                    f"{ledger.chain.path or 'The ledger'} does not hold what the run of this key "
                    f"has recorded since: {path} says that it went on in "
                    f"{mark.ledger or 'a ledger in memory'}. Expected that ledger, so that no "
                    "noise is used for two different releases."
                )
        return
    user = None
    if earlier is not None and earlier.recorder:
        user = f"another run of this process ({earlier.recorder})"
    elif marks:
        path, mark = marks[0]
        user = f"a run that left {path}" + (f" and records in {mark.ledger}" * bool(mark.ledger))
    if user is not None:
        raise AccountingError(
            f"This plan's key was used by {user}; the difference of the two models would show a "
            "gradient without noise. Make a new plan for a new run, or go on with that run by "
            "load_checkpoint."
        )


def reserve(plan: Any, source: str, caller: object) -> None:
    """Assign the noise of a plan with a secret key to one source, before any is drawn."""
    root = plan.root.require_secret()
    if root.seed is not None:
        return
    with _lock:
        run = _run_of(plan, 0) or _secret.setdefault(root.sha256, KeyUse(os.getpid()))
        _set_source(run, source, caller)


@contextlib.contextmanager
def drawing(
    plan: Any,
    source: str,
    caller: object,
    step: int,
    branch: int | None = None,
    *,
    on_record_only: bool = False,
) -> Iterator[Any]:
    """Permit a source to draw the noise of one release, once; revoked if drawing fails.

    The context is the branch whose noise may be drawn, None if that release is not on record; with
    correlated noise it is the path, the branches of this step and of those before. Without
    `branch` it is the one on record. With `on_record_only` a secret key without a recorder is
    refused at once, not after its first step.
    """
    granted = _grant(plan, source, caller, step, branch, on_record_only)
    try:
        yield granted
    except BaseException:
        with _lock:
            run = _run_of(plan, step)
            if run is not None and run.recorder and granted is not None:
                run.waiting[step] = granted
        raise


def _grant(
    plan: Any, source: str, caller: object, step: int, branch: int | None, on_record_only: bool
) -> Any:
    """Branch whose noise may be drawn, or None; see `drawing`."""
    branch = branch if branch is None else _validate.integer("branch", branch)
    root = plan.root.require_secret()
    with _lock:
        run = _run_of(plan, step)
        if root.seed is not None and (run is None or run.source == OWN_STEP):
            return branch or 0  # unrestricted: for comparisons
        if run is None:
            run = _secret.setdefault(root.sha256, KeyUse(os.getpid()))
        _set_source(run, source, caller)
        if not run.recorder:
            return _grant_unrecorded(root, run, step, branch, on_record_only)
        if step in run.waiting and branch in (None, _last_branch(run.waiting[step])):
            return run.waiting.pop(step)
        if step >= run.end:
            run.missing.add(step)
            return None
    raise AccountingError(
        f"The noise of step={step} was handed out before; the difference of the two releases would "
        "show gradients without noise. Expected one draw for each release on record; make a new "
        "plan for a new run."
    )


def _last_branch(waiting: Any) -> int:
    """Branch of a step whose noise waits, by its branch or its path."""
    return int(waiting if isinstance(waiting, int) else waiting[-1][1])


def _grant_unrecorded(
    root: RootKey, run: KeyUse, step: int, branch: int | None, on_record_only: bool
) -> int | None:
    """Permit the first noise of a secret key without a recorder; a second raises."""
    if on_record_only:
        run.missing.add(step)
        return None
    if run.unrecorded is not None:
        raise AccountingError(
            f"The noise of step={run.unrecorded} was drawn by {run.source} and nobody recorded "
            f"that release, so epsilon would not count it. {_OWN_LOOP}"
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


def not_recorded(source: str, step: int) -> AccountingError:
    """Return the error about noise for a release that is not on record."""
    return AccountingError(
        f"{source} was asked for the noise of step={step}, but that release is not on record, so "
        "epsilon would not count it. Call engine.record() before it (Ledger.record and Ledger.seal "
        "in a loop without an engine)."
    )


def _run_of(plan: Any, step: int) -> KeyUse | None:
    """Run of a plan in this process; with a seed, the latest that waits for this step's noise."""
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
    """Return the error message about a fork that would continue its parent's run."""
    return (
        f"This process is a fork of process {pid}, whose run this is: both would use the same "
        "noise. Expected the run to go on in that process, or here from its checkpoint "
        "(load_checkpoint) once it has ended."
    )


def _set_source(run: KeyUse, source: str, caller: object) -> None:
    """Make this the source of a run's noise, or raise if there is another one."""
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


def mark_new_file(root: RootKey) -> None:
    """Write the markers of a key that was just saved to a file, if its run has begun."""
    run = _secret.get(root.sha256)
    if run is not None and (run.recorder or run.unrecorded is not None):
        ledger = None if run.ledger is None else run.ledger()
        used_keys.leave(root.sha256, _mark(ledger), is_new=False)


def is_known(ledger: HasRecord) -> bool:
    """Return True if a run was begun with this ledger."""
    return ledger in _recorded


def draw_by_engine(ledger: HasRecord) -> None:
    """Assign the noise of a resumed run to the engine's own step, unless another source has it."""
    with _lock:
        _set_source(_recorded[ledger], OWN_STEP, OWN_STEP)


def sealed(ledger: HasRecord, step: int, branch: Any) -> None:
    """Note that a release is on record, so that its noise may be drawn.

    `branch` is what `drawing` hands out: the branch, or with correlated noise the path.
    """
    run = _recorded.get(ledger)
    if run is None or run.source == OWN_STEP:  # which draws only sealed releases
        return
    with _lock:
        run.waiting[step], run.end = branch, max(run.end, step + 1)
        run.missing.discard(step)


def require_recorded(ledger: HasRecord) -> None:
    """Raise if the ledger lacks a release whose noise was requested."""
    run = _recorded.get(ledger)
    if run is not None and run.missing:
        raise AccountingError(
            f"{run.source} was asked for the noise of step={min(run.missing)}, which is not on "
            "record, so this epsilon would not count it. Call engine.record() before each release."
        )
