# SPDX-License-Identifier: Apache-2.0
"""Correlated noise of bands and buffered Toeplitz strategies, from rows of the noise before.

Without rows the noise of step t takes t + 1 draws, since the inverse of such a strategy is full.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dualdp.plan.correlated.noise import (
    Path,
    Recursion,
    branch_at,
    recursion_of,
    require_affordable,
)
from dualdp_jax.noise import generators
from dualdp_jax.rules.arrays import beside

_log = logging.getLogger("dualdp")
_SECONDS = 10.0  # between two lines about the progress
_UNROLLED = 8  # rows that one pass over the noise takes in
#: Shape, dtype and sharding of each leaf of the noise; no sharding where nobody placed the sum.
Layout = tuple[tuple[tuple[int, ...], Any, Any], ...]
#: Rows of a plan, by the identity of the object.
_of_plan: dict[int, Rows] = {}


@dataclass(eq=False, repr=False)
class _Kept:
    """Rows after a step, and its noise."""

    layout: Layout
    step: int = -1
    path: Path = ()  # branches up to the step
    noise: Sequence[Any] = ()  # leaves, in units of z
    rows: Sequence[Any] = ()  # leaves (d, *shape)

    def leads_to(self, step: int, path: Path, layout: Layout) -> bool:
        return self.layout == layout and self.step <= step and self.path == _until(self.step, path)


class Rows:
    """Cache of the rows of a plan's noise, which are drawn again from the key where they lack.

    The rows take the noise away from what was released: no pickle, copy or repr holds them.

    Guarantees:
        The same bits, whether the steps before were just drawn or not.
            [test_any_order_of_the_steps_gives_the_same_noise,
            test_a_resumed_run_has_the_same_noise]
        No checkpoint, pickle, copy or repr has a row.  [test_rows_are_in_nothing_that_is_saved]
    """

    def __init__(self, recursion: Recursion) -> None:
        self._recursion, self._lock = recursion, threading.Lock()
        self._kept: _Kept | None = None

    def __reduce__(self) -> Any:
        return Rows, (self._recursion,)

    def noise(self, plan: Any, step: int, path: Path, like: Any) -> Any:
        """Return the noise of a step in units of z, placed like the sums `like`.

        The plan is the same at each call; `path` has the branches of the steps that lead to this.
        """
        layout = _layout_of(like)
        zeros, following = _programs(self._recursion, layout)
        with self._lock:
            kept = self._kept
            if kept is None or not kept.leads_to(step, path, layout):
                require_affordable(plan.correlation, step, size_of(like))
                kept = _Kept(layout, rows=zeros())
            self._kept = None  # a call that fails on the way has lost the rows that it donated
            told = time.monotonic()
            for t in range(kept.step + 1, step + 1):
                order, branch = self._order(t), branch_at(path, t)
                # No variable of this frame is a key, row or noise, which a traceback would show.
                kept = _Kept(
                    layout,
                    t,
                    _until(t, path),
                    *following(kept.rows, plan.step_key("noise", t, branch), order),
                )
                if t < step and time.monotonic() - told > _SECONDS:
                    jax.block_until_ready(kept.rows)
                    told = time.monotonic()
                    _log.warning("Correlated noise is drawn again: step %d of %d.", t, step)
            self._kept = kept
            return jax.tree.unflatten(jax.tree.structure(like), kept.noise)

    def _order(self, step: int) -> Any:
        """(d,) index of each row S_i; of a band the last is the oldest, whose place is taken."""
        size = max(1, len(self._recursion.taps))
        order = np.arange(size) if self._recursion.decays else (step - 1 - np.arange(size)) % size
        return order.astype(np.int32)


def rows_for(plan: Any) -> Rows | None:
    """Return empty rows for a plan's noise, None if it needs none."""
    recursion = recursion_of(plan.correlation)
    return None if recursion is None else Rows(recursion)


def rows_of(plan: Any) -> Rows | None:
    """Return the rows that go with this plan as long as it lives, None if it needs none."""
    if id(plan) not in _of_plan:
        made = rows_for(plan)
        if made is None:
            return None
        _of_plan[id(plan)] = made
        weakref.finalize(plan, _of_plan.pop, id(plan), None)
    return _of_plan[id(plan)]


def size_of(like: Any) -> int:
    """Return the number of numbers in a pytree of arrays."""
    return sum(prod(leaf.shape) for leaf in jax.tree.leaves(like))


def _until(step: int, path: Path) -> Path:
    """Part of a path up to a step."""
    return tuple(pair for pair in path if pair[0] <= step)


def _layout_of(like: Any) -> Layout:
    return tuple(
        (
            leaf.shape,
            jnp.result_type(jnp.float32, leaf),
            leaf.sharding if getattr(leaf, "committed", False) else None,
        )
        for leaf in jax.tree.leaves(like)
    )


@lru_cache(8)
def _programs(
    recursion: Recursion, layout: Layout
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compiled () -> rows before step 0, and (rows, key, order) -> noise and the rows after it."""
    leaves = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in layout]
    taps = np.asarray(recursion.taps or (0.0,))  # one row of zeros where C has one band

    def zeros() -> list[Any]:
        return [jnp.zeros((len(taps), *leaf.shape), leaf.dtype) for leaf in leaves]

    def following(rows: Sequence[Any], key: Any, order: Any) -> tuple[list[Any], list[Any]]:
        normals = generators.draw(key, leaves)
        noise = [_less(z, taps, s, order) for z, s in zip(normals, rows, strict=True)]
        noise = [n * jnp.asarray(recursion.scale, n.dtype) for n in noise]
        if recursion.decays is None:
            moved = [s.at[order[-1]].set(n) for s, n in zip(rows, noise, strict=True)]
        else:
            decays = np.asarray(recursion.decays)
            moved = [
                s * beside(jnp.asarray(decays, s.dtype), s) + n
                for s, n in zip(rows, noise, strict=True)
            ]
        return noise, moved

    placed = [sharding for *_, sharding in layout]
    of_rows = [_of_rows(sharding) for sharding in placed]
    return (
        jax.jit(zeros, out_shardings=of_rows),
        jax.jit(following, donate_argnums=0, out_shardings=(placed, of_rows)),
    )


def _less(z: Any, taps: Any, rows: Any, order: Any) -> Any:
    """Return z minus the sum of taps times rows, (d, *shape), in this order."""
    taps = jnp.asarray(taps, z.dtype)
    minus = lambda i, rest: rest - taps[i] * rows[order[i]]  # noqa: E731
    return jax.lax.fori_loop(0, len(taps), minus, z, unroll=min(len(taps), _UNROLLED))


def _of_rows(sharding: Any) -> Any:
    """Sharding of rows (d, *shape), each of them on the devices of the noise."""
    if isinstance(sharding, NamedSharding):
        return sharding.update(spec=P(None, *sharding.spec))
    return sharding
