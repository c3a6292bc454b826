# SPDX-License-Identifier: Apache-2.0
"""`verify` on ledgers that are whole, edited, forged and odd."""

import json

import numpy as np
import pytest

from dualdp import PrivacyPlan, accountants
from dualdp.exactness import ExactnessError
from dualdp.ledger.hash_chain import Chain
from dualdp.ledger.ledger import Ledger
from dualdp.ledger.verify import verify
from dualdp.plan.schedules import AdaptiveNorm


def plan_of(**changes):
    numbers = {"noise_multiplier": 1.0, "max_grad_norm": 1.5, "delta": 1e-5}
    sizes = {"num_examples": 1000, "expected_batch_size": 50, "num_steps": 20}
    return PrivacyPlan(**{**sizes, **numbers, **changes})


def run(plan, steps=8, path=None, counts=None):
    """A ledger of so many steps."""
    ledger = Ledger(plan, path=path)
    for step in range(steps):
        ledger.record(step)
        ledger.seal(step, [np.full(3, float(step))], **(counts or {}))
    return ledger


def finding(found, name):
    return next(f for f in found.findings if f.name == name)


def test_a_true_ledger_passes(tmp_path):
    path = tmp_path / "run.ledger"
    ledger = run(plan_of(), path=path)
    for source in (path, str(path), ledger.to_json()):
        found = verify(source)
        assert found.passed, found.findings
        assert len(found.of_kind("release")) == 8
        assert found.failures == ()


def test_epsilon_is_recomputed():
    """From the releases, not from what the run said of itself."""
    found = verify(run(plan_of(accountant="rdp"), steps=8).to_json())
    for name in ("pld", "rdp"):
        account = accountants.create(name)
        account.step(noise_multiplier=1.0, sample_rate=0.05, num_steps=8)
        assert found.epsilons[name] == pytest.approx(account.get_epsilon(delta=1e-5), rel=1e-12)
    assert found.epsilon == found.epsilons["pld"] < found.epsilons["rdp"]
    assert finding(found, "accountants agree").passed


def test_every_edit_of_a_ledger_fails():
    lines = run(plan_of(), steps=4).to_json().splitlines(keepends=True)
    for k, line in enumerate(lines[:-1]):
        assert verify("".join(lines[:k] + lines[k + 1 :])).failures == ("chain is unbroken",)
        swapped = [*lines[:k], lines[k + 1], line, *lines[k + 2 :]]
        assert verify("".join(swapped)).failures == ("chain is unbroken",)
    for k, line in enumerate(lines):
        position = len(line) // 2
        for other in "01ax":
            edited = line[:position] + other + line[position + 1 :]
            if edited != line and edited.lstrip().startswith("{"):
                found = verify("".join([*lines[:k], edited, *lines[k + 1 :]]))
                assert found.failures == ("chain is unbroken",)
                assert f"line {k + 1}" in found.findings[0].detail


def test_two_entries_of_one_name_fail():
    """A reader sees the first of them, and the hash was that of the last."""
    lines = run(plan_of(), steps=4).to_json().splitlines(keepends=True)
    k = next(k for k, line in enumerate(lines) if '"kind": "release"' in line)
    doubled = lines[k].replace("{", '{"noise_multiplier": 50.0, ', 1)
    found = verify("".join([*lines[:k], doubled, *lines[k + 1 :]]))
    assert found.failures == ("chain is unbroken",)
    assert f"line {k + 1}" in found.findings[0].detail


def forge(ledger, change):
    """The ledger written anew, with true hashes over other records."""
    records = [json.loads(line) for line in ledger.to_json().splitlines()]
    for record in records:
        del record["hash"]
    return Chain(change(records)).text()


def changed(kind, index, **values):
    """Change the fields of the index-th record of a kind."""

    def change(records):
        of_kind = [k for k, record in enumerate(records) if record.get("kind") == kind]
        return [
            {**record, **values} if k == of_kind[index] else record
            for k, record in enumerate(records)
        ]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("release", 3, noise_multiplier=2.0), "Step 3 was recorded with another noise_mul"),
        (changed("release", 3, sample_rate=0.01), "recorded with another sample_rate"),
        (changed("release", 3, sampler="shuffle"), "recorded with another sampler"),
        (changed("release", 3, max_grad_norm=0.1), "recorded with another max_grad_norm"),
        (changed("release", 3, step=2), "Step 2 of branch 0 is out of order or came twice"),
        (changed("release", 3, step=5), "Step 5 of branch 0 is out of order or came twice"),
        (changed("release", 3, step="three"), "A record can't be read"),
        (changed("release", 3, step=[]), "A record can't be read"),
        (changed("release", 3, branch=-1), "Step 3 "),
        (lambda records: [*records, *records[-2:]], "Step 7 of branch 0 is out of order or"),
    ],
)
def test_forged_numbers_fail(change, message):
    found = verify(forge(run(plan_of()), change))
    assert "releases are the plan's" in found.failures
    assert message in finding(found, "releases are the plan's").detail


def test_seals_without_releases_fail():
    found = verify(forge(run(plan_of()), changed("seal", 7, step=19)))
    assert found.failures == ("releases are sealed",)
    assert "never recorded as a release" in finding(found, "releases are sealed").detail
    torn = forge(run(plan_of()), lambda records: records[:-1])
    assert "1 cut short by a crash" in finding(verify(torn), "releases are sealed").detail
    assert verify(torn).passed


def test_more_steps_than_planned_fail():
    def longer(records):
        plan = {**records[0]["plan"], "num_steps": 4}
        return [{**records[0], "plan": plan}, *records[1:]]

    found = verify(forge(run(plan_of()), longer))
    assert "releases are the plan's" in found.failures


def test_a_seed_is_a_failure_unless_it_is_allowed():
    text = run(plan_of(seed=3)).to_json()
    assert verify(text).failures == ("key is secret",)
    assert "seed=3" in finding(verify(text), "key is secret").detail
    assert verify(text, allow_seed=True).passed


def test_unprotected_numbers_are_listed():
    ledger = run(plan_of())
    ledger.note(unprotected=["unprotected_loss", "unprotected_median_norm"])
    found = verify(ledger.to_json())
    assert found.passed
    assert found.unprotected == ["unprotected_loss", "unprotected_median_norm"]
    assert "unprotected_loss" in finding(found, "unprotected numbers").detail


def test_the_target_is_checked():
    assert finding(verify(run(plan_of()).to_json()), "epsilon is within its target").passed is None
    text = run(plan_of(target_epsilon=3.0)).to_json()
    assert finding(verify(text), "epsilon is within its target").passed

    def stricter(records):
        return [{**records[0], "plan": {**records[0]["plan"], "target_epsilon": 0.1}}, *records[1:]]

    found = verify(forge(run(plan_of(target_epsilon=3.0)), stricter))
    assert found.failures == ("epsilon is within its target",)


def test_steps_that_were_run_again_are_both_accounted(tmp_path):
    plan = plan_of()
    ledger = run(plan, 3, tmp_path / "run.ledger")
    state = ledger.state()
    ledger.record(3)
    ledger.seal(3, [np.ones(3)])
    ledger.close()
    again = Ledger.resume(plan, state, tmp_path / "run.ledger")
    again.record(3)
    assert again.seal(3, [np.zeros(3)]).branch == 1
    found = verify(tmp_path / "run.ledger")
    assert found.passed, found.findings
    assert "1 of them of steps run again" in finding(found, "releases are the plan's").detail
    assert "resumed 1 times" in finding(found, "releases are sealed").detail
    assert found.epsilons["pld"] == pytest.approx(again.get_epsilon(), rel=1e-9)
    assert found.epsilons["pld"] > verify(run(plan_of(), 4).to_json()).epsilons["pld"]


def test_adaptive_bounds_follow_from_the_noisy_counts():
    plan = plan_of(max_grad_norm=AdaptiveNorm(1.0, count_noise_multiplier=5.0))
    ledger = run(plan, counts={"num_below": 10, "num_rows": 50})
    assert verify(ledger.to_json()).passed
    found = verify(forge(ledger, changed("release", 4, max_grad_norm=0.5)))
    assert "releases are the plan's" in found.failures
    found = verify(forge(ledger, changed("seal", 3, noisy_fraction=0.9)))
    assert "releases are the plan's" in found.failures


def test_a_sampler_that_rdp_does_not_know_has_one_opinion():
    found = verify(run(plan_of(sampler="balls_in_bins")).to_json())
    assert found.passed, found.findings
    assert finding(found, "epsilon by RDP").passed is None


def test_a_ledger_that_was_cut_anywhere_is_not_called_whole():
    """Fewer steps than planned, a last line cut off, or a step without its seal."""
    text = run(plan_of(num_steps=2), steps=2).to_json()
    assert verify(text).is_whole
    header = text.index("\n")
    ends = [k for k, character in enumerate(text) if character == "\n"][:-1]
    for cut in {end + more for end in ends for more in (-9, -1, 0, 1, 2, 30)} | {len(text) - 2}:
        found = verify(text[:cut])
        assert not found.is_whole, cut
        assert found.passed == (cut >= header), cut
        is_cut = cut > header and cut not in ends and cut - 1 not in ends
        assert found.cut_line == (1 + text[:cut].count("\n") if is_cut else None), cut
    inside = verify(text[: ends[3]])  # header, release, seal, release
    assert (inside.num_steps, inside.stopped_inside, inside.cut_line) == (2, 1, None)
    assert finding(verify(text[: ends[3] - 9]), "last line is whole").passed is None


def test_a_cut_line_after_the_last_step_is_told():
    """A resumed run may have repeated steps in what is lost."""
    ledger = run(plan_of(num_steps=2), steps=2)
    ledger.note(unprotected=["unprotected_loss"])
    assert verify(ledger.to_json()).is_whole
    cut = verify(ledger.to_json()[:-9])
    assert (cut.covers_the_plan, cut.stopped_inside, cut.cut_line) == (True, None, 6)
    assert not cut.is_whole


def test_a_last_line_without_its_end_of_line_counts(tmp_path):
    """An editor or a mail may take it; a bound that counts too much is a bound."""
    text = run(plan_of(num_steps=4), steps=4).to_json()
    released = text[: text.rindex('"seal"')]
    released = released[: released.rindex("\n")]  # ends with the fourth release
    assert not released.endswith("\n")
    assert verify(released).epsilons == verify(text).epsilons
    (tmp_path / "x").write_text(text[:-1])
    found = verify(tmp_path / "x")
    assert found.is_whole
    assert len(found.records) == text.count("\n")


def test_what_the_whole_plan_costs_is_said_where_there_is_a_bound():
    account = accountants.create("pld")
    account.step(noise_multiplier=1.0, sample_rate=0.05, num_steps=20)
    found = verify(run(plan_of(accountant="rdp"), steps=3).to_json())
    expected = account.get_epsilon(delta=1e-5)
    assert found.epsilon_of_the_plan == pytest.approx(expected, rel=1e-12)
    assert np.isnan(verify(run(plan_of(num_steps=None)).to_json()).epsilon_of_the_plan)


@pytest.mark.parametrize("text", ["", "{", "{}", "{}\n", "[]\n", '{"hash": 3}\n', '{"a": 1}\n' * 3])
def test_what_is_no_ledger_fails(text, tmp_path):
    path = tmp_path / "x"
    path.write_text(text)
    assert verify(path).failures == ("chain is unbroken",)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing does not exist. Expected.*ledger="):
        verify(tmp_path / "nothing")
    with pytest.raises(IsADirectoryError, match="is a folder. Expected the file of a run's"):
        verify(tmp_path)


def test_spot_checks_are_told():
    """What was checked, and since when nothing vouches for the gradients."""
    name = "exactness was checked"
    assert finding(verify(run(plan_of()).to_json()), name).passed is None  # no engine wrote it
    ledger = run(plan_of(), steps=0)
    ledger.note(checks=0.02)
    assert "none was due yet" in finding(verify(ledger.to_json()), name).detail
    for step in range(3):
        ledger.record(step)
        ledger.check_passed(step)
        ledger.seal(step, [np.full(3, float(step))])
    ledger.check_impossible("fused dropout")
    told = finding(verify(ledger.to_json()), name)
    assert told.passed
    assert (
        told.detail
        == "3 passed, the last at step 2, at 0.02 of the steps; not checked: fused dropout"
    )
    error = ExactnessError("wrong", parameters=["a"], relative_error="1e-01")
    ledger.check_failed(3, error)
    found = verify(ledger.to_json())
    assert found.failures == (name,)
    assert "not vouched for since step 2" in finding(found, name).detail
    off = run(plan_of())
    off.note(checks=0)
    assert "Off (checks=0)" in finding(verify(off.to_json()), name).detail
