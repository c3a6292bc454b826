# SPDX-License-Identifier: Apache-2.0
"""Noise of the averaged gradient against batch size and number of steps, at one budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dualdp import _validate
from dualdp._validate import AccountingError
from dualdp.accountants.solve import get_noise_multiplier
from dualdp.mechanisms import num_steps_of

OPTIONS = ("sampler", "accountant", "neighboring_relation", "group_size")
SAMPLERS = ("poisson", "fixed_size", "shuffle")  # whose bounds hold at any batch size
_ENOUGH = 1.25  # times the noise of full batches: more is clearly worse
_HALVINGS = 10  # of the data set, down to the smallest batch size


class BatchSizeOption(NamedTuple):
    """One batch size for one number of epochs, calibrated to the budget."""

    epochs: float
    batch_size: int  # expected
    num_steps: int
    sample_rate: float
    noise_multiplier: float
    noise: float  # noise_multiplier * C / batch_size, see `BatchSizeComparison`
    noise_of_sum: float  # sqrt(num_steps) * noise
    relative_noise: float  # noise over that of full batches for as many steps
    gradients: int  # batch_size * num_steps, expected number of gradients of single examples


@dataclass(frozen=True)
class BatchSizeComparison:
    """Batch sizes at one (epsilon, delta), by epochs and then by size.

    `noise` is the standard deviation, per coordinate, in the averaged gradient of a step;
    `noise_of_sum` that in the sum of all of them: for SGD with learning rate 1 the distance of a
    coordinate from the model without noise. `relative_noise` compares runs of different lengths:
    the noise of a step over that of a step on all the data, in a run of as many steps and the same
    budget. Full batches have 1. It is near 1 where the noise multiplier is large, and grows as
    1 / sqrt(batch size) where it hardly falls any more.
    """

    options: tuple[BatchSizeOption, ...]
    epsilon: float
    delta: float

    @property
    def smallest_enough(self) -> dict[float, BatchSizeOption | None]:
        """Epochs -> the smallest batch size with a relative noise of at most 1.25, if any."""
        found: dict[float, BatchSizeOption | None] = {o.epochs: None for o in self.options}
        for o in reversed(self.options):
            if o.relative_noise <= _ENOUGH:
                found[o.epochs] = o
        return found

    @property
    def verdict(self) -> str:
        """Sentences: the smallest batch size to take for each number of epochs."""
        sizes = [
            f"{o.batch_size if o else 'none of these'} at epochs={epochs:g}"
            f"{f' (num_steps={o.num_steps})' if o else ''}"
            for epochs, o in self.smallest_enough.items()
        ]
        return (
            f"Smallest batch size with at most {_ENOUGH:g} times the noise of full batches: "
            f"{', '.join(sizes)}. Smaller ones have clearly more, larger ones hardly less."
        )

    def __str__(self) -> str:
        """Return the table and the verdict as text."""
        head = (
            f"{'epochs':>7}{'batch size':>12}{'steps':>9}{'sample rate':>13}"
            f"{'noise multiplier':>18}{'noise':>10}{'of sum':>10}{'relative':>10}{'gradients':>11}"
        )
        lines = [
            f"{o.epochs:>7.4g}{o.batch_size:>12}{o.num_steps:>9}{o.sample_rate:>13.3g}"
            f"{o.noise_multiplier:>18.4g}{o.noise:>10.3g}{o.noise_of_sum:>10.3g}"
            f"{o.relative_noise:>10.2f}{o.gradients:>11.3g}"
            for o in self.options
        ]
        return "\n".join([head, *lines, self.verdict])


def compare_batch_sizes(
    *,
    target_epsilon: float,
    target_delta: float,
    num_examples: int,
    epochs: Any,
    batch_sizes: Any = None,
    max_grad_norm: float = 1.0,
    **options: Any,
) -> BatchSizeComparison:
    """Compare batch sizes at one budget: noise of a step and of the run, steps and gradients.

    It reads no data: the table is as public as `num_examples`.

    Args:
        target_epsilon: float > 0.
        target_delta: float > 0, below 1 / num_examples.
        num_examples: number of examples, or of users where users are drawn.
        epochs: number > 0 of passes over the data, or a sequence of such numbers.
        batch_sizes: sequence of expected batch sizes, integers in [1, num_examples]; None for
            the powers of two from num_examples / 1024, and num_examples.
        max_grad_norm: C > 0, gradient units.
        **options: `sampler=` ("poisson", "fixed_size" or "shuffle"), `accountant=`,
            `neighboring_relation=` and `group_size=` of `get_noise_multiplier`.

    Raises:
        AccountingError: a sampler, relation or group without a bound.
        TypeError, ValueError: an argument of another kind or out of range.

    Guarantees:
        Every option spends at most the budget.  [test_every_batch_size_spends_at_most_the_budget]

    Source: Sander et al. 2023 (arXiv 2210.03403): at large noise multipliers epsilon depends on
    (sample_rate / noise_multiplier) sqrt(num_steps) alone.

    >>> found = compare_batch_sizes(
    ...     target_epsilon=2, target_delta=1e-5, num_examples=60_000, epochs=10,
    ...     batch_sizes=[512, 2048],
    ... )
    >>> [round(option.relative_noise, 2) for option in found.options]
    [1.58, 1.23]
    """
    examples = _validate.integer("num_examples", num_examples, minimum=1)
    norm = _validate.positive("max_grad_norm", max_grad_norm)
    lengths = sorted({_validate.positive("epochs", e) for e in _values("epochs", epochs)})
    sizes = _grid(examples) if batch_sizes is None else _checked_sizes(batch_sizes, examples)
    _check_budget(target_delta, examples)
    _check_options(options)
    budget = {"target_epsilon": target_epsilon, "target_delta": target_delta, **options}
    full = get_noise_multiplier(sample_rate=1.0, num_steps=1, **budget) * norm / examples
    found = []
    for length in lengths:
        for size in sizes:
            steps = num_steps_of(epochs=length, num_examples=examples, batch_size=size)
            rate = size / examples
            sigma = get_noise_multiplier(sample_rate=rate, num_steps=steps, **budget)
            noise, root = sigma * norm / size, math.sqrt(steps)
            # Full batches are one Gaussian: their noise multiplier goes with the root of the steps.
            noises = noise, noise * root, noise / (full * root)
            option = BatchSizeOption(length, size, steps, rate, sigma, *noises, size * steps)
            found.append(option)
    return BatchSizeComparison(tuple(found), float(target_epsilon), float(target_delta))


def _grid(num_examples: int) -> list[int]:
    """Powers of two from num_examples / 1024, and num_examples.

    >>> _grid(2500)
    [4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 2500]
    """
    powers = (1 << i for i in range(num_examples.bit_length()))
    least = num_examples / (1 << _HALVINGS)
    return sorted({size for size in powers if size >= least} | {num_examples})


def _values(name: str, given: Any) -> list[Any]:
    """One value, or those of a sequence or array."""
    values = np.asarray(given, dtype=object).reshape(-1).tolist()
    if not values:
        raise ValueError(f"{name} is empty. Expected at least one number.")
    return values


def _checked_sizes(batch_sizes: Any, num_examples: int) -> list[int]:
    """Increasing batch sizes, of at most all examples."""
    values = _values("batch_sizes", batch_sizes)
    sizes = sorted({_validate.integer("batch_sizes", size, minimum=1) for size in values})
    if sizes[-1] > num_examples:
        raise ValueError(
            f"batch_sizes holds {sizes[-1]}, but num_examples={num_examples}. Expected batches of "
            "at most all examples."
        )
    return sizes


def _check_budget(target_delta: float, num_examples: int) -> None:
    """Refuse a delta within which small batches may publish their examples."""
    delta = _validate.open_probability("target_delta", target_delta)
    if delta * num_examples >= 1:
        raise ValueError(
            f"target_delta={delta:g} is not below 1 / num_examples = {1 / num_examples:.3g}: an "
            "example published at random is within it, so that small batches would seem to need "
            "little noise. Expected a smaller target_delta."
        )


def _check_options(options: dict[str, Any]) -> None:
    """Refuse options that are unknown, or belong to one batch size."""
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise TypeError(
            f"There is no argument {', '.join(map(repr, unknown))}. Expected target_epsilon, "
            "target_delta, num_examples, epochs, batch_sizes, max_grad_norm, "
            f"{', '.join(OPTIONS)}."
        )
    _validate.choice("sampler", options.get("sampler", "poisson"), SAMPLERS)
    if options.get("accountant") == "gdp":
        raise AccountingError(
            "accountant='gdp' is an approximation, with which a batch size may spend more than the "
            "budget. Expected 'pld' or 'rdp'."
        )
