# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of sparse noisy gradients of a table of embeddings (DP-AdaFEST).

A step releases two sums with one Gaussian mechanism: the contribution map, which says how many
examples touch each row of the table, and the gradient. Rows whose noisy count is too small get no
gradient, and no noise.

Source: Ghazi et al. 2023, "Sparsity-preserving differentially private training of large embedding
models", Algorithm 1 (arXiv 2311.08357).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from dualdp import _validate


class Scales(NamedTuple):
    """Factors of the two sums before they get the noise of one plan.

    With a = map_share, an example moves (gradient x sums, map x contributions) by at most
    root((1 - a) C^2 + a C^2) = C, the sensitivity of the plan; its contribution to the map has norm
    at most 1.

    Attributes:
        gradient: root(1 - a); the gradient alone has the plan's noise multiplier divided by it.
        map: root(a) C.
    """

    gradient: float
    map: float


def joint_scales(map_share: Any, max_grad_norm: float) -> Scales:
    """Return the factors by which gradient and contribution map together cost what the plan costs.

    The noise multipliers s2 = s / root(1 - a) of the gradient and s1 = s / root(a) of the map
    satisfy 1 / s^2 = 1 / s1^2 + 1 / s2^2.

    Args:
        map_share: a in (0, 1), part of the privacy that the map gets.
        max_grad_norm: C > 0, bound on an example's gradient.

    Raises:
        TypeError, ValueError: map_share is no such number.

    Source: Ghazi et al. 2023, section 3 (the two Gaussian mechanisms accounted as one).

    >>> [round(scale, 3) for scale in joint_scales(0.36, 2.0)]
    [0.8, 1.2]
    """
    share = _validate.open_probability("map_share", map_share)
    return Scales(math.sqrt(1 - share), math.sqrt(share) * max_grad_norm)
