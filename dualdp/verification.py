# SPDX-License-Identifier: Apache-2.0
"""Goes through a ledger as an auditor would: is it whole, is it the plan's, what did it cost."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dualdp import spending
from dualdp._validate import AccountingError
from dualdp.accountants.interop import to_dp_event
from dualdp.chain import Record
from dualdp.ledger import Ledger
from dualdp.plan import PrivacyPlan
from dualdp.schedules import AdaptiveNorm

_SLACK = 1e-9  # relative, for numbers that were computed twice
_BROKEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: of the check.
        passed: None where it does not apply or is only worth knowing.
        detail: one sentence.
    """

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True)
class Verification:
    """Everything found in one ledger.

    Attributes:
        source: the file, or "text".
        findings: in order.
        plan: of the run, if it could be read.
        records: of the ledger.
        epsilons: by accountant, at the plan's delta.
    """

    source: str
    findings: tuple[Finding, ...]
    plan: PrivacyPlan | None = None
    records: tuple[Record, ...] = ()
    epsilons: dict[str, float] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Steps of which a release is on record."""
        return len({record.get("step") for record in self.of_kind("release")})

    @property
    def covers_the_plan(self) -> bool | None:
        """Whether all planned steps are on record; None for an open-ended plan."""
        planned = None if self.plan is None else self.plan.num_steps
        return None if planned is None else self.num_steps >= planned

    @property
    def failures(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(finding.name for finding in self.findings if finding.passed is False)

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    @property
    def epsilon(self) -> float:
        """The upper bound by PLD, or the least of the others; nan if none could be had."""
        return self.epsilons.get("pld", min(self.epsilons.values(), default=math.nan))

    def of_kind(self, kind: str) -> list[Record]:
        """The records of one kind: "release", "seal", "resume" or "note"."""
        return [record for record in self.records if record.get("kind") == kind]

    @property
    def unprotected(self) -> list[str]:
        """Names of the logged numbers that epsilon does not cover."""
        noted = (record.get("unprotected") for record in self.of_kind("note"))
        return sorted({str(n) for names in noted if isinstance(names, list) for n in names})


def verify(source: str | os.PathLike[str], *, allow_seed: bool = False) -> Verification:
    """Check a ledger and recompute what it cost, by independent accountants.

    Args:
        source: text of `Ledger.to_json`, or the path of a file.
        allow_seed: whether a run whose key came from a seed may pass.

    Returns:
        What was found; a broken ledger is a finding, not an error.

    Raises:
        OSError: the file can't be read.

    Guarantees:
        A changed, removed or moved line fails.  [test_every_edit_of_a_ledger_fails]
        A release that is not the plan's fails.  [test_forged_numbers_fail]
        The epsilons are those of an accountant that saw the releases.
            [test_epsilon_is_recomputed]
    """
    is_text = isinstance(source, str) and source.lstrip().startswith("{")
    name = "text" if is_text else os.fspath(source)
    try:
        records = Ledger.read(source)
        plan = PrivacyPlan.from_json(json.dumps(records[0]["plan"]))
    except _BROKEN as error:
        return Verification(name, (Finding("chain is unbroken", False, str(error)),))
    whole = Finding("chain is unbroken", True, f"{len(records)} lines, each chained to the last")
    found = Verification(name, (whole,), plan, tuple(records))
    epsilons: dict[str, float] = {}
    findings = [
        whole,
        _caught("record covers the plan", lambda: _coverage(found, plan)),
        _caught("releases are the plan's", lambda: _releases(found, plan)),
        _caught("releases are sealed", lambda: _seals(found)),
        *_costs(found, plan, epsilons),
        _caught("epsilon is within its target", lambda: _target(plan, epsilons)),
        _caught("exactness was checked", lambda: _checks(found)),
        _seed(plan, allow_seed),
        _unprotected(found),
        _noise(plan),
    ]
    return Verification(name, tuple(findings), plan, tuple(records), epsilons)


def _caught(name: str, look: Callable[[], tuple[bool | None, str]]) -> Finding:
    """What a check found; records that it can't read fail it."""
    try:
        return Finding(name, *look())
    except _BROKEN as error:
        return Finding(name, False, f"A record can't be read ({type(error).__name__}: {error}).")


# ---------------------------------------------------------------------- the record


def _releases(found: Verification, plan: PrivacyPlan) -> tuple[bool, str]:
    """Every release carries the plan's numbers, in order, once on a branch."""
    bounds = dict(_bounds(found, plan))
    seen: set[tuple[int, int]] = set()
    last = -1
    for record in found.of_kind("release"):
        step, branch = int(record["step"]), int(record["branch"])
        told = spending.release(
            plan, plan.noise_multiplier_at(step), plan.expected_batch_size_at(step)
        )
        wrong = [key for key, value in told.items() if not _same(record.get(key), value)]
        if not _same(record["max_grad_norm"], bounds.get((step, branch))):
            wrong.append("max_grad_norm")
        if wrong:
            return False, f"Step {step} was recorded with another {', '.join(wrong)}."
        if (step, branch) in seen or step > last + 1 or branch < 0:
            return False, f"Step {step} of branch {branch} is out of order or came twice."
        seen.add((step, branch))
        last = max(last, step)
    if plan.num_steps is not None and last >= plan.num_steps:
        return False, f"Step {last} is past the plan's {plan.num_steps} steps."
    again = len(seen) - len({step for step, _ in seen})
    return True, f"{len(seen)} releases of {last + 1} steps, {again} of them of steps run again"


def _coverage(found: Verification, plan: PrivacyPlan) -> tuple[bool | None, str]:
    """How much of the plan is on record: lines that are missing at the end leave no other trace."""
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


def _bounds(found: Verification, plan: PrivacyPlan) -> Iterable[tuple[tuple[int, int], float]]:
    """((step, branch), max_grad_norm) of every release, adaptive ones from the noisy counts."""
    if not isinstance(plan.max_grad_norm, AdaptiveNorm):
        for record in found.of_kind("release"):
            step = int(record["step"])
            yield (step, int(record["branch"])), plan.max_grad_norm_at(step)
        return
    bound_after = {-1: {plan.max_grad_norm_at(0)}}  # a step run again may start from either bound
    seals = {(int(s["step"]), int(s["branch"])): s for s in found.of_kind("seal")}
    for record in found.of_kind("release"):
        step, branch = int(record["step"]), int(record["branch"])
        bound = float(record["max_grad_norm"])
        if any(_same(bound, other) for other in bound_after.get(step - 1, ())):
            yield (step, branch), bound
        sealed = seals.get((step, branch))
        if sealed is not None:
            following = plan.max_grad_norm.following(bound, float(sealed["noisy_fraction"]))
            bound_after.setdefault(step, set()).add(following)


def _same(found: Any, expected: Any) -> bool:
    """Equal, numbers up to rounding."""
    if isinstance(expected, float) and isinstance(found, int | float):
        return math.isclose(found, expected, rel_tol=_SLACK)
    return bool(found == expected)


def _seals(found: Verification) -> tuple[bool, str]:
    """Every seal has its release; a release without a seal is one that a crash cut short."""
    released = [(r["step"], r["branch"]) for r in found.of_kind("release")]
    sealed = [(r["step"], r["branch"]) for r in found.of_kind("seal")]
    strange = [pair for pair in sealed if pair not in set(released)]
    if strange or len(sealed) != len(set(sealed)):
        return False, "A sum was sealed that was never recorded as a release, or twice."
    open_ones = len(released) - len(sealed)
    resumed = len(found.of_kind("resume"))
    return True, f"{len(sealed)} sealed, {open_ones} cut short by a crash; resumed {resumed} times"


# ---------------------------------------------------------------------- the cost


def _costs(found: Verification, plan: PrivacyPlan, epsilons: dict[str, float]) -> Iterable[Finding]:
    """Epsilon by two accountants of ours and one of others'; they bound each other."""
    releases = found.of_kind("release")
    yield _caught("epsilon by PLD", lambda: _epsilon("pld", plan, releases, epsilons))
    yield _caught("epsilon by RDP", lambda: _epsilon("rdp", plan, releases, epsilons))
    yield _caught("epsilon by dp-accounting", lambda: _google(plan, releases, epsilons))
    yield _caught("accountants agree", lambda: _agreement(plan, releases, epsilons))


def _epsilon(
    name: str, plan: PrivacyPlan, releases: list[Record], epsilons: dict[str, float]
) -> tuple[bool | None, str]:
    """Epsilon by one of our accountants."""
    try:
        spent = spending.spent_by(plan, releases, name)
        value = float(spent.get_epsilon(delta=plan.delta))
    except AccountingError as error:
        return None, f"It has no bound for this run: {error}"
    epsilons[name] = value
    return True, f"epsilon = {value:.4f} at delta = {plan.delta:g}"


def _google(
    plan: PrivacyPlan, releases: list[Record], epsilons: dict[str, float]
) -> tuple[bool | None, str]:
    """Epsilon by Google's library, from the same releases as its own event."""
    try:
        import dp_accounting
        from dp_accounting import pld, rdp

        event = to_dp_event(spending.spent_by(plan, releases, "pld").history)
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
    epsilons["dp-accounting"] = value
    return True, f"epsilon = {value:.4f} at delta = {plan.delta:g}, by {type(theirs).__name__}"


def _agreement(
    plan: PrivacyPlan, releases: list[Record], epsilons: dict[str, float]
) -> tuple[bool | None, str]:
    """No upper bound lies below the certified lower bound."""
    if not epsilons:
        return False, "No accountant has a bound for these releases."
    if "pld" not in epsilons or len(epsilons) < 2:
        return None, "There is one opinion only."
    lower, _, _ = spending.spent_by(plan, releases, "pld").epsilon_bounds(delta=plan.delta)
    low = [name for name, value in epsilons.items() if value < float(lower) * (1 - 1e-3)]
    if low:
        return False, f"{', '.join(low)} lies below the certified lower bound {lower:.4f}."
    return True, f"each is above the certified lower bound {lower:.4f}"


def _target(plan: PrivacyPlan, epsilons: dict[str, float]) -> tuple[bool | None, str]:
    """The target, if the plan has one."""
    if plan.target_epsilon is None:
        return None, "The plan names no target."
    spent = epsilons.get("pld", min(epsilons.values(), default=math.inf))
    verdict = spent <= plan.target_epsilon * (1 + _SLACK)
    return verdict, f"{spent:.4f} spent of {plan.target_epsilon:g}"


def _checks(found: Verification) -> tuple[bool | None, str]:
    """Spot checks of the gradients: how often, and whether one failed."""
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
        part = "" if not any(rates) else " for a part of the run"
        return None, f"Off (checks=0){part}: nothing but the rules vouches for the gradients."
    impossible = [str(note["check_impossible"]) for note in notes if "check_impossible" in note]
    limits = f"; not checked: {'; '.join(impossible)}" if impossible else ""
    last = max((int(check["step"]) for check in checks), default=None)
    told = f"{len(checks)} passed, the last at step {last}" if checks else "none was due yet"
    return bool(checks) or None, f"{told}, at {rates[-1]:.3g} of the steps{limits}"


# ---------------------------------------------------------------------- worth knowing


def _seed(plan: PrivacyPlan, allowed: bool) -> Finding:
    """Whether the key is secret."""
    if plan.seed is None:
        return Finding("key is secret", True, "drawn by the operating system; its hash is recorded")
    detail = (
        f"The key comes from seed={plan.seed}: whoever reads the plan can take the noise away. "
        "Such a run is for tests and comparisons only."
    )
    return Finding("key is secret", None if allowed else False, detail)


def _unprotected(found: Verification) -> Finding:
    """Logged numbers that epsilon does not cover."""
    names = found.unprotected
    detail = f"{', '.join(names)} were logged: epsilon does not cover them." if names else "none"
    return Finding("unprotected numbers", None if names else True, detail)


def _noise(plan: PrivacyPlan) -> Finding:
    """What the noise source is good for."""
    if plan.noise == "secure":
        return Finding("noise source", True, "cryptographic generator, public grid")
    return Finding(
        "noise source",
        None,
        f"noise={plan.noise!r} is float32 from a statistical generator: no proof holds for its "
        "last bits; use noise='secure' where an attacker sees the released numbers.",
    )


# ---------------------------------------------------------------------- several ledgers


def one_key(ledgers: Sequence[Verification]) -> Finding:
    """Look for two ledgers of one key: the difference of what they released is without noise.

    Args:
        ledgers: of `verify`.

    Returns:
        A finding that fails where two records of one secret key are not one record at two times.
    """
    name = "each key has one ledger"
    by_key: dict[str, list[Verification]] = {}
    for found in ledgers:
        if found.plan is not None and found.plan.seed is None:
            by_key.setdefault(found.plan.root.sha256, []).append(found)
    unclear = []
    for sha256, several in by_key.items():
        longest = max(several, key=lambda found: len(found.records))
        for found in several:
            pair = f"{found.source} and {longest.source}"
            if found.records != longest.records[: len(found.records)]:
                return Finding(
                    name,
                    False,
                    f"{pair} are records of two runs with one key (sha256 {sha256[:12]}...): both "
                    "used the same noise.",
                )
            hidden = any(record.get("digest") is None for record in found.of_kind("seal"))
            if found is not longest and hidden:
                unclear.append(pair)
    if unclear:
        return Finding(
            name,
            None,
            f"{unclear[0]} say the same and hold no digest of their sums: one record twice, or two "
            "runs with the same noise.",
        )
    return Finding(name, True, f"{len(by_key)} secret keys in {len(ledgers)} ledgers")
