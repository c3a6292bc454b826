# SPDX-License-Identifier: Apache-2.0
"""Spot checks of the engine on JAX: faults planted in ordinary runs, and what a check changes."""

import functools
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
from dualdp_jax.per_sample import clip, gradients, methods, squared_norms, tied
from dualdp_jax.rules import RULES, arrays, gather
from dualdp_jax.training import step
from tests.dualdp_jax.runs import make_plan, train

N, ROWS, STEPS = 64, 16, 220
RNG = np.random.default_rng(5)


def draw(*shape, scale=1.0):
    return (scale * RNG.normal(size=shape)).astype(np.float32)


def seeded(model):
    """The same numbers at every call."""

    @functools.wraps(model)
    def made():
        RNG.bit_generator.state = np.random.default_rng(5).bit_generator.state
        return model()

    return made


# ---------------------------------------------------------------------- models


@seeded
def mlp():
    """Every example in one position: norms by lengths."""
    params = {"a": draw(12, 40, scale=0.3), "b": draw(40), "c": draw(40, 30, scale=0.3)}
    loss = lambda p, x, y: jnp.mean((jnp.tanh(x @ p["a"] + p["b"]) @ p["c"] - y) ** 2)  # noqa: E731
    return params, loss, (draw(N, 12), draw(N, 30))


@seeded
def sequence():
    """Four positions: the Gram form."""
    params = {"a": draw(60, 60, scale=0.1), "c": draw(60, 50, scale=0.1)}
    loss = lambda p, x, y: jnp.mean((jnp.tanh(x @ p["a"]) @ p["c"] - y) ** 2)  # noqa: E731
    return params, loss, (draw(N, 4, 60), draw(N, 50))


@seeded
def cancelling():
    """Positions that are nearly equal, whose gradients nearly sum to zero."""
    params = {"w": np.zeros((64, 64), np.float32)}
    signs = draw(N, 4, 64)
    signs -= signs.mean(1, keepdims=True)
    loss = lambda p, x, y: 1e3 * jnp.sum((x @ p["w"]) * y)  # noqa: E731
    return params, loss, ((1 + draw(N, 4, 64, scale=1e-3)).astype(np.float32), signs)


@seeded
def file_bytes():
    """Bytes as they come from a file, as indices of a table."""
    params = {"t": draw(256, 16), "w": draw(16, 3)}
    loss = lambda p, x: jnp.sum(jnp.tanh(jnp.take(p["t"], x, 0)).mean(0) @ p["w"]) ** 2  # noqa: E731
    return params, loss, (RNG.integers(0, 256, (N, 12)).astype(np.uint8),)


@seeded
def tokens():
    """An embedding that is the head's matrix, too."""
    params = {"e": draw(256, 24, scale=0.3), "w": draw(24, 24, scale=0.3)}

    def loss(p, x):
        h = jnp.tanh(p["e"][x[:-1]] @ p["w"])
        return -jnp.take_along_axis(jax.nn.log_softmax(h @ p["e"].T), x[1:, None], 1).mean()

    return params, loss, (RNG.integers(0, 256, (N, 7)),)


@seeded
def image():
    """A convolution."""
    params = {"k": draw(3, 3, 2, 8, scale=0.3), "v": draw(8, 3)}

    def loss(p, x, y):
        names = ("NHWC", "HWIO", "NHWC")
        h = jax.lax.conv_general_dilated(x[None], p["k"], (1, 1), "SAME", dimension_numbers=names)
        return -jax.nn.log_softmax(jnp.tanh(h[0]).mean((0, 1)) @ p["v"])[y]

    return params, loss, (draw(N, 8, 8, 2), RNG.integers(0, 3, N))


# ---------------------------------------------------------------------- faults


def wrap(owner, name, change):
    """Plant: the result of a function, changed."""

    def plant(patch):
        right = getattr(owner, name)
        patch.setattr(owner, name, lambda *a, **k: change(right(*a, **k)))

    return plant


def of_rule(primitive, field, change):
    """Plant: the result of one function of a rule, changed."""

    def plant(patch):
        right = RULES[primitive]
        function = getattr(right, field)
        wrong = lambda *arguments: change(function(*arguments))  # noqa: E731
        patch.setitem(RULES, primitive, right._replace(**{field: wrong}))

    return plant


def one_in_eight(n):
    return jnp.arange(n) % 8 == 3


def shrunk(estimate, factor=0.2, which=lambda n: jnp.ones(n, bool)):
    """Squared norms, too small for some examples."""
    where = which(estimate.sq_norms.shape[0])
    smaller = jnp.where(where, factor * estimate.sq_norms, estimate.sq_norms)
    return estimate._replace(sq_norms=smaller)


def weighted_sums_of(rows):
    """Plant: the factors of some rows are zero, or doubled, where gradients are added up."""

    def plant(patch):
        right = arrays.weighted_sum
        wrong = lambda factors, grads: right(rows(factors), grads)  # noqa: E731
        patch.setattr(arrays, "weighted_sum", wrong)
        patch.setattr(gradients, "weighted_sum", wrong)

    return plant


def without_cross_terms(patch):
    patch.setattr(
        tied, "pairs", lambda a, b, right=tied.pairs: right(a, b) if a is b else 0 * right(a, b)
    )


def second_pass_with(change):
    def plant(patch):
        right = gradients.reweighted
        patch.setattr(
            gradients,
            "reweighted",
            lambda call, rows, factor, *rest: right(call, rows, change(factor), *rest),
        )

    return plant


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
    model: object
    method: str
    plant: object
    start: int = 2
    changes: dict = {}
    is_on_host: bool = False  # not compiled in


FAULTS = {
    "lengths too small": Fault(mlp, "book_keeping", of_rule("dot_general", "norms", shrunk)),
    "lengths too small, one row in eight": Fault(
        mlp,
        "book_keeping",
        of_rule("dot_general", "norms", functools.partial(shrunk, which=one_in_eight)),
    ),
    "product 0.3 percent too large": Fault(
        mlp, "book_keeping", of_rule("dot_general", "weighted_sum", lambda x: 1.003 * x)
    ),
    "gram form without its error": Fault(
        cancelling, "book_keeping", wrap(squared_norms, "within_error", lambda found: {})
    ),
    "gram form, one row in eight": Fault(
        sequence,
        "book_keeping",
        of_rule("dot_general", "norms", functools.partial(shrunk, which=one_in_eight)),
    ),
    "indices in their own dtype": Fault(
        file_bytes,
        "book_keeping",
        wrap(gather, "looked_up", lambda found: (found[0].astype(jnp.uint8), *found[1:])),
        start=0,
    ),
    "tied matrix without cross terms": Fault(tokens, "book_keeping", without_cross_terms),
    "two_pass with squared factors": Fault(mlp, "two_pass", second_pass_with(jnp.square)),
    "two_pass with the neighbour's factor": Fault(
        mlp, "two_pass", second_pass_with(lambda f: jnp.where(one_in_eight(f.shape[0]), 1.3 * f, f))
    ),
    "a row in eight is left out": Fault(
        mlp, "vmap", weighted_sums_of(lambda f: jnp.where(one_in_eight(f.shape[0]), 0, f))
    ),
    "a row in eight counts twice": Fault(
        sequence,
        "materialize",
        weighted_sums_of(lambda f: jnp.where(one_in_eight(f.shape[0]), 2 * f, f)),
    ),
    "kernel upside down": Fault(
        image, "book_keeping", of_rule("conv_general_dilated", "weighted_sum", lambda g: g[::-1])
    ),
    "norms of kernels too small": Fault(
        image, "book_keeping", of_rule("conv_general_dilated", "norms", shrunk)
    ),
    "clip by min(norm / C, 1)": Fault(
        mlp,
        "loop",
        lambda patch: patch.setattr(
            clip, "factors_for", lambda kind, n, c, xp: xp.minimum(n / c, 1.0)
        ),
    ),
    "padding counts": Fault(mlp, "auto", mask_forgotten, changes={"physical_batch_size": 16}),
    "chunks are not added up": Fault(
        mlp, "auto", only_the_last_chunk, changes={"physical_batch_size": 4}, is_on_host=True
    ),
}


def plan_of(**changes):
    given = {"num_examples": N, "expected_batch_size": ROWS, "physical_batch_size": 24, "seed": 4}
    given |= {"num_steps": STEPS, "noise_multiplier": 1.0, "max_grad_norm": 0.02}
    return make_plan(**given | changes)


def begin(model, method="auto", checks=None, plan=None, **changes):
    params, loss, data = model
    engine = dpj.PrivacyEngine()
    return engine, *engine.make_private(
        loss_fn=loss,
        params=params,
        optimizer=optax.sgd(1e-3),
        data=data,
        plan=plan or plan_of(),
        method=method,
        checks=checks,
        **changes,
    )


def caught(fault, rate, num_steps, monkeypatch):
    """Step at which a check failed, of a run with a fault from step `fault.start` on, or None."""
    engine, step, state, loader = begin(fault.model(), fault.method, rate, plan_of(**fault.changes))
    for batch, _ in zip(loader.remaining(), range(num_steps), strict=False):
        with monkeypatch.context() as patch:
            if batch.step == fault.start or (fault.is_on_host and batch.step > fault.start):
                fault.plant(patch)
            if batch.step == fault.start:
                jax.clear_caches()  # its programs are compiled anew, with the fault
            try:
                state, _ = step(state, batch)
            except dualdp.ExactnessError:
                return batch.step
    return None


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name, monkeypatch):
    """Where every step is checked, within 20 steps: one wrong row in eight may be none of four."""
    fault = FAULTS[name]
    assert fault.start <= caught(fault, 1, 24, monkeypatch) < fault.start + 20


@pytest.mark.parametrize("method", ["auto", "book_keeping"])
@pytest.mark.parametrize("is_supported", [True, False])
def test_auto_goes_by_vmap_from_the_first_batch_on(method, is_supported, monkeypatch):
    """Where a rule is wrong, or has no form for the loss; the ledger says what was taken."""

    def refuse(*arguments):
        raise dualdp.UnsupportedLayerError("No such form. Use method='vmap'.")

    rule = RULES["conv_general_dilated"]
    wrong = (lambda *given: 0.5 * rule.grads(*given)) if is_supported else refuse
    monkeypatch.setitem(RULES, "conv_general_dilated", rule._replace(grads=wrong, norms=None))
    engine, step, state, loader = begin(image(), method, 1, plan_of(num_steps=3))
    if method != "auto":
        with pytest.raises((dualdp.ExactnessError, dualdp.UnsupportedLayerError)):
            step(state, next(iter(loader)))
        return
    for batch in loader:
        state, _ = step(state, batch)
    assert engine.ledger.last_check == 2
    assert engine.ledger.failed_check is None
    assert engine.ledger.to_json().count("auto goes by vmap") == 1


def test_one_step_in_fifty_catches_a_fault_within_200(monkeypatch):
    fault = FAULTS["two_pass with squared factors"]
    assert caught(fault, None, 202, monkeypatch) > 2
    assert caught(fault, 0, 202, monkeypatch) is None


# ---------------------------------------------------------------------- what a check changes


def failing(monkeypatch, name="lengths too small", at=2, **changes):
    """A run in whose steps from `at` on a fault is planted, every step checked."""
    fault = FAULTS[name]
    engine, step, state, loader = begin(fault.model(), fault.method, 1, plan_of(), **changes)
    batches = iter(loader)
    for _ in range(at):
        state, _ = step(state, next(batches))
    with monkeypatch.context() as patch:
        fault.plant(patch)
        jax.clear_caches()
        batch = next(batches)
        with pytest.raises(dualdp.ExactnessError, match="A spot check failed") as caught:
            step(state, batch)
    return engine, step, state, batch, caught.value


def test_a_failed_check_releases_and_records_nothing(monkeypatch, tmp_path):
    path = tmp_path / "run.ledger"
    engine, step, state, batch, error = failing(monkeypatch, ledger=path)
    assert engine.ledger.position == len(engine.ledger) == 2
    assert engine.ledger.failed_check["step"] == batch.step == 2
    assert engine.ledger.failed_check["last_passed"] == engine.ledger.last_check == 1
    assert engine.ledger.failed_check["parameters"] == list(error.parameters) != []
    with pytest.raises(dualdp.ExactnessError):  # the same batch, the same fault
        step(state, batch)
    with pytest.raises(AccountingError, match="is not vouched for since step 1"):
        engine.get_epsilon(1e-3)
    assert engine.get_epsilon(1e-3, accept_unverified=True) > 0
    engine.detach()
    assert not verify(path, allow_seed=True).passed


def test_a_failed_check_tells_nothing_of_the_data(monkeypatch, tmp_path):
    path = tmp_path / "run.ledger"
    engine, _, _, _, error = failing(monkeypatch, ledger=path)
    details = error.unprotected_details
    assert set(details) == {"norm", "error"}
    copy = pickle.loads(pickle.dumps(error))
    told = [str(error), repr(error), repr(copy), path.read_text()]
    told += traceback.format_exception(error)
    assert error.__cause__ is None
    assert error.__context__ is None
    for number in details.values():
        assert number == 0 or not any(f"{number:.4g}"[:5] in text for text in told)


def test_the_same_batch_is_tried_again_and_no_half_sum_is_left(monkeypatch):
    engine, step, state, batch, _ = failing(monkeypatch)
    jax.clear_caches()  # the fault is gone
    state, _ = step(state, batch)
    other, theirs, their_state, loader = begin(mlp(), "book_keeping", 0, plan_of())
    for _, wanted in zip(range(3), loader, strict=False):
        their_state, _ = theirs(their_state, wanted)
    assert_same(state, their_state)
    assert engine.ledger.last_check == 2
    assert engine.ledger.failed_check is not None


def assert_same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


CHANGES = {
    "several chunks": {"physical_batch_size": 5, "clipping": "per_layer"},
    "no example": {"expected_batch_size": 1e-9},
    "few examples": {"expected_batch_size": 0.5, "physical_batch_size": 2},
}


@pytest.mark.parametrize("name", CHANGES)
def test_checks_change_nothing(name):
    """Bitwise, with dropout and with every step checked as a whole."""
    params, loss, data = mlp()
    params = {"one": {"a": params["a"], "b": params["b"]}, "two": {"c": params["c"]}}

    def drops(p, x, y, key):
        x = x * jax.random.bernoulli(key, 0.5, x.shape)
        return loss({**p["one"], **p["two"]}, x, y)

    ends = []
    for rate in (1, 0):
        plan = plan_of(num_steps=12, **CHANGES[name])
        engine, step, state, loader = begin(
            (params, drops, data), "auto", rate, plan, needs_key=True
        )
        for batch in loader.remaining():
            state, metrics = step(state, batch)
        ends.append((state, metrics))
        assert len(engine.ledger) == 12
        checked = engine.ledger.last_check
        assert checked is None if rate == 0 or name == "no example" else checked is not None
    assert_same(*ends)


def test_the_ledger_says_how_many_steps_are_checked():
    for rate, told in ((0, 0), (None, 1 / 50), (0.25, 0.25)):
        engine, *_ = begin(mlp(), checks=rate)
        lines = engine.ledger.to_json().splitlines()
        notes = [json.loads(line).get("note", {}) for line in lines]
        assert [note["checks"] for note in notes if "checks" in note] == [told]
        engine.detach()
    with pytest.raises(ValueError, match="checks=1.5 is not a probability"):
        begin(mlp(), checks=1.5)


def test_a_check_waits_for_the_first_example():
    """An empty batch does not use up the first check."""
    plan = plan_of(expected_batch_size=0.2, physical_batch_size=2)
    engine, step, state, loader = begin(mlp(), plan=plan)
    for batch in loader.remaining():
        state, _ = step(state, batch)
        is_empty = not any(chunk.mask.any() for chunk in batch.chunks)
        assert (engine.ledger.last_check is None) == is_empty
        if not is_empty:
            break
    assert batch.step > 0, "the first draw was empty"


def test_broken_examples_pass_their_check():
    """An example without a finite gradient contributes nothing, which is what it should."""
    params, loss, (x, y) = mlp()
    x = x.copy()
    x[::3] = np.nan
    engine, step, state, loader = begin((params, loss, (x, y)), checks=1, plan=plan_of(num_steps=8))
    state = train(step, state, loader)
    assert engine.ledger.last_check == 7
