# SPDX-License-Identifier: Apache-2.0
"""Options, errors and output that several commands share."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Column, Table
from typer import Option

from dualdp import _validate, mechanisms
from dualdp.accountants.solve import Setting, get_epsilon

NoiseMultiplier = Annotated[float, Option(help="Noise standard deviation / max_grad_norm.")]
Json = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]

#: Neighboring relation -> the two data sets that it compares, for a unit of privacy.
RELATIONS = {
    "add_or_remove": "the data with and without any one {}",
    "replace": "the data with any one {} and with another in its place",
    "zero_out": "the data with any one {} and with an empty one in its place",
}
NEIGHBORS = f"One of {', '.join(RELATIONS)}."
SAMPLERS = f"One of {', '.join(sorted(mechanisms.SAMPLERS))}."
#: Name of a number that `show` prints -> its meaning.
MEANINGS = {
    "protects": "epsilon is that of any one of these",
    "target_epsilon": "what was asked for; epsilon is not above it",
    "delta": "probability left out of that comparison; below 1 / examples",
    "noise_multiplier": "noise standard deviation / max_grad_norm",
    "sample_rate": "expected batch size / number of examples",
    "num_steps": "noisy gradient sums that are released",
    "accountant": "pld and rdp give upper bounds, pld the smaller",
    "sampler": "the run must draw its batches in this way",
}
#: Number of a run -> what to do where no option tells it.
MISSING = {
    "sample_rate": "The sampling rate is missing. Give --sample-rate, or --num-examples and "
    "--batch-size.",
    "num_steps": "The length of the run is unclear. Give one of --steps and --epochs.",
}


@dataclass(frozen=True)
class Run:
    """Equal steps; the fields are the options that `epsilon` and `calibrate` share."""

    delta: Annotated[float, Option(help="The delta of (epsilon, delta).")]
    sample_rate: Annotated[float | None, Option(help="Batch size / number of examples.")] = None
    steps: Annotated[int | None, Option(help="Number of noise releases.")] = None
    num_examples: Annotated[int | None, Option(help="Examples, instead of a rate.")] = None
    batch_size: Annotated[int | None, Option(help="Expected, with --num-examples.")] = None
    epochs: Annotated[float | None, Option(help="Passes over the data, not --steps.")] = None
    accountant: Annotated[str, Option(help="pld, or rdp.")] = "pld"
    sampler: Annotated[str, Option(help=SAMPLERS)] = "poisson"
    neighboring_relation: Annotated[str, Option("--relation", help=NEIGHBORS)] = "add_or_remove"
    group_size: Annotated[int, Option(help="Most examples of a user, where rows are drawn.")] = 1
    max_batch_size: Annotated[int | None, Option(help="Cut of truncated_poisson.")] = None

    @property
    def setting(self) -> dict[str, Any]:
        """Arguments of `get_epsilon` and of its inverses."""
        return {name: it for name, it in vars(self).items() if name in Setting.__annotations__}

    def numbers(self, noise_multiplier: float | None, num_missing: int = 0) -> dict[str, Any]:
        """Return noise multiplier, rate and steps, of which `num_missing` may be None."""
        rate, steps, sizes = self.sample_rate, self.steps, (self.num_examples, self.batch_size)
        if rate is not None and self.batch_size is not None:
            raise ValueError("--sample-rate and --batch-size both say the rate. Give one of them.")
        if None not in sizes:
            examples = _validate.integer("num_examples", self.num_examples, minimum=1)
            rate = _validate.integer("batch_size", self.batch_size, minimum=1) / examples
        if self.epochs is not None:
            if steps is not None:
                raise ValueError(MISSING["num_steps"])
            if self.num_examples is None or self.batch_size is None:
                raise ValueError("--epochs needs --num-examples and --batch-size. Or give --steps.")
            steps = mechanisms.num_steps_of(
                epochs=self.epochs, num_examples=self.num_examples, batch_size=self.batch_size
            )
        found = {"noise_multiplier": noise_multiplier, "sample_rate": rate, "num_steps": steps}
        missing = [name for name, value in found.items() if value is None]
        if len(missing) > num_missing:
            raise ValueError(MISSING[missing[-1]])
        return found

    def show(self, numbers: dict[str, Any], *, title: str, as_json: bool, **asked: float) -> None:
        """Print the run with its epsilon as JSON, or as a table with the meaning of each number."""
        with working("Accounting"):
            epsilon = get_epsilon(**numbers, delta=self.delta, **self.setting)
        several = f"user with at most {self.group_size} examples"
        protects = "example" if self.group_size == 1 else several
        record = {"epsilon": epsilon, **asked, "delta": self.delta, **numbers}
        for name in ("accountant", "sampler", "neighboring_relation"):
            record[name] = getattr(self, name)
        record["protects"] = protects
        if as_json:
            typer.echo(json.dumps(record | {"epsilon": finite(epsilon)}, indent=2))
            return
        likely = f"any outcome is at most {factor(epsilon)} times as likely on neighboring data"
        compared = RELATIONS[self.neighboring_relation].format(protects)
        meanings = MEANINGS | {"epsilon": likely, "neighboring_relation": compared}
        table = Table(title=title, show_header=False)
        for name, value in record.items():
            text = f"{value:.6g}" if isinstance(value, float) else str(value)
            table.add_row(name, text, meanings[name])
        Console().print(table)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose first argument, a dataclass, is made of one option for each field."""
    first, *own = inspect.signature(command, eval_str=True).parameters.values()
    fields = inspect.signature(first.annotation, eval_str=True).parameters

    @wraps(command)
    def called(**given: Any) -> None:
        command(first.annotation(**{name: given.pop(name) for name in fields}), **given)

    options = [it.replace(kind=it.KEYWORD_ONLY) for it in (*own, *fields.values())]
    called.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return called


def working(title: str) -> Status:
    """Return a context that shows on a terminal that work goes on."""
    return Console(stderr=True).status(f"{title} ...")


def columns(*names: str, words: int = 0) -> list[Column]:
    """Return the columns of a table, the first `words` for words and the others for numbers."""
    left = [Column(name, no_wrap=True) for name in names[:words]]
    return left + [Column(name, justify="right") for name in names[words:]]


def made(option: str, name: str) -> Any:
    """Return what the user's function "module:function" returns; without arguments."""
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{option}={name!r} names no function ({error}). Expected package.module:function, "
            "found from the working directory."
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    _validate.takes(f"{option}={name!r}", function, "no arguments")
    return function()


def factor(epsilon: float) -> str:
    """Return e^epsilon as text, rounded up to four digits.

    >>> factor(1.51564), factor(4118.4), factor(math.inf)
    ('4.553', 'e^4119', 'inf')
    """
    if epsilon > 700:
        return "inf" if epsilon == math.inf else f"e^{math.ceil(epsilon)}"
    exact = math.exp(epsilon)
    unit = 10.0 ** (math.floor(math.log10(exact)) - 3)
    return f"{math.ceil(exact / unit) * unit:.4g}"


def finite(value: float) -> float | None:
    """Return the number, or None for one that JSON does not know."""
    return value if math.isfinite(value) else None
