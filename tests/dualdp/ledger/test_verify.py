# SPDX-License-Identifier: Apache-2.0
"""`verify` on ledgers that are whole, edited, forged and odd."""

import dataclasses

import pytest

from dualdp import PrivacyPlan, accountants
from dualdp.exactness import ExactnessError
from dualdp.ledger.chain import Chain
from dualdp.ledger.ledger import Ledger
from dualdp.ledger.verify import verify
from dualdp.plan import accounting
from dualdp.plan.accounting import Segment
from dualdp.plan.schedules import AdaptiveNorm
from tests.dualdp.ledger.test_ledger import release, run


def plan_of(**changes):
    numbers = {"noise_multiplier": 1.0, "max_grad_norm": 1.5, "delta": 1e-5}
    sizes = {"num_examples": 1000, "expected_batch_size": 50, "num_steps": 20}
    return PrivacyPlan(**{**sizes, **numbers, **changes})


def finding(found, name):
    return next(f for f in found.findings if f.name == name)


def test_a_true_ledger_passes(tmp_path):
    path = tmp_path / "run.ledger"
    ledger = run(plan_of(), path=path)
    for source in (path, str(path), ledger.to_json()):
        found = verify(source)
        assert found.passed, found.findings
        assert len(found.releases) == 8
        assert (found.failures, found.secrecy) == ((), "")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sampler": "truncated_poisson", "max_batch_size": 70},
        {"sampler": "fixed_size", "neighboring_relation": "replace"},
        {"noise_multiplier": lambda k: 1 + k / 9, "expected_batch_size": lambda k: 40 + k},
        {"max_grad_norm": AdaptiveNorm(1.0, count_noise_multiplier=5.0)},
        {"sampler": "balls_in_bins"},
        {"sampler": "fixed_order"},
        {"sampler": "cyclic_poisson", "min_separation": 4},
    ],
)
def test_the_ledger_and_verify_agree(changes):
    """One composes segments of the plan, the other the numbers of the lines."""
    plan = plan_of(**changes)
    ledger = run(plan)
    again = Ledger.resume(ledger.to_json(), plan=plan, step=5, bound=ledger.max_grad_norm)
    for step in (5, 6):
        release(again, step)
    for made in (ledger, again):
        found = verify(made.to_json())
        assert found.passed, found.findings
        assert found.epsilons["pld"] == pytest.approx(made.get_epsilon(), rel=1e-9)


def test_epsilon_is_recomputed():
    """From the releases, not from what the run said of itself."""
    found = verify(run(plan_of(accountant="rdp"), steps=8).to_json())
    for name in ("pld", "rdp"):
        account = accountants.create(name)
        account.step(noise_multiplier=1.0, sample_rate=0.05, num_steps=8)
        assert found.epsilons[name] == pytest.approx(account.get_epsilon(delta=1e-5), rel=1e-12)
    assert found.epsilon == found.epsilons["pld"] < found.epsilons["rdp"]
    assert finding(found, "accountants agree").passed


def test_accountants_that_do_not_agree_are_told(monkeypatch):
    empty_account = accounting.empty_account

    def wrong(cost):
        other = "rdp" if cost.accountant == "pld" else "pld"
        return empty_account(dataclasses.replace(cost, accountant=other))

    monkeypatch.setattr("dualdp.ledger.verify.empty_account", wrong)
    found = verify(run(plan_of()).to_json())
    assert found.failures == ("accountants agree",)
    assert "was spent, by RDP" in finding(found, "accountants agree").detail


def test_every_edit_of_a_ledger_fails():
    lines = run(plan_of(), steps=4).to_json().splitlines(keepends=True)
    for k, line in enumerate(lines[:-1]):
        assert verify("".join(lines[:k] + lines[k + 1 :])).failures == ("chain is unbroken",)
        swapped = [*lines[:k], lines[k + 1], line, *lines[k + 2 :]]
        assert verify("".join(swapped)).failures == ("chain is unbroken",)
    for k, line in enumerate(lines):
        for position in (2, len(line) // 2, len(line) - 9):
            for other in "01ax":
                edited = line[:position] + other + line[position + 1 :]
                if edited != line:
                    found = verify("".join([*lines[:k], edited, *lines[k + 1 :]]))
                    assert found.failures == ("chain is unbroken",)


def test_two_entries_of_one_name_fail():
    """A reader sees the first of them, and the hash was that of the last."""
    lines = run(plan_of(), steps=4).to_json().splitlines(keepends=True)
    lines[3] = lines[3].replace("{", '{"r":[2,50.0,0.05],', 1)
    found = verify("".join(lines))
    assert found.failures == ("chain is unbroken",)
    assert "line 4" in found.findings[0].detail


def forge(ledger, change):
    """The ledger written anew, with true hashes over other records."""
    made = Chain()
    for record in change(Ledger.read(ledger.to_json())):
        made.append(record)
    return made.text()


def changed(index, **values):
    """Change a line."""

    def change(records):
        return [*records[:index], {**records[index], **values}, *records[index + 1 :]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(4, r=[3, 2.0, 0.05]), "Step 3 was recorded with another noise_multiplier."),
        (changed(4, r=[3, 1.0, 0.01]), "Step 3 was recorded with another sample_rate."),
        (changed(4, r=[3, 1.0]), "Step 3 was recorded with another number of columns than 3"),
        (changed(4, r=[2, 1.0, 0.05]), "step 2 came where 3 was expected"),
        (changed(4, r=[3, "much", 0.05]), "must be real number"),
        (changed(4, r=None), "NoneType"),
        (lambda records: [*records, records[-1]], "step 7 came where 8 was expected"),
        (
            lambda records: [*records, {"segment": 9, "noise_scale": 1.0}],
            "segment 9 begins with no step before it on record",
        ),
        (
            lambda records: [*records, {"segment": 7, "noise_scale": 2.0}, {"r": [7, 1.0, 0.05]}],
            "Step 7 was recorded with another noise_multiplier.",
        ),
    ],
)
def test_forged_numbers_fail(change, message):
    found = verify(forge(run(plan_of()), change))
    assert "releases are the plan's" in found.failures
    assert message in finding(found, "releases are the plan's").detail


def test_a_step_may_be_written_as_a_fraction():
    """What a forger wrote is a finding, or is harmless, and never an error."""
    found = verify(forge(run(plan_of()), changed(8, r=[7.0, 1.0, 0.05])))
    assert (found.passed, found.num_steps) == (True, 8)


def test_a_seed_is_a_failure_unless_it_is_allowed():
    text = run(plan_of(seed=3)).to_json()
    found = verify(text)
    assert found.failures == ("noise is secret",)
    assert "seed=3" in finding(found, "noise is secret").detail
    for name in ("epsilon by PLD", "epsilon by RDP"):
        assert finding(found, name).detail.endswith("if the noise were secret (seed=3 tells it)")
    assert verify(text, allow_seed=True).passed


def test_unprotected_numbers_and_notes_are_listed():
    ledger = run(plan_of())
    ledger.note(unprotected=["unprotected_median_norm", "unprotected_loss"])
    ledger.note(suspicion="rows went through NumPy")
    found = verify(ledger.to_json())
    assert found.passed
    assert found.unprotected == ["unprotected_loss", "unprotected_median_norm"]
    told = finding(found, "notes").detail
    assert told.startswith("suspicion: rows went through NumPy; epsilon does not cover unprotected")


def test_the_target_is_checked():
    assert finding(verify(run(plan_of()).to_json()), "epsilon is within its target").passed is None
    text = run(plan_of(target_epsilon=3.0)).to_json()
    assert finding(verify(text), "epsilon is within its target").passed

    def stricter(records):
        return [{**records[0], "plan": {**records[0]["plan"], "target_epsilon": 0.1}}, *records[1:]]

    found = verify(forge(run(plan_of(target_epsilon=3.0)), stricter))
    assert found.failures == ("epsilon is within its target",)


def test_steps_that_were_run_again_are_told(tmp_path):
    plan, path = plan_of(), tmp_path / "run.ledger"
    run(plan, 5, path).close()
    again = Ledger.resume(path, plan=plan, step=3)
    again.recalibrate()
    release(again, 3)
    found = verify(path)
    assert found.passed, found.findings
    told = finding(found, "releases are the plan's").detail
    assert told == "6 releases of 5 steps, 1 of them of steps run again"
    scale = again.segments[-1].noise_scale
    told = finding(found, "segments").detail
    assert told == f"resumed 1 times, at step 3; noise scaled by {scale:.4g}"
    assert found.segments == (Segment(0, 5), Segment(3, 3), Segment(3, 4, scale))
    assert found.epsilon == pytest.approx(again.get_epsilon(), rel=1e-9)


def test_adaptive_bounds_follow_from_the_noisy_counts():
    plan = plan_of(max_grad_norm=AdaptiveNorm(1.0, count_noise_multiplier=5.0))
    ledger = run(plan)
    assert verify(ledger.to_json()).passed
    values = Ledger.read(ledger.to_json())[5]["r"]
    for column, other in ((3, 0.5), (4, 0.9)):
        forged = [*values[:column], other, *values[column + 1 :]]
        found = verify(forge(ledger, changed(5, r=forged)))
        assert "releases are the plan's" in found.failures
        assert "another max_grad_norm" in finding(found, "releases are the plan's").detail


def test_a_ledger_cut_anywhere_is_not_called_whole():
    text = run(plan_of(num_steps=2), steps=2).to_json()
    assert verify(text).is_whole
    header = text.index("\n")
    ends = [k for k, character in enumerate(text) if character == "\n"][:-1]
    for cut in {end + more for end in ends for more in (-9, -1, 0, 1, 2, 30)}:
        found = verify(text[:cut])
        assert not found.is_whole, cut
        assert found.passed == (cut > header), cut
        assert bool(found.torn) == (cut > header and cut - 1 not in ends), cut


def test_a_cut_line_counts_if_it_may_be_a_release():
    ledger = run(plan_of(num_steps=4), steps=3)
    text = ledger.to_json()
    cut = verify(text[:-9])
    assert (cut.num_steps, cut.is_whole, cut.epsilons) == (3, False, verify(text).epsilons)
    assert "cut off, and counted as a release" in finding(cut, "last line is whole").detail
    ledger.note(unprotected=["unprotected_loss"])
    cut = verify(ledger.to_json()[:-9])
    assert (cut.num_steps, cut.epsilons) == (3, verify(text).epsilons)
    assert "cut off, and no release" in finding(cut, "last line is whole").detail


def test_how_much_of_the_plan_is_covered_is_said():
    found = verify(run(plan_of(), steps=3).to_json())
    assert (found.covers_the_plan, found.is_whole) == (False, False)
    found = verify(run(plan_of(num_steps=None)).to_json())
    assert (found.covers_the_plan, found.is_whole) == (None, False)
    assert "the plan has no end" in finding(found, "record covers the plan").detail


@pytest.mark.parametrize("text", ["", "{", "{}", "{}\n", "[]\n", '{"h":3}\n', '{"a":1}\n' * 3])
def test_what_is_no_ledger_fails(text, tmp_path):
    path = tmp_path / "x"
    path.write_text(text)
    assert verify(path).failures == ("chain is unbroken",)


def test_a_header_without_a_plan_fails():
    found = verify(forge(run(plan_of()), lambda records: [{"dualdp_ledger": 2}, *records[1:]]))
    assert found.failures == ("chain is unbroken",)
    bad = {"dualdp_ledger": 2, "plan": {"dualdp_plan": 3}}
    found = verify(forge(run(plan_of()), lambda records: [bad, *records[1:]]))
    assert "is not a plan" in found.findings[0].detail


def test_checks_are_told():
    """What was checked, and since when nothing vouches for the gradients."""
    name = "exactness was checked"
    assert finding(verify(run(plan_of()).to_json()), name).passed is None  # no engine wrote it
    ledger = run(plan_of(), steps=0)
    ledger.note(checks=0.02)
    assert "none was due yet" in finding(verify(ledger.to_json()), name).detail
    for step in range(5):
        release(ledger, step)
        if step < 3:
            ledger.check_passed(step)
    told = finding(verify(ledger.to_json()), name)
    assert told.passed
    assert told.detail == (
        "3 passed, the last at step 2, at 0.02 of the steps; 2 steps were not checked"
    )
    error = ExactnessError("wrong", parameters=["a"], relative_error="1e-01")
    ledger.check_failed(5, error)
    found = verify(ledger.to_json())
    assert found.failures == (name,)
    assert "not vouched for since step 2" in finding(found, name).detail
    off = run(plan_of())
    off.note(checks=0)
    assert "Off (checks=0)" in finding(verify(off.to_json()), name).detail
