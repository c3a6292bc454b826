# SPDX-License-Identifier: Apache-2.0
"""`dualdp verify`: what it says, its exit code, and its page."""

import json
import re

import pytest

from dualdp import PrivacyPlan
from dualdp.ledger.ledger import Ledger
from tests.dualdp_tools.cli.test_audit import call


@pytest.fixture
def ledger(tmp_path):
    def made(name="run.ledger", note=(), **changes):
        numbers = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "delta": 1e-5}
        sizes = {"num_examples": 500, "expected_batch_size": 25, "num_steps": 9}
        written = Ledger(PrivacyPlan(**{**numbers, **sizes, **changes}), path=tmp_path / name)
        for step in range(5):
            written.record(step)
        if note:
            written.note(unprotected=sorted(note))
        written.close()
        return tmp_path / name

    return made


def said(code, *arguments):
    """What `dualdp verify` says, with this exit code."""
    done = call("verify", *arguments)
    assert done.exit_code == code, done.output
    return done.output


def test_a_true_ledger_is_verified(ledger):
    text = said(0, ledger(num_steps=5))
    assert "all 5 planned steps are on record" in text
    assert re.search(r"The ledger is whole and true: epsilon = \d\.\d{4}\.", text)
    data = json.loads(said(0, ledger("second"), "--json"))
    assert (data["passed"], data["failures"]) == (True, [])
    assert 0 < data["epsilons"]["pld"] < data["epsilons"]["rdp"]


def test_a_ledger_that_was_cut_short_is_not_called_whole(ledger, tmp_path):
    """known_failures 85: its first line says how many steps were planned."""
    whole, cut = ledger("whole", num_steps=5), tmp_path / "cut"
    cut.write_text("".join(whole.read_text().splitlines(keepends=True)[:-2]))
    for path, steps in ((cut, "3 of 5 planned"), (ledger("ran"), "5 of 9 planned")):
        text = said(0, path)
        assert f"note    record covers the plan        {steps} steps are on record" in text
        assert "whole and true" not in text
        assert f"is true, for the {steps} steps that it covers: epsilon = " in text
        assert "The ledger is CUT SHORT of its plan. What" in text
        data = json.loads(said(0, path, "--json"))
        assert not data["covers_the_plan"]
    cut.write_text(whole.read_text()[:-9])
    text = said(0, cut)
    assert "true, for the 5 of 5 planned steps" in text
    assert "Its last line is cut off." in text
    assert "whole and true" not in text
    text = said(0, ledger("open", num_steps=None))
    assert "5 steps are on record and the plan has no end" in text
    assert "is true, for the 5 steps that it covers" in text


def test_a_run_of_several_segments_is_told(ledger):
    path = ledger()
    plan = PrivacyPlan.from_json(json.dumps(Ledger.read(path)[0]["plan"]))
    again = Ledger.resume(path, plan=plan, step=3)
    again.record(3)
    again.close()
    text = said(0, path)
    assert "6 releases of 5 steps, 1 of them of steps run again" in text
    assert "resumed 1 times, at step 3" in text
    assert json.loads(said(0, path, "--json"))["segments"] == [[0, 5, 1.0], [3, 4, 1.0]]


def test_a_failure_is_named_and_the_exit_code_tells(ledger):
    path, seeded = ledger(), ledger("seeded", seed=1)
    path.write_text(path.read_text().replace('"r":[3,', '"r":[4,'))
    assert "NOT verified: chain is unbroken." in said(1, path)
    assert "NOT verified: noise is secret." in said(1, seeded)
    text = said(0, seeded, "--allow-seed")
    assert re.search(r"epsilon = [\d.]+ if the noise were secret \(seed=1 tells it\)\.", text)
    assert "All of this would hold if the noise were secret" in text


def test_the_page_says_what_was_released(ledger, tmp_path):
    page = tmp_path / "page.md"
    said(0, ledger(note=["unprotected_<script>|x"]), "--report", page)
    text = page.read_text()
    for word in (
        "5 noisy sums of clipped gradients",
        "add_or_remove: the data with and without any one example",
        "poisson, sample rate 0.05",
        "max_grad_norm 1",
        "dualdp 1.",
        "What the number means",
        "A person with several examples has less protection",
        "unprotected_",
    ):
        assert word in text, word
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4}
    # TPR <= e^eps FPR + delta and its mirror: a fair coin is guessed with p <= (e^eps + d)/...
    factor = float(re.search(r"e\^[\d.]+ = ([\d.]+)", text).group(1))
    best = float(re.search(r"at most ([\d.]+)% \(guessing", text).group(1)) / 100
    assert best == pytest.approx((factor + 1e-5) / (1 + factor), abs=6e-4)
    (tmp_path / "x").write_text("nonsense\n")
    said(1, tmp_path / "x", "--report", page)
    text = page.read_text()
    assert "NOT verified" in text
    assert "No statement about privacy can be made" in text
