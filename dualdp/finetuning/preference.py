# SPDX-License-Identifier: Apache-2.0
"""Losses of a pair of responses to one prompt, of which the first is preferred.

All arguments are arrays (u,), a number for each pair; `xp` is `torch` or `jax.numpy`. A log-prob
ratio is log pi(y|x) - log pi_ref(y|x), summed over the tokens of the response y; a mean log-prob is
log pi(y|x) / |y|.
"""

from __future__ import annotations

from collections.abc import Sequence

from dualdp.arrays import Array, Namespace


def checked_reference(reference: Array | None, shape: Sequence[int], of: str) -> Array:
    """Return the entry "reference_log_probs" of a batch of `of`, whose rows have this shape.

    Raises:
        ValueError: it is None, or has another shape.
    """
    if reference is None:
        raise ValueError(
            f"The batch of {of} has no 'reference_log_probs'. Compute them once for all rows of "
            "the data: reference_log_probs(reference_model, rows)."
        )
    if tuple(reference.shape) != tuple(shape):
        raise ValueError(
            f"reference_log_probs have the shape {tuple(reference.shape)}. Expected "
            f"{tuple(shape)}, a number for each row of token ids."
        )
    return reference


def dpo(chosen: Array, rejected: Array, *, beta: float, xp: Namespace) -> Array:
    """Return -log sigmoid(beta (chosen - rejected)), (u,), of log-prob ratios.

    Source: Rafailov et al. 2023 (arXiv 2305.18290), equation 7.
    """
    return _minus_log_sigmoid(beta * (chosen - rejected), xp)


def ipo(chosen: Array, rejected: Array, *, tau: float, xp: Namespace) -> Array:
    """Return (chosen - rejected - 1 / (2 tau))^2, (u,), of log-prob ratios.

    Source: Azar et al. 2023 (arXiv 2310.12036), equation 17.
    """
    return xp.square(chosen - rejected - 1 / (2 * tau))


def simpo(chosen: Array, rejected: Array, *, beta: float, gamma: float, xp: Namespace) -> Array:
    """Return -log sigmoid(beta (chosen - rejected) - gamma), (u,), of mean log-probs.

    Source: Meng et al. 2024 (arXiv 2405.14734), equation 6.
    """
    return _minus_log_sigmoid(beta * (chosen - rejected) - gamma, xp)


def orpo(chosen: Array, rejected: Array, *, weight: float, xp: Namespace) -> Array:
    """Return -chosen - weight log sigmoid(log of the odds ratio), (u,), of mean log-probs.

    The odds of a response are P / (1 - P) for P = exp(mean log-prob).

    Source: Hong et al. 2024 (arXiv 2403.07691), equations 3, 4, 6 and 7.
    """
    log_ratio = _log_odds(chosen, xp) - _log_odds(rejected, xp)
    return weight * _minus_log_sigmoid(log_ratio, xp) - chosen


def _log_odds(mean: Array, xp: Namespace) -> Array:
    """(u,) mean log-probs, below 0 -> (u,), without cancellation."""
    return mean - xp.log(-xp.expm1(mean))


def _minus_log_sigmoid(z: Array, xp: Namespace) -> Array:
    """(u,) -> (u,), without overflow."""
    return xp.logaddexp(xp.zeros_like(z), -z)
