# SPDX-License-Identifier: Apache-2.0
"""Spot checks of the engine on JAX: faults planted in ordinary runs, and what a check changes."""

import json
import pickle
import traceback
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dualdp
import dualdp_jax as dpj
from dualdp import AccountingError
from dualdp.ledger.verify import verify
from dualdp_jax.per_sample import gradients, methods
from dualdp_jax.rules import RULES
from dualdp_jax.training import step
from tests.dualdp_jax.checkpointed import assert_same
from tests.dualdp_jax.runs import make_plan, train

N, ROWS, STEPS = 64, 16, 220
RNG = np.random.default_rng(5)
PARAMS = {
    name: RNG.normal(size=shape).astype(np.float32) / 5
    for name, shape in {"a": (12, 80), "b": (80,), "c": (80, 60)}.items()
}
X, Y = (RNG.normal(size=(N, width)).astype(np.float32) for width in (12, 60))


def loss_fn(p, x, y):
    return jnp.mean((jnp.tanh(x @ p["a"] + p["b"]) @ p["c"] - y) ** 2)


# ---------------------------------------------------------------------- faults


def norms_too_small(patch):
    """Of one row in eight, by the rule of products."""

    def wrong(*arguments):
        found = right.norms(*arguments)
        where = jnp.arange(len(found.sq_norms)) % 8 == 3
        return found._replace(sq_norms=jnp.where(where, 0.3, 1.0) * found.sq_norms)

    right = RULES["dot_general"]
    patch.setitem(RULES, "dot_general", right._replace(norms=wrong))


def squared_factors(patch):
    right = gradients.reweighted
    wrong = lambda call, rows, factor, *rest: right(call, rows, factor**2, *rest)  # noqa: E731
    patch.setattr(gradients, "reweighted", wrong)


def mask_forgotten(patch):
    right = methods.checked_mask
    patch.setattr(methods, "checked_mask", lambda mask, n: jnp.ones_like(right(mask, n)))


def only_the_last_chunk(patch):
    """Sums of earlier chunks are lost; the number of rows is right."""

    def wrong(run, inputs):
        totals, answers = right(run, inputs)
        last, _ = right(run, inputs._replace(parts=inputs.parts[-1:]))
        return totals._replace(sums=last.sums), answers

    right = step.PrivateStep.total
    patch.setattr(step.PrivateStep, "total", wrong)


class Fault(NamedTuple):
    method: str
    plant: object
    rows: int = 24  # of a chunk
    is_on_host: bool = False  # not compiled in


FAULTS = {
    "norms too small": Fault("auto", norms_too_small),
    "two_pass with squared factors": Fault("two_pass", squared_factors),
    "padding counts": Fault("auto", mask_forgotten, rows=16),
    "chunks are not added up": Fault("auto", only_the_last_chunk, rows=4, is_on_host=True),
}


def plan_of(**changes):
    given = {"num_examples": N, "expected_batch_size": ROWS, "physical_batch_size": 24, "seed": 4}
    given |= {"num_steps": STEPS, "noise_multiplier": 1.0, "max_grad_norm": 0.02}
    return make_plan(**given | changes)


def begin(method="auto", checks=None, plan=None, **changes):
    given = {"loss_fn": loss_fn, "params": PARAMS, "data": (X, Y), "optimizer": optax.sgd(1e-3)}
    engine, plan = dpj.PrivacyEngine(), plan or plan_of()
    given |= {"plan": plan, "method": method, "checks": checks}
    return engine, *engine.make_private(**given | changes)


def caught(fault, rate, num_steps, monkeypatch):
    """Step at which a check failed, of a run with a fault from step 2 on, or None."""
    plan = plan_of(physical_batch_size=fault.rows)
    engine, step, state, loader = begin(fault.method, rate, plan)
    for batch, _ in zip(loader.remaining(), range(num_steps), strict=False):
        with monkeypatch.context() as patch:
            if batch.step == 2 or (fault.is_on_host and batch.step > 2):
                fault.plant(patch)
            if batch.step == 2:
                jax.clear_caches()  # its programs are compiled anew, with the fault
            try:
                state, _ = step(state, batch)
            except dualdp.ExactnessError:
                return batch.step
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name, monkeypatch):
    """Where every step is checked, within 20 steps: one wrong row in eight may be none of four."""
    assert 2 <= caught(FAULTS[name], 1, 24, monkeypatch) < 22


@pytest.mark.slow
def test_one_step_in_fifty_catches_a_fault_within_200(monkeypatch):
    fault = FAULTS["two_pass with squared factors"]
    assert caught(fault, None, 202, monkeypatch) > 2
    assert caught(fault, 0, 202, monkeypatch) is None


@pytest.mark.slow
@pytest.mark.parametrize("is_supported", [True, False])
def test_auto_goes_by_vmap_from_the_first_batch_on(is_supported, monkeypatch):
    """Where a rule is wrong, or has no form for the loss; a named method is refused."""

    def refuse(*arguments):
        raise dualdp.UnsupportedLayerError("No such form. Use method='vmap'.")

    rule = RULES["dot_general"]
    wrong = (lambda *given: 0.5 * rule.grads(*given)) if is_supported else refuse
    monkeypatch.setitem(RULES, "dot_general", rule._replace(grads=wrong, norms=None))
    _, step, state, loader = begin("book_keeping", 1, plan_of(num_steps=3))
    with pytest.raises((dualdp.ExactnessError, dualdp.UnsupportedLayerError)):
        step(state, next(iter(loader)))
    engine, *run = begin("auto", 1, plan_of(num_steps=3))
    train(*run)
    assert engine.ledger.last_check == 2
    assert engine.ledger.failed_check is None
    assert engine.ledger.to_json().count("auto goes by vmap") == 1


# ---------------------------------------------------------------------- what a check changes


def test_a_failed_check_releases_and_records_nothing(monkeypatch, tmp_path):
    """Nor does it tell anything of the data; the same batch is tried again, and is whole then."""
    path, fault = tmp_path / "run.ledger", FAULTS["norms too small"]
    engine, step, state, loader = begin(fault.method, 1, ledger=path)
    state, batches = train(step, state, loader, 2), loader.remaining()
    batch = next(iter(batches))
    with monkeypatch.context() as patch:
        fault.plant(patch)
        jax.clear_caches()
        for _ in range(2):  # the same batch, the same fault
            with pytest.raises(dualdp.ExactnessError, match="A spot check failed") as caught:
                step(state, batch)
    ledger, error = engine.ledger, caught.value
    assert ledger.position == len(ledger) == 2
    assert ledger.failed_check["step"] == batch.step == 2
    assert ledger.failed_check["last_passed"] == ledger.last_check == 1
    assert ledger.failed_check["parameters"] == list(error.parameters) != []
    with pytest.raises(AccountingError, match="is not vouched for since step 1"):
        engine.get_epsilon(1e-3)
    assert engine.get_epsilon(1e-3, accept_unverified=True) > 0

    details, copy = error.unprotected_details, pickle.loads(pickle.dumps(error))
    assert set(details) == {"norm", "error"}
    told = [str(error), repr(error), repr(copy), path.read_text()]
    told += traceback.format_exception(error)
    assert (error.__cause__, error.__context__) == (None, None)
    for number in details.values():
        assert number == 0 or not any(f"{number:.4g}"[:5] in text for text in told)

    jax.clear_caches()  # the fault is gone
    state, _ = step(state, batch)
    assert_same(state, train(*begin(fault.method, 0)[1:], 3))
    assert ledger.last_check == 2
    assert ledger.failed_check is not None
    engine.detach()
    assert not verify(path, allow_seed=True).passed


def drops(p, x, y, key):
    return loss_fn({**p["one"], "c": p["c"]}, x * jax.random.bernoulli(key, 0.5, x.shape), y)


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (1e-9, {}),
        pytest.param(0.5, {"physical_batch_size": 2}, marks=pytest.mark.slow),
        pytest.param(
            16, {"physical_batch_size": 5, "clipping": "per_layer"}, marks=pytest.mark.slow
        ),
    ],
)
def test_checks_change_nothing(size, changes):
    """Bitwise, with dropout and with every step checked as a whole; of no, few, many examples."""
    nested = {"one": {name: PARAMS[name] for name in "ab"}, "c": PARAMS["c"]}
    x = np.where(np.arange(N)[:, None] % 3, X, np.nan)  # examples that contribute nothing
    ends, last = [], []
    for rate in (1, 0):
        plan = plan_of(num_steps=12, expected_batch_size=size, **changes)
        given = {"params": nested, "loss_fn": drops, "needs_key": True, "data": (x, Y)}
        engine, *run = begin("auto", rate, plan, **given)
        ends.append(train(*run))
        last.append(engine.ledger.last_check)
        assert len(engine.ledger) == 12
    assert_same(*ends)
    assert [number is None for number in last] == [size < 0.1, True]


def test_the_ledger_says_how_many_steps_are_checked():
    for rate, told in ((0, 0), (None, 1 / 50), (0.25, 0.25)):
        engine, *_ = begin(checks=rate)
        lines = engine.ledger.to_json().splitlines()
        notes = [json.loads(line).get("note", {}) for line in lines]
        assert [note["checks"] for note in notes if "checks" in note] == [told]
        engine.detach()
    with pytest.raises(ValueError, match="checks=1.5 is not a probability"):
        begin(checks=1.5)


def test_a_check_waits_for_the_first_example():
    """An empty batch does not use up the first check."""
    plan = plan_of(expected_batch_size=0.2, physical_batch_size=2)
    engine, step, state, loader = begin(plan=plan)
    for batch in loader.remaining():
        state, _ = step(state, batch)
        assert (engine.ledger.last_check is None) == (not batch.mask.any())
        if batch.mask.any():
            break
    assert batch.step > 0, "the first draw was empty"
