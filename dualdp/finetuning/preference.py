# SPDX-License-Identifier: Apache-2.0
"""Losses of a pair of responses to one prompt, of which the first is preferred.

All arguments are arrays (u,), a number for each pair; `xp` is `torch` or `jax.numpy`. A log-prob
ratio is log pi(y|x) - log pi_ref(y|x), summed over the tokens of the response y; a mean log-prob is
log pi(y|x) / |y|.
"""

from __future__ import annotations

from typing import Any


def dpo(chosen: Any, rejected: Any, *, beta: float, xp: Any) -> Any:
    """Return -log sigmoid(beta (chosen - rejected)), (u,), of log-prob ratios.

    Source: Rafailov et al. 2023 (arXiv 2305.18290), equation 7.
    """
    return _minus_log_sigmoid(beta * (chosen - rejected), xp)


def ipo(chosen: Any, rejected: Any, *, tau: float, xp: Any) -> Any:
    """Return (chosen - rejected - 1 / (2 tau))^2, (u,), of log-prob ratios.

    Source: Azar et al. 2023 (arXiv 2310.12036), equation 17.
    """
    return xp.square(chosen - rejected - 1 / (2 * tau))


def simpo(chosen: Any, rejected: Any, *, beta: float, gamma: float, xp: Any) -> Any:
    """Return -log sigmoid(beta (chosen - rejected) - gamma), (u,), of mean log-probs.

    Source: Meng et al. 2024 (arXiv 2405.14734), equation 6.
    """
    return _minus_log_sigmoid(beta * (chosen - rejected) - gamma, xp)


def orpo(chosen: Any, rejected: Any, *, weight: float, xp: Any) -> Any:
    """Return -chosen - weight log sigmoid(log of the odds ratio), (u,), of mean log-probs.

    The odds of a response are P / (1 - P) for P = exp(mean log-prob).

    Source: Hong et al. 2024 (arXiv 2403.07691), equations 3, 4, 6 and 7.
    """
    log_ratio = _log_odds(chosen, xp) - _log_odds(rejected, xp)
    return weight * _minus_log_sigmoid(log_ratio, xp) - chosen


def _log_odds(mean: Any, xp: Any) -> Any:
    """(u,) mean log-probs, below 0 -> (u,), without cancellation."""
    return mean - xp.log(-xp.expm1(mean))


def _minus_log_sigmoid(z: Any, xp: Any) -> Any:
    """(u,) -> (u,), without overflow."""
    return xp.logaddexp(xp.zeros_like(z), -z)
