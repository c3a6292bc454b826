# SPDX-License-Identifier: Apache-2.0
"""Clip factors and bounds of per-layer groups: Abadi et al. 2016, Algorithm 1.

All operations are elementwise; `xp` is the array namespace (`torch`, `jax.numpy`, `numpy`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dualdp import _validate
from dualdp.arrays import Array, Namespace

CLIPPING = ("flat", "per_layer", "automatic")
AUTOMATIC_OFFSET = 0.01  # gamma of AUTO-S, Bu et al. 2023 (automatic clipping), eq. 4.1

#: Factors are divided by 1 + margin, by dtype of the sums. The margin covers the rounding of a
#: contribution on its way into the sum, so that the contribution itself has norm at most C.
MARGIN = {"float32": 1e-4, "float64": 1e-12}


def margin_of(dtype: object) -> float:
    """Return the margin for sums in this dtype, of any array library."""
    return MARGIN["float64" if str(dtype).endswith("float64") else "float32"]


def factors_for(
    clipping: str, norms: Array, max_grad_norm: Array | float, *, xp: Namespace
) -> Array:
    """Return the factor that scales each example's gradient to norm at most C.

    min(1, C / norm); for "automatic" C / (norm + 0.01), which normalises. Both / (1 + margin).

    Args:
        clipping: one of `CLIPPING`.
        norms: (n,) L2 norm of each example's gradient, or of its part in one group, gradient units,
            >= 0 or non-finite.
        max_grad_norm: C > 0, gradient units; a number or a scalar array.
        xp: array namespace, `torch` or `jax.numpy`.

    Returns:
        (n,) factors >= 0, dtype of `norms`; nan or inf gives 0. Exactly 1 up to norm
        C / (1 + margin), unless "automatic".

    Guarantees:
        factors[k] * norms[k] <= C / (1 + margin) * (1 + 2 * eps(dtype)) for every finite norm.
            [test_factors_bound_the_norm]
        factors[k] depends on example k alone.  [test_factors_are_per_sample]

    Source: Abadi et al. 2016, Algorithm 1, "clip gradient"; Bu et al. 2023, "Automatic clipping",
    AUTO-S.
    """
    bound = max_grad_norm / (1 + margin_of(norms.dtype))
    # An array: a plain number would be multiplied by a reciprocal, and bound / bound not be 1.
    whole = xp.asarray(bound, dtype=norms.dtype)
    least = norms + AUTOMATIC_OFFSET if clipping == "automatic" else xp.clip(norms, bound, None)
    return xp.nan_to_num(whole / least)


def group_bounds(
    groups: Sequence[str], max_grad_norm: Array | float | Mapping[str, float]
) -> dict[str, Array]:
    """Return the bound of each per-layer group, with the total sensitivity C.

    `max_grad_norm` is C (C / sqrt(groups) for each group), or a mapping from group to bound.

    Raises:
        ValueError: the mapping lacks a group or names one that does not exist.

    Source: McMahan et al. 2018, section 3.1, per-layer clipping.
    """
    if not isinstance(max_grad_norm, Mapping):
        share = max_grad_norm / math.sqrt(max(len(groups), 1))
        return dict.fromkeys(groups, share)
    missing = sorted(set(groups) - set(max_grad_norm))
    unknown = sorted(set(max_grad_norm) - set(groups))
    if missing or unknown:
        raise ValueError(
            f"max_grad_norm lacks {missing} and names {unknown}. Expected one bound for each "
            f"group of trainable parameters: {sorted(groups)}."
        )
    return {
        group: _validate.positive(f"max_grad_norm[{group!r}]", max_grad_norm[group])
        for group in groups
    }
