# SPDX-License-Identifier: Apache-2.0
"""`dualdp audit`: an empirical lower bound on epsilon from canaries, against the claimed one."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from dualdp import _validate
from dualdp.audit.canaries import Audit
from dualdp.audit.canaries import audit as run_audit
from dualdp.plan.plan import PrivacyPlan
from dualdp.testing import PrivateStep, Release, Report, check_private_step
from dualdp_tools.cli.common import Json, NoiseMultiplier, made, working

STACKS = ("torch", "jax")


def audit(
    stack: Annotated[
        str, typer.Option(help="torch or jax: our engine, on a small classifier.")
    ] = "torch",
    step: Annotated[
        str | None,
        typer.Option(help="package.module:function that returns a PrivateStep of your own."),
    ] = None,
    noise_multiplier: NoiseMultiplier = 1.0,
    sample_rate: Annotated[float, typer.Option(help="Of the run with canaries.")] = 0.1,
    steps: Annotated[int, typer.Option(help="Noise releases of a run.")] = 100,
    canaries: Annotated[int, typer.Option(help="Inserted, each by a fair coin.")] = 1000,
    delta: Annotated[float, typer.Option(help="At which epsilon is claimed and bounded.")] = 1e-5,
    confidence: Annotated[float, typer.Option(help="Of the lower bound.")] = 0.95,
    noise: Annotated[str, typer.Option(help="fast, portable or secure.")] = "fast",
    seed: Annotated[int | None, typer.Option(help="Fixes coins and run.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Also run check_private_step.")] = False,
    as_json: Json = False,
) -> None:
    """Bound epsilon from below by canaries; exit code 1 if the claim is refuted."""
    with working("Preparing"):
        tested = _own(step) if step is not None else _ours(stack, noise_multiplier, noise)
    with working("Training with canaries", steps) as advance:
        watched: Any = _Watched(tested, advance)
        found = run_audit(
            watched,
            num_steps=steps,
            num_canaries=canaries,
            sample_rate=sample_rate,
            delta=delta,
            confidence=confidence,
            seed=seed,
        )
    report = None
    if check:
        with working("Checking the step"):
            report = check_private_step(tested, seed=seed)
    typer.echo(_json(found, report) if as_json else _text(found, report))
    if found.is_refuted or (report is not None and not report.passed):
        raise typer.Exit(1)


class _Watched:
    """`PrivateStep` that calls `advance` after each release."""

    def __init__(self, step: PrivateStep, advance: Callable[[], None]) -> None:
        self._step, self._advance = step, advance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def releases(self, *arguments: Any, **keywords: Any) -> Iterator[Release]:
        for release in self._step.releases(*arguments, **keywords):
            self._advance()
            yield release


def _ours(stack: str, noise_multiplier: float, noise: str) -> PrivateStep:
    """Engine of this package on a small classifier."""
    _validate.choice("stack", stack, STACKS)
    plan = PrivacyPlan(
        num_examples=100,
        expected_batch_size=10,
        num_steps=1,
        noise_multiplier=_validate.positive("noise_multiplier", noise_multiplier),
        max_grad_norm=1.0,
        delta=1e-5,
        noise=noise,
    )
    try:
        importlib.import_module(f"dualdp.{stack}")
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error
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


def _json(found: Audit, report: Report | None) -> str:
    """Audit and checks as JSON."""
    data = asdict(found)
    if report is not None:
        data["checks"] = [asdict(check) for check in report.checks]
    return json.dumps(data, indent=2)
