# SPDX-License-Identifier: Apache-2.0
"""JAX systems, each a jitted program: non-private, dualdp's methods, vmap(grad), the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dualdp_tools.bench import results, systems, workloads_jax
from dualdp_tools.bench.systems import Clipped, Prepared, Setting


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
        return analysis.temp_size_in_bytes + analysis.output_size_in_bytes


class Problem:
    """Parameters, loss and optimizer of one system."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.params = workloads_jax.params(setting.workload, setting.seed)
        self.loss = partial(workloads_jax.loss, setting.workload)

    def factors(self, norms: jax.Array) -> jax.Array:
        """Return the clip factors, (n,)."""
        return jnp.minimum(1, self.setting.max_grad_norm / norms)

    def units(self, batch: Any) -> Any:
        """Return the rows (n, ...) of a batch by unit, (units, rows of a unit, ...)."""
        rows = self.setting.rows_per_unit
        return jax.tree.map(lambda leaf: leaf.reshape(-1, rows, *leaf.shape[1:]), batch)

    def unit_loss(self, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return the mean loss of the rows of one unit."""
        return jax.vmap(self.loss, (None, 0, 0))(params, x, y).mean()

    def prepared(
        self,
        gradient: Callable[..., Any],
        *,
        transform: optax.GradientTransformation,
        private: bool = True,
        optimizer: optax.GradientTransformation | None = None,
        **extra: Any,
    ) -> Prepared:
        """Return a system made from `(params, x, y) -> (sums, norms)` and a noise transform.

        `extra` are further arguments of the optimizer's update; it is SGD if it is left out.
        """
        program = Program(lambda params, batch: gradient(params, *batch), self.params)
        chain = optax.chain(transform, optimizer or optax.sgd(systems.LEARNING_RATE))

        def update(params: Any, state: Any, batch: Any) -> Any:
            changes, state = chain.update(gradient(params, *batch)[0], state, params, **extra)
            return optax.apply_updates(params, changes), state

        step = Program(update, self.params, chain.init(self.params))
        return Prepared(program, read if private else None, step, program.memory)


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


def non_private(
    setting: Setting, optimizer: optax.GradientTransformation | None = None
) -> Prepared:
    """Return `jax.grad` of the mean loss of the batched program."""
    problem = Problem(setting)

    def mean_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return workloads_jax.losses(setting.workload, params, x, y).mean()

    def gradient(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return jax.grad(mean_loss)(params, x, y), None

    return problem.prepared(
        gradient, transform=optax.identity(), private=False, optimizer=optimizer
    )


def vmap_grad(setting: Setting) -> Prepared:
    """Return `jax.vmap(jax.grad)`, the program of fast-dpsgd and of every tutorial."""
    problem = Problem(setting)

    def gradient(params: Any, x: jax.Array, y: jax.Array) -> Any:
        grads = jax.vmap(jax.grad(problem.unit_loss), (None, 0, 0))(params, *problem.units((x, y)))
        norms = jax.vmap(_global_norm)(grads)
        factors = problem.factors(norms)
        return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), grads), norms

    return problem.prepared(gradient, transform=by_hand(setting))


def loop(setting: Setting) -> Prepared:
    """Return the loop over single examples on the host, the reference of all other systems."""
    problem = Problem(setting)

    def one(params: Any, sums: Any, x: jax.Array, y: jax.Array) -> Any:
        grads = jax.grad(problem.unit_loss)(params, x, y)
        norm = _global_norm(grads)
        return jax.tree.map(lambda s, g: s + problem.factors(norm) * g, sums, grads), norm

    program = Program(one)
    optimizer = optax.chain(by_hand(setting), optax.sgd(systems.LEARNING_RATE))
    finish = Program(lambda sums, state: optimizer.update(sums, state)[0])

    def gradient(batch: Any) -> Any:
        sums, norms = jax.tree.map(jnp.zeros_like, problem.params), []
        for example in zip(*problem.units(batch), strict=True):
            sums, norm = program(problem.params, sums, *example)
            norms.append(norm)
        return sums, jnp.stack(norms)

    state = optimizer.init(problem.params)
    return Prepared(gradient, read, lambda batch: finish(gradient(batch)[0], state))


def dualdp(
    setting: Setting,
    method: str,
    optimizer: optax.GradientTransformation | None = None,
    **extra: Any,
) -> Prepared:
    """Return `clipped_grad_sum` in a jitted program, with `add_noise` before the optimizer."""
    import dualdp.jax as dpj

    problem = Problem(setting)
    plan = setting.plan()

    def gradient(params: Any, x: jax.Array, y: jax.Array) -> Any:
        result = dpj.clipped_grad_sum(
            problem.loss,
            params,
            x,
            y,
            max_grad_norm=setting.max_grad_norm,
            method=method,
            rows_per_unit=setting.rows_per_unit,
        )
        return result.grads, result.norms

    return problem.prepared(gradient, transform=dpj.add_noise(plan), optimizer=optimizer, **extra)


def auto(setting: Setting) -> Prepared:
    """Return dualdp with the choices of its cost model, and their description."""
    import dualdp.jax as dpj

    problem = Problem(setting)

    def chosen(batch: Any) -> str:
        found = dpj.explain(problem.loss, problem.params, *batch, check="off")
        if found["way"] == "vmap":
            return "vmap"
        forms: dict[str, list[str]] = {}
        for use in found["uses"]:
            forms.setdefault(use["form"], []).append(use["primitive"])
        if found["instantiated"]:
            forms.setdefault("gradients", []).extend(found["instantiated"])
        return "; ".join(f"{form}: {', '.join(what)}" for form, what in forms.items())

    return replace(dualdp(setting, "auto"), chosen=chosen)


def engine(setting: Setting, checks: float, correlation: Any = None) -> Callable[[], Any]:
    """Return a call that takes one step of a run of `PrivacyEngine`."""
    import dualdp.jax as dpj

    problem = Problem(setting)
    step, state, loader = dpj.PrivacyEngine().make_private(
        loss_fn=problem.loss,
        params=problem.params,
        optimizer=optax.sgd(systems.LEARNING_RATE),
        data=load(setting, *setting.workload.batch(2 * setting.n)),
        plan=setting.run_of_batches(correlation),
        checks=checks,
    )

    def states() -> Iterator[Any]:
        now = state
        while True:
            for batch in loader:
                now, _ = step(now, batch)
                yield now.params

    return partial(next, states())


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
    return found.device_kind


def load(setting: Setting, x: np.ndarray, y: np.ndarray) -> Any:
    """Return a NumPy batch on the device."""
    return workloads_jax.load(x, y)


wait = jax.block_until_ready
#: Systems with one method forced on every layer: none in JAX.
FORCED: dict[str, Callable[[Setting], Prepared]] = {}
SYSTEMS: dict[str, Callable[[Setting], Prepared]] = {
    systems.NON_PRIVATE: non_private,
    **{f"dualdp:{method}": partial(dualdp, method=method) for method in systems.METHODS},
    systems.AUTO: auto,
    systems.MULTI: vmap_grad,
    systems.LOOP: loop,
}
