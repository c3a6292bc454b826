# SPDX-License-Identifier: Apache-2.0
"""Reports of checks: what failed, and what each line says."""

from dualdp.audit.report import Check, Report, at_most, p_value


def test_a_report_names_what_failed():
    checks = [
        p_value("noise", 1e-9, 1e-6, "too small"),
        at_most("bound", 1.0, 1.0),
        Check("run", None),
    ]
    report = Report(checks, 1e-6, seconds=1.25)
    assert (report.passed, report.failures) == (False, ("noise",))
    first, noise, bound, run = str(report).splitlines()[:4]
    assert first == "1 checks FAILED (1.2 s)"
    assert noise.split() == ["FAIL", "noise", "p=1e-09", "limit", "1e-06", "too", "small"]
    assert bound.split() == ["pass", "bound", "value=1", "limit", "1"]
    assert run.split() == ["not", "run", "run"]
    assert "At most one correct step in 1,000,000 fails" in str(report)
    assert Report(checks[1:], 1e-6).passed


def test_a_number_that_is_none_fails():
    assert not at_most("bound", float("nan"), 1.0).passed
    assert not p_value("noise", float("nan"), 1e-6).passed
