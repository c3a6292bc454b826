# SPDX-License-Identifier: Apache-2.0
"""`verify` on ledgers that are whole, edited, forged and odd."""

import dataclasses
import re

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

ADAPTIVE = AdaptiveNorm(1.0, count_noise_multiplier=5.0)


def plan_of(**changes):
    numbers = {"noise_multiplier": 1.0, "max_grad_norm": 1.5, "delta": 1e-5}
    sizes = {"num_examples": 1000, "expected_batch_size": 50, "num_steps": 20}
    return PrivacyPlan(**{**sizes, **numbers, **changes})


def text_of(steps=8, **changes):
    return run(plan_of(**changes), steps).to_json()


def detail(found, name):
    return next(f.detail for f in found.findings if f.name == name)


def pld_epsilon(steps, name="pld"):
    """What steps of `plan_of()` spend."""
    account = accountants.create(name)
    account.step(noise_multiplier=1.0, sample_rate=0.05, num_steps=steps)
    return pytest.approx(account.get_epsilon(delta=1e-5), rel=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sampler": "truncated_poisson", "max_batch_size": 70},
        {"sampler": "fixed_size", "neighboring_relation": "replace"},
        {"noise_multiplier": lambda k: 1 + k / 9, "expected_batch_size": lambda k: 40 + k},
        {"max_grad_norm": ADAPTIVE},
        {"sampler": "balls_in_bins"},
        {"sampler": "fixed_order"},
        {"sampler": "cyclic_poisson", "min_separation": 4},
    ],
)
def test_the_ledger_and_verify_agree(changes):
    """One composes segments of the plan, the other the numbers of the lines."""
    plan = plan_of(**changes)
    ledger = run(plan)
    assert ledger.get_epsilon() == pytest.approx(plan.epsilon(8), rel=1e-12)
    again = Ledger.resume(ledger.to_json(), plan=plan, step=5, bound=ledger.max_grad_norm)
    for step in (5, 6):
        release(again, step)
        again.get_epsilon()  # the next release is added to this
    for made in (ledger, again):
        found = verify(made.to_json())
        assert found.passed, found.findings
        assert found.epsilons["pld"] == pytest.approx(made.get_epsilon(), rel=1e-9)


def test_epsilon_is_recomputed(tmp_path):
    """From the releases, not from what the run said of itself."""
    path = tmp_path / "run.ledger"
    run(plan_of(accountant="rdp"), path=path).close()
    for source in (path, str(path), path.read_text()):
        found = verify(source)
        assert (found.passed, found.secrecy, len(found.releases)) == (True, "", 8)
    assert found.epsilons == {name: pld_epsilon(8, name) for name in ("pld", "rdp")}
    assert found.epsilon == found.epsilons["pld"] < found.epsilons["rdp"]
    assert (found.covers_the_plan, found.is_whole) == (False, False)
    found = verify(text_of(num_steps=None))
    assert (found.covers_the_plan, found.is_whole) == (None, False)
    assert "the plan has no end" in detail(found, "record covers the plan")


def test_accountants_that_do_not_agree_are_told(monkeypatch):
    empty_account = accounting.empty_account

    def wrong(cost):
        other = "rdp" if cost.accountant == "pld" else "pld"
        return empty_account(dataclasses.replace(cost, accountant=other))

    monkeypatch.setattr("dualdp.ledger.verify.empty_account", wrong)
    found = verify(text_of())
    assert found.failures == ("accountants agree",)
    assert "was spent, by RDP" in detail(found, "accountants agree")


def test_every_edit_of_a_ledger_fails():
    lines = text_of(4).splitlines(keepends=True)
    edits = []
    for k, line in enumerate(lines):
        if k < len(lines) - 1:
            edits += [lines[:k] + lines[k + 1 :]]
            edits += [[*lines[:k], lines[k + 1], line, *lines[k + 2 :]]]
        for position in (2, len(line) // 2, len(line) - 9):
            changed = {line[:position] + other + line[position + 1 :] for other in "01ax"}
            edits += [[*lines[:k], other, *lines[k + 1 :]] for other in changed - {line}]
    assert len(edits) > 50
    for edit in edits:
        assert verify("".join(edit)).failures == ("chain is unbroken",), edit
    # A reader sees the first of two entries of one name, and the hash was that of the last.
    lines[3] = lines[3].replace("{", '{"r":[2,50.0,0.05],', 1)
    found = verify("".join(lines))
    assert found.failures == ("chain is unbroken",)
    assert "line 4" in found.findings[0].detail


def forge(text, change):
    """The ledger written anew, with true hashes over other records."""
    made = Chain()
    for record in change(Ledger.read(text)):
        made.append(record)
    return made.text()


def changed(index, **values):
    """Change a line."""
    return lambda old: [*old[:index], {**old[index], **values}, *old[index + 1 :]]


def more(*records):
    """Add lines."""
    return lambda old: [*old, *records]


OTHER = "Step 3 was recorded with another"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(4, r=[3, 2.0, 0.05]), f"{OTHER} noise_multiplier."),
        (changed(4, r=[3, 1.0, 0.01]), f"{OTHER} sample_rate."),
        (changed(4, r=[3, 1.0]), f"{OTHER} number of columns than 3"),
        (changed(4, r=[2, 1.0, 0.05]), "step 2 came where 3 was expected"),
        (changed(4, r=[3, "much", 0.05]), "must be real number"),
        (changed(4, r=None), "NoneType"),
        (more({"r": [7, 1.0, 0.05]}), "step 7 came where 8 was expected"),
        (more({"segment": 9, "noise_scale": 1.0}), "segment 9 begins with no step before it on re"),
        (
            more({"segment": 3, "noise_scale": 2.0}, {"r": [3, 1.0, 0.05]}),
            f"{OTHER} noise_multiplier.",
        ),
    ],
)
def test_forged_numbers_fail(change, message):
    found = verify(forge(text_of(), change))
    assert "releases are the plan's" in found.failures
    assert message in detail(found, "releases are the plan's")


def test_adaptive_bounds_follow_from_the_noisy_counts():
    text = text_of(max_grad_norm=ADAPTIVE)
    values = Ledger.read(text)[5]["r"]
    for column, other in ((3, 0.5), (4, 0.9)):
        found = verify(forge(text, changed(5, r=[*values[:column], other, *values[column + 1 :]])))
        assert "releases are the plan's" in found.failures
        assert "another max_grad_norm" in detail(found, "releases are the plan's")


def test_a_seed_is_a_failure_unless_it_is_allowed():
    text = text_of(seed=3)
    found = verify(text)
    assert found.failures == ("noise is secret",)
    assert "seed=3" in detail(found, "noise is secret")
    for name in ("epsilon by PLD", "epsilon by RDP"):
        assert detail(found, name).endswith("if the noise were secret (seed=3 tells it)")
    assert verify(text, allow_seed=True).passed
    stricter = {**Ledger.read(text)[0]["plan"], "target_epsilon": 0.1}
    found = verify(forge(text, changed(0, plan=stricter)), allow_seed=True)
    assert found.failures == ("epsilon is within its target",)


def test_notes_are_listed():
    ledger = run(plan_of())
    ledger.note(unprotected=["unprotected_median_norm", "unprotected_loss"])
    ledger.note(suspicion="rows went through NumPy")
    found = verify(ledger.to_json())
    assert found.passed
    assert found.unprotected == ["unprotected_loss", "unprotected_median_norm"]
    said = "suspicion: rows went through NumPy; epsilon does not cover unprotected"
    assert detail(found, "notes").startswith(said)


@pytest.mark.parametrize(("target", "passed"), [(None, None), (3.0, True), (0.1, False)])
def test_the_target_is_checked(target, passed):
    header = Ledger.read(text_of(0))[0]["plan"]
    found = verify(forge(text_of(), changed(0, plan=header | {"target_epsilon": target})))
    by_name = {finding.name: finding.passed for finding in found.findings}
    assert by_name["epsilon is within its target"] is passed
    assert found.passed == (passed is not False)


def test_steps_that_were_run_again_are_told():
    plan = plan_of()
    again = Ledger.resume(text_of(5), plan=plan, step=3)
    again.recalibrate()
    release(again, 3)
    found, scale = verify(again.to_json()), again.segments[-1].noise_scale
    assert found.passed, found.findings
    told = "6 releases of 5 steps, 1 of them of steps run again"
    assert detail(found, "releases are the plan's") == told
    told = f"resumed 1 times, at step 3; noise scaled by {scale:.4g}"
    assert detail(found, "segments") == told
    assert found.segments == (Segment(0, 5), Segment(3, 3), Segment(3, 4, scale))
    assert found.epsilon == pytest.approx(again.get_epsilon(), rel=1e-9)


def test_a_ledger_cut_anywhere_is_not_called_whole():
    text = text_of(2, num_steps=2)
    assert verify(text).is_whole
    header = text.index("\n")
    ends = [found.start() for found in re.finditer("\n", text)][:-1]
    for cut in {end + more for end in ends for more in (-9, -1, 0, 1, 2, 30)}:
        found = verify(text[:cut])
        assert not found.is_whole, cut
        assert found.passed == (cut > header), cut
        assert bool(found.torn) == (cut > header and cut - 1 not in ends), cut


def test_a_cut_line_counts_if_it_may_be_a_release():
    ledger = run(plan_of(), steps=3)
    whole = verify(ledger.to_json())
    for counted in ("counted as a release", "no release"):
        cut = verify(ledger.to_json()[:-9])
        assert (cut.num_steps, cut.is_whole, cut.epsilons) == (3, False, whole.epsilons)
        assert f"cut off, and {counted}" in detail(cut, "last line is whole")
        ledger.note(unprotected=["unprotected_loss"])  # the line that is cut then


BAD = {"dualdp_ledger": 2, "plan": {"dualdp_plan": 3}}
NO_LEDGERS = ["", "{", "{}\n", "[]\n", '{"h":3}\n', '{"a":1}\n' * 3]
HEADERS = [forge(text_of(1), lambda old, new=new: [new, *old[1:]]) for new in (BAD, {})]


@pytest.mark.parametrize("text", [*NO_LEDGERS, *HEADERS])
def test_what_is_no_ledger_fails(text, tmp_path):
    (tmp_path / "x").write_text(text)
    assert verify(tmp_path / "x").failures == ("chain is unbroken",)


def test_checks_are_told():
    """What was checked, and since when nothing vouches for the gradients."""
    ledger = run(plan_of(), steps=0)
    told = lambda: detail(verify(ledger.to_json()), "exactness was checked")  # noqa: E731
    assert "a loop of one's own" in told()
    ledger.note(checks=0.02)
    assert "none was due yet" in told()
    for step in range(5):
        release(ledger, step)
        if step < 3:
            ledger.check_passed(step)
    said = "3 passed, the last at step 2, at 0.02 of the steps; 2 steps were not checked"
    assert told() == said
    assert verify(ledger.to_json()).passed
    error = ExactnessError("wrong", parameters=["a"], relative_error="1e-01")
    ledger.check_failed(5, error)
    assert verify(ledger.to_json()).failures == ("exactness was checked",)
    assert "not vouched for since step 2" in told()
    ledger = run(plan_of())
    ledger.note(checks=0)
    assert "Off (checks=0)" in told()
