# SPDX-License-Identifier: Apache-2.0
"""`dualdp verify`: check a ledger, and write a one-page report for a privacy officer."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dualdp import PrivacyPlan, _validate
from dualdp.ledger.verify import Finding, Verification
from dualdp.ledger.verify import verify as run_verify
from dualdp_tools.cli.common import PROTECTED, RELATIONS, Json, factor, working

LedgerFiles = Annotated[list[Path], typer.Argument(help="Ledgers that runs wrote.")]
Page = Annotated[Path | None, typer.Option("--report", help="Write one page, FILE.md.")]
AllowSeed = Annotated[bool, typer.Option(help="Let a run pass whose noise came from a seed.")]

_WORDS = {True: "ok", False: "FAILED", None: "note"}


def verify(
    ledger: LedgerFiles, report: Page = None, allow_seed: AllowSeed = False, as_json: Json = False
) -> None:
    """Check ledgers' chains, recompute their epsilon, and report; exit code 1 on any failure.

    Ledgers of several runs on the same data add up: each epsilon is that of its run alone.
    """
    if report is not None and report.suffix != ".md":
        raise ValueError(f"report={str(report)!r} has no known form. Expected a file .md.")
    if report is not None and len(ledger) > 1:
        raise ValueError(f"report came with {len(ledger)} ledgers. Expected one of them.")
    if report is not None:
        _validate.new_file("report", report)
    several = []
    with working("Checking", len(ledger)) as advance:
        for path in ledger:
            several.append(run_verify(path, allow_seed=allow_seed))
            advance()
    if report is not None:
        report.write_text(to_markdown(several[0]), encoding="utf-8")
    if as_json:
        data = {found.source: _data(found) for found in several}
        shown = {"ledgers": data} if len(several) > 1 else _data(several[0])
        typer.echo(json.dumps(shown, indent=2))
    elif len(several) == 1:
        typer.echo(_text(several[0]))
    else:
        typer.echo("\n".join(f"{found.source}\n{_text(found)}\n" for found in several))
    if not all(found.passed for found in several):
        raise typer.Exit(1)


def _line(finding: Finding) -> str:
    """Text of one finding."""
    return f"{_WORDS[finding.passed]:8s}{finding.name:30s}{finding.detail}"


def _text(found: Verification) -> str:
    """Text of all findings, one line each, the verdict, and what its epsilon means."""
    return "\n".join([*map(_line, found.findings), "", verdict(found), *meaning(found)[:2]])


def _data(found: Verification) -> dict[str, Any]:
    """Findings and verdict as plain data."""
    return {
        "passed": found.passed,
        "verdict": verdict(found),
        "covers_the_plan": found.covers_the_plan,
        "is_whole": found.is_whole,
        "segments": [[s.start, s.stop, s.noise_scale] for s in found.segments],
        "failures": found.failures,
        "epsilons": {name: _finite(value) for name, value in found.epsilons.items()},
        "findings": [asdict(finding) for finding in found.findings],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def verdict(found: Verification) -> str:
    """Return the verdict: what holds, and what the ledger does not show."""
    plan = found.plan
    if plan is None:
        return f"NOT verified: {', '.join(found.failures)}."
    epsilon = (
        f"epsilon = {found.epsilon:.4f}{found.secrecy}. It protects any one {PROTECTED[plan.unit]}."
    )
    if found.passed and found.is_whole:
        return f"The ledger is whole and true: {epsilon}"
    planned = "" if plan.num_steps is None else f" of {plan.num_steps} planned"
    covered = f"the {found.num_steps}{planned} steps that it covers"
    if not found.passed:
        said = [f"NOT verified: {', '.join(found.failures)}."]
    else:
        said = [f"What the ledger says is true, for {covered}: {epsilon}"]
    if found.covers_the_plan is False:
        said.insert(0, "The ledger is CUT SHORT of its plan.")
        said.append("It does not show whether the run stopped there or went on.")
    elif found.covers_the_plan is None:
        said.append("It does not show whether there were more: its plan has no end.")
    if found.torn:
        said.append("Its last line is cut off.")
    return " ".join(said)


def facts(found: Verification) -> list[tuple[str, str]]:
    """Return (name, value) of the released quantities and settings, from the ledger alone."""
    plan, releases = found.plan, found.releases
    if plan is None:
        return []
    header = found.records[0]
    steps = [step for segment in found.segments for step in range(segment.start, segment.stop)]
    bounds = [[plan.max_grad_norm_at(step)] for step in steps] if not plan.is_adaptive else []
    norm = _range(releases, 3) if plan.is_adaptive else _range(bounds, 0)
    unprotected = ", ".join(found.unprotected) or "none"
    planned = "an open-ended plan" if plan.num_steps is None else f"{plan.num_steps} planned steps"
    return [
        ("Released", f"{len(releases)} noisy sums of clipped gradients, and all made of them"),
        ("Covered", f"{found.num_steps} steps of {planned}"),
        (
            f"{plan.unit.capitalize()}s",
            f"{plan.num_examples}; one {PROTECTED[plan.unit]} is what is protected",
        ),
        ("Relation", f"{plan.neighboring_relation}: {_neighbors(plan)}"),
        ("Sampler", f"{plan.sampler}, sample rate {_range(releases, 2)}"),
        ("Clipping", f"{plan.clipping}, max_grad_norm {norm}"),
        ("Noise", f"{plan.noise}, accounted multiplier {_range(releases, 1)}"),
        (
            "Secrecy",
            f"seed={plan.seed}: none" if plan.seed is not None else "fresh bits, not stored",
        ),
        ("Code", f"dualdp {header.get('version')}, accountant {plan.accountant}"),
        ("Logged without protection", unprotected),
    ]


def _neighbors(plan: PrivacyPlan) -> str:
    """Words for the two data sets that epsilon compares."""
    return RELATIONS[plan.neighboring_relation].format(PROTECTED[plan.unit])


def _range(releases: list[list[Any]], column: int) -> str:
    """A constant value of a column, or the range of a schedule."""
    values = [float(release[column]) for release in releases]
    if not values:
        return "none"
    low, high = min(values), max(values)
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"


def meaning(found: Verification) -> list[str]:
    """Return paragraphs about the meaning and the limits of epsilon."""
    if found.plan is None or not math.isfinite(found.epsilon):
        return ["No statement about privacy can be made from this record."]
    epsilon, delta = found.epsilon, found.plan.delta
    seeded = [f"All of this would hold{found.secrecy}."] if found.secrecy else []
    odds = math.exp(min(epsilon, 700.0))
    best = min(1.0, (odds + delta) / (1 + odds))
    return [
        *seeded,
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
    lines = ["# Privacy record", "", f"**{verdict(found)}**", "", "## What was released", ""]
    lines += [f"- {name}: {value}" for name, value in facts(found)]
    lines += ["", "## What the number means", ""]
    lines += [text for paragraph in meaning(found) for text in (paragraph, "")]
    lines += ["## What was checked", "", "| | check | finding |", "|---|---|---|"]
    for finding in found.findings:
        detail = finding.detail.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {_WORDS[finding.passed]} | {finding.name} | {detail} |")
    return "\n".join([*lines, ""])
