# SPDX-License-Identifier: Apache-2.0
"""Tables of `dualdp calibrate --table`: runs of one (epsilon, delta) beside each other.

A table is computed and reads no data, but for the counts of rows of `units`, which are private.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from dualdp import PrivacyPlan, _validate, correlated, get_noise_multiplier
from dualdp.mechanisms import num_steps_of

ENOUGH = 1.25  # times the noise of full batches: a larger batch hardly helps
HALVINGS = 10  # of the data set, down to the smallest batch size
GROUPS = (1, 2, 4, 8, 16, 32, 64)  # rows of a user; the noise for a larger group takes seconds
#: (family, its size, sampler): kinds of correlated noise.
CANDIDATES = (
    *(("window", size, "fixed_order") for size in (2, 4, 8, 16)),
    *(("band", size, "cyclic_poisson") for size in (4, 8, 16, 32)),
    ("blt", 3, "fixed_order"),
)


@dataclass(frozen=True)
class Run:
    """What all lines of a table have in common."""

    target_epsilon: float
    delta: float
    num_examples: int
    neighboring_relation: str = "add_or_remove"
    accountant: str = "pld"

    def noise_multiplier(self, sample_rate: float, num_steps: int, group_size: int = 1) -> float:
        """Return the noise multiplier of one line under Poisson sampling."""
        return get_noise_multiplier(
            target_epsilon=self.target_epsilon,
            target_delta=self.delta,
            sample_rate=sample_rate,
            num_steps=num_steps,
            accountant=self.accountant,
            neighboring_relation=self.neighboring_relation,
            group_size=group_size,
        )


@dataclass(frozen=True)
class Comparison:
    """Lines with one number or word for each column, and a sentence about them."""

    title: str
    caption: str
    columns: tuple[str, ...]
    lines: list[tuple[Any, ...]]
    verdict: str

    def show(self, *, as_json: bool) -> None:
        """Print the table, or JSON with one object for each line."""
        if as_json:
            lines = [dict(zip(self.columns, line, strict=True)) for line in self.lines]
            typer.echo(json.dumps({"lines": lines, "verdict": self.verdict}, indent=2))
            return
        table = Table(title=self.title, caption=self.caption)
        for name in self.columns:
            table.add_column(name, justify="right")
        for line in self.lines:
            table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in line))
        Console().print(table)
        typer.echo(self.verdict)


def batch_sizes(run: Run, epochs: Sequence[float]) -> Comparison:
    """Compare batch sizes for numbers of epochs: noise of a step, of the run, and against full.

    `relative` is the noise of a step over that of a step on all the data in a run of as many
    steps. It is near 1 where the noise multiplier is large, and grows as 1 / sqrt(batch size)
    where that hardly falls any more.

    Source: Sander et al. 2023 (arXiv 2210.03403): at large noise multipliers epsilon depends on
    (sample_rate / noise_multiplier) sqrt(num_steps) alone.
    """
    examples = run.num_examples
    if run.delta * examples >= 1:
        raise ValueError(
            f"delta={run.delta:g} is not below 1 / num_examples = {1 / examples:.3g}: an example "
            "published at random is within it, so that small batches would seem to need little "
            "noise. Expected a smaller delta."
        )
    powers = (1 << i for i in range(examples.bit_length()))
    sizes = sorted({n for n in powers if n >= examples / (1 << HALVINGS)} | {examples})
    full = run.noise_multiplier(1.0, 1) / examples  # of one step; as the root of their number
    lines, enough = [], dict[float, int]()
    for length in epochs:
        for size in sizes:
            steps = num_steps_of(epochs=length, num_examples=examples, batch_size=size)
            noise = run.noise_multiplier(size / examples, steps)
            relative = noise / size / (full * math.sqrt(steps))
            if relative <= ENOUGH:
                enough.setdefault(length, size)
            of_step, of_run = noise / size, noise / size * math.sqrt(steps)
            lines.append((length, size, steps, noise, of_step, of_run, relative, size * steps))
    said = [f"{enough.get(length, 'none of these')} at {length:g} epochs" for length in epochs]
    return Comparison(
        f"Batch sizes at epsilon = {run.target_epsilon:g}, delta = {run.delta:g}",
        "noise: in the averaged gradient, per coordinate, for max_grad_norm = 1",
        (
            "epochs",
            "batch size",
            "steps",
            "noise multiplier",
            "noise",
            "of run",
            "relative",
            "gradients",
        ),
        lines,
        f"Smallest batch size with at most {ENOUGH:g} times the noise of full batches: "
        f"{', '.join(said)}. Smaller ones have clearly more, larger ones hardly less.",
    )


def noise(run: Run, batch_size: int, num_steps: int) -> Comparison:
    """Compare independent and correlated noise for the same data, batches, steps and epsilon.

    `error` is the root mean square over the steps of the noise in the sum of all updates so far,
    per coordinate: for SGD with learning rate 1 the distance from the model without noise.
    """
    batches = run.num_examples // batch_size
    found: list[tuple[str, str, Any]] = [("independent", "poisson", None)]
    for family, size, sampler in CANDIDATES:
        is_cyclic = sampler == "cyclic_poisson"
        if size > num_steps or (is_cyclic and size * batch_size > run.num_examples):
            continue
        sizes: dict[str, Any] = {"buffers" if family == "blt" else "bands": size}
        if not is_cyclic:  # columns of a band do not overlap under cyclic Poisson sampling
            sizes |= {"min_separation": max(batches, 1), "max_participations": None}
        strategy = correlated.optimise(family=family, num_steps=num_steps, **sizes)
        found.append((f"{family} of {size}", sampler, strategy))
    lines = []
    for name, sampler, kind in found:
        plan = PrivacyPlan.calibrate(
            target_epsilon=run.target_epsilon,
            delta=run.delta,
            num_examples=run.num_examples,
            expected_batch_size=batch_size,
            num_steps=num_steps,
            max_grad_norm=1.0,
            sampler=sampler,
            correlation=kind,
            min_separation=len(kind.weights) if sampler == "cyclic_poisson" else None,
            accountant=run.accountant,
            neighboring_relation=run.neighboring_relation,
        )
        squared = (kind or correlated.identity()).mean_error(num_steps)
        error = plan.draw_stddev(0, 1.0) * math.sqrt(squared) / batch_size
        lines.append((name, sampler, plan.noise_multiplier_at(0), error, error))
    first = lines[0][3]
    lines = sorted(((*line[:4], line[4] / first) for line in lines), key=lambda line: line[3])
    name, sampler, _, _, ratio = lines[0]
    said = "No correlated noise here is clearly less than DP-SGD's."
    if ratio < 0.97:
        said = f"The {name} with sampler={sampler!r}: {1 - ratio:.0%} less noise than DP-SGD."
    return Comparison(
        f"Noise at epsilon = {run.target_epsilon:g}, delta = {run.delta:g}",
        "error: noise in the model, per coordinate, for max_grad_norm = 1 and learning rate 1",
        ("noise", "sampler", "noise multiplier", "error", "to DP-SGD"),
        lines,
        said,
    )


def units(run: Run, rows_per_step: float, num_steps: int, counts: Any) -> Comparison:
    """Compare drawing users with drawing rows, of which a user keeps at most G.

    Rows that agree are copies of each other; rows that differ are as different as those of two
    users, so that their average is smaller by the root of their number. The truth lies between.

    Args:
        run: its `num_examples` is not used.
        rows_per_step: expected number of rows of a step.
        num_steps: number of releases.
        counts: (users,) integers, rows of each user.

    Source: Charles et al. 2024 (arXiv 2407.07737), section 4.
    """
    rows = np.asarray(counts)
    if rows.ndim != 1 or rows.dtype.kind not in "iu" or rows.min(initial=1) < 0 or not rows.sum():
        raise ValueError(
            f"counts is {_validate.kind(counts)}. Expected integers >= 0, the number of rows of "
            "each user, not all 0."
        )
    lines: list[tuple[Any, ...]] = []
    for size in [g for g in GROUPS if g < 2 * int(rows.max())]:
        kept = np.minimum(rows, size)
        rate = rows_per_step / float(kept.sum())
        if rate > 1:
            continue
        drawn, share = rate * len(rows), float(kept.sum() / rows.sum())
        sigma = run.noise_multiplier(rate, num_steps)
        apart = math.sqrt(float(kept[kept > 0].mean()))
        lines.append(("user", size, sigma, sigma / drawn / apart, sigma / drawn, 1.0))
        sigma = run.noise_multiplier(rate, num_steps, group_size=size)
        mean = sigma / rows_per_step
        lines.append(("example", size, sigma, mean, mean, share))
    if not lines:
        raise ValueError(
            f"{rows_per_step:g} rows a step are more than the users have. Expected a smaller batch."
        )
    lines.sort(key=lambda line: line[4])
    differ, agree = min(lines, key=lambda line: line[3]), lines[0]
    say: Callable[[Any], str] = lambda line: f"draw {line[0]}s, at most {line[1]} rows of a user"  # noqa: E731
    said = f"{say(differ)} if the rows of a user differ; {say(agree)} if they are alike."
    return Comparison(
        f"Users at epsilon = {run.target_epsilon:g}, delta = {run.delta:g}",
        "noise in the mean gradient; computed from private counts: not for publication",
        ("drawn", "rows", "noise multiplier", "if rows differ", "if they agree", "rows kept"),
        lines,
        said.capitalize(),
    )
