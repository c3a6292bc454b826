# SPDX-License-Identifier: Apache-2.0
"""Both engines take the same arguments, make the same plan of them, and refuse the same ones."""

import json
import pickle
from collections import deque
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import dualdp
from dualdp import AccountingError
from dualdp.plan.schedules import AdaptiveNorm, Linear
from dualdp.randomness import bits
from tests.backends.runs import FACES, Run, X, make_plan, stacks

NUMBERS = {"noise_multiplier": 1.0, "max_grad_norm": 0.5}
TARGET = {"target_epsilon": 3.0, "target_delta": 1e-4, "max_grad_norm": 0.5}
WITH_TARGET = "make_private_with_epsilon"
ZEROS = {"torch": {"w": torch.zeros(3)}, "jax": {"w": jnp.zeros(3)}}


def plan(**changes):
    return make_plan(**{"num_steps": 10, "noise": "fast", "accountant": "pld", **changes})


def outcome(engine, method, given):
    """What both stacks make of the arguments: the plan, or kind and text of the error."""
    found = []
    for stack in FACES:
        try:
            run = Run(stack, engine=engine, method=method, **given).engine.plan
            found.append({**json.loads(run.to_json()), "accountant": run.accountant})
        except (TypeError, ValueError) as error:
            found.append((type(error), str(error)))
    return found


RIGHT = [
    {"seed": None, "epochs": None, "num_steps": None, "plan": None},
    {"target_delta": 1e-4, "num_steps": 9},
    {"sampler": "fixed_size", "neighboring_relation": "replace", "num_steps": 10},
    {"noise": "portable", "seed": 7, "clipping": "automatic", "epochs": 2},
    {"noise_multiplier": Linear(1.0, 2.0, over=5), "max_physical_batch_size": 4},
    {"max_grad_norm": AdaptiveNorm(1.0), "physical_batch_size": 4},
    {"target_epsilon": 3.0, "target_delta": 1e-4, "on_budget": "stop", "delta": None},
]


@pytest.mark.parametrize("given", RIGHT, ids=" ".join)
def test_the_same_arguments_give_the_same_run(given):
    """known_failures 86."""
    torch_, jax_ = outcome((), "make_private", {**NUMBERS, **given})
    assert torch_ == jax_
    assert isinstance(torch_, dict), torch_
    fields = {"target_delta": "delta", "max_physical_batch_size": "physical_batch_size"}
    for word, value in given.items():
        field = fields.get(word, word)
        if field in torch_ and isinstance(value, str | int | float):
            assert torch_[field] == value


@pytest.mark.parametrize(
    ("engine", "more", "field", "value"),
    [
        ({"accountant": "rdp"}, NUMBERS, "accountant", "rdp"),
        ({}, {**NUMBERS, "accountant": "rdp"}, "accountant", "rdp"),
        ({"accountant": "rdp"}, {"plan": plan(accountant="rdp")}, "accountant", "rdp"),
        ({"accountant": "prv"}, {"plan": plan()}, "accountant", "pld"),
        ({"secure_mode": True}, NUMBERS, "noise", "secure"),
    ],
)
def test_settings_of_the_engine_reach_the_plan(engine, more, field, value):
    torch_, jax_ = outcome(engine, "make_private", more)
    assert torch_ == jax_
    assert torch_[field] == value


@pytest.mark.parametrize("more", [{"epochs": 2}, {"num_steps": 7, "sampler": "shuffle"}])
def test_targets_give_the_same_run(more):
    torch_, jax_ = outcome({"accountant": "rdp"}, WITH_TARGET, {**TARGET, **more})
    assert torch_ == jax_
    assert torch_["num_steps"] == (10 if "epochs" in more else 7)
    assert torch_["noise_multiplier"] > 0.3


#: Words -> (settings of the engine, arguments) that are refused by them.
WRONG = {
    "has no argument 'noise_multipler'.*Expected any of .*epochs": (
        {},
        {**NUMBERS, "noise_multipler": 1.0},
    ),
    "make_private misses noise_multiplier": ({}, {"max_grad_norm": 1.0}),
    "make_private misses max_grad_norm": ({}, {"noise_multiplier": 1.0}),
    "delta came together with plan=": ({}, {"plan": plan(), "delta": 1e-5}),
    "max_grad_norm, noise_multiplier came together with plan=": ({}, {"plan": plan(), **NUMBERS}),
    "has no argument 'z'": ({}, {"plan": plan(), "z": 1}),
    "target_delta and delta came together": ({}, {**NUMBERS, "delta": 1e-5, "target_delta": 1e-5}),
    "epochs=1 and num_steps=5. Expected one of the two": (
        {},
        {**NUMBERS, "epochs": 1, "num_steps": 5},
    ),
    "target_epsilon came without target_delta": ({}, {**NUMBERS, "target_epsilon": 1.0}),
    "noise_multiplier=-1.0 is out": ({}, {**NUMBERS, "noise_multiplier": -1.0}),
    "max_grad_norm=nan is not a nu": ({}, {**NUMBERS, "max_grad_norm": float("nan")}),
    "Bounds of groups came with": ({}, {**NUMBERS, "max_grad_norm": {"a": 1.0}}),
    "accountant='gdp' is unknown": ({}, {**NUMBERS, "accountant": "gdp"}),
    "seed=1 with noise=": ({}, {**NUMBERS, "noise": "secure", "seed": 1}),
    "accountant='gdp' is unknown. Expected one": ({"accountant": "gdp"}, NUMBERS),
    "accountant='rdp' of the engine besid": ({"accountant": "rdp"}, {"plan": plan()}),
    "accountant='pld' came": ({"accountant": "rdp"}, {**NUMBERS, "accountant": "pld"}),
    "secure_mode=True with a plan whose": ({"secure_mode": True}, {"plan": plan()}),
    "noise='fast' came together": ({"secure_mode": True}, {**NUMBERS, "noise": "fast"}),
}
#: The same of `make_private_with_epsilon`.
WRONG_TARGETS = {
    "epochs=None and num_steps=None. Expected one of the two": {},
    "epochs=0 is out of range": {"epochs": 0},
    "noise_multiplier and target_epsilon came together": {"epochs": 1, "noise_multiplier": 1.0},
    "make_private_with_epsilon misses max_gra": {"epochs": 1, "max_grad_norm": None},
    "target_epsilon came together with plan=": {"epochs": 1, "plan": plan()},
}


def refused_alike(words, engine, method, given):
    """By one error on both stacks; what is misspelt, missing or no number is a TypeError."""
    kind = TypeError if "has no argument" in words or "misses" in words else ValueError
    for stack in FACES:
        with pytest.raises(kind, match=words) as caught:
            Run(stack, engine=engine, method=method, **given)
        assert type(caught.value) is kind


@pytest.mark.parametrize("words", WRONG)
def test_the_same_arguments_are_refused_alike(words):
    refused_alike(words, WRONG[words][0], "make_private", WRONG[words][1])


@pytest.mark.parametrize("words", WRONG_TARGETS)
def test_targets_are_refused_alike(words):
    refused_alike(words, {}, WITH_TARGET, {**TARGET, **WRONG_TARGETS[words]})


# ---------------------------------------------------------------------- before and after a run


@stacks
def test_an_engine_has_one_run(stack):
    engine = FACES[stack].PrivacyEngine()
    for read in (
        lambda: engine.plan,
        lambda: engine.ledger,
        lambda: engine.accountant,
        lambda: engine.get_epsilon(1e-5),
        lambda: engine.record(),
    ):
        with pytest.raises(AccountingError, match="The engine has no run yet. Call make_priv"):
            read()
    run = Run(stack, **NUMBERS)
    for is_detached in (False, True):
        if is_detached:
            run.engine.detach()
        with pytest.raises(AccountingError, match="This engine has a run already, and a"):
            run.engine.make_private(**run.given, **NUMBERS)
        with pytest.raises(AccountingError, match="This engine has a run already, and a"):
            run.engine.make_private_with_epsilon(**run.given, **TARGET, epochs=1)


@stacks
def test_delta_is_asked_for_unless_it_was_named(stack):
    """The default of the plan is the same on both stacks, and nobody's choice."""
    engine = Run(stack, **NUMBERS).engine
    assert engine.plan.delta == 1e-5
    with pytest.raises(ValueError, match="delta is missing. Expected a number in"):
        engine.get_epsilon()
    assert engine.get_epsilon(1e-5) == engine.get_epsilon(delta=1e-5) == 0
    for more in ({**NUMBERS, "delta": 1e-4}, {**NUMBERS, "target_delta": 1e-4}, {"plan": plan()}):
        assert Run(stack, **more).engine.get_epsilon() == 0


def test_the_default_delta_is_below_one_in_n():
    sizes = {"num_examples": 10**6, "accountant": None, "secure_mode": False}
    arguments = {**NUMBERS, "expected_batch_size": 1}
    found = dualdp.plan.arguments.plan_of(None, arguments, **sizes)
    assert found.delta == 1 / (10**6 + 1)


# ---------------------------------------------------------------------- loops of one's own


def own_loop(stack, **arguments):
    """Engine and loader for a loop of the user's own."""
    engine = FACES[stack].PrivacyEngine()
    rows = DataLoader(TensorDataset(torch.tensor(X)), batch_size=12)
    given = {"data_loader": rows} if stack == "torch" else {"data": X}
    return engine, engine.make_loader(**given, **arguments)


def released(engine, num_steps=1):
    """Record releases, and give out the noise of each."""
    steps = engine.record(num_steps)
    for step in steps:
        engine.ledger.take(step)
    return steps


@stacks
def test_loops_of_ones_own_are_the_same_on_both_stacks(stack):
    """A pass is an epoch of five steps; `remaining` is what is left."""
    run = plan(num_steps=8)
    engine, loader = own_loop(stack, plan=run)
    assert len(loader) == 5
    for passed, batches in enumerate((loader, loader.remaining())):
        for step, batch in enumerate(batches, 5 * passed):
            assert batch.step == step
            rows = [np.asarray(chunk.indices)[np.asarray(chunk.mask)] for chunk in batch.chunks]
            np.testing.assert_array_equal(np.concatenate(rows), run.batch_indices(step))
            assert released(engine) == range(step, step + 1)
    assert engine.get_epsilon() == pytest.approx(run.epsilon())
    assert list(loader.remaining()) == []
    with pytest.raises(AccountingError, match="All 8 planned steps are taken. Plan more"):
        next(iter(loader))
    with pytest.raises(AccountingError, match="num_steps=1 after 8 recorded steps is past step 8"):
        released(engine)


@stacks
def test_a_loop_that_forgets_to_record_reads_no_epsilon(stack):
    """known_failures 85: it read 0.0."""
    engine, loader = own_loop(stack, plan=plan(num_steps=4))
    batches = iter(loader)
    next(batches)
    assert engine.get_epsilon() == 0  # nothing was released
    next(batches)
    with pytest.raises(AccountingError, match="handed out 2 batches for which no release"):
        engine.get_epsilon()
    released(engine, 2)
    assert engine.get_epsilon() > 0


@stacks
def test_a_batch_serves_one_release(stack):
    """Thirty releases on ten drawn batches had the epsilon of thirty draws."""
    run = plan(num_steps=40)
    engine, loader = own_loop(stack, plan=run)
    cached = list(loader)
    for _ in cached:  # drawn ahead
        released(engine)
    assert engine.get_epsilon() == run.epsilon(step=len(cached))
    released(engine)  # before its batch is drawn
    with pytest.raises(AccountingError, match=f"step {len(cached)} is on record and its ba"):
        released(engine)
    released(engine, 3)  # a run of several steps in one program draws as it likes
    with pytest.warns(match=f"releases are on record and {len(cached)} batches were drawn for"):
        engine.get_epsilon()

    engine, loader = own_loop(stack, plan=run)
    batches = iter(loader.remaining())
    for _ in range(10):
        released(engine)
        next(batches)
    assert engine.get_epsilon() > 0


@stacks
def test_batches_of_ones_own_are_not_those_of_the_plan(stack):
    """Permuted batches of the user's had the epsilon of Poisson's."""
    engine, loader = own_loop(stack, plan=plan(seed=None))
    for _ in range(5):
        released(engine)
    with pytest.warns(match="5 releases are on record and 0 batches were drawn for them: this eps"):
        engine.get_epsilon()
    del loader

    run = plan()
    engine, _ = own_loop(stack, plan=run)
    for step in range(5):
        run.batch_indices(step)  # by a loop that fetches its rows itself
        released(engine)
    assert engine.get_epsilon() > 0


@stacks
def test_every_batch_that_is_used_is_a_release(stack):
    """Sums added over four batches, and empty batches left out, were fewer releases."""
    engine, loader = own_loop(stack, plan=plan(num_steps=8))
    for step, _ in enumerate(loader.remaining()):
        if step % 4 == 3:
            released(engine)
    with pytest.raises(AccountingError, match="handed out 6 batches for which no release"):
        engine.get_epsilon()

    engine, loader = own_loop(stack, plan=plan(num_steps=8))
    batches, ahead = iter(loader.remaining()), deque()
    for _ in range(8):  # as a loop that moves three batches ahead to a device
        while len(ahead) < 3 and (batch := next(batches, None)):
            ahead.append(batch)
        assert released(engine) == range(ahead[0].step, ahead.popleft().step + 1)
        assert engine.get_epsilon() > 0


@stacks
def test_noise_of_a_loop_of_ones_own_is_for_recorded_steps(stack):
    """known_failures 79: with a secret key and with a seed."""
    zeros, noisy_mean = ZEROS[stack], FACES[stack].noisy_mean
    for seed in (None, 1):
        run = plan(num_steps=4, seed=seed)
        engine, _ = own_loop(stack, plan=run)
        missing = "has no release on record whose noise is still to be drawn"
        with pytest.raises(AccountingError, match=f"step=0 {missing}"):
            noisy_mean(zeros, run, 0)
        engine.record(2)
        noisy_mean(zeros, run, 0)
        noisy_mean(zeros, run, 1)
        with pytest.raises(AccountingError, match=f"step=1 {missing}"):
            noisy_mean(zeros, run, 1)


@stacks
def test_noise_of_an_engine_is_its_own(stack):
    """known_failures 79: an engine and noisy_mean or add_noise of one plan."""
    run = plan(seed=None)
    begun = Run(stack, plan=run)
    with pytest.raises(AccountingError, match="no loop|is open|make_loader"):
        FACES[stack].noisy_mean(ZEROS[stack], run, 0)
    Run("jax" if stack == "torch" else "torch", plan=run)  # a run of its own
    begun.engine.detach()


def test_a_pickled_batch_has_no_bits(monkeypatch):
    """known_failures 81; a chunk of JAX is a pytree, and no pickle."""
    given, real = [], bits.fresh_bits
    monkeypatch.setattr(bits, "fresh_bits", lambda size=64: given.append(real(size)) or given[-1])
    engine, loader = own_loop("torch", plan=plan(seed=None))
    data = pickle.dumps(next(iter(loader)))
    assert given
    assert not any(secret in data or secret.hex().encode() in data for secret in given)
    assert pickle.loads(data).step == 0
    engine.detach()


def test_loops_of_ones_own_are_for_one_process_on_torch(monkeypatch):
    engine, _ = own_loop("torch", plan=plan())
    engine.group = SimpleNamespace(size=2)
    with pytest.raises(AccountingError, match=r"record\(\) came in a run of several processes"):
        released(engine)
    monkeypatch.setattr("dualdp_torch.training.engine.Group", lambda: SimpleNamespace(size=2))
    with pytest.raises(AccountingError, match="make_loader came in a group of several proce"):
        own_loop("torch", plan=plan())


@stacks
def test_releases_without_noise_are_told(stack):
    """A loop that records and never asks for noise had an epsilon without a word."""
    engine, loader = own_loop(stack, plan=plan(num_steps=4))
    for _ in loader:
        engine.record()
        if engine.ledger.position == 1:
            assert engine.get_epsilon() > 0  # its noise may be about to be drawn
    with pytest.warns(match="4 releases are on record whose noise was never asked for: this eps"):
        engine.get_epsilon()
