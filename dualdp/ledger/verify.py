# SPDX-License-Identifier: Apache-2.0
"""Verification of a ledger: hash chain, agreement with the plan, and recomputed epsilon."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.signal import fftconvolve

from dualdp._validate import AccountingError
from dualdp.accountants.interop import to_dp_event
from dualdp.ledger import release_record
from dualdp.ledger.hash_chain import Record, read_text
from dualdp.ledger.ledger import read_records
from dualdp.plan import accounting, participation
from dualdp.plan.correlated.noise import START, as_path, branch_at
from dualdp.plan.correlated.strategies import identity
from dualdp.plan.plan import PrivacyPlan
from dualdp.plan.schedules import AdaptiveNorm

_SLACK = 1e-9  # relative tolerance for recomputed numbers
_BROKEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    passed: bool | None  # None if the check does not apply or only informs
    detail: str  # one sentence


@dataclass(frozen=True)
class Verification:
    """Results of all checks of one ledger."""

    source: str  # path of the file, or "The text"
    findings: tuple[Finding, ...]
    plan: PrivacyPlan | None = None  # None if it could not be read
    records: tuple[Record, ...] = ()
    epsilons: dict[str, float] = field(default_factory=dict)  # by accountant, at the plan's delta
    cut_line: int | None = None  # number of a last line that is cut off, and not in `records`

    @property
    def num_steps(self) -> int:
        """Number of steps with a recorded release."""
        return len({record.get("step") for record in self.of_kind("release")})

    @property
    def covers_the_plan(self) -> bool | None:
        """True if all planned steps are recorded; None for an open-ended plan."""
        planned = None if self.plan is None else self.plan.num_steps
        return None if planned is None else self.num_steps >= planned

    @property
    def stopped_inside(self) -> int | None:
        """Step of the last release, if others are sealed and it is not; else None."""
        sealed = [(seal.get("step"), seal.get("branch")) for seal in self.of_kind("seal")]
        last = [(made.get("step"), made.get("branch")) for made in self.of_kind("release")[-1:]]
        return last[0][0] if sealed and last and last[0] not in sealed else None

    @property
    def is_whole(self) -> bool:
        """True if all planned steps are recorded and nothing at the end is cut off."""
        ends = self.cut_line is None and self.stopped_inside is None
        return ends and bool(self.covers_the_plan)

    @cached_property
    def epsilon_of_the_plan(self) -> float:
        """Upper bound by PLD for one run of all planned steps; nan if open-ended or without one."""
        plan = self.plan
        if plan is None or plan.num_steps is None:
            return math.nan
        try:
            whole = accounting.spent_after(plan, plan.num_steps, "pld")
            return float(whole.get_epsilon(delta=plan.delta))
        except ValueError:
            return math.nan

    @property
    def failures(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(finding.name for finding in self.findings if finding.passed is False)

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not self.failures

    @property
    def epsilon(self) -> float:
        """Upper bound by PLD, else the smallest of the others; nan if there is none."""
        return self.epsilons.get("pld", min(self.epsilons.values(), default=math.nan))

    def of_kind(self, kind: str) -> list[Record]:
        """Return the records of one kind: "release", "seal", "resume" or "note"."""
        return [record for record in self.records if record.get("kind") == kind]

    @property
    def unprotected(self) -> list[str]:
        """Names of the logged quantities that epsilon does not cover."""
        noted = (record.get("unprotected") for record in self.of_kind("note"))
        return sorted({str(n) for names in noted if isinstance(names, list) for n in names})


def verify(source: str | os.PathLike[str], *, allow_seed: bool = False) -> Verification:
    """Check a ledger and recompute its privacy cost with independent accountants.

    Args:
        source: text of `Ledger.to_json`, or the path of a file.
        allow_seed: bool, True if a run whose key came from a seed may pass.

    Returns:
        `Verification`; a broken ledger is a failed finding, not an error.

    Raises:
        OSError: the file can't be read.

    Guarantees:
        A changed, removed or moved line fails.  [test_every_edit_of_a_ledger_fails]
        A release that is not the plan's fails.  [test_forged_numbers_fail]
        The epsilons are those of an accountant that saw the releases.
            [test_epsilon_is_recomputed]
    """
    text, name = read_text(source)
    try:
        records, cut_line = _records(text, name)
        plan = PrivacyPlan.from_json(json.dumps(records[0]["plan"]))
    except _BROKEN as error:
        return Verification(name, (Finding("chain is unbroken", False, str(error)),))
    chain = Finding("chain is unbroken", True, f"{len(records)} lines, each chained to the last")
    found = Verification(name, (chain,), plan, tuple(records), cut_line=cut_line)
    findings = [chain]
    for title, check in _CHECKS.items():
        try:
            passed, detail = check(found, plan)
        except _BROKEN as error:
            passed, detail = False, f"A record can't be read ({type(error).__name__}: {error})."
        if check is _seed and allow_seed:
            passed = passed or None
        findings.append(Finding(title, passed, detail))
    return replace(found, findings=tuple(findings))


def _records(text: str, name: str) -> tuple[list[Record], int | None]:
    """Records of a ledger, and the number of a last line that is cut off.

    A last line that lacks only its end-of-line counts: a run does not, but a copy may have lost it.
    """
    if not text.endswith("\n"):
        with suppress(ValueError):
            return read_records(f"{text}\n", name), None
    return read_records(text, name), None if text.endswith("\n") else text.count("\n") + 1


def _last_line(found: Verification, plan: PrivacyPlan) -> tuple[bool | None, str]:
    """Note a last line that is cut off; the run itself released nothing of it, another copy may."""
    if found.cut_line is None:
        return True, f"line {len(found.records)}"
    return None, (
        f"Line {found.cut_line} is cut off and not counted: a crash while it was written, before "
        "anything of it was released, or a copy that is not whole."
    )


def _releases(found: Verification, plan: PrivacyPlan) -> tuple[bool, str]:
    """Check that releases have the plan's numbers, in order, once per branch."""
    adaptive = plan.max_grad_norm if isinstance(plan.max_grad_norm, AdaptiveNorm) else None
    bounds = {0: {plan.max_grad_norm_at(0)}}  # of each step; a repeated one may have several
    seals = {(int(s["step"]), int(s["branch"])): s for s in found.of_kind("seal")}
    seen: set[tuple[int, int]] = set()
    last = -1
    for record in found.of_kind("release"):
        step, branch = int(record["step"]), int(record["branch"])
        planned = release_record.planned(plan, step)
        wrong = [key for key, value in planned.items() if not _same(record.get(key), value)]
        bound = record["max_grad_norm"]
        allowed = bounds.get(step, ()) if adaptive else [plan.max_grad_norm_at(step)]
        if not any(_same(bound, other) for other in allowed):
            wrong.append("max_grad_norm")
        if wrong:
            return False, f"Step {step} was recorded with another {', '.join(wrong)}."
        if (step, branch) in seen or step > last + 1 or branch < 0:
            return False, f"Step {step} of branch {branch} is out of order or came twice."
        seen.add((step, branch))
        last = max(last, step)
        if adaptive and (step, branch) in seals:
            fraction = float(seals[step, branch]["noisy_fraction"])
            bounds.setdefault(step + 1, set()).add(adaptive.following(float(bound), fraction))
    if plan.num_steps is not None and last >= plan.num_steps:
        return False, f"Step {last} is past the plan's {plan.num_steps} steps."
    again = len(seen) - len({step for step, _ in seen})
    return True, f"{len(seen)} releases of {last + 1} steps, {again} of them of steps run again"


def _coverage(found: Verification, plan: PrivacyPlan) -> tuple[bool | None, str]:
    """Share of the plan on record: missing lines at the end leave no other trace."""
    made, planned = found.num_steps, plan.num_steps
    if planned is None:
        return None, (
            f"{made} steps are on record and the plan has no end: whether lines are missing at the "
            "end of the record does not show."
        )
    if made >= planned:
        return True, f"all {planned} planned steps are on record"
    return None, (
        f"{made} of {planned} planned steps are on record: the run stopped there, or goes on, or "
        "lines are missing at the end of the record."
    )


def _same(found: Any, expected: Any) -> bool:
    """True if equal, floats up to rounding."""
    if isinstance(expected, float) and isinstance(found, int | float):
        return math.isclose(found, expected, rel_tol=_SLACK)
    return bool(found == expected)


def _seals(found: Verification, plan: PrivacyPlan) -> tuple[bool, str]:
    """Check that every seal has its release; a release without a seal was cut short by a crash."""
    released = [(r["step"], r["branch"]) for r in found.of_kind("release")]
    sealed = [(r["step"], r["branch"]) for r in found.of_kind("seal")]
    strange = [pair for pair in sealed if pair not in set(released)]
    if strange or len(sealed) != len(set(sealed)):
        return False, "A sum was sealed that was never recorded as a release, or twice."
    for seal in found.of_kind("seal") if plan.is_correlated else []:
        step, path = int(seal["step"]), as_path(seal.get("path", START))
        ends = [*(first for first, _ in path[1:]), step + 1]
        on_path = [
            (at, branch)
            for (first, branch), end in zip(path, ends, strict=True)
            for at in range(first, end)
            if len(path) > 1 or at == step  # of an unbranched run the own line is enough
        ]
        if branch_at(path, step) != seal["branch"] or not set(on_path) <= set(sealed):
            return False, f"The noise of step {step} names steps that were not sealed before it."
    open_ones = len(released) - len(sealed)
    resumed = len(found.of_kind("resume"))
    return True, f"{len(sealed)} sealed, {open_ones} cut short by a crash; resumed {resumed} times"


def _epsilon(found: Verification, plan: PrivacyPlan, accountant: str) -> tuple[bool | None, str]:
    try:
        spent = accounting.spent_by(plan, found.of_kind("release"), accountant)
        value = float(spent.get_epsilon(delta=plan.delta))
    except AccountingError as error:
        return None, f"It has no bound for this run: {error}"
    found.epsilons[accountant] = value
    return True, f"epsilon = {value:.4f} of one {plan.unit} at delta = {plan.delta:g}"


def _epsilon_of_dp_accounting(found: Verification, plan: PrivacyPlan) -> tuple[bool | None, str]:
    """Epsilon by dp-accounting, from the releases as its own event."""
    try:
        import dp_accounting
        from dp_accounting import pld, rdp

        releases = found.of_kind("release")
        event = to_dp_event(accounting.spent_by(plan, releases, "pld").history)
    except ModuleNotFoundError:
        return None, "It is not installed; install dp-accounting for a third opinion."
    except AccountingError as error:
        return None, str(error)
    relation = {
        "add_or_remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        "replace": dp_accounting.NeighboringRelation.REPLACE_ONE,
        "zero_out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
    }[plan.neighboring_relation]
    try:
        theirs: Any = pld.PLDAccountant(neighboring_relation=relation).compose(event)
    except (dp_accounting.UnsupportedEventError, ValueError):
        try:
            theirs = rdp.RdpAccountant(neighboring_relation=relation).compose(event)
        except (dp_accounting.UnsupportedEventError, ValueError) as error:
            return None, f"It refuses these releases ({error})."
    value = float(theirs.get_epsilon(plan.delta))
    found.epsilons["dp-accounting"] = value
    told = f"epsilon = {value:.4f} of one {plan.unit} at delta = {plan.delta:g}"
    return True, f"{told}, by {type(theirs).__name__}"


def _agreement(found: Verification, plan: PrivacyPlan) -> tuple[bool | None, str]:
    """Check that no upper bound is below the certified lower bound."""
    epsilons = found.epsilons
    if not epsilons:
        return False, "No accountant has a bound for these releases."
    if "pld" not in epsilons or len(epsilons) < 2:
        return None, "There is one opinion only."
    spent = accounting.spent_by(plan, found.of_kind("release"), "pld")
    lower, _, _ = spent.epsilon_bounds(delta=plan.delta)
    low = [name for name, value in epsilons.items() if value < float(lower) * (1 - 1e-3)]
    if low:
        return False, f"{', '.join(low)} lies below the certified lower bound {lower:.4f}."
    return True, f"each is above the certified lower bound {lower:.4f}"


def _strategy(found: Verification, plan: PrivacyPlan) -> tuple[bool | None, str]:
    """Recompute the noise of z from the coefficients, by the definition of its sensitivity."""
    if not participation.is_patterned(plan):
        return None, "The noises of all steps are independent."
    n, gap = plan.num_steps or 0, participation.separation(plan)
    strategy = plan.correlation or identity()
    column = strategy.strategy(n)
    product = fftconvolve(column, strategy.inverse(n))[:n] if n else column
    if n and not np.allclose(product, np.eye(1, n)[0], atol=1e-9 * np.abs(column).sum()):
        return False, "C times its inverse is not the identity."
    starts = [0] if plan.sampler != "fixed_order" else range(min(gap, n, 1 + 10**7 // (n + 1)))
    largest = 0.0
    for start in starts:
        joined = np.zeros(n)
        joined[start :: gap if plan.sampler == "fixed_order" else n + 1] = 1
        row = fftconvolve(column, joined)[:n] if n else joined
        largest = max(largest, float(row @ row) ** 0.5)
    if plan.sensitivity < largest * (1 - _SLACK):
        return False, f"z is {plan.sensitivity:.6g} noises and not {largest:.6g}."
    return True, f"z has {plan.sensitivity:.6g} times the noise of a single release"


def _users(found: Verification, plan: PrivacyPlan) -> tuple[bool | None, str]:
    """Find the digest of the rows of each user; a run has one."""
    if plan.unit == "example":
        size = plan.rows_per_item
        what = "One row" if size is None else f"One item of {size} rows"
        return None, f"{what} of the data is what is protected: whose it is has no part in it."
    bound = sorted({str(note["users"]) for note in found.of_kind("note") if "users" in note})
    if len(bound) > 1:
        return False, "The record holds the users of the rows twice, and not the same."
    if not bound:
        return None, "The record does not say whose the rows were: a loop without an engine."
    most = f"at most {plan.rows_per_unit} rows of a user in a step"
    return True, f"{most}; who has which row has the keyed hash {bound[0][:12]}..."


def _target(found: Verification, plan: PrivacyPlan) -> tuple[bool | None, str]:
    if plan.target_epsilon is None:
        return None, "The plan names no target."
    spent = found.epsilons.get("pld", min(found.epsilons.values(), default=math.inf))
    verdict = spent <= plan.target_epsilon * (1 + _SLACK)
    return verdict, f"{spent:.4f} spent of {plan.target_epsilon:g}"


def _checks(found: Verification, plan: PrivacyPlan) -> tuple[bool | None, str]:
    notes = found.of_kind("note")
    checks = [note["check"] for note in notes if "check" in note]
    failed = [check for check in checks if not check["passed"]]
    if failed:
        since = failed[0]["last_passed"]
        return False, (
            f"A spot check failed at step {failed[0]['step']} (relative error "
            f"{failed[0]['relative_error']}): the gradients are not vouched for "
            f"{'from the beginning' if since is None else f'since step {since}'}."
        )
    rates = [float(note["checks"]) for note in notes if "checks" in note]
    if not rates:
        return None, "The record does not say: an own loop, or a version before checks were made."
    if not all(rates):
        extent = " for a part of the run" if any(rates) else ""
        return None, f"Off (checks=0){extent}: nothing but the rules vouches for the gradients."
    impossible = [str(note["check_impossible"]) for note in notes if "check_impossible" in note]
    limits = f"; not checked: {'; '.join(impossible)}" if impossible else ""
    last = max((int(check["step"]) for check in checks), default=None)
    done = f"{len(checks)} passed, the last at step {last}" if checks else "none was due yet"
    return bool(checks) or None, f"{done}, at {rates[-1]:.3g} of the steps{limits}"


def _seed(found: Verification, plan: PrivacyPlan) -> tuple[bool, str]:
    if plan.seed is None:
        return True, "drawn by the operating system; its hash is recorded"
    return False, (
        f"The key comes from seed={plan.seed}: whoever reads the plan can take the noise away. "
        "Such a run is for tests and comparisons only."
    )


def _unprotected(found: Verification, plan: PrivacyPlan) -> tuple[bool | None, str]:
    names = found.unprotected
    if names:
        return None, f"{', '.join(names)} were logged: epsilon does not cover them."
    return True, "none in a run log; what a loop printed is not on record"


def _noise(found: Verification, plan: PrivacyPlan) -> tuple[bool | None, str]:
    if plan.noise == "secure":
        return True, "cryptographic generator, public grid"
    stacks = [str(seal["stack"]) for seal in found.of_kind("seal") if "stack" in seal]
    if len(stacks) > 1:
        return None, (
            f"{', '.join(stacks)} drew the noise: from each to the next the run takes back other "
            "noise than it had, which costs accuracy and no epsilon."
        )
    return None, (
        f"noise={plan.noise!r} is float32 from a statistical generator: no proof holds for its "
        "last bits; use noise='secure' where an attacker sees the released numbers."
    )


_CHECKS: Mapping[str, Callable[[Verification, PrivacyPlan], tuple[bool | None, str]]] = {
    "last line is whole": _last_line,
    "record covers the plan": _coverage,
    "releases are the plan's": _releases,
    "releases are sealed": _seals,
    "users are bound": _users,
    "epsilon by PLD": lambda found, plan: _epsilon(found, plan, "pld"),
    "epsilon by RDP": lambda found, plan: _epsilon(found, plan, "rdp"),
    "epsilon by dp-accounting": _epsilon_of_dp_accounting,
    "accountants agree": _agreement,
    "noise is that of the strategy": _strategy,
    "epsilon is within its target": _target,
    "exactness was checked": _checks,
    "key is secret": _seed,
    "unprotected numbers": _unprotected,
    "noise source": _noise,
}


def one_key(ledgers: Sequence[Verification]) -> Finding:
    """Check that no two ledgers of one key differ: the difference of their releases has no noise.

    Two records of one secret key must be one record at two times.
    """
    name = "each key has one ledger"
    by_key: dict[str, list[Verification]] = {}
    for found in ledgers:
        if found.plan is not None and found.plan.seed is None:
            by_key.setdefault(found.plan.root.sha256, []).append(found)
    unclear = ""
    for sha256, several in by_key.items():
        longest = max(several, key=lambda found: len(found.records))
        for found in several:
            pair = f"{found.source} and {longest.source}"
            if found.records != longest.records[: len(found.records)]:
                detail = (
                    f"{pair} are records of two runs with one key (sha256 {sha256[:12]}...): both "
                    "used the same noise."
                )
                return Finding(name, False, detail)
            hidden = any(record.get("digest") is None for record in found.of_kind("seal"))
            if found is not longest and hidden:
                unclear = unclear or pair
    if unclear:
        detail = (
            f"{unclear} say the same and hold no digest of their sums: one record twice, or two "
            "runs with the same noise."
        )
        return Finding(name, None, detail)
    return Finding(name, True, f"{len(by_key)} secret keys in {len(ledgers)} ledgers")
