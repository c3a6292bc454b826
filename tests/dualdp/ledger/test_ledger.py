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
from dualdp import AccountingError, Ledger
from dualdp.ledger.chain import chained
from dualdp.ledger.ledger import Release
from dualdp.plan.accounting import Segment
from dualdp.plan.schedules import AdaptiveNorm
from tests.dualdp.plan.test_plan import make
from tests.mistakes import refused

# JAX, which other tests bring into this process, warns of every fork.
forks = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


def release(ledger, step, below=3, rows=50):
    """Record one step."""
    fraction = ledger.noisy_fraction(below, rows) if ledger.plan.is_adaptive else None
    return ledger.record(step, noisy_fraction=fraction)


def run(plan, steps=8, path=None):
    """A ledger of the first steps."""
    ledger = Ledger(plan, path=path)
    for step in range(steps):
        release(ledger, step)
    return ledger


def resumed(ledger, step, **options):
    """The run of a ledger's file, or of its text, that goes on at a step."""
    ledger.close()
    source = ledger.path or ledger.to_json()
    return Ledger.resume(source, **{"plan": ledger.plan, "step": step, **options})


def epsilon_of(noise, steps):
    """What steps of `make()` with another noise spend."""
    alone = dualdp.accountants.create("pld")
    alone.step(noise_multiplier=noise, sample_rate=0.05, num_steps=steps)
    return pytest.approx(alone.get_epsilon(delta=1e-5), rel=1e-9)


def test_an_entry_says_what_was_released():
    plan = make(max_grad_norm=lambda step: 1.0 + step, noise="secure")
    ledger = Ledger(plan)
    release(ledger, 0)
    assert release(ledger, 1) == Release(1, 0, 0, 2.0, 1.1, 2.2, 50.0)
    noise = ledger.entries[0]["noise_multiplier"]
    assert noise < 1.1  # the grid is paid for
    assert ledger.entries[1] == {"step": 1, "noise_multiplier": noise, "sample_rate": 0.05}
    header, *records = Ledger.read(ledger.to_json())
    assert header["columns"] == list(ledger.entries[0])
    assert header["plan"] == json.loads(plan.to_json())
    assert [record["r"] for record in records] == [[0, noise, 0.05], [1, noise, 0.05]]


def test_a_step_is_recorded_once():
    ledger = run(make(), 1)
    for step in (0, 2):
        refused(lambda: ledger.record(step), AccountingError, f"step={step} came after 1 recorded")  # noqa: B023
    refused(lambda: ledger.record(-1), ValueError, "step=-1 is out of range")
    assert (len(ledger), ledger.position) == (1, 1)


def test_a_refused_step_changes_nothing():
    ledger = run(make(num_steps=1), 1)
    facts = lambda: (ledger.get_epsilon(), len(ledger.accountant), ledger.to_json())  # noqa: E731
    before = facts()
    for refuse in (ledger.require, ledger.record):
        refused(lambda: refuse(1), AccountingError, "step=1 is past the plan's num_steps=1")  # noqa: B023
    assert facts() == before


@pytest.mark.parametrize("num_steps", [None, 1000])
def test_a_target_ends_the_run(num_steps):
    plan = make(num_steps=num_steps, target_epsilon=2.0, accountant="pld")
    ledger = Ledger(plan)
    end = ledger.end
    assert plan.epsilon(end) <= 2.0 < plan.epsilon(end + 1)
    for step in range(end - 2):
        release(ledger, step)
    ahead = rf"num_steps=3 after {end - 2} recorded"
    refused(lambda: ledger.steps_ahead(3), AccountingError, ahead)
    for step in ledger.steps_ahead(2):
        release(ledger, step)
    spent = r"step=\d+ would exceed target_epsilon=2.0: \d+ releases have spent 1"
    refused(lambda: ledger.record(end), AccountingError, spent)
    assert len(ledger) == end
    assert ledger.get_epsilon() <= 2.0


def test_a_ledger_can_not_be_copied():
    ledger = Ledger(make())
    refused(lambda: copy.deepcopy(ledger), TypeError, "A ledger can't be copied")
    refused(lambda: pickle.dumps(ledger), TypeError, "A ledger can't be copied")


def test_every_epsilon_of_a_seed_is_labelled(caplog):
    caplog.set_level(logging.WARNING, "dualdp")
    assert "secret" not in repr(run(make(), 2))
    assert not caplog.records
    ledger = run(make(seed=3), 2)
    assert "every epsilon is that of a run whose noise were one" in caplog.text
    assert repr(ledger).endswith("if its noise were secret (seed=3)>")
    assert f"epsilon={ledger.get_epsilon():.4g}" in repr(ledger)


# ---------------------------------------------------------------------- resumed runs


def test_steps_that_run_again_are_accounted(tmp_path):
    ledger = run(make(accountant="pld"), 3, path=tmp_path / "ledger")
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
    assert third.get_epsilon() == epsilon_of(1.1, 9)


def test_a_resumed_run_ends_where_the_record_ends(tmp_path, caplog):
    caplog.set_level(logging.INFO, "dualdp")
    plan = make(target_epsilon=make().epsilon() + 1e-9)
    assert resumed(run(plan, 40), 40).end == 100
    assert "goes on at step 40: 60 steps are left" in caplog.text
    ledger = resumed(run(plan, 40, path=tmp_path / "ledger"), 10)
    assert 60 < ledger.end <= 71
    left = ledger.end - 10
    assert f"step 10: {left} steps are left of 90 planned" in caplog.text
    for step in range(10, ledger.end):
        release(ledger, step)
    assert ledger.get_epsilon() <= plan.target_epsilon
    refused(lambda: ledger.record(ledger.end), AccountingError, "would exceed target_epsilon")


def test_a_recalibrated_run_ends_with_its_plan():
    plan = make(target_epsilon=make().epsilon() + 1e-9)
    again = resumed(run(plan, 40), 10)
    again.recalibrate()
    assert again.end == 100
    scale = again.segments[-1].noise_scale
    assert scale > 1.05
    made = [release(again, step) for step in range(10, 100)][0]
    assert made.noise_multiplier == pytest.approx(1.1 * scale)
    assert made.draw_stddev == pytest.approx(1.1 * scale * 0.5)
    assert 0.99 * plan.target_epsilon < again.get_epsilon() <= plan.target_epsilon
    assert resumed(again, 100).segments[-1].noise_scale == scale  # after another break, too


@pytest.mark.parametrize("cut", [1, 53])
def test_a_torn_last_line_counts_as_a_release(tmp_path, cut):
    """After a crash of the machine the release may have left before its whole line was kept."""
    path = tmp_path / "ledger"
    ledger = run(make(), 6, path=path)
    ledger.close()
    path.write_text(path.read_text()[:-cut])
    assert len(Ledger.resume(path.read_text(), plan=make(), step=6)) == 6
    again = resumed(ledger, 4)
    assert (len(again), again.position) == (6, 4)
    release(again, 4)
    assert Ledger.read(path) == Ledger.read(again.to_json())
    assert [entry["step"] for entry in resumed(again, 0).entries] == [0, 1, 2, 3, 4, 5, 4]


def test_a_ledger_of_another_run_is_refused(tmp_path):
    ledger = run(make(), 3, path=tmp_path / "one")
    other = run(make(), 3, path=tmp_path / "two")
    known, goes_on = (len(ledger.chain), ledger.chain.last_hash), "two does not continue the ledger"

    def open_other(**changes):
        return Ledger.resume(other.path, **{"plan": make(), "step": 2, **changes})

    refused(open_other, ValueError, "two is in use by another run")
    other.close()
    before = (tmp_path / "two").read_text()
    changed = lambda: open_other(plan=make(delta=1e-6))  # noqa: E731
    refused(changed, ValueError, "two was written under another plan")
    refused(lambda: open_other(known=known), ValueError, goes_on)
    refused(lambda: open_other(known=(40, "A" * 43)), ValueError, goes_on)
    refused(lambda: open_other(step=7), ValueError, "step=7 is past the 3 steps on record")
    foreign = "The text is not a ledger. Expected a file or text that"
    refused(lambda: Ledger.read("{}\n"), ValueError, foreign)
    assert (tmp_path / "two").read_text() == before
    open_other().close()  # no lock is left


def forged(ledger, *records):
    """The text of a ledger with further lines, whose hashes are true."""
    lines = ledger.to_json().splitlines()
    for record in records:
        lines.append(chained(lines[-1][-45:-2], json.dumps(record)))
    return "".join(f"{line}\n" for line in lines)


SEGMENTS = [(1,), (9, 1.0), (1, -1.0), (1, 0.0), (math.inf, 1.0), (1, math.inf), (1, 10**400)]


@pytest.mark.parametrize(
    "record",
    [
        *({"r": value} for value in ([7, 1.1, 0.05], [], 3)),
        *(dict(zip(("segment", "noise_scale"), values, strict=False)) for values in SEGMENTS),
        *({"check": math.inf}, {"note": 3}, {"what": 1}),
    ],
)
def test_lines_that_do_not_follow_are_refused(record):
    text = forged(run(make(), 3), record)
    words = "Line 5 of the ledger is no record of this plan's run"
    refused(lambda: Ledger.resume(text, plan=make(), step=1), ValueError, words)


def test_a_file_is_made_with_the_first_release(tmp_path):
    """A set-up that fails leaves no file that would be in the way of the next one."""
    path = tmp_path / "ledger"
    failed = Ledger(make(), path=path)
    failed.note(checks=0.5)
    assert (failed.path, list(tmp_path.iterdir())) == (str(path), [])
    ledger = run(make(), 1, path=path)
    assert path.read_text() == ledger.to_json()
    refused(lambda: release(failed, 0), FileExistsError, "ledger exists. Expected a new path")
    assert len(failed) == 0


# ---------------------------------------------------------------------- the adaptive bound


def test_the_bound_follows_the_quantile():
    plan = make(max_grad_norm=AdaptiveNorm(0.1, quantile=0.5), seed=0)
    ledger, bounds = Ledger(plan), []
    norms = np.random.default_rng(0).uniform(0, 4, 50)
    for step in range(100):
        bounds.append(ledger.max_grad_norm)
        made = release(ledger, step, int((norms <= bounds[-1]).sum()))
        assert (made.max_grad_norm, made.draw_stddev) == (bounds[-1], 1.1 * bounds[-1])
    assert bounds[0] == 0.1
    assert np.median(bounds[50:]) == pytest.approx(2.0, rel=0.25)
    assert [entry["max_grad_norm"] for entry in ledger.entries] == bounds
    refused(lambda: plan.max_grad_norm_at(3), AccountingError, "max_grad_norm adapts to the run")


@pytest.mark.parametrize("fraction", [-1e6, 1e6])
def test_a_count_that_is_all_noise_leaves_the_record_readable(fraction):
    ledger = Ledger(make(max_grad_norm=AdaptiveNorm(1e10, count_noise_multiplier=1e6)))
    ledger.record(0, noisy_fraction=fraction)
    assert (len(ledger), ledger.get_epsilon() > 0) == (1, True)
    again = lambda: ledger.record(1, noisy_fraction=0.5)  # noqa: E731
    refused(again, ValueError, "max_grad_norm=.* is out of range")


@pytest.mark.parametrize("noise", ["fast", "secure"])
def test_the_count_of_an_adaptive_bound_is_noisy(noise):
    adaptive = AdaptiveNorm(1.0, count_noise_multiplier=1.0)
    ledger = Ledger(make(max_grad_norm=adaptive, noise=noise))
    fractions = np.array([ledger.noisy_fraction(30, 50) for _ in range(2000)])
    assert np.mean(fractions) == pytest.approx((30 - 25) / 50 + 0.5, abs=4 / 50 / 2000**0.5)
    assert np.std(fractions) == pytest.approx(1.0 / 50, rel=0.1)
    assert len(set(fractions)) > (10 if noise == "secure" else 1999)
    if noise == "secure":
        halves = fractions * 50 * 2
        np.testing.assert_allclose(halves, np.round(halves), atol=1e-9)


def test_an_adaptive_bound_needs_its_count():
    adaptive = AdaptiveNorm(1.0, count_noise_multiplier=1.0)
    ledger = run(make(max_grad_norm=adaptive, accountant="pld"), 4)
    assert ledger.get_epsilon() == epsilon_of((1.1**-2 + 2.0**-2) ** -0.5, 4)
    text, missing = ledger.to_json(), "noisy_fraction is missing beside an adaptive max_grad"
    refused(lambda: ledger.record(4), TypeError, missing)
    no_number = lambda: ledger.record(4, noisy_fraction=math.nan)  # noqa: E731
    refused(no_number, ValueError, "noisy_fraction=nan is not a number")
    assert ledger.to_json() == text
    constant = lambda: Ledger(make()).noisy_fraction(1, 2)  # noqa: E731
    refused(constant, TypeError, r"max_grad_norm=0.5 follows no quantile")
    refused(lambda: resumed(ledger, 2), TypeError, "bound=None. Expected a number")


# ---------------------------------------------------------------------- checks and notes


def test_a_failed_check_is_not_vouched_for(tmp_path):
    ledger = run(make(num_steps=5), 1, path=tmp_path / "run.ledger")
    ledger.check_passed(0)
    release(ledger, 1)
    epsilon = ledger.get_epsilon()
    told, secret = {"parameters": ["fc.weight"], "relative_error": "1e-01"}, {"norm": 3.5}
    ledger.check_failed(2, dualdp.ExactnessError("wrong", unprotected_details=secret, **told))
    assert ledger.failed_check == {"step": 2, "last_passed": 0, **told}
    since = "failed at step 2 .* not vouched for since st.*accept_unverified=True"
    refused(ledger.get_epsilon, AccountingError, since)
    assert ledger.get_epsilon(accept_unverified=True) == epsilon
    assert "3.5" not in (tmp_path / "run.ledger").read_text()
    again = resumed(ledger, ledger.position)
    assert again.last_check == 0
    refused(again.get_epsilon, AccountingError, since)


def test_a_note_is_written_once():
    ledger = Ledger(make())
    said = [{"suspicion": "through NumPy"}, {"unprotected": ["a_loss"]}, {"suspicion": "another"}]
    for note in (*said[:2], *said):
        ledger.note(**note)
    assert [record["note"] for record in Ledger.read(ledger.to_json())[1:]] == said


# ---------------------------------------------------------------------- interrupts and forks

HOME = os.path.dirname(dualdp.__file__)
LINES_OF = (os.path.join(HOME, "ledger"), os.path.join(HOME, "accountants/base.py"))


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
        if not frame.f_code.co_filename.startswith(LINES_OF):
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
    plan, number, reached = make(num_steps=4, max_grad_norm=bound), 0, True
    while reached:
        number += 1
        path = tmp_path / f"{number}" if where != "memory" else None
        ledger = run(plan, 1, path=path)
        assert len(ledger.accountant) == 1
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
        assert len(Ledger.read(text)) == 4, number
        ledger.close()
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
    words = f"AccountingError: This process is a fork of process {os.getpid()}, which"
    for write in (ledger.record, ledger.check_passed, lambda step: ledger.note(a=step)):
        assert words in in_a_fork(lambda: write(1))  # noqa: B023
    release(ledger, 1)
    assert len(Ledger.read(tmp_path / "ledger")) == 3
