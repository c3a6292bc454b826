# SPDX-License-Identifier: Apache-2.0
"""`dualdp verify`: check a ledger, and write a one-page report for a privacy officer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dualdp import PrivacyPlan, _validate
from dualdp.ledger.verify import Verification
from dualdp.ledger.verify import verify as run_verify
from dualdp_tools.cli.common import RELATIONS, Json, factor, finite, working

LedgerFile = Annotated[Path, typer.Argument(help="Ledger that a run wrote.")]
Page = Annotated[Path | None, typer.Option("--report", help="Write one page of Markdown.")]
AllowSeed = Annotated[bool, typer.Option(help="Let a run pass whose noise came from a seed.")]
PROTECTED = {"example": "example", "user": "user with all rows"}  # by the unit of a plan
_WORDS = {True: "ok", False: "FAILED", None: "note"}


def verify(
    ledger: LedgerFile, report: Page = None, allow_seed: AllowSeed = False, as_json: Json = False
) -> None:
    """Check a ledger's chain, recompute its epsilon, and report; exit code 1 on any failure."""
    with working("Checking"):
        found = run_verify(ledger, allow_seed=allow_seed)
    if report is not None:
        _validate.new_file("report", report)
        report.write_text(to_markdown(found), encoding="utf-8")
    typer.echo(json.dumps(_data(found), indent=2) if as_json else _text(found))
    if not found.passed:
        raise typer.Exit(1)


def _text(found: Verification) -> str:
    """Text of all findings, one line each, the verdict, and what its epsilon means."""
    lines = [f"{_WORDS[it.passed]:8s}{it.name:30s}{it.detail}" for it in found.findings]
    return "\n".join([*lines, "", verdict(found), *meaning(found)[:2]])


def _data(found: Verification) -> dict[str, Any]:
    """Findings and verdict as plain data."""
    names = ("passed", "failures", "covers_the_plan", "is_whole")
    return {name: getattr(found, name) for name in names} | {
        "verdict": verdict(found),
        "segments": [[s.start, s.stop, s.noise_scale] for s in found.segments],
        "epsilons": {name: finite(value) for name, value in found.epsilons.items()},
        "findings": [asdict(finding) for finding in found.findings],
    }


def verdict(found: Verification) -> str:
    """Return the verdict: what holds, and what the ledger does not show."""
    plan = found.plan
    failed = f"NOT verified: {', '.join(found.failures)}."
    if plan is None:
        return failed
    whom = f"It protects any one {PROTECTED[plan.unit]}."
    epsilon = f"epsilon = {found.epsilon:.4f}{found.secrecy}. {whom}"
    if found.passed and found.is_whole:
        return f"The ledger is whole and true: {epsilon}"
    planned = "" if plan.num_steps is None else f" of {plan.num_steps} planned"
    true = f"What the ledger says is true, for the {found.num_steps}{planned} steps that it covers"
    said = ["The ledger is CUT SHORT of its plan."] if found.covers_the_plan is False else []
    said += [f"{true}: {epsilon}" if found.passed else failed]
    if not found.covers_the_plan:
        said.append("It does not show whether the run stopped there or went on.")
    return " ".join([*said, *(["Its last line is cut off."] if found.torn else [])])


def facts(found: Verification, plan: PrivacyPlan) -> dict[str, str]:
    """Return name -> value of the released quantities and settings, from the ledger alone."""
    releases, unit = found.releases, PROTECTED[plan.unit]
    bounds: Iterable[float] = map(plan.max_grad_norm_at, range(found.num_steps))
    if plan.is_adaptive:
        bounds = (release[3] for release in releases)
    return {
        "Released": f"{len(releases)} noisy sums of clipped gradients, and all made of them",
        f"{plan.unit.capitalize()}s": f"{plan.num_examples}; one {unit} is what is protected",
        "Relation": f"{plan.neighboring_relation}: {_neighbors(plan)}",
        "Sampler": f"{plan.sampler}, sample rate {_range(r[2] for r in releases)}",
        "Clipping": f"{plan.clipping}, max_grad_norm {_range(bounds)}",
        "Noise": f"{plan.noise}, accounted multiplier {_range(r[1] for r in releases)}",
        "Code": f"dualdp {found.records[0].get('version')}, accountant {plan.accountant}",
    }


def _neighbors(plan: PrivacyPlan) -> str:
    """Words for the two data sets that epsilon compares."""
    return RELATIONS[plan.neighboring_relation].format(PROTECTED[plan.unit])


def _range(values: Iterable[float]) -> str:
    """A constant value, or the range of a schedule."""
    ends = sorted(map(float, values))
    return " to ".join(dict.fromkeys(f"{value:.6g}" for value in ends[:1] + ends[-1:])) or "none"


def meaning(found: Verification) -> list[str]:
    """Return paragraphs about the meaning and the limits of epsilon."""
    if found.plan is None or not math.isfinite(found.epsilon):
        return ["No statement about privacy can be made from this record."]
    epsilon, delta = found.epsilon, found.plan.delta
    odds = math.exp(min(epsilon, 700.0))
    best = min(1.0, (odds + delta) / (1 + odds))
    return [
        *([f"All of this would hold{found.secrecy}."] if found.secrecy else []),
        f"Compare {_neighbors(found.plan)}. Whatever is done with the "
        f"releases on record, the probability of any outcome differs by a factor of at most "
        f"e^{epsilon:.4f} = {factor(epsilon)}, apart from a probability of {delta:g}.",
        f"Someone who knows everything else and is to tell the two apart, where a fair coin chose, "
        f"is right with probability at most {best:.1%} (guessing is 50 %).",
        f"A person with several {found.plan.unit}s has less protection. Choices made by looking at "
        "the data (which model, which hyper-parameters, when to stop) are not in the number, nor "
        "is what was published besides: statistics, examples, logs.",
        "The record is kept by those who trained. Its chain of hashes shows edits of a copy, not a "
        "record that was written anew, and not lines that are missing at its end.",
    ]


def to_markdown(found: Verification) -> str:
    """Return the report as Markdown."""
    known = {} if found.plan is None else facts(found, found.plan)
    lines = ["# Privacy record", "", f"**{verdict(found)}**", "", "## What was released", ""]
    lines += [f"- {name}: {value}" for name, value in known.items()]
    lines += ["", "## What the number means", "", "\n\n".join(meaning(found)), ""]
    lines += ["## What was checked", "", "| | check | finding |", "|---|---|---|"]
    for finding in found.findings:
        detail = finding.detail.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {_WORDS[finding.passed]} | {finding.name} | {detail} |")
    return "\n".join([*lines, ""])
