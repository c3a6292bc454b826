# SPDX-License-Identifier: Apache-2.0
"""`check_private_step` on DP-SGD in NumPy: right ones pass, every fault is found."""

import numpy as np
import pytest
from scipy import stats

from dualdp.audit.checks import at_most, p_value
from dualdp.testing import Check, Claims, Report, check_private_step
from tests.mistakes import refused
from tests.numpy_step import FAULTS, NumpyStep

SAMPLERS = ("poisson", "fixed_size", "balls_in_bins", "shuffle")


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_right_steps_pass(sampler):
    report = check_private_step(NumpyStep(sampler=sampler), checks=["sensitivity", "run"], seed=0)
    assert report.passed, report
    assert report.false_alarm == 1e-6
    assert "All checks passed" in str(report)
    assert "At most one correct step in 1,000,000 fails any of the checks." in str(report)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found(fault):
    """And by the kind of check that is meant for it, alone."""
    report = check_private_step(NumpyStep(fault), checks=[FAULTS[fault]], seed=0)
    assert not report.passed, fault
    assert "FAIL" in str(report)


@pytest.mark.parametrize("sampler", ["fixed_size", "balls_in_bins", "shuffle"])
def test_poisson_is_not_taken_for_another_sampler(sampler):
    """The claim is what is tested, not one sampler."""
    step = NumpyStep()
    step.claims = Claims(1.0, 0.7, sampler)
    step._draw = lambda rng, step, count, size: np.flatnonzero(rng.random(count) < size / count)
    assert not check_private_step(step, checks=["run"], seed=0).passed


@pytest.mark.slow
def test_p_values_are_uniform():
    """Correct steps see p-values as they should be: no check is quietly off, none too strict."""
    found = {}
    for seed in range(60):
        report = check_private_step(
            NumpyStep(), checks=["run"], seed=seed, num_steps=40, num_examples=400
        )
        for check in report.checks:
            if check.is_p_value:
                found.setdefault(check.name, []).append(check.statistic)
    assert len(found) == 6
    everything = np.concatenate([np.array(p) for p in found.values()])
    assert everything.min() > 1e-5
    for name, p in found.items():
        below = stats.binom.sf(sum(np.array(p) < 0.1) - 1, len(p), 0.1)
        assert below > 1e-4, f"{name}: too many small p-values"
        assert np.min(p) < 0.3, f"{name}: it never looks"


def test_what_can_not_be_seen_is_said():
    def no_sum(rows, factors):
        raise NotImplementedError("it only trains")

    step = NumpyStep()
    step.clipped_sum = no_sum
    report = check_private_step(step, seed=0)
    assert report.passed
    missing = {check.name: check.detail for check in report.checks if check.passed is None}
    assert missing == {"sensitivity": "it only trains"}
    assert str(report).count("not run") == 1


def changed(step, change):
    """A step whose releases are changed on their way out, by their number."""
    made = step.releases
    step.releases = lambda *a, **k: (change(i, r) for i, r in enumerate(made(*a, **k)))
    return step


def test_a_run_that_releases_nothing_fails():
    step = NumpyStep()
    step.releases = lambda *args, **kwargs: iter(())
    failures = ("every step releases", "every step is accounted")
    assert check_private_step(step, checks=["run"]).failures == failures


def test_nan_releases_fail():
    broken = lambda i, r: r._replace(canaries=r.canaries * (np.nan if i == 5 else 1))  # noqa: E731
    assert not check_private_step(changed(NumpyStep(), broken), checks=["run"], seed=0).passed


def test_bad_arguments_are_one_sentence():
    check = check_private_step
    words = "checks='nose' is unknown. Expected one of empty, run, sens"
    refused(lambda: check(NumpyStep(), checks=["nose"]), ValueError, words)
    given = {"num_steps": 3, "num_examples": 5, "sample_rate": 1.0, "false_alarm": 0.0}
    for name, value in given.items():
        words = f"{name}={value} is out of range"
        refused(lambda: check(NumpyStep(), **{name: value}), ValueError, words)  # noqa: B023


def test_a_report_names_what_failed():
    checks = [
        p_value("noise", 1e-9, 1e-6, "too small"),
        at_most("bound", 1.0, 1.0),
        Check("run", None),
    ]
    report = Report(checks, 1e-6)
    assert (report.passed, report.failures) == (False, ("noise",))
    first, noise, bound, run = str(report).splitlines()[:4]
    assert first == "1 checks FAILED"
    assert noise.split() == ["FAIL", "noise", "p=1e-09", "limit", "1e-06", "too", "small"]
    assert bound.split() == ["pass", "bound", "value=1", "limit", "1"]
    assert run.split() == ["not", "run", "run"]
    assert Report(checks[1:], 1e-6).passed


def test_a_number_that_is_none_fails():
    assert not at_most("bound", float("nan"), 1.0).passed
    assert not p_value("noise", float("nan"), 1e-6).passed
