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


def test_a_true_ledger_is_verified(ledger):
    done = call("verify", ledger(num_steps=5))
    assert done.exit_code == 0, done.output
    assert "all 5 planned steps are on record" in done.output
    assert re.search(r"The ledger is whole and true: epsilon = \d\.\d{4}\.", done.output)
    data = json.loads(call("verify", ledger("second"), "--json").output)
    assert data["passed"]
    assert data["failures"] == []
    assert 0 < data["epsilons"]["pld"] < data["epsilons"]["rdp"]


def test_a_ledger_that_was_cut_short_is_not_called_whole(ledger, tmp_path):
    """known_failures 85: its first line says how many steps were planned."""
    whole = ledger("whole", num_steps=5)
    cut = tmp_path / "cut"
    cut.write_text("".join(whole.read_text().splitlines(keepends=True)[:-2]))
    for path, steps in ((cut, "3 of 5 planned"), (ledger("ran"), "5 of 9 planned")):
        done = call("verify", path)
        assert done.exit_code == 0, done.output
        assert f"note    record covers the plan        {steps} steps are on record" in done.output
        assert "whole and true" not in done.output
        assert f"is true, for the {steps} steps that it covers: epsilon = " in done.output
        assert "The ledger is CUT SHORT of its plan. What" in done.output
        data = json.loads(call("verify", path, "--json").output)
        assert not data["covers_the_plan"]
    cut.write_text(whole.read_text()[:-9])
    said = call("verify", cut).output
    assert "true, for the 5 of 5 planned steps" in said
    assert "Its last line is cut off." in said
    assert "whole and true" not in said
    done = call("verify", ledger("open", num_steps=None))
    assert "5 steps are on record and the plan has no end" in done.output
    assert "is true, for the 5 steps that it covers" in done.output


def test_a_run_of_several_segments_is_told(ledger):
    path = ledger()
    plan = PrivacyPlan.from_json(json.dumps(Ledger.read(path)[0]["plan"]))
    again = Ledger.resume(path, plan=plan, step=3)
    again.record(3)
    again.close()
    done = call("verify", path)
    assert done.exit_code == 0, done.output
    assert "6 releases of 5 steps, 1 of them of steps run again" in done.output
    assert "resumed 1 times, at step 3" in done.output
    segments = json.loads(call("verify", path, "--json").output)["segments"]
    assert segments == [[0, 5, 1.0], [3, 4, 1.0]]


def test_a_failure_is_named_and_the_exit_code_tells(ledger):
    path = ledger()
    path.write_text(path.read_text().replace('"r":[3,', '"r":[4,'))
    done = call("verify", path)
    assert done.exit_code == 1
    assert "NOT verified: chain is unbroken." in done.output
    seeded = ledger("seeded", seed=1)
    done = call("verify", seeded)
    assert done.exit_code == 1
    assert "NOT verified: noise is secret." in done.output
    done = call("verify", seeded, "--allow-seed")
    assert done.exit_code == 0
    label = r"epsilon = [\d.]+ if the noise were secret \(seed=1 tells it\)\."
    assert re.search(label, done.output)
    assert "All of this would hold if the noise were secret" in done.output


def test_the_page_says_what_was_released(ledger, tmp_path):
    page = tmp_path / "page.md"
    path = ledger(note=["unprotected_<script>|x"])
    assert call("verify", path, "--report", page).exit_code == 0
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


def test_the_best_guess_is_that_of_the_definition(ledger, tmp_path):
    """TPR <= e^eps FPR + delta and its mirror: a fair coin is guessed with p <= (e^eps + d)/..."""
    call("verify", ledger(), "--report", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    factor = float(re.search(r"e\^[\d.]+ = ([\d.]+)", text).group(1))
    best = float(re.search(r"at most ([\d.]+)% \(guessing", text).group(1)) / 100
    assert best == pytest.approx((factor + 1e-5) / (1 + factor), abs=6e-4)


def test_a_page_of_a_broken_ledger_makes_no_statement(tmp_path):
    (tmp_path / "x").write_text("nonsense\n")
    assert call("verify", tmp_path / "x", "--report", tmp_path / "x.md").exit_code == 1
    text = (tmp_path / "x.md").read_text()
    assert "NOT verified" in text
    assert "No statement about privacy can be made" in text
