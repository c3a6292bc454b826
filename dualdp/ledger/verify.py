# SPDX-License-Identifier: Apache-2.0
"""`verify`: check a ledger from its lines alone, and recompute its epsilon by two accountants.

found = verify("run.ledger")
found.passed, found.is_whole, found.epsilon
for finding in found.findings: print(finding.name, finding.passed, finding.detail)
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from dualdp._validate import AccountingError
from dualdp.ledger.chain import Record, is_torn_release, parse, read_text
from dualdp.ledger.ledger import COLUMNS, State
from dualdp.plan.accounting import WHOLE_PASS, Segment, empty_account, release, spent_by
from dualdp.plan.plan import PrivacyPlan

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
    segments: tuple[Segment, ...] = ()
    epsilons: dict[str, float] = field(default_factory=dict)  # by accountant, at the plan's delta
    torn: str = ""  # a last line that is cut off; counted if it is a release

    @cached_property
    def releases(self) -> list[list[Any]]:
        """Columns of each release on record: step, noise multiplier, sample rate, ..."""
        return [record["r"] for record in self.records if "r" in record]

    @property
    def num_steps(self) -> int:
        """Number of steps with a release: no segment begins past those before it."""
        return max((segment.stop for segment in self.segments), default=0)

    @property
    def covers_the_plan(self) -> bool | None:
        """True if all planned steps are recorded; None for an open-ended plan."""
        planned = None if self.plan is None else self.plan.num_steps
        return None if planned is None else self.num_steps >= planned

    @property
    def is_whole(self) -> bool:
        """True if all planned steps are recorded and nothing at the end is cut off."""
        return not self.torn and bool(self.covers_the_plan)

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
        """Upper bound by PLD, else by RDP; nan if there is none."""
        return self.epsilons.get("pld", min(self.epsilons.values(), default=math.nan))

    @property
    def secrecy(self) -> str:
        """What an epsilon presumes of the noise: "" or, with a seed, that it were secret."""
        seed = None if self.plan is None else self.plan.seed
        return "" if seed is None else f" if the noise were secret (seed={seed} tells it)"

    @property
    def notes(self) -> list[tuple[str, Any]]:
        """Public facts about the run, (name, value) in order."""
        noted = (record["note"] for record in self.records if "note" in record)
        return [fact for facts in noted for fact in facts.items()]

    @property
    def unprotected(self) -> list[str]:
        """Names of the logged quantities that epsilon does not cover."""
        return sorted(
            {str(n) for name, value in self.notes if name == "unprotected" for n in value}
        )


def verify(source: str | os.PathLike[str], *, allow_seed: bool = False) -> Verification:
    """Check a ledger and recompute its privacy cost by two accountants.

    Args:
        source: text of `Ledger.to_json`, or the path of a file.
        allow_seed: bool, True if a run whose noise came from a seed may pass.

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
        parsed = parse(text, name)
        plan = PrivacyPlan.from_json(json.dumps(parsed.records[0]["plan"]))
    except _BROKEN as error:
        return Verification(name, (Finding("chain is unbroken", False, str(error)),))
    state, wrong = _read(plan, parsed.records)
    torn, records, segments = state.torn_release(plan, parsed.torn), parsed.records, state.segments
    if torn is not None:
        records, segments = [*records, torn], state.after(torn, plan).segments
    found = Verification(name, (), plan, tuple(records), segments, torn=parsed.torn)
    made, steps = len(found.releases), found.num_steps
    summary = f"{made} releases of {steps} steps, {made - steps} of them of steps run again"
    findings = [
        Finding("chain is unbroken", True, f"{len(parsed.lines)} lines, each chained to the last"),
        Finding("releases are the plan's", not wrong, wrong or summary),
    ]
    for title, check in _CHECKS.items():
        try:
            passed, detail = check(found, plan)
        except _BROKEN as error:
            passed, detail = False, f"A record can't be read ({type(error).__name__}: {error})."
        if check is _seed and allow_seed:
            passed = passed or None
        findings.append(Finding(title, passed, detail))
    return replace(found, findings=tuple(findings))


def _read(plan: PrivacyPlan, records: list[Record]) -> tuple[State, str]:
    """(state at the first line that is not the plan's, what is wrong there); else (the end, "")."""
    state = State(1, (Segment(0, 0),), plan.max_grad_norm_at(0))
    for record in records[1:]:
        try:
            if "r" in record:
                step = state.segments[-1].stop
                if step == plan.num_steps:
                    return state, f"Step {step} is past the plan's {plan.num_steps} steps."
                wrong = _differences(record["r"], state.next_release(plan)["r"])
                if wrong:
                    return state, f"Step {step} was recorded with another {', '.join(wrong)}."
            state = state.after(record, plan)
        except _BROKEN as error:
            return state, str(error)
    return state, ""


def _differences(values: list[Any], expected: list[Any]) -> list[str]:
    """Names of the columns of a release that are not the plan's."""
    names = COLUMNS[: len(expected)]
    if len(values) != len(expected):
        return [f"number of columns than {len(expected)}"]
    pairs = list(zip(names, values, expected, strict=True))[1:4]
    return [name for name, own, plans in pairs if not math.isclose(own, plans, rel_tol=_SLACK)]


Result = tuple[bool | None, str]


def _coverage(found: Verification, plan: PrivacyPlan) -> Result:
    """Share of the plan on record, the only trace of lines that are missing at the end."""
    made, planned = found.num_steps, plan.num_steps
    if planned is not None and made >= planned:
        return True, f"all {planned} planned steps are on record"
    of = "steps are on record and the plan has no end"
    if planned is not None:
        of = f"of {planned} planned steps are on record"
    return None, f"{made} {of}: whether lines are missing at the end does not show."


def _last_line(found: Verification, plan: PrivacyPlan) -> Result:
    """Whether the last line was cut off, and what it counts as."""
    if not found.torn:
        return True, f"line {len(found.records)}"
    counted = "counted as a release" if is_torn_release(found.torn) else "no release"
    return None, f"It is cut off, and {counted}: by a crash, or a copy that is not whole."


def _segments(found: Verification, plan: PrivacyPlan) -> Result:
    """How often the run was resumed, and with how much more noise."""
    starts = [segment.start for segment in found.segments[1:] if segment.stop > segment.start]
    scales = [f"{s.noise_scale:.4g}" for s in found.segments if s.noise_scale != 1]
    raised = f"; noise scaled by {', '.join(scales[:10])}" if scales else ""
    where = f", at step {', '.join(map(str, starts[:10]))}" if starts else ""
    return True, f"resumed {len(starts)} times{where}{raised}"


def _epsilon(found: Verification, plan: PrivacyPlan, accountant: str) -> Result:
    """Epsilon by one accountant, from the numbers in the lines.

    Under samplers that are accounted by passes or segments it is that of the segments' steps, with
    the plan's numbers, to which `_read` has compared those in the lines.
    """
    try:
        cost = replace(plan, accountant=accountant)
        spent, event = empty_account(cost), release(cost, 0)
        if plan.sampler not in WHOLE_PASS:
            counts = Counter((float(values[1]), float(values[2])) for values in found.releases)
            for (noise, rate), count in counts.items():
                event |= {"noise_multiplier": noise, "sample_rate": rate}
                spent.step(num_steps=count, **event)
        else:
            spent = spent_by(cost, found.segments)
        value = found.epsilons[accountant] = spent.get_epsilon(delta=plan.delta)
    except AccountingError as error:
        return None, f"It has no bound for this run: {error}"
    at = f"of one {plan.unit} at delta = {plan.delta:g}{found.secrecy}"
    return True, f"epsilon = {value:.4f} {at}"


def _agreement(found: Verification, plan: PrivacyPlan) -> Result:
    """PLD against RDP: a few percent above the truth at most, against what is not below it."""
    if len(found.epsilons) < 2:
        return (None if found.epsilons else False), f"{len(found.epsilons)} of them has a bound."
    pld, rdp = found.epsilons["pld"], found.epsilons["rdp"]
    if pld > 1.05 * rdp + 1e-6:
        return False, f"PLD says {pld:.4f} where at most {rdp:.4f} was spent, by RDP."
    return True, f"{pld:.4f} by PLD, at most {rdp:.4f} by RDP"


def _target(found: Verification, plan: PrivacyPlan) -> Result:
    """Epsilon by the plan's accountant against its target."""
    if plan.target_epsilon is None:
        return None, "The plan names none."
    spent = found.epsilons.get(empty_account(plan).name, found.epsilon)
    passed = spent <= plan.target_epsilon * (1 + _SLACK)
    return passed, f"{spent:.4f} spent of {plan.target_epsilon:g}"


def _checks(found: Verification, plan: PrivacyPlan) -> Result:
    """Comparisons with plain autodiff that the run recorded (`dualdp.exactness`)."""
    checks = [record for record in found.records if "check" in record]
    rates = [float(value) for name, value in found.notes if name == "checks"]
    for check in checks:
        if "failed" in check:
            failed, since = check["failed"], check["failed"]["last_passed"]
            return False, (
                f"A check failed at step {check['check']} (relative error "
                f"{failed['relative_error']}): the gradients are not vouched for "
                f"{'from the beginning' if since is None else f'since step {since}'}."
            )
    if not rates:
        return None, "The record does not say: a loop of one's own."
    if not all(rates):
        extent = " for a part of the run" if any(rates) else ""
        return None, f"Off (checks=0){extent}: nothing but the rules vouches for the gradients."
    checked = {int(check["check"]) for check in checks}
    last = f"the last at step {max(checked)}" if checks else "none was due yet"
    return bool(checks) or None, (
        f"{len(checks)} passed, {last}, at {rates[-1]:.3g} of the steps; "
        f"{found.num_steps - len(checked)} steps were not checked"
    )


def _notes(found: Verification, plan: PrivacyPlan) -> Result:
    """What a check could not see, what looked suspicious, what epsilon does not cover."""
    parts = [f"{name}: {value}" for name, value in found.notes if name not in _NUMBERS]
    if found.unprotected:
        parts.append(f"epsilon does not cover {', '.join(found.unprotected)}, which were logged")
    return (None, "; ".join(parts)) if parts else (True, "none")


def _seed(found: Verification, plan: PrivacyPlan) -> Result:
    """Whether the noise can be drawn again by a reader of the plan."""
    if plan.seed is None:
        return True, "fresh bits of the operating system for each release, stored nowhere"
    return False, (
        f"Noise and batches come from seed={plan.seed}: whoever reads the plan can take the noise "
        "away. Such a run is for tests and comparisons only."
    )


_NUMBERS = ("unprotected", "checks", "views")  # notes that `_notes` does not list as they are
_CHECKS: dict[str, Callable[[Verification, PrivacyPlan], Result]] = {
    "last line is whole": _last_line,
    "record covers the plan": _coverage,
    "segments": _segments,
    "epsilon by PLD": partial(_epsilon, accountant="pld"),
    "epsilon by RDP": partial(_epsilon, accountant="rdp"),
    "accountants agree": _agreement,
    "epsilon is within its target": _target,
    "exactness was checked": _checks,
    "notes": _notes,
    "noise is secret": _seed,
}
