# SPDX-License-Identifier: Apache-2.0
"""Plans for the test of an engine of this package."""

from __future__ import annotations

import dataclasses
from typing import Any

from dualdp.audit.protocol import Claims
from dualdp.plan.plan import PrivacyPlan


def claims_of(plan: PrivacyPlan) -> Claims:
    """Return the claims of a plan at step 0; raise where a canary is no example of its own."""
    if plan.unit != "example":
        raise ValueError(
            f"unit={plan.unit!r} draws users, but each canary is one row. Expected unit='example', "
            "which tests the same draw, clip and noise on users of one row each: "
            "dataclasses.replace(plan, unit='example', rows_per_unit=None)."
        )
    if plan.clipping == "per_layer":
        raise ValueError(
            "clipping='per_layer' gives the canaries a part of max_grad_norm only. Expected "
            "'flat' or 'automatic'; their factors are those of per_layer's groups."
        )
    return Claims(
        plan.noise_multiplier_at(0),
        plan.max_grad_norm_at(0),
        plan.sampler,
        plan.neighboring_relation,
        plan.correlation,
        plan.min_separation or 1,
    )


def of_run(plan: PrivacyPlan, **changes: Any) -> PrivacyPlan:
    """Return the plan of a run with canaries: constant settings of step 0, no target epsilon."""
    constant = {
        "noise_multiplier": plan.noise_multiplier_at(0),
        "max_grad_norm": plan.max_grad_norm_at(0),
        "target_epsilon": None,
        "accountant": "rdp" if plan.sampler == "poisson" else "pld",
    }
    return dataclasses.replace(plan, **{**constant, **changes})


def of_sum(plan: PrivacyPlan, num_rows: int, **changes: Any) -> PrivacyPlan:
    """Return the plan of steps without noise in which every example takes part."""
    without: dict[str, Any] = {
        "num_examples": num_rows,
        "expected_batch_size": num_rows,
        "noise_multiplier": 0.0,
        "noise": "fast",
        "seed": 0,
        "sampler": "poisson",
        "neighboring_relation": "add_or_remove",
        "accountant": "pld",
        "max_batch_size": None,
        "correlation": None,
        "min_separation": None,
        "epochs_per_assignment": None,
    }
    return of_run(plan, **{**without, **changes})
