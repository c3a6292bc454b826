# SPDX-License-Identifier: Apache-2.0
"""Puts any implementation of a private step to the test: ours, yours, anybody's.

    report = check_private_step(step)        # see `PrivateStep` for what a step must offer
    print(report)
    assert report.passed

`dualdp_torch.testing.EngineStep` and `dualdp_jax.testing.EngineStep` offer it for a model of yours.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from dualdp import _validate
from dualdp.testing.checks import CHECKS, Setting
from dualdp.testing.report import Check as Check
from dualdp.testing.report import Report as Report
from dualdp.testing.step import Claims as Claims
from dualdp.testing.step import Event as Event
from dualdp.testing.step import PrivateStep as PrivateStep
from dualdp.testing.step import Release as Release

FALSE_ALARM = 1e-6
_P_VALUES = 25  # at most so many p-values in one report share the false-alarm rate


def check_private_step(
    step: PrivateStep,
    *,
    checks: Sequence[str] = tuple(CHECKS),
    num_steps: int = 100,
    num_examples: int = 1000,
    sample_rate: float = 0.1,
    false_alarm: float = FALSE_ALARM,
    seed: int | None = None,
) -> Report:
    """Test whether releases are what is claimed of them.

    Epsilon's empirical lower bounds overlook most faults (`dualdp.audit` has them); this compares
    the whole distribution of what is released with the claimed mechanism, and the sensitivity
    exactly. It tests the step, not the number of steps that a run will take.

    Args:
        step: the implementation, see `PrivateStep`.
        checks: of "sensitivity", "run" (noise, sampler, canaries, events) and "empty" (batches
            without examples).
        num_steps: of the run with canaries.
        num_examples: examples of that run; as many further canaries stay without example.
        sample_rate: of that run.
        false_alarm: probability that a correct implementation fails.
        seed: fixes the implementation's and the test's own randomness; None for fresh.

    Returns:
        A report: `passed`, `failures`, `checks`; `print` shows it.

    Raises:
        ValueError, TypeError: an argument out of range.

    Guarantees:
        A correct implementation fails with probability at most about `false_alarm`.
            [test_p_values_are_uniform, test_the_correct_implementation_passes]
        It finds the faults that research and practice know.  [test_every_mutant_is_killed]

    Source: Nasr et al. 2023 (canaries); the choice of tests is ours.
    """
    for name in checks:
        _validate.choice("checks", name, CHECKS)
    setting = Setting(
        num_steps=_validate.integer("num_steps", num_steps, minimum=10),
        num_examples=_validate.integer("num_examples", num_examples, minimum=100),
        sample_rate=_validate.open_probability("sample_rate", sample_rate),
        limit=_validate.open_probability("false_alarm", false_alarm) / _P_VALUES,
        seed=None if seed is None else _validate.integer("seed", seed),
    )
    began = time.perf_counter()
    found = [check for name in checks for check in CHECKS[name](step, setting)]
    return Report(tuple(found), false_alarm, time.perf_counter() - began)
