# SPDX-License-Identifier: Apache-2.0
"""Tables of `dualdp calibrate --table`: runs of one (epsilon, delta) beside each other.

A table is computed and reads no data, but for the counts of rows of `units`, which are private.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from dualdp import PrivacyPlan, _validate, correlated, get_noise_multiplier
from dualdp.mechanisms import num_steps_of
from dualdp_tools.cli.common import Run, columns

ENOUGH = 1.25  # times the noise of full batches: a larger batch hardly helps
HALVINGS = 10  # of the data set, down to the smallest batch size
GROUPS = (1, 2, 4, 8, 16, 32, 64)  # rows of a user; the noise for a larger group takes seconds
#: (family, its size, sampler): kinds of noise, DP-SGD's first.
CANDIDATES = (
    ("independent", 1, "poisson"),
    *(("window", size, "fixed_order") for size in (2, 4, 8, 16)),
    *(("band", size, "cyclic_poisson") for size in (4, 8, 16, 32)),
    ("blt", 3, "fixed_order"),
)


class Comparison(NamedTuple):
    """Lines with one number or word for each column, and a sentence about them."""

    caption: str
    lines: list[dict[str, Any]]
    verdict: str

    def show(self, *, title: str, as_json: bool) -> None:
        """Print the table, or JSON with one object for each line."""
        if as_json:
            typer.echo(json.dumps({"lines": self.lines, "verdict": self.verdict}, indent=2))
            return
        table = Table(*columns(*self.lines[0]), title=title, caption=self.caption)
        for line in self.lines:
            table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in line.values()))
        Console().print(table)
        typer.echo(self.verdict)


def noise_of(run: Run, target_epsilon: float, sample_rate: float, num_steps: int) -> float:
    """Return the noise multiplier of a line."""
    about: dict[str, Any] = {"sample_rate": sample_rate, "num_steps": num_steps, **run.setting}
    return get_noise_multiplier(target_epsilon=target_epsilon, target_delta=run.delta, **about)


def batch_sizes(run: Run, target_epsilon: float) -> Comparison:
    """Compare batch sizes for numbers of epochs: noise of a step, of the run, and against full.

    `relative` is the noise of a step over that of a step on all the data in a run of as many
    steps. It is near 1 where the noise multiplier is large, and grows as 1 / sqrt(batch size)
    where that hardly falls any more.

    Source: Sander et al. 2023 (arXiv 2210.03403): at large noise multipliers epsilon depends on
    (sample_rate / noise_multiplier) sqrt(num_steps) alone.
    """
    examples = run.num_examples
    if examples is None or run.batch_size is not None or run.steps is not None:
        raise ValueError(
            "--table batch-sizes compares batch sizes. Expected --num-examples, --epochs (1, "
            "10 and 100 if left out), and no --batch-size or --steps."
        )
    if run.delta * examples >= 1:
        raise ValueError(
            f"delta={run.delta:g} is not below 1 / num_examples = {1 / examples:.3g}: an example "
            "published at random is within it, so that small batches would seem to need little "
            "noise. Expected a smaller delta."
        )
    powers = (1 << i for i in range(examples.bit_length()))
    sizes = sorted({n for n in powers if n >= examples / (1 << HALVINGS)} | {examples})
    # Of one step on all the data; that of more steps grows as the root of their number.
    full = noise_of(run, target_epsilon, 1.0, 1) / examples
    lines: list[dict[str, Any]] = []
    enough = []
    for epochs in [1.0, 10.0, 100.0] if run.epochs is None else [run.epochs]:
        for size in sizes:
            steps = num_steps_of(epochs=epochs, num_examples=examples, batch_size=size)
            multiplier = noise_of(run, target_epsilon, size / examples, steps)
            of_step = multiplier / size
            line = {"epochs": epochs, "batch size": size, "steps": steps}
            line |= {"noise multiplier": multiplier, "noise": of_step}
            line |= {"of run": of_step * math.sqrt(steps)}
            lines.append(line | {"relative": of_step / (full * math.sqrt(steps))})
        close = [it["batch size"] for it in lines[-len(sizes) :] if it["relative"] <= ENOUGH]
        enough.append(f"{min(close, default='none of these')} at {epochs:g} epochs")
    return Comparison(
        "noise: in the averaged gradient, per coordinate, for max_grad_norm = 1",
        lines,
        f"Smallest batch size with at most {ENOUGH:g} times the noise of full batches: "
        f"{', '.join(enough)}. Smaller ones have clearly more, larger ones hardly less.",
    )


def _sizes(run: Run, kind: str) -> tuple[int, int, int]:
    """(examples, batch size, steps) of all lines of a table."""
    if run.num_examples is None or run.batch_size is None:
        raise ValueError(
            f"--table {kind} compares runs of one length. Expected --num-examples, --batch-size, "
            "and --steps or --epochs."
        )
    return run.num_examples, run.batch_size, run.numbers(0.0)["num_steps"]


def noise(run: Run, target_epsilon: float) -> Comparison:
    """Compare independent and correlated noise for the same data, batches, steps and epsilon.

    `error` is the root mean square over the steps of the noise in the sum of all updates so far,
    per coordinate: for SGD with learning rate 1 the distance from the model without noise.
    """
    examples, batch_size, num_steps = _sizes(run, "noise")
    lines: list[dict[str, Any]] = []
    for family, size, sampler in CANDIDATES:
        is_cyclic = sampler == "cyclic_poisson"
        if size > num_steps or (is_cyclic and size * batch_size > examples):
            continue
        sizes: dict[str, Any] = {"buffers" if family == "blt" else "bands": size}
        if not is_cyclic:  # columns of a band do not overlap under cyclic Poisson sampling
            sizes |= {"min_separation": max(examples // batch_size, 1), "max_participations": None}
        name, kind = family, None
        if family != "independent":
            name = f"{family} of {size}"
            kind = correlated.optimise(family=family, num_steps=num_steps, **sizes)
        plan = PrivacyPlan.calibrate(
            target_epsilon=target_epsilon,
            delta=run.delta,
            num_examples=examples,
            expected_batch_size=batch_size,
            num_steps=num_steps,
            max_grad_norm=1.0,
            sampler=sampler,
            correlation=kind,
            min_separation=size if is_cyclic else None,
            accountant=run.accountant,
            neighboring_relation=run.neighboring_relation,
        )
        squared = (kind or correlated.identity()).mean_error(num_steps)
        line = {"noise": name, "sampler": sampler, "noise multiplier": plan.noise_multiplier_at(0)}
        line["error"] = plan.draw_stddev(0, 1.0) * math.sqrt(squared) / batch_size
        lines.append(line | {"to DP-SGD": line["error"] / (lines or [line])[0]["error"]})
    best = min(lines, key=lambda line: line["error"])
    said = "No correlated noise here is clearly less than DP-SGD's."
    if best["to DP-SGD"] < 0.97:
        less = f"{1 - best['to DP-SGD']:.0%} less noise than DP-SGD."
        said = f"The {best['noise']} with sampler={best['sampler']!r}: {less}"
    return Comparison(
        "error: noise in the model, per coordinate, for max_grad_norm = 1 and learning rate 1",
        sorted(lines, key=lambda line: line["error"]),
        said,
    )


def units(run: Run, target_epsilon: float, counts: Path | None) -> Comparison:
    """Compare drawing users with drawing rows, of which a user keeps at most G.

    Rows that agree are copies of each other; rows that differ are as different as those of two
    users, so that their average is smaller by the root of their number. The truth lies between.

    Args:
        run: its `num_examples` only tells the length of an epoch.
        target_epsilon: of every line.
        counts: text file, the number of rows of each user.

    Source: Charles et al. 2024 (arXiv 2407.07737), section 4.
    """
    _, batch_size, num_steps = _sizes(run, "units")
    if counts is None:
        raise ValueError(
            "--table units needs --counts. Expected a text file with the number of rows of each "
            "user."
        )
    with _validate.file_errors("read", counts, "a text file of integers"):
        rows = np.array(counts.read_text().split(), dtype=np.int64)
    if rows.min(initial=1) < 0 or not rows.sum():
        raise ValueError(
            f"{counts} holds no rows, or fewer than 0. Expected integers >= 0, the number of rows "
            "of each user, not all 0."
        )
    lines: list[dict[str, Any]] = []
    most = 2 * int(rows.max())
    for size in [g for g in GROUPS if g < most and np.minimum(rows, g).sum() >= batch_size]:
        kept = np.minimum(rows, size)
        rate = batch_size / float(kept.sum())
        apart, share = math.sqrt(kept[kept > 0].mean()), float(kept.sum() / rows.sum())
        for drawn, group_size in (("user", 1), ("example", size)):
            is_user = drawn == "user"
            drawing = replace(run, group_size=group_size)
            multiplier = noise_of(drawing, target_epsilon, rate, num_steps)
            mean = multiplier / (rate * len(rows) if is_user else batch_size)
            line = {"drawn": drawn, "rows": size, "noise multiplier": multiplier}
            line |= {"if rows differ": mean / apart if is_user else mean, "if they agree": mean}
            lines.append(line | {"rows kept": 1.0 if is_user else share})
    if not lines:
        raise ValueError(
            f"{batch_size} rows a step are more than the users have. Expected a smaller batch."
        )
    lines.sort(key=lambda line: line["if they agree"])
    differ, agree = (
        f"draw {line['drawn']}s, at most {line['rows']} rows of a user"
        for line in (min(lines, key=lambda line: line["if rows differ"]), lines[0])
    )
    return Comparison(
        "noise in the mean gradient; computed from private counts: not for publication",
        lines,
        f"{differ.capitalize()} if the rows of a user differ; {agree} if they are alike.",
    )
