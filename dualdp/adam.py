# SPDX-License-Identifier: Apache-2.0
"""Adam with the noise of the gradient taken out of its second moment (DP-AdamBC).

The mean square of a noisy gradient is that of the gradient plus the variance of the noise, which
the plan knows. Where the noise is larger than the gradient, Adam would divide every coordinate by
the same number.

Source: Tang, Shpilevskiy and Lecuyer 2024, "DP-AdamBC", Algorithm 1 (arXiv 2312.14334); with
weight decay beside it as in Loshchilov and Hutter 2019 (AdamW).
"""

from __future__ import annotations

from collections.abc import Mapping

from dualdp import _validate
from dualdp.arrays import Array, Namespace
from dualdp.plan.plan import PrivacyPlan

#: Settings of the optimizers of both backends -> default. `floor` is the smallest second moment, in
#: squared gradient units; the paper has no `eps`, which AdamW adds to the root.
DEFAULTS: Mapping[str, float] = {
    "b1": 0.9,
    "b2": 0.999,
    "floor": 5e-8,
    "eps": 0.0,
    "weight_decay": 0.0,
}


def adam_bc(
    grad: Array,
    first: Array,
    second: Array,
    count: Array | float,
    noise_stddev: Array | float,
    *,
    b1: Array | float,
    b2: Array | float,
    floor: Array | float,
    eps: Array | float,
    xp: Namespace,
) -> tuple[Array, Array, Array]:
    """Return direction and moments after one more noisy gradient.

    The paper subtracts the variance of the noise from the average of the squares. Here it is
    subtracted from each square, which gives the same number if all steps have the same noise, and
    is right if they have not.

    Args:
        grad: noisy mean, any shape, gradient units.
        first: moving average of gradients, shape of `grad`.
        second: moving average of the squares without their noise, shape of `grad`; may be negative.
        count: number of updates with this one, >= 1.
        noise_stddev: standard deviation of the noise in each coordinate of `grad`.
        b1: decay of `first`, in [0, 1).
        b2: decay of `second`, in [0, 1).
        floor: smallest second moment that is divided by, squared gradient units.
        eps: number added to the root of the second moment, gradient units.
        xp: array namespace, `torch`, `jax.numpy` or `numpy`.

    Returns:
        `(direction, first, second)`; an optimizer moves by -learning rate * direction.

    Guarantees:
        noise_stddev = 0 and floor = 0 is Adam.  [test_without_noise_and_floor_it_is_adamw]

    Source: Tang et al. 2024, Algorithm 1.

    >>> import numpy as np
    >>> settings = {"b1": 0.9, "b2": 0.999, "floor": 1e-4, "eps": 0.0, "xp": np}
    >>> grad, zero = np.array([0.1, 0.5]), np.zeros(2)
    >>> adam_bc(grad, zero, zero, 1, 0.0, **settings)[0].round(2)
    array([1., 1.])
    >>> adam_bc(grad, zero, zero, 1, 0.3, **settings)[0].round(2)  # 0.1 / 0.01, 0.5 / 0.4
    array([10.  ,  1.25])
    """
    first = b1 * first + (1 - b1) * grad
    second = b2 * second + (1 - b2) * (grad * grad - noise_stddev**2)
    scale = xp.sqrt(xp.clip(second / (1 - b2**count), floor, None)) + eps
    return first / (1 - b1**count) / scale, first, second


def check_settings(*, b1: float, b2: float, floor: float, eps: float, weight_decay: float) -> None:
    """Refuse settings that are out of range, and floor and eps that are both 0."""
    for name, decay in (("b1", b1), ("b2", b2)):
        if _validate.probability(name, decay) == 1:
            raise ValueError(f"{name}=1 would never change. Expected a number in [0, 1).")
    for name, value in (("floor", floor), ("eps", eps), ("weight_decay", weight_decay)):
        _validate.non_negative(name, value)
    if floor == eps == 0:
        raise ValueError(
            "floor=0 and eps=0 would divide by zero where the noise is larger than the squares. "
            f"Expected one above 0, such as floor={DEFAULTS['floor']}."
        )


def require_independent(plan: PrivacyPlan) -> None:
    """Refuse a plan with correlated noise."""
    if plan.is_correlated:
        raise ValueError(
            "AdamBC came with a plan whose noise is correlated over the steps: the parameters then "
            "hold noise that the next gradient takes back, and the square of their sum is not the "
            "sum of their squares. Expected a plan without correlation=, or another optimizer."
        )
