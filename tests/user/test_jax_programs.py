# SPDX-License-Identifier: Apache-2.0
"""Programs on JAX: Flax linen and nnx, Equinox, Haiku and plain functions, with optax."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import dualdp.jax as dpj
from tests import closeness

ROWS, STEPS = 24, 30
NUMBERS = {"expected_batch_size": 6, "max_grad_norm": 0.5, "num_steps": STEPS, "delta": 1e-5}
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(ROWS, 6)), RNG.integers(0, 3, ROWS)
IMAGES, WORDS = RNG.normal(size=(ROWS, 8, 8, 1)), RNG.integers(1, 20, (ROWS, 7))
TARGETS = RNG.normal(size=ROWS)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
PROGRAMS = {}


def program(make):
    """Register a function that returns (loss_fn, params, optimizer, data, options)."""
    PROGRAMS[make.__name__] = make
    return make


@program
def linen_convnet_with_schedule_and_metrics():
    class ConvNet(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.gelu(linen.GroupNorm(2)(linen.Conv(4, (3, 3))(x)))
            return linen.Dense(3)(linen.avg_pool(x, (2, 2), (2, 2)).reshape(-1))

    net = ConvNet()

    def loss_fn(params, x, y):
        logits = net.apply(params, x)
        return cross_entropy(logits, y), {"accuracy": logits.argmax() == y}

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, STEPS)
    optimizer = optax.adamw(schedule, weight_decay=1e-4)
    params = net.init(jax.random.key(0), IMAGES[0])
    return loss_fn, params, optimizer, (IMAGES, Y), {"has_aux": True}


@program
def linen_transformer_with_padding():
    class Encoder(linen.Module):
        @linen.compact
        def __call__(self, words):
            mask = words > 0
            x = linen.Embed(20, 8)(words) + self.param("pos", linen.initializers.normal(), (7, 8))
            h = linen.MultiHeadDotProductAttention(2)(x, x, mask=mask[None, None])
            x = linen.LayerNorm()(x + h)
            return linen.Dense(3)((x * mask[:, None]).sum(0) / mask.sum())

    net, words = Encoder(), WORDS * (np.arange(7) < np.arange(ROWS)[:, None] % 6 + 2)

    def loss_fn(params, x, y):
        return cross_entropy(net.apply(params, x), y)

    return loss_fn, net.init(jax.random.key(0), WORDS[0]), optax.adam(1e-2), (words, Y), {}


@program
def plain_language_model_with_tied_head():
    params = {"table": RNG.normal(size=(20, 8)) * 0.3, "bias": np.zeros(8)}
    params["cell"] = RNG.normal(size=(16, 8)) * 0.3

    def loss_fn(params, text):
        embedded = params["table"][text]

        def cell(h, x):
            h = jnp.tanh(jnp.concatenate([h, x]) @ params["cell"] + params["bias"])
            return h, h

        _, states = jax.lax.scan(cell, jnp.zeros(8, embedded.dtype), embedded[:-1])
        return cross_entropy(states @ params["table"].T, text[1:]).mean()

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    return loss_fn, params, optimizer, (WORDS,), {}


@program
def plain_vae_with_keys():
    sizes = {"encode": (6, 8), "decode": (4, 6)}
    params = {name: RNG.normal(size=size) * 0.3 for name, size in sizes.items()}

    def loss_fn(params, x, *, key):
        mean, log_var = jnp.split(x @ params["encode"], 2)
        z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(key, mean.shape, mean.dtype)
        kl = 0.5 * (mean**2 + jnp.exp(log_var) - log_var - 1).sum()
        return jnp.square(z @ params["decode"] - x).sum() + kl

    return loss_fn, params, optax.adam(1e-2), (X,), {"needs_key": True}


@program
def haiku_classifier():
    def forward(x):
        h = hk.LayerNorm(-1, True, True)(jnp.tanh(hk.Linear(8)(x)))
        return hk.Linear(3)(h)

    net = hk.without_apply_rng(hk.transform(forward))

    def loss_fn(params, x, y):
        return cross_entropy(net.apply(params, x), y)

    return loss_fn, net.init(jax.random.key(0), X[0]), optax.lion(1e-3), (X, Y), {}


@program
def equinox_mlp():
    params, static = eqx.partition(eqx.nn.MLP(6, 3, 8, 1, key=jax.random.key(0)), eqx.is_array)

    def loss_fn(params, x, y):
        return cross_entropy(eqx.combine(params, static)(x), y)

    return loss_fn, params, optax.adam(1e-2), (X, Y), {}


@program
def nnx_classifier():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.hidden, self.out = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.out(nnx.tanh(self.hidden(x)))

    def loss_fn(model, x, y):
        return cross_entropy(model(x), y)

    return loss_fn, Net(nnx.Rngs(0)), optax.adam(1e-2), (X, Y), {}


@program
def low_rank_adapters():
    base, a = RNG.normal(size=(6, 3)) * 0.3, RNG.normal(size=(6, 2)) * 0.3
    params = {"base": base, "a": a, "b": np.zeros((2, 3))}

    def loss_fn(params, x, y):
        return cross_entropy(x @ params["base"] + x @ params["a"] @ params["b"], y)

    trainable = {"base": False, "a": True, "b": True}
    return loss_fn, params, optax.adam(1e-2), (X, Y), {"trainable": trainable}


each = pytest.mark.parametrize("name", PROGRAMS)


def as_floats(tree, dtype):
    """Leaves of floats in a dtype; a module stays one."""

    def cast(leaf):
        is_float = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(leaf, dtype) if is_float else leaf

    return jax.tree.map(cast, tree)


def start(name, dtype, **given):
    """Return (loss of plain parameters, data, options, engine, made) of a program."""
    loss_fn, params, optimizer, data, options = PROGRAMS[name]()
    params, *data = as_floats((params, *data), dtype)
    engine, graph = dpj.PrivacyEngine(), None
    if isinstance(params, nnx.Module):
        graph, _ = nnx.split(params)

    def plain(params, *row):
        found = loss_fn(params if graph is None else nnx.merge(graph, params), *row)
        return found[0] if "has_aux" in options else found

    parts = {"loss_fn": loss_fn, "params": params, "optimizer": optimizer, "data": tuple(data)}
    made = engine.make_private(**parts, seed=3, **NUMBERS, **options, **given)
    return plain, data, options, engine, made


def clipped_sum(loss_fn, params, rows, trainable):
    """Trained leaves of the definition: a float64 loop over the rows."""
    trained = jax.tree.leaves(jax.tree.map(lambda _: True, params) if not trainable else trainable)
    each = [jax.tree.leaves(jax.grad(loss_fn)(params, *row)) for row in rows]
    grads = {k: np.stack(part) for k, part in enumerate(zip(*each, strict=True)) if trained[k]}
    return closeness.clipped_sum(grads, NUMBERS["max_grad_norm"], "float64").values()


@pytest.mark.slow
@each
def test_it_equals_a_loop_over_rows(name):
    """Steps with checks=1.0, each sum beside the definition where a row has no key of its own."""
    with jax.enable_x64(True):
        given = {"noise_multiplier": 1e-12, "checks": 1.0}
        plain, data, options, engine, (step, state, loader) = start(name, jnp.float64, **given)
        for k, batch in enumerate(loader.remaining()):
            before = state.params
            state, _ = step(state, batch)
            if k in (0, 13) and "needs_key" not in options:
                rows = [[part[i] for part in data] for i in engine.plan.batch_indices(k)]
                expected = clipped_sum(plain, before, rows, options.get("trainable"))
                found = jax.tree.leaves(engine.stages().unprotected_sum)
                for ours, theirs in zip(found, expected, strict=True):
                    np.testing.assert_allclose(ours, theirs, atol=1e-9)
    assert len(engine.ledger) == STEPS


@pytest.mark.slow
@each
def test_it_runs_by_default(name):
    *_, engine, (step, state, loader) = start(name, jnp.float32, noise_multiplier=1.0)
    for _epoch in range(-(-STEPS // -(-ROWS // 6))):
        for batch in loader:
            state, metrics = step(state, batch)
    assert len(engine.ledger) == STEPS


class Normed(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(6, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x[None])[0]


def averaged(updates, params=None):
    return jax.tree.map(lambda update: update.mean(0), updates)


MISTAKES = {
    "one loss for each class": ({"loss_fn": lambda p, x, y: x @ p["w"]}, "scalar"),
    "an integer leaf": ({"params": {"w": np.ones((6, 3)), "step": np.ones(3, int)}}, "step"),
    "a mean over an axis": ({"optimizer": optax.stateless(averaged)}, "Expected the same"),
    "batch norm": ({"loss_fn": lambda m, x, y: m(x).sum(), "params": Normed()}, "use GroupNorm"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused(mistake):
    changes, words = MISTAKES[mistake]
    given = {"loss_fn": lambda p, x, y: cross_entropy(x @ p["w"], y), "data": (X, Y)}
    given |= {"params": {"w": np.ones((6, 3))}, "optimizer": optax.sgd(0.1), **NUMBERS, **changes}

    def first_step():
        engine = dpj.PrivacyEngine()
        step, state, loader = engine.make_private(noise_multiplier=1.0, **given)
        step(state, next(iter(loader)))

    with pytest.raises((TypeError, ValueError, IndexError, RuntimeError), match=words):
        first_step()
