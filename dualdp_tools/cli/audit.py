# SPDX-License-Identifier: Apache-2.0
"""`dualdp audit`: an empirical lower bound on epsilon from canaries, against the claimed one."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from typing import Annotated

import typer
from typer import Option

from dualdp import _validate
from dualdp.audit.canaries import Audit
from dualdp.audit.canaries import audit as run_audit
from dualdp.plan.plan import PrivacyPlan
from dualdp.port import STACKS
from dualdp.testing import PrivateStep, Report, check_private_step
from dualdp_tools.cli.common import Json, NoiseMultiplier, made, working

OwnStep = Annotated[str | None, Option(help="module:function that returns your PrivateStep.")]


def audit(
    stack: Annotated[str, Option(help="torch or jax: our engine, on a small model.")] = "torch",
    step: OwnStep = None,
    noise_multiplier: NoiseMultiplier = 1.0,
    steps: Annotated[int, Option(help="Noise releases of a run.")] = 100,
    canaries: Annotated[int, Option(help="Inserted, each by a fair coin.")] = 1000,
    noise: Annotated[str, Option(help="fast, portable or secure.")] = "fast",
    seed: Annotated[int | None, Option(help="Fixes coins and run.")] = None,
    check: Annotated[bool, Option("--check", help="Also run check_private_step.")] = False,
    as_json: Json = False,
) -> None:
    """Bound epsilon from below by canaries; exit code 1 if the claim is refuted."""
    with working("Training with canaries and looking at what comes out"):
        tested = _ours(stack, noise_multiplier, noise) if step is None else _own(step)
        found = run_audit(tested, num_steps=steps, num_canaries=canaries, seed=seed)
        report = check_private_step(tested, seed=seed) if check else None
    if as_json:
        checks = {} if report is None else {"checks": [asdict(it) for it in report.checks]}
        typer.echo(json.dumps(asdict(found) | checks, indent=2))
    else:
        typer.echo(_text(found, report))
    if found.is_refuted or (report is not None and not report.passed):
        raise typer.Exit(1)


def _ours(stack: str, noise_multiplier: float, noise: str) -> PrivateStep:
    """Engine of this package on a small classifier."""
    plan = PrivacyPlan(
        num_examples=100,
        expected_batch_size=10,
        num_steps=1,
        noise_multiplier=_validate.positive("noise_multiplier", noise_multiplier),
        max_grad_norm=1.0,
        delta=1e-5,
        noise=noise,
    )
    importlib.import_module(f"dualdp.{_validate.choice('stack', stack, STACKS)}")
    step: PrivateStep = importlib.import_module(f"dualdp_{stack}.testing").small_step(plan)
    return step


def _own(name: str) -> PrivateStep:
    """`PrivateStep` returned by the user's function "module:function"."""
    step: PrivateStep = made("step", name)
    words = ("claims", "num_examples", "releases", "events")
    missing = [word for word in words if not hasattr(step, word)]
    if missing:
        raise TypeError(
            f"step={name!r} returned a {type(step).__name__} without {', '.join(missing)}. "
            "Expected a dualdp.testing.PrivateStep."
        )
    return step


def _text(found: Audit, report: Report | None) -> str:
    """Text of the bound and the verdict, one line each."""
    lines = [
        f"claimed: epsilon = {found.claimed_epsilon:.3f} of one example at "
        f"delta = {found.delta:g}, {found.num_steps} steps",
        f"seen: epsilon is at least {found.epsilon:.3f} with {found.confidence:.0%} confidence",
        f"At most one correct step in {1 / found.false_alarm:,.0f} is refuted.",
        "",
        found.verdict,
    ]
    if not found.is_refuted:
        lines.append("That proves nothing: most faults do not show in canaries; see --check.")
    return "\n".join(lines if report is None else [*lines, "", str(report)])
