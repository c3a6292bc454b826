# SPDX-License-Identifier: Apache-2.0
"""The ledger: every release once, in order, on record before it happens."""

import copy
import json
import logging
import math
import os
import pickle
import sys

import numpy as np
import pytest

import dualdp
from dualdp.ledger.chain import chained
from dualdp.ledger.ledger import Release
from dualdp.plan.accounting import Segment
from dualdp.plan.schedules import AdaptiveNorm
from tests.dualdp.plan.test_plan import make

# JAX, which other tests bring into this process, warns of every fork.
forks = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


def release(ledger, step, below=3, rows=50):
    """Record one step."""
    fraction = ledger.noisy_fraction(below, rows) if ledger.plan.is_adaptive else None
    return ledger.record(step, noisy_fraction=fraction)


def run(plan, steps=8, path=None):
    """A ledger of the first steps."""
    ledger = dualdp.Ledger(plan, path=path)
    for step in range(steps):
        release(ledger, step)
    return ledger


def test_a_ledger_spends_what_the_plan_says():
    plan = make(num_steps=10, noise_multiplier=lambda step: 1.0 + step / 10)
    ledger = dualdp.Ledger(plan)
    assert ledger.get_epsilon() == 0
    for step in range(10):
        release(ledger, step)
        assert ledger.get_epsilon() == pytest.approx(plan.epsilon(step + 1), rel=1e-12)
    assert len(ledger) == len(ledger.accountant) == 10
    assert ledger.get_epsilon(1e-3) < ledger.get_epsilon()


def test_an_entry_says_what_was_released():
    plan = make(max_grad_norm=lambda step: 1.0 + step, noise="secure")
    ledger = dualdp.Ledger(plan)
    release(ledger, 0)
    made = release(ledger, 1)
    assert made == Release(1, 0, 0, 2.0, 1.1, 2.2, 50.0)
    (noise,) = {entry["noise_multiplier"] for entry in ledger.entries}
    assert noise < 1.1  # the grid is paid for
    assert ledger.entries[1] == {"step": 1, "noise_multiplier": noise, "sample_rate": 0.05}
    records = dualdp.Ledger.read(ledger.to_json())
    assert records[0]["columns"] == list(ledger.entries[0])
    assert records[0]["plan"] == json.loads(plan.to_json())
    assert [record["r"] for record in records[1:]] == [[0, noise, 0.05], [1, noise, 0.05]]


def test_a_step_is_recorded_once():
    ledger = dualdp.Ledger(make())
    release(ledger, 0)
    for step in (0, 2):
        with pytest.raises(dualdp.AccountingError, match=f"step={step} came after 1 recorded"):
            ledger.record(step)
    with pytest.raises(ValueError, match=r"step=-1 is out of range"):
        ledger.record(-1)
    assert (len(ledger), ledger.position) == (1, 1)


def test_a_refused_step_changes_nothing():
    ledger = run(make(num_steps=1), 1)
    before = (ledger.entries, ledger.get_epsilon(), len(ledger.accountant), ledger.to_json())
    for refuse in (ledger.require, ledger.record):
        with pytest.raises(dualdp.AccountingError, match="step=1 is past the plan's num_steps=1"):
            refuse(1)
    after = (ledger.entries, ledger.get_epsilon(), len(ledger.accountant), ledger.to_json())
    assert after == before


@pytest.mark.parametrize("num_steps", [None, 1000])
def test_a_target_ends_the_run(num_steps):
    plan = make(num_steps=num_steps, target_epsilon=2.0, accountant="pld")
    ledger = dualdp.Ledger(plan)
    end = ledger.end
    assert plan.epsilon(end) <= 2.0 < plan.epsilon(end + 1)
    for step in range(end - 2):
        release(ledger, step)
    with pytest.raises(dualdp.AccountingError, match=rf"num_steps=3 after {end - 2} recorded"):
        ledger.steps_ahead(3)
    for step in ledger.steps_ahead(2):
        release(ledger, step)
    with pytest.raises(
        dualdp.AccountingError, match=r"target_epsilon=2.0: \d+ releases have spent 1"
    ):
        ledger.record(end)
    assert len(ledger) == end
    assert ledger.get_epsilon() <= 2.0


def test_a_ledger_can_not_be_copied(tmp_path):
    ledger = dualdp.Ledger(make(), path=tmp_path / "ledger")
    for made in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="A ledger can't be copied"):
            made(ledger)


def test_every_epsilon_of_a_seed_is_labelled(caplog):
    caplog.set_level(logging.WARNING, "dualdp")
    ledger = run(make(), 2)
    assert "secret" not in repr(ledger)
    assert not caplog.records
    ledger = run(make(seed=3), 2)
    assert "every epsilon is that of a run whose noise were one" in caplog.text
    assert repr(ledger).endswith("if its noise were secret (seed=3)>")
    assert f"epsilon={ledger.get_epsilon():.4g}" in repr(ledger)


# ---------------------------------------------------------------------- resumed runs


def resumed(ledger, step, **options):
    """The run of a file that goes on at a step."""
    ledger.close()
    return dualdp.Ledger.resume(ledger.path, plan=ledger.plan, step=step, **options)


def test_steps_that_run_again_are_accounted(tmp_path):
    plan = make(accountant="pld")
    ledger = run(plan, 3, path=tmp_path / "ledger")
    known = len(ledger.chain), ledger.chain.last_hash
    for step in (3, 4):
        release(ledger, step)
    again = resumed(ledger, 3, known=known)
    assert (again.position, again.segments[1:], len(again)) == (3, (Segment(3, 3),), 5)
    assert release(again, 3) == Release(3, 1, 3, 0.5, 1.1, 0.55, 50.0)
    third = resumed(again, 3)
    for step in (3, 4, 5):
        release(third, step)
    assert third.segments == (Segment(0, 5), Segment(3, 4), Segment(3, 6))
    assert [entry["step"] for entry in third.entries] == [0, 1, 2, 3, 4, 3, 3, 4, 5]
    alone = dualdp.accountants.create("pld")
    alone.step(noise_multiplier=1.1, sample_rate=0.05, num_steps=9)
    assert third.get_epsilon() == pytest.approx(alone.get_epsilon(delta=1e-5), rel=1e-9)


def test_a_resumed_run_ends_where_the_record_ends(tmp_path, caplog):
    caplog.set_level(logging.INFO, "dualdp")
    plan = make(target_epsilon=make().epsilon() + 1e-9)
    ledger = run(plan, 40, path=tmp_path / "ledger")
    assert resumed(ledger, 40).end == 100
    assert "goes on at step 40: 60 steps are left" in caplog.text
    ledger = dualdp.Ledger.resume(tmp_path / "ledger", plan=plan, step=10)
    assert 60 < ledger.end <= 71
    left = ledger.end - 10
    assert f"step 10: {left} steps are left of 90 planned" in caplog.text
    for step in range(10, ledger.end):
        release(ledger, step)
    assert ledger.get_epsilon() <= plan.target_epsilon
    with pytest.raises(dualdp.AccountingError, match="would exceed target_epsilon"):
        ledger.record(ledger.end)


def test_a_recalibrated_run_ends_with_its_plan(tmp_path):
    plan = make(target_epsilon=make().epsilon() + 1e-9, accountant="rdp")
    ledger = run(plan, 40, path=tmp_path / "ledger")
    ledger.close()
    again = dualdp.Ledger.resume(ledger.path, plan=plan, step=10)
    again.recalibrate()
    assert again.end == 100
    scale = again.segments[-1].noise_scale
    assert scale > 1.05
    made = [release(again, step) for step in range(10, 100)]
    assert made[0].noise_multiplier == pytest.approx(1.1 * scale)
    assert made[0].draw_stddev == pytest.approx(1.1 * scale * 0.5)
    assert 0.99 * plan.target_epsilon < again.get_epsilon() <= plan.target_epsilon
    # It goes on with the same noise after another break.
    again.close()
    third = dualdp.Ledger.resume(ledger.path, plan=plan, step=100)
    assert third.segments[-1].noise_scale == scale


@pytest.mark.parametrize("cut", [1, 53])
def test_a_torn_last_line_counts_as_a_release(tmp_path, cut):
    """After a crash of the machine the release may have left before its whole line was kept."""
    path = tmp_path / "ledger"
    ledger = run(make(), 6, path=path)
    ledger.close()
    text = path.read_text()
    path.write_text(text[:-cut])
    again = dualdp.Ledger.resume(path, plan=ledger.plan, step=4)
    assert (len(again), again.position) == (6, 4)
    release(again, 4)
    steps = [
        entry["step"]
        for entry in dualdp.Ledger.resume(again.to_json(), plan=ledger.plan, step=0).entries
    ]
    assert steps == [0, 1, 2, 3, 4, 5, 4]
    assert dualdp.Ledger.read(path) == dualdp.Ledger.read(again.to_json())


def test_a_ledger_of_another_run_is_refused(tmp_path):
    ledger = run(make(), 3, path=tmp_path / "one")
    other = run(make(), 2, path=tmp_path / "two")
    known = len(ledger.chain), ledger.chain.last_hash
    ledger.close()
    with pytest.raises(ValueError, match="two is in use by another run"):
        dualdp.Ledger.resume(other.path, plan=ledger.plan, step=3, known=known)
    release(other, 2)
    other.close()
    before = (tmp_path / "two").read_text()
    with pytest.raises(ValueError, match="two was written under another plan"):
        dualdp.Ledger.resume(other.path, plan=make(delta=1e-6), step=3)
    with pytest.raises(ValueError, match="does not continue the ledger that was saved"):
        dualdp.Ledger.resume(other.path, plan=ledger.plan, step=2, known=known)
    with pytest.raises(ValueError, match="does not continue the ledger that was saved"):
        dualdp.Ledger.resume(other.path, plan=ledger.plan, step=2, known=(40, "A" * 43))
    with pytest.raises(ValueError, match="step=7 is past the 3 steps on record"):
        dualdp.Ledger.resume(ledger.path, plan=ledger.plan, step=7)
    with pytest.raises(ValueError, match="The text is not a ledger. Expected a file or text that"):
        dualdp.Ledger.read("{}\n")
    assert (tmp_path / "two").read_text() == before
    dualdp.Ledger.resume(other.path, plan=ledger.plan, step=2).close()  # no lock is left


def forged(ledger, *records):
    """The text of a ledger with further lines, whose hashes are true."""
    lines = ledger.to_json().splitlines()
    for record in records:
        lines.append(chained(lines[-1][-45:-2], json.dumps(record)))
    return "".join(f"{line}\n" for line in lines)


@pytest.mark.parametrize(
    "record",
    [
        {"r": [7, 1.1, 0.05]},
        {"r": []},
        {"r": 3},
        {"segment": "one"},
        {"segment": 1},
        {"segment": 9, "noise_scale": 1.0},
        {"segment": 1, "noise_scale": -1.0},
        {"segment": 1, "noise_scale": 0.0},
        {"segment": math.inf, "noise_scale": 1.0},
        {"segment": 1, "noise_scale": math.inf},
        {"segment": 1, "noise_scale": math.nan},
        {"segment": 1, "noise_scale": 10**400},
        {"check": math.inf},
        {"check": None},
        {"note": 3},
        {"what": 1},
    ],
)
def test_lines_that_do_not_follow_are_refused(record):
    ledger = run(make(), 3)
    with pytest.raises(ValueError, match="Line 5 of the ledger is no record of this plan's run"):
        dualdp.Ledger.resume(forged(ledger, record), plan=ledger.plan, step=1)


def test_a_file_is_made_with_the_first_release(tmp_path):
    """A set-up that fails leaves no file that would be in the way of the next one."""
    path = tmp_path / "ledger"
    failed = dualdp.Ledger(make(), path=path)
    failed.note(checks=0.5)
    assert (failed.path, list(tmp_path.iterdir())) == (str(path), [])
    ledger = run(make(), 1, path=path)
    assert path.read_text() == ledger.to_json()
    with pytest.raises(FileExistsError, match="ledger exists. Expected a new path"):
        release(failed, 0)
    assert len(failed) == 0
    with pytest.raises(FileExistsError, match="ledger exists. Expected a new path"):
        dualdp.Ledger(make(), path=path)


# ---------------------------------------------------------------------- the adaptive bound


def test_the_bound_follows_the_quantile():
    plan = make(max_grad_norm=AdaptiveNorm(0.1, quantile=0.5), num_steps=100, seed=0)
    ledger = dualdp.Ledger(plan)
    norms = np.random.default_rng(0).uniform(0, 4, 50)
    bounds = []
    for step in range(100):
        bounds.append(ledger.max_grad_norm)
        made = release(ledger, step, int((norms <= bounds[-1]).sum()))
        assert made.max_grad_norm == bounds[-1]
        assert made.draw_stddev == 1.1 * bounds[-1]
    assert bounds[0] == 0.1
    assert np.median(bounds[50:]) == pytest.approx(2.0, rel=0.25)
    assert [entry["max_grad_norm"] for entry in ledger.entries] == bounds
    with pytest.raises(dualdp.AccountingError, match="max_grad_norm adapts to the run"):
        plan.max_grad_norm_at(3)


@pytest.mark.parametrize("fraction", [-1e6, 1e6])
def test_a_count_that_is_all_noise_leaves_the_record_readable(fraction):
    ledger = dualdp.Ledger(make(max_grad_norm=AdaptiveNorm(1e10, count_noise_multiplier=1e6)))
    ledger.record(0, noisy_fraction=fraction)
    assert (len(ledger), ledger.get_epsilon() > 0) == (1, True)
    with pytest.raises(ValueError, match="max_grad_norm=.* is out of range"):
        ledger.record(1, noisy_fraction=0.5)
    assert len(ledger) == 1


@pytest.mark.parametrize("noise", ["fast", "secure"])
def test_the_count_of_an_adaptive_bound_is_noisy(noise):
    adaptive = AdaptiveNorm(1.0, count_noise_multiplier=1.0)
    ledger = dualdp.Ledger(make(max_grad_norm=adaptive, noise=noise))
    fractions = np.array([ledger.noisy_fraction(30, 50) for _ in range(2000)])
    assert np.mean(fractions) == pytest.approx((30 - 25) / 50 + 0.5, abs=4 / 50 / 2000**0.5)
    assert np.std(fractions) == pytest.approx(1.0 / 50, rel=0.1)
    assert len(set(fractions)) > (10 if noise == "secure" else 1999)
    if noise == "secure":
        halves = fractions * 50 * 2
        np.testing.assert_allclose(halves, np.round(halves), atol=1e-9)


def test_the_count_of_a_seed_is_the_same_each_time():
    plan = make(max_grad_norm=AdaptiveNorm(1.0), seed=5)
    ledger, again = dualdp.Ledger(plan), dualdp.Ledger(plan)
    first = ledger.noisy_fraction(30, 50)
    assert first == ledger.noisy_fraction(30, 50) == again.noisy_fraction(30, 50)
    ledger.record(0, noisy_fraction=first)
    assert ledger.noisy_fraction(30, 50) != first


def test_an_adaptive_bound_needs_its_count():
    adaptive = AdaptiveNorm(1.0, count_noise_multiplier=1.0)
    plan = make(max_grad_norm=adaptive, accountant="pld")
    both = dualdp.accountants.create("pld")
    both.step(noise_multiplier=(1.1**-2 + 2.0**-2) ** -0.5, sample_rate=0.05, num_steps=4)
    ledger = run(plan, 4)
    assert ledger.get_epsilon() == pytest.approx(both.get_epsilon(delta=1e-5), rel=1e-9)
    text = ledger.to_json()
    with pytest.raises(TypeError, match="noisy_fraction=None. Expected a number"):
        ledger.record(4)
    with pytest.raises(ValueError, match="noisy_fraction=nan is not a number"):
        ledger.record(4, noisy_fraction=math.nan)
    assert ledger.to_json() == text
    with pytest.raises(TypeError, match=r"max_grad_norm=0.5 follows no quantile"):
        dualdp.Ledger(make()).noisy_fraction(1, 2)
    with pytest.raises(TypeError, match="bound=None. Expected a number"):
        dualdp.Ledger.resume(text, plan=plan, step=2)


# ---------------------------------------------------------------------- checks and notes


def failed():
    """A failed check, as an engine raises it."""
    return dualdp.ExactnessError(
        "wrong", parameters=["fc.weight"], relative_error="1e-01", unprotected_details={"norm": 3.5}
    )


def test_a_failed_check_is_not_vouched_for(tmp_path):
    ledger = dualdp.Ledger(make(num_steps=5), path=tmp_path / "run.ledger")
    release(ledger, 0)
    ledger.check_passed(0)
    release(ledger, 1)
    epsilon = ledger.get_epsilon()
    ledger.check_failed(2, failed())
    assert ledger.failed_check == {
        "step": 2,
        "last_passed": 0,
        "parameters": ["fc.weight"],
        "relative_error": "1e-01",
    }
    with pytest.raises(
        dualdp.AccountingError, match="failed at step 2 .* not vouched for since st"
    ):
        ledger.get_epsilon()
    assert ledger.get_epsilon(accept_unverified=True) == epsilon
    assert "3.5" not in (tmp_path / "run.ledger").read_text()
    again = resumed(ledger, ledger.position)
    assert again.last_check == 0
    with pytest.raises(dualdp.AccountingError, match="accept_unverified=True"):
        again.get_epsilon()


def test_a_note_is_written_once():
    ledger = dualdp.Ledger(make())
    for _ in range(2):
        ledger.note(suspicion="rows went through NumPy")
        ledger.note(unprotected=["unprotected_loss"])
    ledger.note(suspicion="another")
    notes = [record["note"] for record in dualdp.Ledger.read(ledger.to_json())[1:]]
    assert notes == [
        {"suspicion": "rows went through NumPy"},
        {"unprotected": ["unprotected_loss"]},
        {"suspicion": "another"},
    ]


# ---------------------------------------------------------------------- interrupts and forks

LINES_OF = [
    os.path.join(os.path.dirname(dualdp.__file__), name)
    for name in ("ledger", "accountants/base.py")
]


class Interrupts:
    """Raises KeyboardInterrupt at the line of this number, of those of the record."""

    def __init__(self, number):
        self.left = number

    def __enter__(self):
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(tuple(LINES_OF)):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("where", ["file", "memory", "adaptive"])
def test_an_interrupt_at_any_line_counts_no_step_twice(tmp_path, where):
    """Between the accountant and the file it counted the step in one and not in the other."""
    bound = AdaptiveNorm(1.0) if where == "adaptive" else 1.0
    plan, number = make(num_steps=4, max_grad_norm=bound), 0
    while True:
        number += 1
        path = tmp_path / f"{number}" if where != "memory" else None
        ledger = run(plan, 1, path=path)
        assert len(ledger.accountant) == 1
        reached = True
        try:
            with Interrupts(number) as lines:
                release(ledger, 1)
                len(ledger.accountant)
            reached = lines.left <= 0
        except KeyboardInterrupt:
            if ledger.position == 1:
                release(ledger, 1)
        release(ledger, 2)
        assert [entry["step"] for entry in ledger.entries] == [0, 1, 2], number
        assert ledger.segments == (Segment(0, 3),)
        assert len(ledger.accountant) == 3, number
        text = ledger.to_json()
        assert path is None or path.read_text() == text
        assert len(dualdp.Ledger.read(text)) == 4, number
        ledger.close()
        if not reached:
            break
    assert number > 60  # the lines were there


def in_a_fork(work):
    """What a function returns, or the text of its error, in a fork of this process."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = str(work())
        except BaseException as error:  # noqa: BLE001
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(read, 10_000).decode()
    os.close(read)
    os.close(write)
    return said


@forks
def test_a_fork_can_not_write_the_file(tmp_path):
    ledger = run(make(), 1, path=tmp_path / "ledger")
    for work in (
        lambda: ledger.record(1),
        lambda: ledger.note(a=1),
        lambda: ledger.check_passed(1),
    ):
        said = in_a_fork(work)
        assert f"AccountingError: This process is a fork of process {os.getpid()}, which" in said
    release(ledger, 1)
    assert len(dualdp.Ledger.read(tmp_path / "ledger")) == 3
