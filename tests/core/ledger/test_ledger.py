# SPDX-License-Identifier: Apache-2.0
"""The ledger: every release once, in order, accounted before it happens."""

import copy
import hashlib
import os
import pickle
import sys

import numpy as np
import pytest

import dualdp
from dualdp.ledger import hash_chain, release_record
from dualdp.plan.schedules import AdaptiveNorm
from dualdp.randomness.universal_hash import hash_arrays
from tests.core.plan.test_plan import BASE, make

SUMS = (np.zeros(1),)
# JAX, which other tests bring into this process, warns of every fork.
forks = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


def release(ledger, step, parts=SUMS, stack="here 1"):
    """Record and seal one step."""
    ledger.record(step)
    return ledger.seal(step, parts, stack=stack)


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
    plan = make(max_grad_norm=lambda step: 1.0 + step, seed=1)
    ledger = dualdp.Ledger(plan)
    release(ledger, 0)
    assert ledger.record(1) == {
        "step": 1,
        "branch": 0,
        "sampler": "poisson",
        "noise_multiplier": 1.1,
        "max_grad_norm": 2.0,
        "sample_rate": 0.05,
    }
    text = ledger.to_json()
    released = [record for record in dualdp.Ledger.read(text) if record.get("kind") == "release"]
    assert released == [{"kind": "release", **entry} for entry in ledger.entries]
    assert plan.root.secret.hex() not in text


def test_a_step_is_recorded_once():
    ledger = dualdp.Ledger(make())
    release(ledger, 0)
    for step in (0, 2):
        with pytest.raises(dualdp.AccountingError, match=f"step={step} came after 1 recorded"):
            ledger.record(step)
    assert ledger.record(1) == ledger.record(1)  # a computation that failed is tried again
    assert len(ledger) == 2
    with pytest.raises(dualdp.AccountingError, match="step=2 was not recorded"):
        ledger.seal(2, None)
    with pytest.raises(dualdp.AccountingError, match="Save between two steps"):
        ledger.state()


def test_refused_step_changes_nothing():
    ledger = dualdp.Ledger(make(num_steps=1))
    release(ledger, 0)
    before = (list(ledger.entries), ledger.get_epsilon(), len(ledger.accountant), ledger.to_json())
    with pytest.raises(dualdp.AccountingError, match="step=1 is past the plan's num_steps=1"):
        ledger.record(1)
    after = (ledger.entries, ledger.get_epsilon(), len(ledger.accountant), ledger.to_json())
    assert after == before


@pytest.mark.parametrize("num_steps", [None, 1000])
def test_a_target_ends_the_run(num_steps):
    plan = make(num_steps=num_steps, target_epsilon=2.0, accountant="pld")
    ledger = dualdp.Ledger(plan)
    end = ledger.end
    assert plan.epsilon(end) <= 2.0 < plan.epsilon(end + 1)
    for step in range(end):
        release(ledger, step)
    with pytest.raises(
        dualdp.AccountingError, match=r"target_epsilon=2.0: \d+ releases have spent 1"
    ):
        ledger.record(end)
    assert len(ledger) == end
    assert ledger.get_epsilon() <= 2.0


def test_a_ledger_cannot_be_copied(tmp_path):
    ledger = dualdp.Ledger(make(), path=tmp_path / "ledger")
    for made in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="A ledger can't be copied"):
            made(ledger)


def test_a_calibrated_plan_may_run_to_its_end():
    for arguments in ({}, {"max_grad_norm": AdaptiveNorm(1.0)}, {"sampler": "balls_in_bins"}):
        base = {k: v for k, v in BASE.items() if k != "noise_multiplier"}
        plan = dualdp.PrivacyPlan.calibrate(
            target_epsilon=3.0, **{**base, "accountant": "pld", **arguments}
        )
        assert dualdp.Ledger(plan).end == plan.num_steps
        assert 2.9 < plan.epsilon() <= 3.0


# ---------------------------------------------------------------------- running a step again


def run(plan, sums, *, path=None, ledger=None, stop=None):
    """A ledger that has released these sums, one a step, from its position on."""
    ledger = ledger or dualdp.Ledger(plan, path=path)
    seals = []
    while ledger.position < (stop or len(sums)):
        seals.append(release(ledger, ledger.position, [np.asarray(sums[ledger.position])]))
    return ledger, seals


def resumed(ledger, state, **changes):
    ledger.close()
    return dualdp.Ledger.resume(ledger.plan, {**state, **changes}, ledger.path)


def test_an_identical_replay_repeats_its_noise_and_costs_nothing(tmp_path):
    plan, sums = make(), np.random.default_rng(0).normal(size=(6, 4))
    ledger, _ = run(plan, sums, path=tmp_path / "ledger", stop=2)
    state = ledger.state()
    run(plan, sums, ledger=ledger)
    spent = ledger.get_epsilon()
    again = resumed(ledger, state)
    assert (again.position, len(again)) == (2, 6)
    _, seals = run(plan, sums, ledger=again)
    assert [seal.branch for seal in seals] == [0] * 4
    assert all(seal.is_replay for seal in seals)
    assert (len(again), again.get_epsilon()) == (6, spent)
    assert not release(again, 6, [sums[0]]).is_replay


@pytest.mark.parametrize("what", ["value", "dtype", "stack", "shape"])
def test_a_changed_step_gets_a_new_branch(tmp_path, what):
    plan, sums = make(), np.random.default_rng(0).normal(size=(4, 4))
    ledger, _ = run(plan, sums, path=tmp_path / "ledger", stop=1)
    state = ledger.state()
    run(plan, sums, ledger=ledger)
    again = resumed(ledger, state)
    part, stack = sums[1].copy(), "here 1"
    if what == "value":
        part[0] = np.nextafter(part[0], 9)
    elif what == "dtype":
        part = part.astype(np.float32)
    elif what == "shape":
        part = part.reshape(2, 2)
    else:
        stack = "here 2"
    seal = release(again, 1, [part], stack=stack)
    assert (seal.branch, seal.is_replay) == (1, False)
    assert plan.step_key("noise", 1, 1).tolist() != plan.step_key("noise", 1).tolist()
    # The branch is kept; a step of the first run that comes out the same is the same release.
    assert release(again, 2, [sums[2] + 1]).branch == 1
    assert release(again, 3, [sums[3]]).branch == 0
    assert len(again) == 6


def test_both_branches_are_accounted(tmp_path):
    plan, sums = make(accountant="pld"), np.zeros((3, 2))
    ledger, _ = run(plan, sums, path=tmp_path / "ledger", stop=1)
    state = ledger.state()
    run(plan, sums, ledger=ledger)
    before = ledger.get_epsilon()
    again = resumed(ledger, state)
    run(plan, sums + 1, ledger=again)
    twice = dualdp.accountants.create("pld")
    twice.step(noise_multiplier=1.1, sample_rate=0.05)
    twice.step(noise_multiplier=1.1 / 2**0.5, sample_rate=0.05, num_steps=2)
    assert again.get_epsilon() == pytest.approx(twice.get_epsilon(delta=1e-5), rel=1e-9)
    assert again.get_epsilon() > 1.2 * before
    # A third run of the same steps, and a reader of the file, count all three.
    final = resumed(again, state)
    assert final.get_epsilon() == again.get_epsilon()
    run(plan, sums + 2, ledger=final)
    assert [entry["branch"] for entry in final.entries] == [0, 0, 0, 1, 1, 2, 2]
    assert final.get_epsilon() > again.get_epsilon()


def test_a_step_that_was_recorded_and_not_sealed_is_released_once(tmp_path):
    plan, sums = make(), np.zeros((3, 2))
    ledger, _ = run(plan, sums, path=tmp_path / "ledger", stop=2)
    state = ledger.state()
    ledger.record(2)  # killed here, so before any noise
    again = resumed(ledger, state)
    assert (len(again), again.position) == (3, 2)
    assert release(again, 2, [sums[2]]).branch == 0
    assert len(again) == 3
    # Sealed, it is a release, whatever came of the process.
    last = resumed(again, state)
    assert release(last, 2, [sums[2] + 1]).branch == 1
    assert len(last) == 4


@pytest.mark.slow
def test_branches_count_against_the_target(tmp_path):
    plan, sums = (
        make(target_epsilon=2.0, num_steps=None, accountant="pld", noise_multiplier=1.5),
        np.zeros((1000, 2)),
    )
    ledger, _ = run(plan, sums, path=tmp_path / "ledger", stop=5)
    state, end = ledger.state(), ledger.end
    run(plan, sums, ledger=ledger, stop=20)
    again = resumed(ledger, state)
    run(plan, sums + 1, ledger=again, stop=20)
    assert 20 < again.end < end
    run(plan, sums, ledger=again, stop=again.end)
    assert again.get_epsilon() <= 2.0
    with pytest.raises(dualdp.AccountingError, match="would exceed target_epsilon"):
        again.record(again.end)


def test_a_second_run_of_a_step_moves_the_end_by_its_cost(tmp_path):
    plan = make(target_epsilon=2.0, num_steps=None, accountant="pld", noise_multiplier=1.5)
    sums = np.zeros((1000, 2))
    ledger, _ = run(plan, sums, path=tmp_path / "ledger", stop=3)
    state, end = ledger.state(), ledger.end
    run(plan, sums, ledger=ledger, stop=end // 2)
    again = resumed(ledger, state)
    run(plan, sums + 1, ledger=again, stop=4)
    assert end - 4 <= again.end < end
    assert resumed(again, state).end == pytest.approx(end - 2, abs=2)


def test_a_second_run_of_a_step_counts_against_the_target(tmp_path):
    plan = make(num_steps=None, accountant="pld", target_epsilon=1.0)
    ledger, _ = run(plan, np.zeros((1000, 2)), path=tmp_path / "ledger", stop=1)
    state, end = ledger.state(), ledger.end
    run(plan, np.zeros((1000, 2)), ledger=ledger, stop=end)
    again = resumed(ledger, state)
    again.record(1)
    with pytest.raises(dualdp.AccountingError, match="step=1 a second time would exceed target"):
        again.seal(1, [np.ones(2)])
    assert (len(again), again.get_epsilon() <= 1.0) == (end, True)


def test_balls_in_bins_knows_no_second_run(tmp_path):
    plan = make(sampler="balls_in_bins", accountant="pld")
    ledger, _ = run(plan, np.zeros((4, 2)), path=tmp_path / "ledger", stop=1)
    state = ledger.state()
    run(plan, np.zeros((4, 2)), ledger=ledger)
    again = resumed(ledger, state)
    again.record(1)
    with pytest.raises(dualdp.AccountingError, match="run 2 times under sampler='balls_in_bins'"):
        again.seal(1, [np.ones(2)])


def test_shuffled_steps_run_twice_are_accounted(tmp_path):
    plan = make(sampler="shuffle", accountant="pld")
    ledger, _ = run(plan, np.zeros((20, 2)), path=tmp_path / "ledger", stop=1)
    state = ledger.state()
    run(plan, np.zeros((20, 2)), ledger=ledger)
    before = ledger.get_epsilon()
    again = resumed(ledger, state)
    run(plan, np.ones((20, 2)), ledger=again, stop=2)
    extra = dualdp.accountants.create("pld")
    extra.step(noise_multiplier=1.1, sample_rate=1.0, num_steps=2)
    assert again.get_epsilon() == pytest.approx(extra.get_epsilon(delta=1e-5), rel=1e-6)
    assert again.get_epsilon() > before


def test_a_ledger_of_another_run_is_refused(tmp_path):
    ledger, _ = run(make(), np.zeros((3, 2)), path=tmp_path / "one")
    other, _ = run(make(), np.zeros((3, 2)), path=tmp_path / "two")
    state = ledger.state()
    other.close()
    with pytest.raises(ValueError, match="two does not continue the ledger that was saved"):
        dualdp.Ledger.resume(ledger.plan, state, other.path)
    ledger.close()
    with pytest.raises(ValueError, match="was written under another plan"):
        dualdp.Ledger.resume(other.plan, state, ledger.path)
    with pytest.raises(ValueError, match="position 7 is past the 3 steps"):
        dualdp.Ledger.resume(ledger.plan, {**state, "position": 7}, ledger.path)
    with pytest.raises(ValueError, match="The text is not a ledger. Expected a file or text that"):
        dualdp.Ledger.read("{}")


# ---------------------------------------------------------------------- the adaptive bound


def test_the_bound_follows_the_quantile():
    plan = make(max_grad_norm=AdaptiveNorm(0.1, quantile=0.5), num_steps=100, seed=0)
    ledger = dualdp.Ledger(plan)
    norms = np.random.default_rng(0).uniform(0, 4, 50)
    bounds = []
    for step in range(100):
        bounds.append(ledger.max_grad_norm)
        below = int((norms <= ledger.max_grad_norm).sum())
        ledger.record(step)
        seal = ledger.seal(step, None, num_below=below, num_rows=50)
        assert seal.max_grad_norm == bounds[-1]
        assert seal.noise_stddev == 1.1 * bounds[-1]
    assert bounds[0] == 0.1
    assert np.median(bounds[50:]) == pytest.approx(2.0, rel=0.25)
    with pytest.raises(dualdp.AccountingError, match="max_grad_norm adapts to the run"):
        plan.max_grad_norm_at(3)


def test_the_count_of_an_adaptive_bound_is_noisy_and_accounted():
    adaptive = AdaptiveNorm(1.0, count_noise_multiplier=1.0)
    plan = make(max_grad_norm=adaptive, accountant="pld", seed=0)
    both = dualdp.accountants.create("pld")
    both.step(noise_multiplier=(1.1**-2 + 2.0**-2) ** -0.5, sample_rate=0.05, num_steps=100)
    assert plan.epsilon() == pytest.approx(both.get_epsilon(delta=1e-5), rel=1e-9)
    assert plan.epsilon() > make(accountant="pld").epsilon()
    fractions = [
        release_record.noisy_fraction(plan, step, branch, 30, 50)
        for step in range(500)
        for branch in (0, 1)
    ]
    assert np.mean(fractions) == pytest.approx((30 - 25) / 50 + 0.5, abs=0.004)
    assert np.std(fractions) == pytest.approx(1.0 / 50, rel=0.1)
    ledger = dualdp.Ledger(plan)
    ledger.record(0)
    with pytest.raises(TypeError, match="num_below and num_rows are missing"):
        ledger.seal(0, None)
    base = {k: v for k, v in BASE.items() if k != "noise_multiplier"}
    tiny = AdaptiveNorm(1.0, count_noise_multiplier=0.1)
    with pytest.raises(ValueError, match="needs 2.32 for all that is released"):
        dualdp.PrivacyPlan.calibrate(target_epsilon=1.0, **{**base, "max_grad_norm": tiny})
    with pytest.raises(ValueError, match="noise_multiplier is an AdaptiveNorm"):
        make(noise_multiplier=AdaptiveNorm(1.0))


def test_the_bound_is_resumed(tmp_path):
    plan = make(max_grad_norm=AdaptiveNorm(0.1))
    ledger = dualdp.Ledger(plan, path=tmp_path / "ledger")
    for step in range(5):
        ledger.record(step)
        ledger.seal(step, [np.zeros(2)], num_below=step, num_rows=50)
        if step == 2:
            state = ledger.state()
    bound = ledger.max_grad_norm
    again = resumed(ledger, state)
    for step in (3, 4):
        again.record(step)
        assert again.seal(step, [np.zeros(2)], num_below=step, num_rows=50).is_replay
    assert again.max_grad_norm == bound


def test_the_digest_sees_every_bit():
    plan, other = make(), make()
    array = np.random.default_rng(0).normal(size=7)
    base = release_record.digest(plan, (1,), [array])
    assert release_record.digest(plan, (1,), lambda: iter([array.copy()])) == base
    flipped = array.copy()
    flipped.view(np.uint64)[3] ^= 1
    variants = [
        release_record.digest(plan, (1,), [flipped]),
        release_record.digest(plan, (2,), [array]),
        release_record.digest(plan, (1, "fact"), [array]),
        release_record.digest(plan, (1,), [array[:3], array[3:]]),
        release_record.digest(plan, (1,), [array[:4], array[4:]]),
        release_record.digest(plan, (1,), [array.reshape(1, 7)]),
        release_record.digest(plan, (1,), [array.view(np.float32)]),
        release_record.digest(plan, (1,), [array.view(np.int64)]),
        release_record.digest(plan, (1,), [array, np.empty(0)]),
        release_record.digest(other, (1,), [array]),
    ]
    assert len({base, *variants}) == 11


def test_hashes_made_elsewhere_are_sealed_as_those_made_here():
    plan, arrays = make(), [np.ones(3), np.zeros((2, 2), np.float32)]
    here = release_record.digest(plan, (5, "fact"), arrays)
    made = lambda secret: [hash_arrays(secret, arrays)]  # noqa: E731
    assert release_record.digest(plan, (5, "fact"), None, made) == here
    assert release_record.digest(plan, (5, "fact"), None, made, "later") is None
    with pytest.raises(ValueError, match="No clipped sum came"):
        release_record.digest(plan, (5, "fact"), None, lambda secret: [([], b"")])


def test_a_seal_of_the_first_version_is_recognised(tmp_path):
    """Its digest is BLAKE2b of all sums, and its seal names no scheme."""
    plan, sums = make(), np.random.default_rng(0).normal(size=(4, 3))
    ledger, _ = run(plan, sums, path=tmp_path / "now", stop=1)
    state = ledger.state()
    run(plan, sums, ledger=ledger)
    ledger.close()
    records = dualdp.Ledger.read(ledger.path)
    for record in records:
        if record.get("kind") == "seal":
            del record["scheme"]
            facts = record["step"], "here 1", plan.noise, plan.max_grad_norm_at(0), (None, None)
            head = repr((facts, [((3,), "<f8")])).encode()
            whole = head + sums[record["step"]].tobytes()
            key = {"key": plan.root.secret, "person": b"dualdp seal", "digest_size": 16}
            record["digest"] = hashlib.blake2b(whole, **key).hexdigest()
    chain = hash_chain.Chain(records)
    chain.write_to(tmp_path / "first")
    chain.close()
    state |= {"hash": chain.hash_at(state["num_lines"])}
    again = dualdp.Ledger.resume(plan, state, tmp_path / "first")
    sums[2] += 1
    replays = [release(again, step, [sums[step]]).is_replay for step in (1, 2, 3)]
    assert replays == [True, False, True]
    schemes = [r.get("scheme") for r in again.chain.records if r.get("kind") == "seal"]
    assert schemes == [None] * 4 + [release_record.SCHEME]


# ---------------------------------------------------------------------- what a seal needs


def test_a_seal_needs_what_was_summed(tmp_path):
    """Without it a changed step was taken for a replay: the old noise on another sum."""
    ledger = dualdp.Ledger(make(), path=tmp_path / "ledger")
    ledger.record(0)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'parts'"):
        ledger.seal(0)
    with pytest.raises(ValueError, match="parts holds no array. Expected the clipped sums; None"):
        ledger.seal(0, ())
    with pytest.raises(ValueError, match="No clipped sum came, so nothing tells this release"):
        ledger.seal(0, lambda: [])
    assert ledger.seal(0, None).branch == 0


def test_a_sum_that_is_not_shown_is_never_a_replay(tmp_path):
    ledger = dualdp.Ledger(make(), path=tmp_path / "ledger")
    release(ledger, 0)
    state = ledger.state()
    release(ledger, 1, None)
    again = resumed(ledger, state)
    seal = release(again, 1, None)
    assert (seal.branch, seal.is_replay, len(again)) == (1, False, 3)


# ---------------------------------------------------------------------- interrupts and forks

LINES_OF = [
    os.path.join(os.path.dirname(dualdp.__file__), name)
    for name in ("ledger", "plan/accounting.py", "randomness/run_registry.py", "accountants")
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


@pytest.mark.slow
@pytest.mark.parametrize("where", ["file", "memory", "adaptive"])
def test_an_interrupt_at_any_line_counts_no_step_twice(tmp_path, where):
    """Between the accountant and the file it counted the step in one and not in the other."""
    bound = AdaptiveNorm(1.0) if where == "adaptive" else 1.0
    plan = make(num_steps=4, seed=1, max_grad_norm=bound)
    counts = {"num_below": 3, "num_rows": 5} if where == "adaptive" else {}

    def one_step(ledger, step):
        ledger.record(step)
        return ledger.seal(step, [np.zeros(1)], stack="here 1", **counts)

    number = 0
    while True:
        number += 1
        path = tmp_path / f"{number}" if where != "memory" else None
        ledger = dualdp.Ledger(plan, path=path)
        one_step(ledger, 0)
        reached = True
        try:
            with Interrupts(number) as lines:
                one_step(ledger, 1)
            reached = lines.left <= 0
        except KeyboardInterrupt:
            if ledger.position == 1:
                one_step(ledger, 1)
        one_step(ledger, 2)
        assert [entry["step"] for entry in ledger.entries] == [0, 1, 2], number
        assert ledger.get_epsilon() == pytest.approx(plan.epsilon(3), rel=1e-12), number
        text = ledger.to_json()
        assert path is None or path.read_text() == text
        kinds = [record.get("kind") for record in dualdp.Ledger.read(text)]
        assert kinds == [None, *["release", "seal"] * 3], number
        ledger.close()
        if not reached:
            break
    assert number > 100  # the lines were there


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
def test_a_fork_can_not_release():
    """It would use the same noise as the process that it is a fork of."""
    ledger = dualdp.Ledger(make(seed=1))
    release(ledger, 0)
    said = in_a_fork(lambda: ledger.record(1))
    assert f"This process is a fork of process {os.getpid()}, whose run this is" in said
    release(ledger, 1)


def failed():
    """A failed check, as an engine raises it."""
    return dualdp.ExactnessError(
        "wrong", parameters=["fc.weight"], relative_error="1e-01", unprotected_details={"norm": 3.5}
    )


def test_epsilon_of_a_run_whose_check_failed_is_not_vouched_for(tmp_path):
    plan = make(num_steps=5, seed=1)
    ledger = dualdp.Ledger(plan, path=tmp_path / "run.ledger")
    release(ledger, 0)
    ledger.check_passed(0)
    release(ledger, 1)
    epsilon = ledger.get_epsilon()
    ledger.check_failed(2, failed())
    with pytest.raises(
        dualdp.AccountingError, match="failed at step 2 .* not vouched for since st"
    ):
        ledger.get_epsilon()
    assert ledger.get_epsilon(accept_unverified=True) == epsilon
    state = ledger.state()
    ledger.close()
    assert "3.5" not in (tmp_path / "run.ledger").read_text()
    again = dualdp.Ledger.resume(plan, state, tmp_path / "run.ledger")
    assert again.last_check == 0
    with pytest.raises(dualdp.AccountingError, match="accept_unverified=True"):
        again.get_epsilon()


def test_what_can_not_be_checked_is_said_once():
    ledger = dualdp.Ledger(make())
    for _ in range(2):
        ledger.check_impossible("random numbers of a device that is gone")
    assert ledger.to_json().count("random numbers") == 1
