# SPDX-License-Identifier: Apache-2.0
"""The JAX systems, each one jitted program: non-private, dualdp's methods, vmap(grad), the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dualdp_bench import results, workloads_jax
from dualdp_bench.systems import (
    AUTO,
    LEARNING_RATE,
    LOOP,
    METHODS,
    MULTI,
    NOISE_MULTIPLIER,
    NON_PRIVATE,
    Clipped,
    Prepared,
    Setting,
    Stack,
)


class Program:
    """A function compiled at its first call for the shapes of that call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = jax.jit(function)
        self.compiled: Any = None

    def build(self, *arguments: Any) -> Any:
        """The compiled program."""
        if self.compiled is None:
            self.build_seconds(*arguments)
        return self.compiled

    def build_seconds(self, *arguments: Any) -> tuple[float, float]:
        """Build it, and say the seconds to trace and lower, and to compile."""
        start = time.perf_counter()
        lowered = self.function.lower(*arguments)
        middle = time.perf_counter()
        self.compiled = lowered.compile()
        return middle - start, time.perf_counter() - middle

    def __call__(self, *arguments: Any) -> Any:
        """The function's outputs, not awaited."""
        return self.build(*arguments)(*arguments)

    def memory(self, *arguments: Any) -> int:
        """XLA's own count of temporary and output bytes, without running the program."""
        analysis = self.build(*arguments).memory_analysis()
        return analysis.temp_size_in_bytes + analysis.output_size_in_bytes


class Step:
    """A program on the parameters that a system starts from."""

    def __init__(self, program: Program, params: Any) -> None:
        self.program, self.params = program, params

    def __call__(self, batch: Any) -> Any:
        """The program's outputs for a batch, not awaited."""
        return self.program(self.params, *batch)


class Problem:
    """Parameters, loss and optimizer of one system."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.params = workloads_jax.params(setting.workload, setting.seed)
        self.loss = partial(workloads_jax.loss, setting.workload)

    def factors(self, norms: jax.Array) -> jax.Array:
        """Clip factors, (n,)."""
        return jnp.minimum(1, self.setting.max_grad_norm / norms)

    def prepared(
        self,
        gradient: Callable[..., Any],
        *,
        transform: optax.GradientTransformation,
        private: bool = True,
    ) -> Prepared:
        """A system from `(params, x, y) -> (sums, norms)` and what turns sums into updates."""
        program = Program(gradient)
        optimizer = optax.chain(transform, optax.sgd(LEARNING_RATE))

        def update(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
            changes, state = optimizer.update(gradient(params, x, y)[0], state, params)
            return optax.apply_updates(params, changes), state

        whole = Program(update)
        start = (self.params, optimizer.init(self.params))

        return Prepared(
            gradient=Step(program, self.params),
            read=read if private else None,
            update=lambda batch: whole(*start, *batch),
            memory=lambda batch: program.memory(self.params, *batch),
        )


def by_hand(setting: Setting) -> optax.GradientTransformation:
    """Noise and mean as a program without a library writes them."""
    stddev = NOISE_MULTIPLIER * setting.max_grad_norm

    def update(sums: Any, key: Any, params: Any = None) -> Any:
        key, now = jax.random.split(key)
        leaves, tree = jax.tree.flatten(sums)
        keys = jax.random.split(now, len(leaves))
        noised = [
            (leaf + stddev * jax.random.normal(k, leaf.shape, leaf.dtype)) / setting.n
            for k, leaf in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, noised), key

    return optax.GradientTransformation(lambda params: jax.random.key(setting.seed), update)


def read(outcome: tuple[Any, jax.Array | None]) -> Clipped:
    """Sums by tree path and norms as NumPy arrays."""
    sums, norms = outcome
    leaves = jax.tree_util.tree_leaves_with_path(sums)
    arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    return Clipped(arrays, None if norms is None else np.asarray(norms))


def _global_norm(grads: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(grads)))


def non_private(setting: Setting) -> Prepared:
    """`jax.grad` of the mean loss of the batched program."""
    problem = Problem(setting)

    def gradient(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return jax.grad(lambda p: workloads_jax.losses(setting.workload, p, x, y).mean())(
            params
        ), None

    return problem.prepared(gradient, transform=optax.identity(), private=False)


def vmap_grad(setting: Setting) -> Prepared:
    """`jax.vmap(jax.grad)`, the program of fast-dpsgd and of every tutorial."""
    problem = Problem(setting)

    def gradient(params: Any, x: jax.Array, y: jax.Array) -> Any:
        grads = jax.vmap(jax.grad(problem.loss), (None, 0, 0))(params, x, y)
        norms = jax.vmap(_global_norm)(grads)
        factors = problem.factors(norms)
        return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), grads), norms

    return problem.prepared(gradient, transform=by_hand(setting))


def loop(setting: Setting) -> Prepared:
    """One example at a time from the host: what every other system is compared with."""
    problem = Problem(setting)

    def one(params: Any, sums: Any, x: jax.Array, y: jax.Array) -> Any:
        grads = jax.grad(problem.loss)(params, x, y)
        norm = _global_norm(grads)
        return jax.tree.map(lambda s, g: s + problem.factors(norm) * g, sums, grads), norm

    program = Program(one)
    transform = by_hand(setting)
    optimizer = optax.chain(transform, optax.sgd(LEARNING_RATE))
    finish = Program(lambda sums, state: optimizer.update(sums, state)[0])

    def gradient(batch: Any) -> Any:
        sums, norms = jax.tree.map(jnp.zeros_like, problem.params), []
        for example in zip(*batch, strict=True):
            sums, norm = program(problem.params, sums, *example)
            norms.append(norm)
        return sums, jnp.stack(norms)

    state = optimizer.init(problem.params)
    return Prepared(gradient, read, lambda batch: finish(gradient(batch)[0], state))


def dualdp(setting: Setting, method: str) -> Prepared:
    """`clipped_grad_sum` in a jitted program, with `add_noise` before the optimizer."""
    import dualdp.jax as dpj

    problem = Problem(setting)
    plan = setting.plan()

    def gradient(params: Any, x: jax.Array, y: jax.Array) -> Any:
        result = dpj.clipped_grad_sum(
            problem.loss, params, x, y, max_grad_norm=setting.max_grad_norm, method=method
        )
        return result.grads, result.norms

    return problem.prepared(gradient, transform=dpj.add_noise(plan))


def auto(setting: Setting) -> Prepared:
    """dualdp, and what its cost model chooses."""
    import dualdp.jax as dpj

    problem = Problem(setting)

    def takes(batch: Any) -> str:
        found = dpj.explain(problem.loss, problem.params, *batch, check="off")
        if found["way"] == "vmap":
            return "vmap"
        forms: dict[str, list[str]] = {}
        for use in found["uses"]:
            forms.setdefault(use["form"], []).append(use["primitive"])
        if found["instantiated"]:
            forms.setdefault("gradients", []).extend(found["instantiated"])
        return "; ".join(f"{form}: {', '.join(what)}" for form, what in forms.items())

    return replace(dualdp(setting, "auto"), takes=takes)


def engine(setting: Setting, checks: float) -> Callable[[], Any]:
    """A call that makes one step of a run of `PrivacyEngine`."""
    import dualdp.jax as dpj

    problem = Problem(setting)
    step, state, loader = dpj.PrivacyEngine().make_private(
        loss_fn=problem.loss,
        params=problem.params,
        optimizer=optax.sgd(LEARNING_RATE),
        data=load(setting, *setting.workload.batch(2 * setting.n)),
        plan=setting.run_of_batches(),
        checks=checks,
    )

    def states() -> Iterator[Any]:
        now = state
        while True:
            for batch in loader:
                now, _ = step(now, batch)
                yield now.params

    return partial(next, states())


def device_name(device: str) -> str:
    """The processor or accelerator that JAX uses."""
    found = jax.devices()[0]
    return results.processor() if found.platform == "cpu" else found.device_kind


def load(setting: Setting, x: np.ndarray, y: np.ndarray) -> Any:
    """A NumPy batch on the device."""
    return workloads_jax.load(setting.workload, x, y)


def _systems() -> dict[str, Callable[[Setting], Prepared]]:
    from dualdp_bench import peers_jax

    ours = {f"dualdp:{method}": partial(dualdp, method=method) for method in METHODS}
    people = {MULTI: vmap_grad, LOOP: loop}
    return {NON_PRIVATE: non_private} | ours | {AUTO: auto} | people | peers_jax.SYSTEMS


STACK = Stack("jax", _systems(), load, jax.block_until_ready, device_name, engine)
