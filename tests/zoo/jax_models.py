# SPDX-License-Identifier: Apache-2.0
"""Whole JAX models: plain functions, Flax linen and nnx, Equinox and Haiku.

Each shows what only a whole model shows; its name or docstring says what. `MODELS` holds functions
that return (params, function of them and one example, batch, trainable), always the same numbers.
"""

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.sharding import PartitionSpec

N, WIDTH, LENGTH, VOCABULARY = 4, 6, 5, 11
RNG, KEY = np.random.default_rng(0), jax.random.key(0)
X = RNG.normal(size=(N, LENGTH, WIDTH)).astype(np.float32)
IDS = RNG.integers(0, VOCABULARY, (N, LENGTH), np.int32)
IMAGES = RNG.normal(size=(N, 4, 4, 3)).astype(np.float32)
MODELS = {}


def loss_of(function):
    """Mean over the outputs of y^2 / 2 + y cos(index)."""

    def loss_fn(params, *example):
        y = jnp.ravel(function(params, *example))
        return jnp.mean(y**2 / 2 + y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)))

    return loss_fn


# ---------------------------------------------------------------------- plain functions


def plain(*batch, **shapes):
    """Register a function of parameters with these shapes and an example."""

    def register(function):
        def build():
            rng = np.random.default_rng(1)
            draw = lambda shape: jnp.asarray(rng.normal(size=shape) * 0.4 + 0.05, jnp.float32)  # noqa: E731
            params = {name: draw(shape) for name, shape in shapes.items()}
            return params, loss_of(function), batch, None

        MODELS[function.__name__] = build
        return function

    return register


@plain(IDS.astype(np.uint8) * 20, table=(256, WIDTH), body=(WIDTH, WIDTH))
def bytes_with_a_tied_head(p, ids):
    return jnp.tanh(p["table"][ids] @ p["body"]) @ p["table"].T


@plain(X, w=(3, WIDTH, WIDTH), b=(3, WIDTH))
def layers_stacked_and_recomputed(p, x):
    layer = jax.checkpoint(lambda h, layer: (h + jnp.tanh(h @ layer["w"] + layer["b"]), h.mean()))
    h, means = jax.lax.scan(layer, x, p)
    return jnp.append(h.ravel(), means)


@plain(X, decay=(4,), enter=(WIDTH, 4), leave=(4, 2))
def recurrence_by_associative_scan(p, x):
    keep = jnp.exp(-jnp.exp(p["decay"])) * jnp.ones((LENGTH, 4))
    join = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])  # noqa: E731
    _, h = jax.lax.associative_scan(join, (keep, x @ p["enter"]))
    return jax.nn.gelu(h) @ p["leave"]


@plain(X, kernel=(LENGTH, WIDTH), w=(WIDTH, 2))
def convolution_by_fourier_transform(p, x):
    spectrum = jnp.fft.rfft(x, 2 * LENGTH, axis=0) * jnp.fft.rfft(p["kernel"], 2 * LENGTH, axis=0)
    return jnp.fft.irfft(spectrum, 2 * LENGTH, axis=0)[:LENGTH] @ p["w"]


@plain(X, gate=(WIDTH, 4), experts=(4, WIDTH, 5))
def experts_by_ragged_dot(p, x):
    """Tokens sorted by expert, then one product of unequal groups."""
    chosen = jnp.argmax(x @ p["gate"], 1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=4).astype(jnp.int32)
    out = jax.lax.ragged_dot(x[order], p["experts"], sizes)
    return out[jnp.argsort(order)] * jax.nn.softmax(x @ p["gate"]).max(1)[:, None]


@plain(X, w=(WIDTH, 4), v=(4, 2))
def inside_shard_map(p, x):
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    model, everywhere = lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"], PartitionSpec()
    specs = {"in_specs": (everywhere, everywhere), "out_specs": everywhere}
    return jax.shard_map(model, mesh=mesh, **specs)(p, x)


@plain(X, IDS[:, None, :3] % LENGTH, enter=(WIDTH, 4), first=(4, 4), second=(4, 4))
def graph_by_segment_sum(p, x, edges):
    h, (source,) = jnp.tanh(x @ p["enter"]), edges
    for name in ("first", "second"):
        h = h + jax.ops.segment_sum(jnp.tanh(h[source] @ p[name]), source[::-1], LENGTH)
    return h.mean(0)


@plain(X, a=(WIDTH, 4), b=(WIDTH, 4), c=(4, 4))
def branches_by_the_example(p, x):
    branches = [
        lambda x: jnp.tanh(x @ p["a"]),
        lambda x: x @ p["b"],
        lambda x: jnp.tanh(x @ p["a"]) @ p["c"],
    ]
    return jax.lax.switch((x.sum() * 10).astype(jnp.int32) % 3, branches, x)


@plain(X, w=(WIDTH, 4), v=(4, 2))
def rounded_straight_through(p, x):
    """A backward of its own, linear in its cotangent."""

    @jax.custom_vjp
    def rounded(h):
        return jnp.round(h * 4) / 4

    rounded.defvjp(lambda h: (rounded(h), None), lambda _, g: (g,))
    return rounded(jnp.tanh(x @ p["w"])) @ rounded(p["v"])


@plain(X, a=(WIDTH, 4), scale=(2,))
def derivative_by_the_input(p, x):
    return jax.grad(lambda x: jnp.tanh(x @ p["a"]).sum() * p["scale"].sum())(x)


# ---------------------------------------------------------------------- Flax linen


def of_linen(name, module, batch):
    """Register a linen module, of whose collections "params" alone is trained."""

    def build():
        variables = module.init(KEY, jnp.asarray(batch[0]))
        trainable = {collection: collection == "params" for collection in variables}
        return variables, loss_of(module.apply), (batch,), trainable

    MODELS[name] = build


class LinenNet(linen.Module):
    """A batch norm that stands still; down, up by a transposed convolution, and a shortcut."""

    @linen.compact
    def __call__(self, x):
        norm = linen.BatchNorm(use_running_average=True)
        one = linen.silu(norm(linen.GroupNorm(2)(linen.Conv(4, (3, 3), use_bias=False)(x))))
        low = linen.silu(linen.Conv(6, (3, 3), strides=2)(one))
        up = linen.ConvTranspose(4, (2, 2), strides=(2, 2))(low)
        return linen.Conv(2, (1, 1))(jnp.concatenate([up, one], -1))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        mask = linen.make_causal_mask(jnp.ones(x.shape[0]))
        x = x + linen.MultiHeadDotProductAttention(2)(linen.LayerNorm()(x), mask=mask)
        return x + linen.Dense(WIDTH)(linen.gelu(linen.Dense(8)(linen.RMSNorm()(x)))), None


class LinenDecoder(linen.Module):
    """Blocks under `scan` over layers, recomputed on the way back; the head is the table."""

    @linen.compact
    def __call__(self, ids):
        table, axes = linen.Embed(VOCABULARY, WIDTH), {"params": 0}
        x = table(ids) + self.param("places", linen.initializers.normal(0.1), (LENGTH, WIDTH))
        block = linen.remat(LinenBlock)
        block = linen.scan(block, variable_axes=axes, split_rngs={"params": True}, length=2)
        return table.attend(linen.LayerNorm()(block()(x, None)[0]))


class LinenRecurrent(linen.Module):
    @linen.compact
    def __call__(self, x):
        lstm, gru = (cell(4, param_dtype=x.dtype) for cell in (linen.LSTMCell, linen.GRUCell))
        return linen.Bidirectional(linen.RNN(lstm), linen.RNN(gru))(x)


class LinenExperts(linen.Module):
    """Routed by a one-hot dispatch with a capacity for each expert."""

    @linen.compact
    def __call__(self, x):
        gate = linen.softmax(linen.Dense(3)(x))
        chosen = jax.nn.one_hot(gate.argmax(-1), 3)
        place = (jnp.cumsum(chosen, 0) * chosen).astype(jnp.int32) - 1
        dispatch = chosen[..., None] * jax.nn.one_hot(place, 3)  # (t, expert, capacity)
        experts = linen.vmap(linen.Dense, variable_axes={"params": 0}, split_rngs={"params": True})
        out = experts(WIDTH)(jnp.einsum("tec,td->ecd", dispatch, x))
        return jnp.einsum("tec,ecd->td", dispatch * gate[..., None], out)


of_linen("linen_net", LinenNet(), IMAGES)
of_linen("linen_decoder", LinenDecoder(), IDS)
of_linen("linen_recurrent", LinenRecurrent(), X)
of_linen("linen_experts", LinenExperts(), X)
of_linen("linen_weight_norm", linen.WeightNorm(linen.Dense(3)), X)

# ---------------------------------------------------------------------- Flax nnx


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.one = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = nnx.GroupNorm(4, 2, rngs=rngs)
        self.still = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        self.out = nnx.WeightNorm(nnx.Linear(4, 3, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.out(self.still(nnx.gelu(self.norm(self.one(x[None])))).mean((1, 2)))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.inner = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + nnx.gelu(self.inner(x))


class NnxDecoder(nnx.Module):
    """A block that is recomputed; the head is the table."""

    def __init__(self, rngs):
        self.table, self.block = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs), NnxBlock(rngs)

    def __call__(self, ids):
        return self.table.attend(nnx.remat(lambda block, x: block(x))(self.block, self.table(ids)))


class NnxStack(nnx.Module):
    """Blocks made by `vmap` with keys of their own, under `scan`."""

    def __init__(self, rngs):
        make = nnx.split_rngs(splits=2)(nnx.vmap(NnxBlock, in_axes=0, out_axes=0))
        self.blocks = make(rngs)

    def __call__(self, x):
        run = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(lambda x, block: block(x))
        return run(x, self.blocks)


class NnxRecurrent(nnx.Module):
    def __init__(self, rngs):
        self.lstm = nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, 4, rngs=rngs))

    def __call__(self, x):
        start = jnp.zeros((1, 4), x.dtype)
        return self.lstm(x[None], initial_carry=(start, start))


for name, make, batch in (
    ("nnx_net", NnxNet, IMAGES),
    ("nnx_decoder", NnxDecoder, IDS),
    ("nnx_stack", NnxStack, X),
    ("nnx_recurrent", NnxRecurrent, X),
):
    call = loss_of(lambda model, x: model(x))
    MODELS[name] = lambda make=make, batch=batch, call=call: (
        make(rngs=nnx.Rngs(0)),
        call,
        (batch,),
        None,
    )

# ---------------------------------------------------------------------- Equinox and Haiku


class EqxRecurrent(eqx.Module):
    cell: eqx.nn.LSTMCell

    def __call__(self, x):
        start = jnp.zeros(4, x.dtype), jnp.zeros(4, x.dtype)
        return jax.lax.scan(lambda state, x: (self.cell(x, state), None), start, x)[0][0]


class EqxBlock(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm

    def __init__(self, key: Any):
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=key)
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, x):
        h = jax.vmap(self.norm)(x)
        return x + self.attention(h, h, h)


class EqxStack(eqx.Module):
    """Blocks stacked by `filter_vmap`, under `scan` and `filter_checkpoint`."""

    blocks: EqxBlock

    def __init__(self, key: Any):
        self.blocks = eqx.filter_vmap(EqxBlock)(jax.random.split(key, 2))

    def __call__(self, x):
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)
        turn = lambda x, part: (eqx.filter_checkpoint(eqx.combine(part, rest))(x), None)  # noqa: E731
        return jax.lax.scan(turn, x, arrays)[0]


for name, make in (
    ("eqx_recurrent", lambda: EqxRecurrent(eqx.nn.LSTMCell(WIDTH, 4, key=KEY))),
    ("eqx_stack", lambda: EqxStack(KEY)),
):
    call = loss_of(lambda model, x: model(x))
    MODELS[name] = lambda make=make, call=call: (make(), call, (X,), None)


def hk_net(x):
    h = jax.nn.gelu(hk.GroupNorm(2)(hk.Conv2D(4, 3)(x[None])))
    return hk.Conv2DTranspose(3, 2, stride=2)(h).mean() + hk.DepthwiseConv2D(1, 3)(h)


def hk_layers(x):
    def layer(x):
        h = hk.LayerNorm(-1, True, True)(x)
        start = hk.initializers.VarianceScaling(1.0)
        return x + hk.MultiHeadAttention(2, 3, w_init=start, model_size=WIDTH)(h, h, h)

    return hk.experimental.layer_stack(2)(layer)(x)


def hk_recurrent(x):
    core = hk.LSTM(4)
    return hk.dynamic_unroll(core, x, core.initial_state(None))[0]


for function, batch in ((hk_net, IMAGES), (hk_layers, X), (hk_recurrent, X)):
    transformed = hk.without_apply_rng(hk.transform(function))
    MODELS[function.__name__] = lambda transformed=transformed, batch=batch: (
        transformed.init(KEY, jnp.asarray(batch[0])),
        loss_of(transformed.apply),
        (batch,),
        None,
    )
