# SPDX-License-Identifier: Apache-2.0
"""Calls inside a `shard_map` or over arrays that `jit` spreads, on four virtual devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dualdp_jax as dpj
from dualdp import UnsupportedLayerError
from dualdp_jax.per_sample.methods import METHODS
from tests.dualdp_jax.workers import launch

ALL = (*METHODS, "auto")
RULED = ("book_keeping", "materialize", "two_pass")
BOUND = 0.1


def draw(rng, *shape, scale=0.5):
    return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)


def convolved(x, w):
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x[None], w, (1, 1), "SAME", dimension_numbers=names)[0]


def models():
    """Name -> (loss, parameters, batch of eight)."""
    rng = np.random.default_rng(0)
    shapes = {"t": (16, 8), "w": (8, 8), "b": (8,), "r": (8, 8), "v": (4, 8), "s": (8,)}
    many = {name: draw(rng, *shape) for name, shape in shapes.items()}

    def recurrent(p, ids, x):
        step = lambda h, row: (jnp.tanh(h @ p["r"] + row), h)  # noqa: E731
        rows = jnp.tanh(p["t"][ids] @ p["w"] + p["b"])
        states = jax.lax.scan(step, x @ p["v"], rows)[1]
        return jnp.sum(states**2) + jnp.sum(p["t"][ids[:2]].sum(0) * p["s"])

    def tied(p, ids):
        scores = jax.nn.log_softmax(jnp.tanh(p["e"][ids] @ p["w"]) @ p["e"].T)
        return -jnp.take_along_axis(scores, ids[:, None], 1).mean()

    ids = jnp.asarray(rng.integers(0, 16, (8, 6)))
    wide = {"e": draw(rng, 300, 40), "w": draw(rng, 40, 40)}
    kernel = {"k": draw(rng, 3, 3, 2, 4), "h": draw(rng, 8)}
    signs = draw(rng, 8, 8, 96)
    near = 1 + 1e-4 * draw(rng, 8, 8, 96)
    return {
        "square": (lambda p, x: jnp.sum((x @ p["w"] - 1) ** 2), {"w": jnp.ones(3)},
                   (draw(rng, 8, 3),)),
        "recurrent": (recurrent, many, (ids, draw(rng, 8, 4))),
        "tied": (tied, wide, (jnp.asarray(rng.integers(0, 300, (8, 6))),)),
        "convolution": (lambda p, x: jnp.sum(
            jnp.tanh(convolved(x, p["k"])) @ p["h"].reshape(4, 2, order="F") ** 2),
            kernel, (draw(rng, 8, 6, 6, 2),)),
        "cancelling": (lambda p, x, y: jnp.sum((x @ p["w"]) * y), {"w": jnp.zeros((96, 96))},
                       (near, signs - signs.mean(1, keepdims=True))),
    }  # fmt: skip


def mesh_of(shape=(4,), names=("d",)):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def results(loss, params, batch, method, **options):
    """What the three calls give."""
    options = {"method": method, "check": "off", **options}
    found = dpj.clipped_grad_sum(loss, params, *batch, max_grad_norm=BOUND, **options)
    norms = dpj.per_sample_norms(loss, params, *batch, per_parameter=True, **options)
    return found.grads, found.norms, norms, dpj.per_sample_grads(loss, params, *batch, **options)


def assert_same(ours, theirs, bound=1e-5):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= bound * np.abs(b).max() + 1e-12


def on_devices(loss, params, batch, method, wrap=jax.jit, mesh=None, check_vma=True, **options):
    """The same inside a shard_map over the examples."""

    def one(params, *batch):
        sums, *rest = results(loss, params, batch, method, **options)
        return jax.lax.psum(sums, "d"), *rest

    specs = (P(), *[P("d")] * len(batch))
    out = (P(), P("d"), P("d"), P("d"))
    run = jax.shard_map(one, mesh=mesh or mesh_of(), in_specs=specs, out_specs=out,
                        check_vma=check_vma)  # fmt: skip
    return wrap(run)(params, *batch)


# ---------------------------------------------------------------------- shard_map


def truth_of(loss, params, batch):
    return jax.jit(lambda p, *b: results(loss, p, b, "loop"))(params, *batch)


def every_method_in_a_shard_map_is_right():
    """74: also outside jit, without types, and with a second axis that no example lies on."""
    model = models()["square"]
    truth, two = truth_of(*model), mesh_of((2, 2), ("d", "other"))
    for method in ALL:
        assert_same(on_devices(*model, method), truth)
    assert_same(on_devices(*model, "auto", wrap=lambda f: f), truth)
    assert_same(on_devices(*model, "book_keeping", check_vma=False), truth)
    for name in ("square", "recurrent"):
        model = models()[name]
        assert_same(on_devices(*model, "book_keeping", mesh=two), truth_of(*model))


def every_model_in_a_shard_map_is_right():
    """By each method with rules; what has none meets the square above."""
    for name, model in models().items():
        truth, bound = truth_of(*model), 1e-3 if name == "cancelling" else 1e-5
        for method, size in (*((method, None) for method in RULED), ("two_pass", 1)):
            assert_same(on_devices(*model, method, physical_batch_size=size), truth, bound)


def a_masked_chunk_is_left_out():
    loss, params, batch = models()["recurrent"]
    mask = np.arange(8) % 4 < 1
    options = {"max_grad_norm": BOUND, "method": "book_keeping", "check": "off"}

    def one(params, mask, *batch):
        found = dpj.clipped_grad_sum(
            loss, params, *batch, mask=mask, physical_batch_size=1, **options
        )
        return jax.lax.psum(found.grads, "d")

    specs = (P(), *[P("d")] * (1 + len(batch)))
    run = jax.jit(jax.shard_map(one, mesh=mesh_of(), in_specs=specs, out_specs=P()))
    truth = dpj.clipped_grad_sum(loss, params, *batch, mask=mask, **options).grads
    assert_same(run(params, mask, *batch), truth)


def exchanges_inside_a_loss_are_refused():
    for exchange in (
        lambda x: jax.lax.pmean(x, "d"),
        lambda x: jax.lax.all_gather(x, "d").sum(),
        lambda x: jax.lax.ppermute(x, "d", [(0, 1), (1, 0)]),
        lambda x: jax.jit(lambda x: jax.lax.psum(x, "d"))(x),
    ):
        loss = lambda p, x, e=exchange: jnp.sum((x @ p["w"] - e(jnp.sum(x))) ** 2)  # noqa: E731
        for check_vma in (True, False):
            with pytest.raises(UnsupportedLayerError, match="exchanges numbers between devices"):
                on_devices(loss, {"w": jnp.ones((3, 2))}, (jnp.ones((8, 3)),), "auto",
                           check_vma=check_vma)  # fmt: skip


def split_parameters_are_refused():
    """Their norm would be that of one device's part."""
    one = lambda p, x: dpj.per_sample_norms(lambda p, x: jnp.sum(x) * p["b"], p, x)  # noqa: E731
    specs = ({"w": P("m"), "b": P()}, P("d"))
    mesh = mesh_of((2, 2), ("d", "m"))
    run = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P("d"))
    with pytest.raises(UnsupportedLayerError, match=r"\['w'\] differ between devices over which"):
        run({"w": jnp.ones(4), "b": jnp.ones(())}, jnp.ones((8, 3)))


# ---------------------------------------------------------------------- jit


def own_kernel(p, x):
    """A convolution kernel that depends on the example."""
    kernel = p["w"] * jax.nn.sigmoid(x.mean((0, 1)) @ p["g"])
    return jnp.sum(jnp.tanh(convolved(x, kernel)) ** 2)


def own_kernel_inside_jit(p, x):
    """The same, where no parameter is in sight."""
    seen = jax.jit(convolved)(x, x[:3, :3, :, None] * jnp.ones(4))
    return jnp.sum(jnp.tanh(seen @ p["g"]) ** 2) + jnp.sum(p["w"] ** 2)


def plain_kernel(p, x):
    return jnp.sum(jnp.tanh(convolved(x, p["w"]) @ p["g"]) ** 2)


def kernels():
    rng = np.random.default_rng(1)
    return {"w": draw(rng, 3, 3, 4, 4), "g": draw(rng, 4, 4)}, (draw(rng, 8, 6, 6, 4),)


def kernels_are_right_where_jit_spreads_the_batch():
    """78."""
    params, batch = kernels()
    shardings = NamedSharding(mesh_of(), P()), NamedSharding(mesh_of(), P("d"))
    for loss, methods in (
        (own_kernel, (*RULED, "auto")),
        (own_kernel_inside_jit, ("book_keeping", "two_pass")),
        (plain_kernel, ("vmap", "auto")),
    ):
        for method in methods:
            call = lambda p, *b: results(loss, p, b, method)  # noqa: B023, E731
            run = jax.jit(call, in_shardings=shardings)
            assert_same(run(params, *batch), truth_of(loss, params, batch))


# ---------------------------------------------------------------------- arrays that lie on a mesh


def batch_and_parameters_that_are_spread_give_the_same():
    """XLA's partitioner spreads plain operations, whatever axis of a parameter is split."""
    mesh = mesh_of((2, 2), ("data", "model"))
    place = lambda leaf, *spec: jax.device_put(leaf, NamedSharding(mesh, P(*spec)))  # noqa: E731
    for name, method in (("recurrent", "auto"), ("convolution", "two_pass")):
        loss, params, batch = models()[name]
        spread = [place(leaf, ("data", "model")) for leaf in batch]
        split = {k: place(v, *[None] * (v.ndim - 1), "model") for k, v in params.items()}
        given = {"max_grad_norm": BOUND, "mask": np.arange(8) < 6, "method": method}
        given["check"] = "off"
        run = jax.jit(lambda p, *b: dpj.clipped_grad_sum(loss, p, *b, **given)[:2])  # noqa: B023
        for weights in (params, split):
            assert_same(run(weights, *spread), run(params, *batch))


def an_explicit_mesh_is_refused_by_name():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    loss, params, batch = models()["square"]
    call = lambda p, *b: dpj.per_sample_norms(loss, p, *b, check="off")  # noqa: E731
    with jax.set_mesh(mesh):
        spread = [jax.device_put(leaf, P("data")) for leaf in batch]
        for attempt in (call, jax.jit(call)):
            with pytest.raises(UnsupportedLayerError, match="a mesh with explicit axes"):
                attempt(params, *spread)


def what_the_partitioner_gets_wrong_goes_one_by_one():
    """78: a kernel for each example, where vmap makes the gradients, or the loss makes it."""
    params, (x,) = kernels()
    spread = jax.device_put(x, NamedSharding(mesh_of(), P("d")))
    own = own_kernel_inside_jit
    for loss, method in ((plain_kernel, "vmap"), (own, "book_keeping")):
        call = lambda p, x: dpj.per_sample_norms(loss, p, x, method=method, check="off")  # noqa: B023, E731
        truth = dpj.per_sample_norms(loss, params, x, method="loop", check="off")
        for attempt in (call, jax.jit(call)):
            assert_same(attempt(params, spread), truth)
    dpj.per_sample_norms(own, params, spread, method="book_keeping", check="always")


CHECKS = [
    every_method_in_a_shard_map_is_right,
    every_model_in_a_shard_map_is_right,
    a_masked_chunk_is_left_out,
    exchanges_inside_a_loss_are_refused,
    split_parameters_are_refused,
    kernels_are_right_where_jit_spreads_the_batch,
    batch_and_parameters_that_are_spread_give_the_same,
    an_explicit_mesh_is_refused_by_name,
    what_the_partitioner_gets_wrong_goes_one_by_one,
]

if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)  # to compile faster
    launch.say(launch.checked(CHECKS))
