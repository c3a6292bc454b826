# SPDX-License-Identifier: Apache-2.0
"""JAX systems, each a jitted program: non-private, dualdp's engine, vmap(grad), the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import results, systems, workloads_jax
from benchmarks.systems import Clipped, Prepared, Setting


class Program:
    """Function with fixed first arguments, compiled for the shapes of its first call."""

    def __init__(self, function: Callable[..., Any], *fixed: Any) -> None:
        self.function, self.fixed = jax.jit(function), fixed
        self.compiled: Any = None

    def build(self, *arguments: Any) -> Any:
        """Return the compiled program."""
        if self.compiled is None:
            self.compiled = self.function.lower(*self.fixed, *arguments).compile()
        return self.compiled

    def __call__(self, *arguments: Any) -> Any:
        """Return the function's outputs, without waiting for them."""
        return self.build(*arguments)(*self.fixed, *arguments)

    def memory(self, *arguments: Any) -> int:
        """Return XLA's count of temporary and output bytes, without running the program."""
        analysis = self.build(*arguments).memory_analysis()
        return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes)


class Problem:
    """Parameters, loss, optimizer and data of one system."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.params = workloads_jax.params(setting.workload, setting.seed)
        self.optimizer = optax.sgd(systems.LEARNING_RATE)

    def losses(self, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return one loss per example, (n,)."""
        if self.setting.compute == "bfloat16":
            params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
            x = x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x
        found = workloads_jax.losses(self.setting.workload, params, x, y)
        return found.astype(jnp.float32)

    def loss(self, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return the loss of ONE example."""
        return self.losses(params, x[None], y[None])[0]

    def factors(self, norms: jax.Array) -> jax.Array:
        """Return the clip factors, (n,)."""
        return jnp.minimum(1, self.setting.max_grad_norm / norms)

    def batches(self) -> Iterator[Any]:
        """Yield batches of drawn rows without end."""
        data, rng = load(self.setting, *self.setting.data()), np.random.default_rng(0)
        while True:
            order = rng.permutation(systems.EXAMPLES * self.setting.n)
            for rows in order.reshape(systems.EXAMPLES, -1):
                yield jax.tree.map(lambda leaf, rows=rows: leaf[rows], data)

    def prepared(
        self,
        gradient: Callable[..., Any],
        transform: optax.GradientTransformation,
        *,
        is_private: bool = True,
    ) -> Prepared:
        """Return a system made from `(params, x, y) -> (sums, norms)` and a noise transform."""
        program = Program(lambda params, batch: gradient(params, *batch), self.params)
        chain, batches = optax.chain(transform, self.optimizer), self.batches()

        def update(params: Any, state: Any, batch: Any) -> Any:
            changes, state = chain.update(gradient(params, *batch)[0], state, params)
            return optax.apply_updates(params, changes), state

        compiled = Program(update)
        state = [self.params, chain.init(self.params)]

        def step() -> Any:
            state[:] = compiled(*state, next(batches))
            return state

        return Prepared(program, read if is_private else None, step, program.memory)


def by_hand(setting: Setting) -> optax.GradientTransformation:
    """Return a transformation that adds noise and divides, as written without a library."""
    stddev = systems.NOISE_MULTIPLIER * setting.max_grad_norm

    def update(sums: Any, key: Any, params: Any = None) -> Any:
        key, now = jax.random.split(key)
        leaves, tree = jax.tree.flatten(sums)
        keys = jax.tree.unflatten(tree, jax.random.split(now, len(leaves)))

        def mean(total: jax.Array, key: jax.Array) -> jax.Array:
            return (total + stddev * jax.random.normal(key, total.shape, total.dtype)) / setting.n

        return jax.tree.map(mean, sums, keys), key

    return optax.GradientTransformation(lambda params: jax.random.key(setting.seed), update)


def read(outcome: tuple[Any, jax.Array | None]) -> Clipped:
    """Return sums by tree path and norms as NumPy arrays."""
    sums, norms = outcome
    leaves = jax.tree_util.tree_leaves_with_path(sums)
    arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    return Clipped(arrays, None if norms is None else np.asarray(norms))


def _global_norm(grads: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(grads)))


def non_private(setting: Setting) -> Prepared:
    """Return `jax.grad` of the mean loss of the batched program."""
    problem = Problem(setting)

    def mean_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return problem.losses(params, x, y).mean()

    def gradient(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return jax.grad(mean_loss)(params, x, y), None

    return problem.prepared(gradient, optax.identity(), is_private=False)


def vmap_grad(setting: Setting) -> Prepared:
    """Return `jax.vmap(jax.grad)`, the program of fast-dpsgd and of every tutorial."""
    problem = Problem(setting)

    def gradient(params: Any, x: jax.Array, y: jax.Array) -> Any:
        grads = jax.vmap(jax.grad(problem.loss), (None, 0, 0))(params, x, y)
        norms = jax.vmap(_global_norm)(grads)
        factors = problem.factors(norms)
        return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), grads), norms

    return problem.prepared(gradient, by_hand(setting))


def loop(setting: Setting) -> Prepared:
    """Return the loop over single examples on the host, the reference of all other systems."""
    problem = Problem(setting)

    def one(params: Any, sums: Any, x: jax.Array, y: jax.Array) -> Any:
        grads = jax.grad(problem.loss)(params, x, y)
        norm = _global_norm(grads)
        return jax.tree.map(lambda s, g: s + problem.factors(norm) * g, sums, grads), norm

    program = Program(one)

    def gradient(batch: Any) -> Any:
        sums, norms = jax.tree.map(jnp.zeros_like, problem.params), []
        for example in zip(*batch, strict=True):
            sums, norm = program(problem.params, sums, *example)
            norms.append(norm)
        return sums, jnp.stack(norms)

    return Prepared(gradient, read, None, lambda batch: None)


def dualdp(setting: Setting) -> Prepared:
    """Return `clipped_grad_sum` in a jitted program, and a step of `PrivacyEngine`."""
    import dualdp.jax as dpj

    problem = Problem(setting)

    def gradient(params: Any, batch: Any) -> Any:
        result = dpj.clipped_grad_sum(
            problem.loss, params, *batch, max_grad_norm=setting.max_grad_norm, check="off"
        )
        return result.grads, result.norms

    program = Program(gradient, problem.params)

    def states() -> Iterator[Any]:
        step, state, loader = dpj.PrivacyEngine().make_private(
            loss_fn=problem.loss,
            params=problem.params,
            optimizer=problem.optimizer,
            data=load(setting, *setting.data()),
            plan=setting.plan(),
        )
        while True:
            for batch in loader:
                state, _ = step(state, batch)
                yield state.params

    return Prepared(program, read, partial(next, states()), program.memory)


def use_device(device: str) -> str:
    """Compute float32 products in float32, on a GPU too; return the name of the device."""
    platform = {"cpu": "cpu", "cuda": "gpu"}[device]
    found = jax.devices()[0]
    if found.platform != platform:
        raise ValueError(
            f"device={device!r}, but JAX computes on {found.platform!r}. Install JAX for that "
            "device, or choose it by JAX_PLATFORMS."
        )
    if device == "cpu":
        return results.processor()
    jax.config.update("jax_default_matmul_precision", "float32")  # not TF32
    return str(found.device_kind)


def load(setting: Setting, x: np.ndarray, y: np.ndarray) -> Any:
    """Return a NumPy batch on the device."""
    return workloads_jax.load(x, y)


wait = jax.block_until_ready
SYSTEMS: dict[str, systems.System] = {
    systems.NON_PRIVATE: non_private,
    systems.OURS: dualdp,
    systems.MULTI: vmap_grad,
    systems.LOOP: loop,
}
