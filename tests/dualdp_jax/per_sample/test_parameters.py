# SPDX-License-Identifier: Apache-2.0
"""Models as their users hold them: linen, nnx, Equinox, Haiku; what is trained, what is refused."""

import operator

import equinox
import haiku
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import dualdp_jax as dpj
from dualdp import UnsupportedLayerError
from tests.closeness import factors_of
from tests.dualdp_jax import runs
from tests.dualdp_jax.two_layers import norms_of

N = 4
RNG = np.random.default_rng(5)
X = jnp.asarray(RNG.normal(size=(N, 4)), jnp.float32)
Y = jnp.asarray(RNG.integers(0, 3, N))


def loss_of(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def called(model, x, y):
    return loss_of(model(x), y)


def assert_exact(loss_fn, model, gradient, method, batch=(X, Y), **options):
    """Gradients, norms and the sum of the three calls are those of single examples; their aux."""
    each = [gradient(model, *(part[k] for part in batch)) for k in range(N)]
    each = jax.tree.map(lambda *leaves: np.stack(leaves).astype(np.float64), *each)
    norms = norms_of(each)

    @jax.jit
    def compute(batch):
        given = {"method": method, "check": "off", **options}
        grads = dpj.per_sample_grads(loss_fn, model, *batch, **given)
        return grads, dpj.clipped_grad_sum(loss_fn, model, *batch, max_grad_norm=0.7, **given)

    grads, found = compute(batch)
    grads = grads[0] if options.get("has_aux") else grads
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    factors = factors_of(norms, 0.7)
    trees = map(jax.tree.leaves, (each, grads, found.grads))
    for rows, ours, total in zip(*trees, strict=True):
        np.testing.assert_allclose(ours, rows, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(total, np.tensordot(factors, rows, 1), rtol=1e-4, atol=1e-6)
    return grads, found


class Net(nnx.Module):
    def __init__(self, rngs, dropout=0.0):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.last = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(jnp.tanh(self.first(x))))


class Block(nnx.Module):
    def __init__(self, rngs, rate):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.dropout(jnp.tanh(self.linear(x)))


class Deep(nnx.Module):
    """Layers made by `vmap` with split rngs, run by `scan` and `remat`, as Flax's guide has it."""

    def __init__(self, rngs, rate=0.0, write=lambda block: None):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            return Block(rngs, rate)

        self.blocks, self.head, self.write = create(rngs), nnx.Linear(4, 3, rngs=rngs), write

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, block):
            def run(block, x):
                self.write(block)
                return block(x)

            return nnx.remat(run)(block, x)

        return self.head(forward(x, self.blocks))


class Sowing(nnx.Module):
    """Keeps what it computes; the loss reads a part of it, as an auxiliary loss of experts does."""

    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(4, 5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        hidden = jnp.tanh(self.first(x))
        self.sow(nnx.Intermediate, "hidden", hidden)
        add = {"init_fn": lambda: 0.0, "reduce_fn": lambda total, new: total + new}
        self.sow(nnx.Intermediate, "size", jnp.square(hidden).sum(), **add)
        return self.last(hidden)


def sown_loss(model, x, y):
    loss = called(model, x, y)
    return loss + 0.1 * nnx.pop(model, nnx.Intermediate)["size"].get_value()


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        hidden = jnp.tanh(linen.Dense(4)(x))
        self.sow("intermediates", "hidden", hidden)
        return linen.Dense(3)(hidden)


def linen_loss(variables, x, y):
    """Its intermediates are a part of the loss, and handed out."""
    logits, kept = Linen().apply(variables, x, mutable=["intermediates"])
    (hidden,) = kept["intermediates"]["hidden"]
    return loss_of(logits, y) + 0.1 * jnp.square(hidden).sum(), hidden


def batch_loss(params, x, y):
    """Written for a batch (n, 4), (n,)."""
    centred = x - x.mean(axis=-1, keepdims=True)
    logits = jnp.concatenate([centred @ params["w"], jnp.ones((len(x), 1))], axis=1)
    return loss_of(logits, y).mean(axis=0)


def empty_loss(p, x, y):
    """Parameters of size 0 are some."""
    more = jnp.concatenate([x @ p["w"], x @ p["wide"], p["none"].sum(0) * x[:3]])
    return jnp.sum(jnp.tanh(more / 9) ** 2)


def drawn(**shapes):
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}


HAIKU = haiku.without_apply_rng(haiku.transform(lambda x: haiku.nets.MLP([4, 3])(jnp.tanh(x))))
#: name: (loss, what makes the model); the gradient of an example is that of `jax.grad`, or given.
MODELS = {
    "linen": (linen_loss, lambda: {"params": Linen().init(jax.random.key(0), X[0])["params"]}),
    "equinox": (called, lambda: equinox.nn.MLP(4, 3, 4, 1, jnp.tanh, key=jax.random.key(0))),
    "haiku": (
        lambda p, x, y: loss_of(HAIKU.apply(p, x), y),
        lambda: HAIKU.init(jax.random.key(0), X[0]),
    ),
    "batches of one": (batch_loss, lambda: drawn(w=(4, 2))),
    "size 0": (empty_loss, lambda: drawn(w=(4, 3), none=(0, 3), wide=(4, 0))),
    "nnx": (called, lambda: Net(nnx.Rngs(0))),
    "nnx, sowing": (sown_loss, lambda: Sowing(nnx.Rngs(0))),
}
OPTIONS = {"linen": {"has_aux": True}, "batches of one": {"keep_batch_dim": True}}
GRADIENTS = {
    "linen": lambda v, x, y: jax.grad(linen_loss, has_aux=True)(v, x, y)[0],
    "equinox": equinox.filter_grad(called),
    "batches of one": lambda p, x, y: jax.grad(batch_loss)(p, x[None], y[None]),
}
RUNS = [(name, "book_keeping") for name in MODELS]
RUNS += [(name, "vmap") for name in ("nnx", "equinox")]
RUNS += [(name, "two_pass") for name in ("nnx", "size 0", "batches of one")]
FAST = [("nnx", "book_keeping")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "method"),
    [pytest.param(*run, marks=() if run in FAST else pytest.mark.slow) for run in RUNS],
)
def test_models_are_exact_and_left_alone(name, method):
    """The three calls are those of single examples."""
    loss, build = MODELS[name]
    model, is_nnx = build(), name.startswith("nnx")
    before = jax.tree.leaves(nnx.state(model)) if is_nnx else []
    gradient = GRADIENTS.get(name, jax.grad(loss))
    if is_nnx:
        gradient = lambda _, x, y: nnx.grad(loss)(build(), x, y)  # noqa: E731
    grads, found = assert_exact(loss, model, gradient, method, **OPTIONS.get(name, {}))
    if is_nnx:
        assert isinstance(grads, nnx.State)
        after = jax.tree.leaves(nnx.state(model))
        assert all(map(operator.is_, before, after))
    if name == "linen":
        hidden = [linen_loss(model, X[k], Y[k])[1] for k in range(N)]
        np.testing.assert_allclose(found.aux, np.stack(hidden), rtol=1e-6)


def test_a_loss_for_batches_of_one():
    params, given = drawn(w=(4, 2)), {"keep_batch_dim": True}
    assert dpj.explain(batch_loss, params, X, Y, **given)["uses"]
    assert dpj.validate(batch_loss, params, X, Y, **given) == []
    with pytest.raises(ValueError, match=r"float32\[1\] for one .* the mean over a batch of one"):
        dpj.per_sample_norms(lambda p, x, y: loss_of(x @ p["w"], 0 * y), params, X, Y, **given)
    with pytest.raises(ValueError, match=r"for a batch of ONE example, here float32\[1, 4\]"):
        dpj.per_sample_norms(lambda p, x, y: x[0, 0, 0], params, X, Y, **given)


@pytest.mark.slow
def test_linen_running_statistics_are_not_trained():
    model = linen.Sequential([linen.BatchNorm(use_running_average=True), linen.Dense(3)])
    variables = model.init(jax.random.key(0), X)
    loss_fn = lambda v, x, y: loss_of(model.apply(v, x), y)  # noqa: E731
    with pytest.raises(UnsupportedLayerError, match="hold the collection 'batch_stats'"):
        dpj.per_sample_grads(loss_fn, variables, X, Y)
    flags = {"params": True, "batch_stats": False}
    grads = dpj.per_sample_grads(loss_fn, variables, X, Y, trainable=flags)
    assert jax.tree.leaves(grads["batch_stats"]) == []
    assert len(jax.tree.leaves(grads["params"])) == 4


@pytest.mark.slow
def test_equinox_numbers_are_settings():
    model = {"net": equinox.nn.Dropout(0.5), "w": jnp.ones(4)}
    loss_fn = lambda m, x, y, key: loss_of(m["net"](x * m["w"], key=key), y)  # noqa: E731
    grads = dpj.per_sample_grads(loss_fn, model, X, Y, key=jax.random.key(1))
    assert grads["net"].p is None
    assert grads["w"].shape == (N, 4)


# ---------------------------------------------------------------------- nnx


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_an_earlier_call_sowed_is_no_part_of_the_loss():
    model = Sowing(nnx.Rngs(0))
    expected = dpj.per_sample_norms(sown_loss, model, X, Y)
    model(100 * X)  # the size of these examples stays in the module
    np.testing.assert_array_equal(dpj.per_sample_norms(sown_loss, model, X, Y), expected)


@pytest.mark.slow
def test_nnx_keys_are_split_per_example_and_left_alone():
    model = Net(nnx.Rngs(0), dropout=0.5)
    before = jax.tree.leaves(nnx.state(model))
    same = jnp.broadcast_to(X[:1], X.shape)
    norms, again = (dpj.per_sample_norms(called, model, same, Y * 0) for _ in range(2))
    assert len(np.unique(np.asarray(norms).round(6))) > 1
    after = jax.tree.leaves(nnx.state(model))
    assert all(map(operator.is_, before, after))
    np.testing.assert_array_equal(norms, again)


def loss_and_masks(model, x, y):
    """Loss, and the dropout masks (3, 16) that the layers would draw next."""
    masks = nnx.vmap(lambda block: block.dropout(jnp.ones(16)) > 0)(model.blocks)
    return called(model, x, y), masks


@pytest.mark.slow
def test_a_run_of_split_layers_draws_its_masks_from_the_plan():
    """Whatever keys the module had and however many rows a chunk; other masks at each step."""
    ends, seen = [], []
    for seed, rows in ((1, N), (2, 2)):
        model = Deep(nnx.Rngs(0, dropout=seed), rate=0.5)
        sizes = {"num_examples": N, "expected_batch_size": N, "physical_batch_size": rows}
        plan = runs.make_plan(sampler="shuffle", num_steps=2, **sizes)
        given = {"loss_fn": loss_and_masks, "params": model, "data": (X, Y), "has_aux": True}
        _, step, state, loader = runs.private(plan=plan, checks=float(seed == 2), **given)
        before = jax.tree.leaves(nnx.state(model))
        for batch in loader.remaining():
            state, metrics = step(state, batch)
            masks = np.concatenate(metrics["unprotected_aux"])
            assert len({row.tobytes() for row in masks.reshape(-1, 16)}) == 3 * N
            seen.append(masks.tobytes())
        assert all(map(operator.is_, jax.tree.leaves(nnx.state(model)), before))
        nnx.update(model, state.params)
        ends.append(np.asarray(model.head.kernel.get_value()))
    assert seen[:2] == seen[2:]
    assert seen[0] != seen[1]
    np.testing.assert_allclose(*ends, rtol=1e-5)


def test_nnx_frozen_and_integer_parameters():
    model = Net(nnx.Rngs(0))
    flags = jax.tree.map(lambda _: True, nnx.state(model, nnx.Param))
    flags["first"]["kernel"] = flags["first"]["kernel"].replace(False)
    grads = dpj.per_sample_grads(called, model, X, Y, trainable=flags)
    assert len(jax.tree.leaves(grads)) == 3
    model.first.steps = nnx.Param(jnp.arange(2))
    with pytest.raises(TypeError, match="The parameter 'first/steps' is int32"):
        dpj.per_sample_grads(called, model, X, Y)


class Counted(Net):
    """Counts its calls, as spectral normalisation and schedules of quantisation do."""

    def __init__(self, rngs, of_rows=False):
        super().__init__(rngs)
        self.calls, self.of_rows = nnx.Variable(jnp.zeros(())), of_rows

    def __call__(self, x):
        self.calls[...] = self.calls[...] + (x.sum() if self.of_rows else 1.0)
        return super().__call__(x)


class Keeping(Net):
    def __call__(self, x):
        self.seen = nnx.Cache(x)
        return super().__call__(x)


def scaled(block):
    block.linear.kernel.set_value(block.linear.kernel.get_value() * 0.9)


CHANGED = {
    "seen": lambda: Keeping(nnx.Rngs(0)),
    "calls": lambda: Counted(nnx.Rngs(0), of_rows=True),
    "blocks/linear/kernel": lambda: Deep(nnx.Rngs(0), write=scaled),
}


@pytest.mark.parametrize("variable", CHANGED)
def test_nnx_variables_that_change_are_refused(variable):
    with pytest.raises(UnsupportedLayerError, match=f"changed the variable '{variable}"):
        dpj.per_sample_norms(called, CHANGED[variable](), X, Y)


@pytest.mark.slow
def test_a_counter_is_no_state_that_examples_share():
    """It moves alike whatever the row."""
    model = Counted(nnx.Rngs(0))
    norms = dpj.per_sample_norms(called, model, X, Y)
    np.testing.assert_allclose(norms, dpj.per_sample_norms(called, Net(nnx.Rngs(0)), X, Y))
    assert float(model.calls[...]) == 0


# ---------------------------------------------------------------------- strict promotion


@pytest.mark.slow
def test_strict_promotion_changes_nothing():
    """Of a call on bfloat16 numbers, the sums of which are float32, and of a run."""
    low = lambda leaf: leaf.astype("bfloat16")  # noqa: E731
    params, dense = drawn(w=(4, 3)), lambda p, x, y: loss_of(x @ p["w"], y)

    def both():
        sums = dpj.clipped_grad_sum(dense, jax.tree.map(low, params), low(X), Y, max_grad_norm=0.7)
        plan = runs.make_plan(num_examples=N, expected_batch_size=2, num_steps=3)
        engine, *run = runs.private(
            loss_fn=dense, params=params, data=(X, Y), plan=plan, checks=1.0
        )
        return sums, runs.train(*run), engine.stages()

    expected = both()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = both()
    jax.tree.map(np.testing.assert_array_equal, expected, found)
