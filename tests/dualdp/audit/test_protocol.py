# SPDX-License-Identifier: Apache-2.0
"""Claims of a step, and plans of runs with canaries, made of the plan that is tested."""

import dataclasses

from dualdp.audit import protocol
from dualdp.testing import Claims
from tests.dualdp.plan.test_plan import make
from tests.mistakes import refused


def test_bad_claims_are_refused():
    refused(lambda: Claims(0.0, 1.0), ValueError, "noise_multiplier=0.0 is out of range")
    refused(lambda: Claims(1.0, 1.0, "weighted"), ValueError, "sampler='weighted' is unknown")


def test_claims_are_those_of_the_first_step():
    plan = make(noise_multiplier=lambda step: 2.0 + step, max_grad_norm=3.0, sampler="poisson")
    claims = protocol.claims_of(plan)
    assert (claims.noise_multiplier, claims.max_grad_norm, claims.sampler) == (2.0, 3.0, "poisson")
    for changes, words in (
        ({"clipping": "per_layer"}, "clipping='per_layer' gives the canaries a part"),
        ({"unit": "user", "rows_per_unit": 2}, "unit='user' draws users, but each canary is one"),
    ):
        other = dataclasses.replace(plan, **changes)
        refused(lambda: protocol.claims_of(other), ValueError, words)  # noqa: B023


def test_runs_have_constant_settings():
    plan = make(noise_multiplier=2.0, target_epsilon=3.0, sampler="shuffle")
    run = protocol.of_run(plan, num_steps=7)
    assert (run.noise_multiplier_at(6), run.num_steps, run.target_epsilon) == (2.0, 7, None)
    assert run.accountant == "pld"
    whole = protocol.of_sum(plan, 30)
    assert whole.noise_stddev(5) == 0
    assert whole.batch_indices(5).tolist() == list(range(30))
