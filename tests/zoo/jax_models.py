# SPDX-License-Identifier: Apache-2.0
"""Ordinary JAX models: plain functions, Flax linen, Flax nnx, Equinox and Haiku."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.sharding import PartitionSpec

from tests.zoo.entry import Entry, N, Problem

Array = Any
WIDTH, LENGTH, VOCABULARY, CLASSES = 6, 5, 11, 3


def floats(*shape: int, seed: int = 0) -> Array:
    """Standard normals, float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def tokens(*shape: int, seed: int = 0, dtype: Any = np.int32, high: int = VOCABULARY) -> Array:
    """Ids."""
    return np.random.default_rng(seed).integers(0, high, shape).astype(dtype)


X, IDS, IMAGES = floats(N, LENGTH, WIDTH), tokens(N, LENGTH), floats(N, 8, 8, 3)
Y = np.arange(N, dtype=np.int32) % CLASSES


def squared(y: Array) -> Array:
    """Scalar: mean over the outputs of y^2 / 2 + y cos(index)."""
    y = jnp.ravel(y)
    return jnp.mean(y**2 / 2 + y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)))


def labelled(logits: Array, y: Array) -> Array:
    """Scalar: cross entropy."""
    return -jax.nn.log_softmax(logits)[y]


def next_token(logits: Array, ids: Array) -> Array:
    """Scalar: mean cross entropy of the next token."""
    scores = jax.nn.log_softmax(logits[:-1].astype(jnp.promote_types(logits.dtype, jnp.float32)))
    return -jnp.take_along_axis(scores, ids[1:, None].astype(jnp.int32), 1).mean()


# ---------------------------------------------------------------------- plain functions


def draw(seed: int, **shapes: tuple[int, ...]) -> dict[str, Array]:
    """Parameters by name."""
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=shape) * 0.4 + 0.05, jnp.float32)
        for name, shape in shapes.items()
    }


def plain(
    function: Callable[..., Array], *batch: Array, **shapes: tuple[int, ...]
) -> Callable[[], Problem]:
    """A loss of (params, *example)."""
    return lambda: Problem(draw(1, **shapes), function, batch)


def byte_model(p: Any, ids: Array) -> Array:
    """Ids as they lie in a file of bytes."""
    hidden = jnp.tanh(p["table"][ids] @ p["body"])
    return next_token(hidden @ p["table"].T, ids)


def shared_layers(p: Any, x: Array) -> Array:
    """One layer, used at every step of a scan."""
    turn = lambda h, _: (jnp.tanh(h @ p["w"] + p["b"]), None)  # noqa: E731
    return squared(jax.lax.scan(turn, x, None, length=3)[0])


def stacked_layers(p: Any, x: Array) -> Array:
    """Layers stacked along axis 0, recomputed on the way back."""

    @jax.checkpoint
    def turn(h: Array, layer: Any) -> Any:
        return h + jnp.tanh(h @ layer["w"] + layer["b"]), h.mean()

    h, means = jax.lax.scan(turn, x, {"w": p["w"], "b": p["b"]})
    return squared(h) + means.sum()


def state_space(p: Any, x: Array) -> Array:
    """A diagonal linear recurrence by `associative_scan`."""
    keep = jnp.exp(-jnp.exp(p["decay"])) * jnp.ones((LENGTH, 4))

    def join(a: Any, b: Any) -> Any:
        return a[0] * b[0], a[1] * b[0] + b[1]

    _, h = jax.lax.associative_scan(join, (keep, x @ p["enter"]))
    return squared(jax.nn.gelu(h) @ p["leave"])


def selective_state_space(p: Any, x: Array) -> Array:
    """Steps whose decay depends on the input (Mamba)."""
    delta = jax.nn.softplus(x @ p["delta"])

    def step(h: Array, now: Any) -> Any:
        d, u = now
        h = jnp.exp(-d[:, None] * jnp.exp(p["decay"])) * h + (d * u)[:, None]
        return h, (h * p["read"]).sum(1)

    _, y = jax.lax.scan(step, jnp.zeros((WIDTH, 4), x.dtype), (delta, x))
    return squared(y * jax.nn.silu(x @ p["gate"]))


def long_convolution(p: Any, x: Array) -> Array:
    """A convolution as long as the input, by FFT."""
    spectrum = jnp.fft.rfft(x, 2 * LENGTH, axis=0) * jnp.fft.rfft(p["kernel"], 2 * LENGTH, axis=0)
    return squared(jnp.fft.irfft(spectrum, 2 * LENGTH, axis=0)[:LENGTH] @ p["w"])


def experts_by_weights(p: Any, x: Array) -> Array:
    """The two best of four experts, all of them computed."""
    gate = jax.nn.softmax(x @ p["gate"])
    best, chosen = jax.lax.top_k(gate, 2)
    weights = (jax.nn.one_hot(chosen, 4) * best[..., None]).sum(1)
    return squared(jnp.einsum("tw,ewd,te->td", x, p["experts"], weights))


def experts_by_ragged_dot(p: Any, x: Array) -> Array:
    """Tokens sorted by expert, then one product of unequal groups."""
    chosen = jnp.argmax(x @ p["gate"], 1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=4).astype(jnp.int32)
    out = jax.lax.ragged_dot(x[order], p["experts"], sizes)
    return squared(out[jnp.argsort(order)] * jax.nn.softmax(x @ p["gate"]).max(1)[:, None])


def in_shard_map(p: Any, x: Array) -> Array:
    """The model inside `shard_map` over one axis of size one, with its defaults."""
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    model, everywhere = lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"], PartitionSpec()
    specs = {"in_specs": (everywhere, everywhere), "out_specs": everywhere}
    return squared(jax.shard_map(model, mesh=mesh, **specs)(p, x))


def graph(p: Any, x: Array, edges: Array) -> Array:
    """Messages along edges, added up by `segment_sum`."""
    h = jnp.tanh(x @ p["enter"])
    for name in ("first", "second"):
        h = h + jax.ops.segment_sum(jnp.tanh(h[edges[0]] @ p[name]), edges[1], LENGTH)
    return squared(h.mean(0) @ p["leave"])


def switched(p: Any, x: Array) -> Array:
    """Examples that take different branches."""
    branches = [
        lambda x: jnp.tanh(x @ p["a"]),
        lambda x: x @ p["b"],
        lambda x: jax.nn.relu(x @ p["a"]) @ p["c"],
    ]
    return squared(jax.lax.switch((x.sum() * 10).astype(jnp.int32) % 3, branches, x))


def iterated(p: Any, x: Array) -> Array:
    """A fixed number of turns by `fori_loop`."""
    return squared(jax.lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ p["w"] + x), x))


def custom_gradient(p: Any, x: Array) -> Array:
    """A function with a backward of its own, linear in its cotangent: round, straight through."""

    @jax.custom_vjp
    def rounded(h: Array) -> Array:
        return jnp.round(h * 4) / 4

    rounded.defvjp(lambda h: (rounded(h), None), lambda _, g: (g,))
    return squared(rounded(jnp.tanh(x @ p["w"])) @ rounded(p["v"]))


def windows(p: Any, x: Array) -> Array:
    """A window whose place depends on the example, and one parameter read at another place."""
    start = jnp.argmax(x[:, 0]) % 3
    part = jax.lax.dynamic_slice(x, (start, 0), (3, WIDTH))
    return squared(part @ jax.lax.dynamic_index_in_dim(p["w"], start, keepdims=False))


def convolutions(p: Any, x: Array) -> Array:
    """Strided, dilated and transposed."""
    numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    conv = partial(jax.lax.conv_general_dilated, **numbers)
    h = jax.nn.gelu(conv(x[None], p["one"], (2, 2), "SAME"))
    h = jax.nn.gelu(conv(h, p["two"], (1, 1), "SAME", rhs_dilation=(2, 2), feature_group_count=2))
    return squared(jax.lax.conv_transpose(h, p["up"], (2, 2), "SAME", **numbers))


def radiance_field(p: Any, x: Array) -> Array:
    """Points along a ray, through `vmap`."""
    ray, points = x[0], jnp.linspace(0.1, 1, 4)[:, None] * x[1]

    def one(point: Array) -> Array:
        waves = jnp.concatenate([jnp.sin(point * 2.0**k) for k in range(2)])
        return jax.nn.softplus(jax.nn.relu(waves @ p["a"]) @ p["b"])

    out = jax.vmap(one)(ray + points)
    left = jnp.cumprod(jnp.exp(-out[:, 0]))
    return squared((out[:, 1:] * left[:, None]).sum(0))


def forces(p: Any, x: Array) -> Array:
    """The output is a derivative by the input."""
    potential = lambda x: jnp.tanh(x @ p["a"]).sum() * p["scale"].sum()  # noqa: E731
    return squared(jax.grad(potential)(x))


PLAIN: dict[str, Callable[[], Problem]] = {
    "bytes": plain(
        byte_model,
        tokens(N, LENGTH, dtype=np.uint8, high=256),
        table=(256, WIDTH),
        body=(WIDTH, WIDTH),
    ),
    "words": plain(
        byte_model, tokens(N, LENGTH, dtype=np.uint16, high=30_000), table=(30_000, 2), body=(2, 2)
    ),
    "shared_layers": plain(shared_layers, X, w=(WIDTH, WIDTH), b=(WIDTH,)),
    "stacked_layers": plain(stacked_layers, X, w=(3, WIDTH, WIDTH), b=(3, WIDTH)),
    "state_space": plain(state_space, X, decay=(4,), enter=(WIDTH, 4), leave=(4, 2)),
    "selective_state_space": plain(
        selective_state_space,
        X,
        delta=(WIDTH, WIDTH),
        decay=(WIDTH, 4),
        read=(WIDTH, 4),
        gate=(WIDTH, WIDTH),
    ),
    "long_convolution": plain(long_convolution, X, kernel=(LENGTH, WIDTH), w=(WIDTH, 2)),
    "experts_by_weights": plain(experts_by_weights, X, gate=(WIDTH, 4), experts=(4, WIDTH, 5)),
    "experts_by_ragged_dot": plain(
        experts_by_ragged_dot, X, gate=(WIDTH, 4), experts=(4, WIDTH, 5)
    ),
    "in_shard_map": plain(in_shard_map, X, w=(WIDTH, 4), v=(4, 2)),
    "graph": plain(
        graph,
        X,
        tokens(N, 2, 7) % LENGTH,
        enter=(WIDTH, 4),
        first=(4, 4),
        second=(4, 4),
        leave=(4, 2),
    ),
    "switched": plain(switched, X, a=(WIDTH, 4), b=(WIDTH, 4), c=(4, 4)),
    "iterated": plain(iterated, X, w=(WIDTH, WIDTH)),
    "custom_gradient": plain(custom_gradient, X, w=(WIDTH, 4), v=(4, 2)),
    "windows": plain(windows, X, w=(3, WIDTH, 2)),
    "convolutions": plain(
        convolutions, IMAGES, one=(3, 3, 3, 4), two=(3, 3, 2, 4), up=(2, 2, 4, 3)
    ),
    "radiance_field": plain(radiance_field, floats(N, 2, 3), a=(6, 8), b=(8, 4)),
    "forces": plain(forces, X, a=(WIDTH, 4), scale=(2,)),
}


# ---------------------------------------------------------------------- Flax linen


def of_linen(
    module: linen.Module, score: Callable[..., Array], *batch: Array, inputs: int = 1
) -> Callable[[], Problem]:
    """A linen module; `score(outputs, *rest of the example)`; collections but params are frozen."""

    def build() -> Problem:
        example = [jnp.asarray(part[0]) for part in batch[:inputs]]
        variables = module.init(jax.random.key(0), *example)
        trainable = {name: name == "params" for name in variables}

        def loss_fn(variables: Any, *example: Array) -> Array:
            return score(module.apply(variables, *example[:inputs]), *example[inputs:])

        return Problem(variables, loss_fn, batch, trainable)

    return build


class Classifier(linen.Module):
    """Convolutions, group norm, a running batch norm that stands still, a residual."""

    @linen.compact
    def __call__(self, x: Array) -> Array:
        h = linen.relu(linen.GroupNorm(2)(linen.Conv(4, (3, 3), use_bias=False)(x)))
        h = h + linen.gelu(linen.BatchNorm(use_running_average=True)(linen.Conv(4, (3, 3))(h)))
        h = linen.avg_pool(h, (2, 2), (2, 2))
        return linen.Dense(CLASSES)(h.mean((0, 1)))


class Block(linen.Module):
    """Attention and a product, before each a norm."""

    @linen.compact
    def __call__(self, x: Array, _: Any = None) -> Any:
        mask = linen.make_causal_mask(jnp.ones(x.shape[0]))
        x = x + linen.MultiHeadDotProductAttention(2)(linen.LayerNorm()(x), mask=mask)
        h = linen.gelu(linen.Dense(8)(linen.RMSNorm()(x)))
        return x + linen.Dense(WIDTH)(h), None


class Decoder(linen.Module):
    """Blocks under `scan` over layers, recomputed on the way back; the head is the table."""

    scanned: bool = True

    @linen.compact
    def __call__(self, ids: Array) -> Array:
        table = linen.Embed(VOCABULARY, WIDTH)
        x = table(ids) + self.param("places", linen.initializers.normal(0.1), (LENGTH, WIDTH))
        block = linen.remat(Block)
        if self.scanned:
            axes = {"params": 0}
            block = linen.scan(block, variable_axes=axes, split_rngs={"params": True}, length=2)
            x, _ = block()(x, None)
        else:
            for _ in range(2):
                x, _ = block()(x)
        return table.attend(linen.LayerNorm()(x))


class Recurrent(linen.Module):
    """Both ways, then the last state."""

    cell: Any

    @linen.compact
    def __call__(self, x: Array) -> Array:
        cell = lambda: self.cell(4, param_dtype=x.dtype)  # noqa: E731
        both = linen.Bidirectional(linen.RNN(cell()), linen.RNN(cell()))(x)
        return linen.Dense(2)(linen.RNN(cell())(both)[-1])


class Experts(linen.Module):
    """Routed by a one-hot dispatch with a capacity for each expert."""

    @linen.compact
    def __call__(self, x: Array) -> Array:
        gate = linen.softmax(linen.Dense(3)(x))
        chosen = jax.nn.one_hot(gate.argmax(-1), 3)
        place = jnp.cumsum(chosen, 0) * chosen
        dispatch = chosen[..., None] * jax.nn.one_hot(
            place.astype(jnp.int32) - 1, 3
        )  # (t, expert, capacity)
        inner = jnp.einsum("tec,td->ecd", dispatch, x)
        experts = linen.vmap(linen.Dense, variable_axes={"params": 0}, split_rngs={"params": True})
        out = experts(WIDTH)(inner)
        return jnp.einsum("tec,ecd->td", dispatch * gate[..., None], out)


class UNet(linen.Module):
    """Down, up by a transposed convolution, and a shortcut."""

    @linen.compact
    def __call__(self, x: Array) -> Array:
        one = linen.silu(linen.Conv(4, (3, 3))(x))
        low = linen.silu(linen.Conv(6, (3, 3), strides=2)(one))
        up = linen.ConvTranspose(4, (2, 2), strides=(2, 2))(low)
        return linen.Conv(2, (1, 1))(jnp.concatenate([up, one], -1))


class Mixer(linen.Module):
    """Patches, mixed along both axes."""

    @linen.compact
    def __call__(self, x: Array) -> Array:
        x = linen.Conv(WIDTH, (4, 4), strides=(4, 4))(x).reshape(-1, WIDTH)
        x = x + linen.Dense(4)(linen.gelu(linen.Dense(5)(linen.LayerNorm()(x).T))).T
        x = x + linen.Dense(WIDTH)(linen.gelu(linen.Dense(5)(linen.LayerNorm()(x))))
        return linen.Dense(CLASSES)(x.mean(0))


class Adapted(linen.Module):
    """A frozen kernel, and a low-rank one beside it."""

    @linen.compact
    def __call__(self, x: Array) -> Array:
        base = self.variable("frozen", "base", lambda: jnp.asarray(floats(WIDTH, 4, seed=3)))
        a = self.param("a", linen.initializers.normal(0.3), (WIDTH, 2))
        b = self.param("b", linen.initializers.normal(0.3), (2, 4))
        return x @ (base.value + a @ b)


LINEN: dict[str, Callable[[], Problem]] = {
    "linen_cnn": of_linen(Classifier(), labelled, IMAGES, Y),
    "linen_gpt_scanned": of_linen(Decoder(), squared, IDS),
    "linen_gpt": of_linen(Decoder(scanned=False), squared, IDS),
    "linen_lstm": of_linen(Recurrent(linen.OptimizedLSTMCell), squared, X),
    "linen_gru": of_linen(Recurrent(linen.GRUCell), squared, X),
    "linen_experts": of_linen(Experts(), squared, X),
    "linen_u_net": of_linen(UNet(), squared, IMAGES),
    "linen_mixer": of_linen(Mixer(), labelled, IMAGES, Y),
    "linen_lora": of_linen(Adapted(), squared, X),
    "linen_weight_norm": of_linen(linen.WeightNorm(linen.Dense(3)), squared, X),
}


# ---------------------------------------------------------------------- Flax nnx


def of_nnx(
    make: Callable[[nnx.Rngs], Any], score: Callable[..., Array], *batch: Array
) -> Callable[[], Problem]:
    """An nnx module on the first of the batch's arrays."""

    def build() -> Problem:
        def loss_fn(model: Any, x: Array, *rest: Array) -> Array:
            return score(model(x), *rest)

        return Problem(make(nnx.Rngs(0)), loss_fn, batch)

    return build


class NnxNet(nnx.Module):
    """Convolutions and group norm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.one = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = nnx.GroupNorm(4, 2, rngs=rngs)
        self.still = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        self.out = nnx.Linear(4, CLASSES, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        h = self.still(nnx.gelu(self.norm(self.one(x[None]))))
        return self.out(h.mean((1, 2)))[0]


class NnxBlock(nnx.Module):
    """Attention and a product."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.inner = nnx.Linear(WIDTH, 8, rngs=rngs)
        self.outer = nnx.Linear(8, WIDTH, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.attention(self.norm(x))
        return x + self.outer(nnx.gelu(self.inner(x)))


class NnxDecoder(nnx.Module):
    """Blocks made one by one; the head is the table."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs), NnxBlock(rngs)])

    def __call__(self, ids: Array) -> Array:
        x = self.table(ids)
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return self.table.attend(x)


class NnxStack(nnx.Module):
    """Blocks made by `vmap` with keys of their own, under `scan`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> NnxBlock:
            return NnxBlock(rngs)

        self.blocks = make(rngs)

    def __call__(self, x: Array) -> Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: Array, block: NnxBlock) -> Array:
            return block(x)

        return run(x, self.blocks)


class NnxRecurrent(nnx.Module):
    """A GRU and an LSTM."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gru = nnx.RNN(nnx.GRUCell(WIDTH, 4, rngs=rngs))
        self.lstm = nnx.RNN(nnx.OptimizedLSTMCell(4, 4, rngs=rngs))

    def __call__(self, x: Array) -> Array:
        start = jnp.zeros((1, 4), x.dtype)
        h = self.gru(x[None], initial_carry=start)
        return self.lstm(h, initial_carry=(start, start))[0]


NNX: dict[str, Callable[[], Problem]] = {
    "nnx_cnn": of_nnx(NnxNet, labelled, IMAGES, Y),
    "nnx_gpt": of_nnx(NnxDecoder, squared, IDS),
    "nnx_scanned": of_nnx(NnxStack, squared, X),
    "nnx_recurrent": of_nnx(NnxRecurrent, squared, X),
    "nnx_lora": of_nnx(lambda rngs: nnx.LoRALinear(WIDTH, 4, lora_rank=2, rngs=rngs), squared, X),
    "nnx_weight_norm": of_nnx(
        lambda rngs: nnx.WeightNorm(nnx.Linear(WIDTH, 3, rngs=rngs), rngs=rngs), squared, X
    ),
    "nnx_einsum": of_nnx(
        lambda rngs: nnx.Einsum("tw,wd->td", (WIDTH, 4), (4,), rngs=rngs), squared, X
    ),
}


# ---------------------------------------------------------------------- Equinox


class EqxRecurrent(eqx.Module):
    """A cell under `scan`."""

    cell: eqx.nn.LSTMCell
    out: eqx.nn.Linear

    def __call__(self, x: Array) -> Array:
        start = jnp.zeros(4, x.dtype), jnp.zeros(4, x.dtype)
        (h, _), _ = jax.lax.scan(lambda state, x: (self.cell(x, state), None), start, x)
        return self.out(h)


class EqxBlock(eqx.Module):
    """Attention and a product."""

    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    inner: eqx.nn.Linear

    def __init__(self, key: Array) -> None:
        one, two = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=one)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.inner = eqx.nn.Linear(WIDTH, WIDTH, key=two)

    def __call__(self, x: Array) -> Array:
        h = jax.vmap(self.norm)(x)
        return x + self.attention(h, h, h) + jax.nn.gelu(jax.vmap(self.inner)(h))


class EqxStack(eqx.Module):
    """Blocks stacked by `filter_vmap`, under `scan` and `filter_checkpoint`."""

    blocks: EqxBlock

    def __init__(self, key: Array) -> None:
        self.blocks = eqx.filter_vmap(EqxBlock)(jax.random.split(key, 2))

    def __call__(self, x: Array) -> Array:
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)

        def turn(x: Array, part: Any) -> Any:
            return eqx.filter_checkpoint(eqx.combine(part, rest))(x), None

        return jax.lax.scan(turn, x, arrays)[0]


def of_equinox(
    make: Callable[[Array], Any], score: Callable[..., Array], *batch: Array
) -> Callable[[], Problem]:
    """An Equinox module on the first of the batch's arrays."""

    def loss_fn(model: Any, x: Array, *rest: Array) -> Array:
        return score(model(x), *rest)

    return lambda: Problem(make(jax.random.key(0)), loss_fn, batch)


def _eqx_cnn(key: Array) -> Any:
    keys = jax.random.split(key, 3)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(8, 4, 3, key=keys[0]),
            eqx.nn.GroupNorm(2, 4),
            eqx.nn.Lambda(jax.nn.silu),
            eqx.nn.ConvTranspose2d(4, 2, 2, key=keys[1]),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(28, CLASSES, key=keys[2]),
        ]
    )


EQUINOX: dict[str, Callable[[], Problem]] = {
    "eqx_mlp": of_equinox(lambda key: eqx.nn.MLP(WIDTH, 2, 8, 2, key=key), squared, X[:, 0]),
    "eqx_cnn": of_equinox(_eqx_cnn, labelled, IMAGES, Y),
    "eqx_lstm": of_equinox(
        lambda key: EqxRecurrent(eqx.nn.LSTMCell(WIDTH, 4, key=key), eqx.nn.Linear(4, 2, key=key)),
        squared,
        X,
    ),
    "eqx_scanned": of_equinox(EqxStack, squared, X),
    "eqx_embedding": of_equinox(
        lambda key: eqx.nn.Embedding(VOCABULARY, 4, key=key), squared, IDS[:, 0]
    ),
}


# ---------------------------------------------------------------------- Haiku


def of_haiku(
    function: Callable[[Array], Array], score: Callable[..., Array], *batch: Array
) -> Callable[[], Problem]:
    """A transformed function of the first of the batch's arrays."""

    def build() -> Problem:
        model = hk.without_apply_rng(hk.transform(function))
        params = model.init(jax.random.key(0), jnp.asarray(batch[0][0]))
        return Problem(params, lambda p, x, *rest: score(model.apply(p, x), *rest), batch)

    return build


def _hk_cnn(x: Array) -> Array:
    h = jax.nn.relu(hk.GroupNorm(2)(hk.Conv2D(4, 3)(x[None])))
    large = jnp.repeat(jnp.repeat(x[None], 2, 1), 2, 2)
    h = hk.Conv2DTranspose(3, 2, stride=2)(h) + hk.DepthwiseConv2D(1, 3)(large)
    return hk.Linear(CLASSES)(h.mean((0, 1, 2)))


def _hk_layers(x: Array) -> Array:
    start = hk.initializers.VarianceScaling(1.0)

    def layer(x: Array) -> Array:
        h = hk.LayerNorm(-1, True, True)(x)
        h = hk.MultiHeadAttention(2, 3, w_init=start, model_size=WIDTH)(h, h, h)
        return x + jax.nn.gelu(hk.Linear(WIDTH)(h))

    return hk.experimental.layer_stack(2)(layer)(x)


def _hk_lstm(x: Array) -> Array:
    core = hk.LSTM(4)
    out, _ = hk.dynamic_unroll(core, x, core.initial_state(None))
    return hk.Linear(2)(out[-1])


HAIKU: dict[str, Callable[[], Problem]] = {
    "hk_mlp": of_haiku(lambda x: hk.nets.MLP([8, 2], activation=jnp.tanh)(x), squared, X),
    "hk_cnn": of_haiku(_hk_cnn, labelled, IMAGES, Y),
    "hk_stacked": of_haiku(_hk_layers, squared, X),
    "hk_lstm": of_haiku(_hk_lstm, squared, X),
    "hk_tokens": of_haiku(lambda ids: hk.Linear(3)(hk.Embed(VOCABULARY, 4)(ids)), squared, IDS),
}

#: Name -> build, as in `Entry`.
MODELS: dict[str, Callable[[], Problem]] = {**PLAIN, **LINEN, **NNX, **EQUINOX, **HAIKU}
#: Every model.
JAX = tuple(Entry(name, build, None, None) for name, build in MODELS.items())
