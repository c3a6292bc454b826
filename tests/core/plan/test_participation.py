# SPDX-License-Identifier: Apache-2.0
"""Plans whose releases are accounted together: correlated noise, fixed order, cyclic Poisson."""

import itertools
import json
import math

import numpy as np
import pytest

import dualdp
from dualdp import accountants, correlated, mechanisms
from dualdp.ledger.hash_chain import Chain
from dualdp.ledger.verify import verify
from dualdp.plan import accounting, participation

BASE = {
    **{"num_examples": 60, "expected_batch_size": 10, "num_steps": 18, "noise_multiplier": 2.0},
    **{"max_grad_norm": 1.5, "delta": 1e-5, "sampler": "fixed_order", "seed": 3},
}
CYCLIC = {"sampler": "cyclic_poisson", "min_separation": 3}
BISR = correlated.bisr(bands=3)
BAND = correlated.band((1.0, 0.5, 0.25))
BLT = correlated.blt(decays=(0.9, 0.4), scales=(0.3, 0.2))
LINEAR = dualdp.schedules.Linear(1.0, 2.0, 18)
SIGNED = correlated.window((1.0, 0.6, -0.3))
FAMILIES = {"none": None, "bisr": BISR, "band": BAND, "blt": BLT, "signed": SIGNED}


def make(**changes):
    return dualdp.PrivacyPlan(**{**BASE, **changes})


def gaussian_epsilon(noise_multiplier, delta=BASE["delta"]):
    accountant = accountants.create("pld")
    accountant.step(noise_multiplier=noise_multiplier, sample_rate=1.0)
    return accountant.get_epsilon(delta=delta)


def worst(column, times, gap):
    """Largest |sum_t times_t (row_t |C| u)^2| over the units of every batch, by plain loops."""
    n, largest = len(times), 0.0
    for first in range(gap):
        total = 0.0
        for t in range(n):
            added = sum(abs(column[t - s]) for s in range(first, t + 1, gap))
            total += times[t] * added**2
        largest = max(largest, total)
    return math.sqrt(largest)


@pytest.mark.parametrize("family", ["none", "bisr", "band", "blt"])
def test_a_whole_run_is_one_gaussian_of_the_noise_multiplier(family):
    plan = make(correlation=FAMILIES[family])
    assert plan.epsilon() == pytest.approx(gaussian_epsilon(2.0), rel=1e-9)
    column = correlated.identity() if plan.correlation is None else plan.correlation
    ones = [1] * 18
    assert plan.sensitivity == pytest.approx(worst(column.strategy(18), ones, 6), rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("again", [(), (4,), (4, 5, 6, 7), (0, 0, 9, 17)])
def test_no_pattern_costs_more(family, again):
    """Prefixes and steps that were run again, against plain loops over the units of a batch."""
    plan = make(correlation=FAMILIES[family])
    strategy = correlated.identity() if plan.correlation is None else plan.correlation
    column = strategy.strategy(18)
    for stop in (1, 7, 18):
        times = np.bincount([*range(stop), *(step for step in again if step < stop)], minlength=18)
        (((event, count),),) = participation.releases(plan, times)
        total = plan.sensitivity / event.noise_multiplier
        assert (type(event), count) == (mechanisms.Gaussian, 1)
        bound = worst(column, times, 6)
        if family == "signed":  # the bound of the whole run may be the smaller one
            assert total <= bound * (1 + 1e-9)
        else:
            assert total == pytest.approx(bound, rel=1e-9)


def test_signed_gradients_never_cost_more():
    """Every sign of every participation, for every unit: the definition of sensitivity."""
    plan, generator = make(correlation=SIGNED), np.random.default_rng(0)
    column = SIGNED.strategy(18)
    matrix = np.array([[column[t - s] if t >= s else 0.0 for s in range(18)] for t in range(18)])
    for _ in range(30):
        times = generator.integers(0, 3, 18)
        times[0] += not times.any()
        (((event, _),),) = participation.releases(plan, times)
        total = plan.sensitivity / event.noise_multiplier
        for first in range(6):
            joined = range(first, 18, 6)
            for signs in itertools.product((-1, 1), repeat=len(joined)):
                change = matrix[:, joined] @ np.array(signs)
                assert times @ change**2 <= total**2 * (1 + 1e-9)


def test_a_restart_is_the_joint_gaussian_of_both_branches():
    """Steps 0 to 11, then 8 to 14 again: rows with their own noise, inverted by hand."""
    plan = make(correlation=BLT)
    column, inverse = BLT.strategy(18), BLT.inverse(18)
    rows = [(step, 0) for step in range(12)] + [(step, 1) for step in range(8, 15)]
    index = {row: number for number, row in enumerate(rows)}
    noise = np.zeros((len(rows), len(rows)))  # of z of each (step, branch) in each release
    for step, branch in rows:
        for lag in range(step + 1):
            source = (step - lag, branch if step - lag >= 8 else 0)
            noise[index[step, branch], index[source]] = inverse[lag]
    precision = np.linalg.inv(noise @ noise.T)
    largest = 0.0
    for first in range(6):
        joined = np.array([float(step % 6 == first) for step, _ in rows])
        largest = max(largest, joined @ precision @ joined)
    spent = accounting.spent_by(plan, [{"step": step} for step, _ in rows])
    stddev = 2.0 * plan.sensitivity
    expected = gaussian_epsilon(stddev / math.sqrt(largest))
    assert spent.get_epsilon(delta=plan.delta) == pytest.approx(expected, rel=1e-9)
    assert column[0] == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_epsilon_of_prefixes_is_monotone(family):
    plans = [make(correlation=FAMILIES[family]), make(sampler="cyclic_poisson", min_separation=3)]
    for plan in plans:
        spent = [plan.epsilon(step) for step in range(19)]
        assert spent[0] == 0
        assert spent[-1] == plan.epsilon()
        assert all(low <= high for low, high in itertools.pairwise(spent))
        assert spent[1] > 0


def test_cyclic_poisson_is_rounds_of_subsampled_releases():
    """BandMF: ceil(n / b) releases at b times the rate, whatever the band (the bound of others)."""
    plan = make(**CYCLIC, correlation=BAND, noise_multiplier=1.0)
    accountant = accountants.create("pld")
    accountant.step(noise_multiplier=1.0, sample_rate=3 * 10 / 60, num_steps=6)
    assert plan.epsilon() == pytest.approx(accountant.get_epsilon(delta=1e-5), rel=1e-9)
    assert plan.sensitivity == pytest.approx(math.sqrt(1 + 0.25 + 0.0625))
    independent = make(**CYCLIC, noise_multiplier=1.0)
    assert independent.sensitivity == 1.0
    assert independent.epsilon() == plan.epsilon()


@pytest.mark.parametrize(
    ("noise", "steps", "classes", "rate", "epsilon"),
    [
        (1.0, 1000, 4, 0.04, 4.185153218478676),
        (0.8, 2400, 8, 0.068, 12.800994120062805),
        (2.0, 500, 16, 0.5, 7.35718078997516),
        (1.5, 333, 10, 0.2, 4.347370789204653),
    ],
)
def test_epsilon_of_bands_elsewhere(noise, steps, classes, rate, epsilon):
    """The event of jax_privacy 2.0.0 (`amplified_bandmf_event`) in dp-accounting 0.6.0's PLD."""
    plan = make(
        **{**CYCLIC, "min_separation": classes, "correlation": BAND, "noise_multiplier": noise},
        num_steps=steps,
        num_examples=40_000,
        expected_batch_size=40_000 * rate / classes,
    )
    assert plan.epsilon() == pytest.approx(epsilon, rel=2e-3)


@pytest.mark.parametrize("stop", [1, 5, 13, 18])
def test_rounds_of_cyclic_poisson_count_what_holds_their_draw(stop):
    """Each class by itself, by plain loops: no class has a round with less noise than reported."""
    plan = make(**CYCLIC, correlation=BAND)
    times = np.bincount([*range(stop), 4, 4, 5, 9], minlength=18)
    times[stop:] = 0
    (rounds,) = participation.releases(plan, times)
    found = sorted(event.noise_multiplier for event, count in rounds for _ in range(count))
    column, worst_of_round = (1.0, 0.5, 0.25), []
    for start in range(0, 18, 3):
        precisions = [
            sum(c * c * times[t + j] for j, c in enumerate(column) if t + j < 18)
            for t in range(start, start + 3)
        ]
        if max(precisions):
            worst_of_round.append(plan.sensitivity / math.sqrt(max(precisions)))
    np.testing.assert_allclose(found, sorted(worst_of_round), rtol=1e-9)


def test_plans_calibrate_and_come_back():
    arguments = {name: value for name, value in BASE.items() if name != "noise_multiplier"}
    for changes in ({"correlation": BISR}, {**CYCLIC, "correlation": BAND}, {"correlation": BLT}):
        plan = dualdp.PrivacyPlan.calibrate(target_epsilon=1.5, **{**arguments, **changes})
        assert 1.49 < plan.epsilon() <= 1.5
        again = dualdp.PrivacyPlan.from_json(plan.to_json())
        assert again == plan
        assert again.epsilon() == plan.epsilon()
        assert json.loads(plan.to_json())["dualdp_plan"] == 2
    assert json.loads(make(sampler="shuffle").to_json())["dualdp_plan"] == 1


def test_identity_is_independent_noise():
    for sampler in ("poisson", "balls_in_bins"):
        with_it = make(sampler=sampler, correlation=correlated.identity())
        without = make(sampler=sampler)
        assert with_it.epsilon() == without.epsilon()
        assert with_it.noise_stddev(4) == without.noise_stddev(4)
        assert not with_it.is_correlated


def test_noise_stddev_counts_the_weights_so_far():
    plan = make(correlation=BISR)
    drawn = 2.0 * plan.sensitivity * 1.5
    for step, weights in ((0, 1.0), (1, 1 + 1 / 4), (2, 1 + 1 / 4 + 1 / 64), (9, 81 / 64)):
        assert plan.noise_stddev(step) == pytest.approx(drawn * math.sqrt(weights))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampler": "poisson", "correlation": BISR}, "may join any steps"),
        ({"sampler": "shuffle", "correlation": BISR}, "may join any steps"),
        ({"correlation": BISR, "noise": "secure", "seed": None}, "no bound is proved"),
        ({"correlation": (1.0, 0.5)}, "Expected a strategy of dualdp.correlated"),
        ({"correlation": BISR, "num_steps": None}, "accounted as a whole"),
        ({"num_steps": None}, "accounted as a whole"),
        ({"sampler": "cyclic_poisson"}, "without min_separation"),
        ({**CYCLIC, "min_separation": 7}, "need 70 examples"),
        ({**CYCLIC, "min_separation": 0}, "min_separation=0"),
        ({**CYCLIC, "correlation": BISR}, "dualdp.correlated.band"),
        ({**CYCLIC, "correlation": BAND, "min_separation": 2}, "3 bands"),
        ({"min_separation": 4}, "follows from the batch size"),
        ({"sampler": "poisson", "min_separation": 6}, "follows from the batch size"),
        ({"epochs_per_assignment": 2}, "sampler='balls_in_bins'"),
        (
            {"sampler": "balls_in_bins", "correlation": BISR, "epochs_per_assignment": 1},
            "kept for all epochs",
        ),
        (
            {"correlation": BISR, "max_grad_norm": LINEAR},
            "max_grad_norm changes",
        ),
        (
            {"correlation": BISR, "noise_multiplier": LINEAR},
            "noise_multiplier follows a schedule",
        ),
    ],
)
def test_what_has_no_proved_cost_is_refused(changes, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        make(**changes)
    assert words in str(caught.value)
    assert "Expected" in str(caught.value)


def test_min_separation_may_repeat_what_follows():
    assert make(min_separation=6).epsilon() == make().epsilon()


def test_a_schedule_of_the_bound_is_fine_without_correlation():
    assert make(max_grad_norm=LINEAR).epsilon() == make().epsilon()


def test_an_assignment_for_several_epochs_costs_more():
    once, kept = (
        make(sampler="balls_in_bins", epochs_per_assignment=epochs).epsilon() for epochs in (1, 3)
    )
    assert once < kept <= gaussian_epsilon(2.0 / math.sqrt(3)) * (1 + 1e-9)


@pytest.fixture
def ledger(tmp_path):
    return dualdp.Ledger(make(correlation=BISR), path=tmp_path / "run.ledger")


def run(ledger, steps, value=1.0):
    seals = []
    for step in steps:
        ledger.record(step)
        seals.append(ledger.seal(step, [np.full(3, value)]))
    return seals


def test_a_ledger_knows_the_branches_of_its_steps(ledger):
    plan = ledger.plan
    run(ledger, range(5))
    state = json.loads(json.dumps(ledger.state()))
    seals = run(ledger, range(5, 9))
    assert seals[-1].path == ((0, 0),)
    assert ledger.get_epsilon() == plan.epsilon(9)
    ledger.close()
    again = dualdp.Ledger.resume(plan, state, ledger.path)
    replay, *_ = run(again, [5])
    assert replay.is_replay
    assert replay.path == ((0, 0),)
    other, after = run(again, [6, 7], value=2.0)
    assert not other.is_replay
    assert (other.branch, other.path) == (1, ((0, 0), (6, 1)))
    assert (after.branch, after.path) == (1, ((0, 0), (6, 1)))
    steps = [*range(9), 6, 7]
    expected = accounting.spent_by(plan, [{"step": step} for step in steps])
    assert again.get_epsilon() == expected.get_epsilon(delta=plan.delta) > plan.epsilon(9)
    state = again.state()
    assert state["path"] == [[0, 0], [6, 1]]
    run(again, [8])
    again.close()
    third = dualdp.Ledger.resume(plan, state, ledger.path)
    (last,) = run(third, [8], value=5.0)
    assert last.path == ((0, 0), (6, 1), (8, 2))
    found = verify(third.to_json(), allow_seed=True)
    assert found.passed, found.findings
    assert found.epsilon == pytest.approx(third.get_epsilon())


def test_the_same_sum_after_other_noise_is_no_replay(ledger):
    """Step 6 has the sum it had before, but follows another step 5: its noise would differ."""
    run(ledger, range(5))
    state = ledger.state()
    run(ledger, [5, 6])
    ledger.close()
    again = dualdp.Ledger.resume(ledger.plan, state, ledger.path)
    run(again, [5], value=7.0)
    (seal,) = run(again, [6])
    assert not seal.is_replay
    assert seal.branch == 1


def test_a_target_ends_a_run_that_is_accounted_as_a_whole(tmp_path):
    plan = make(correlation=BISR, target_epsilon=1.2)
    assert plan.epsilon() > 1.2
    ledger = dualdp.Ledger(plan)
    end = ledger.end
    assert plan.epsilon(end) <= 1.2 < plan.epsilon(end + 1)
    run(ledger, range(end))
    with pytest.raises(dualdp.AccountingError, match="would exceed target_epsilon"):
        ledger.record(end)


def test_verify_recomputes_the_sensitivity_and_the_paths(ledger, monkeypatch):
    run(ledger, range(4))
    state = ledger.state()
    run(ledger, range(4, 7))
    ledger.close()
    again = dualdp.Ledger.resume(ledger.plan, state, ledger.path)
    run(again, range(4, 8), value=3.0)
    text = again.to_json()
    assert verify(text, allow_seed=True).passed

    def forged(change):
        records = [json.loads(line) for line in text.splitlines()]
        chain = []
        for record in records:
            del record["hash"]
            change(record)
            chain.append(record)
        return Chain(chain).text()

    def other_path(record):
        if record.get("path"):
            record["path"] = [[0, 0], [2, 1]]

    assert verify(forged(lambda record: None), allow_seed=True).passed
    assert verify(forged(other_path), allow_seed=True).failures == ("releases are sealed",)
    monkeypatch.setattr(participation, "unit_sensitivity", lambda plan: 1.0)
    failures = verify(text, allow_seed=True).failures
    assert "noise is that of the strategy" in failures


def test_another_generator_is_on_record(tmp_path):
    """Its old noise can't be drawn again, which costs no more."""
    for family in ("bisr", "signed"):
        ledger = dualdp.Ledger(make(correlation=FAMILIES[family]), path=tmp_path / family)
        for step, stack in enumerate(("torch 1", "torch 1", "torch 2")):
            ledger.record(step)
            ledger.seal(step, [np.ones(2)], stack=stack)
        seals = [r for r in ledger.chain.records if r.get("kind") == "seal"]
        assert [seal.get("stack") for seal in seals] == ["torch 1", None, "torch 2"]
        found = verify(ledger.to_json(), allow_seed=True)
        (source,) = [f for f in found.findings if f.name == "noise source"]
        assert "takes back other noise" in source.detail
        ledger.close()


@pytest.mark.parametrize("strategy", [BLT, BISR, SIGNED])
def test_noise_drawn_anew_costs_no_more(strategy):
    """The definition: covariance of both parts of a run whose generator changed at step 7."""
    n, change = 18, 7
    inverse, column = strategy.inverse(n), strategy.strategy(n)
    lower = lambda c: np.array([[c[t - s] if t >= s else 0.0 for s in range(n)] for t in range(n)])  # noqa: E731
    w, c = lower(inverse), lower(column)
    covariance = w @ w.T
    covariance[:change, change:] = covariance[change:, :change] = 0
    precision = np.linalg.inv(covariance)
    for first in range(6):
        steps = range(first, n, 6)
        signs = itertools.product((-1, 1), repeat=len(steps))
        changes = [np.bincount(steps, sign, minlength=n) for sign in signs]
        whole = max((c @ u) @ (c @ u) for u in changes)
        assert max(u @ precision @ u for u in changes) <= whole * (1 + 1e-12)


def test_rows_released_again_count_by_absolute_values():
    """Signed C: the run to which a repeated step belongs may have had gradients of other signs."""
    band = correlated.band((1.0, 1.0, -1.0))
    plan = make(num_steps=3, expected_batch_size=60, correlation=band)
    (((again, _),),) = participation.releases(plan, np.array([1, 2, 2]))
    c = np.array([[1.0, 0, 0], [1, 1, 0], [-1, 1, 1]])
    total = (plan.sensitivity / again.noise_multiplier) ** 2
    assert total == pytest.approx(np.abs(c).sum(1) ** 2 @ [1, 2, 2])
    (((once, _),),) = participation.releases(plan, np.array([1, 1, 1]))
    assert once.noise_multiplier == pytest.approx(1.0)


@pytest.mark.parametrize(
    "strategy",
    [
        correlated.band((1.0, 2.0)),
        correlated.band((1.0, 1.5)),
        correlated.blt(decays=(0.9,), scales=(2.5,)),
        correlated.band((1e-200, 1e90)),
        correlated.window((1.0, 2000.0)),
    ],
)
def test_noise_that_grows_is_refused(strategy):
    with pytest.raises(ValueError, match=r"grows past|would round away"):
        make(num_steps=60, correlation=strategy)
