# SPDX-License-Identifier: Apache-2.0
"""`PrivacyEngine` on a loss of the user's as an implementation to be tested by `dualdp.testing`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dualdp.audit import protocol
from dualdp.audit.protocol import CANARY_FACTOR, LOSS_FACTOR, Event, Release, events_of
from dualdp.plan.batches import physical_batches
from dualdp.plan.plan import PrivacyPlan
from dualdp_jax.chunk import Array, Rows
from dualdp_jax.compat import PyTree
from dualdp_jax.training.engine import PrivacyEngine

LossFn = Callable[..., PyTree]
_ROWS = 8  # rows of a chunk in `clipped_sum`


class EngineStep:
    """Engine on a user's loss and data, as a `dualdp.testing.PrivateStep`.

    Args:
        params: pytree of trained parameters.
        loss_fn: callable (params, *example) -> scalar loss of one example.
        data: sequence of arrays, examples on axis 0.
        plan: `PrivacyPlan` whose noise_multiplier, max_grad_norm, sampler, clipping (flat or
            automatic), noise and physical_batch_size are tested, at the values of step 0.
        method: str, see `make_private`.
        needs_key: bool, see `make_private`.
    """

    def __init__(
        self,
        params: PyTree,
        loss_fn: LossFn,
        data: Sequence[Array],
        plan: PrivacyPlan,
        *,
        method: str = "auto",
        needs_key: bool = False,
    ) -> None:
        self.params, self.loss_fn, self.plan = params, loss_fn, plan
        self.data = tuple(np.asarray(part) for part in data)
        self.claims = protocol.claims_of(plan)
        self.num_examples = len(self.data[0])
        self._options: dict[str, Any] = {"method": method, "needs_key": needs_key}
        self._engine: PrivacyEngine | None = None

    def plan_of(
        self, make: Callable[..., PrivacyPlan] = protocol.of_run, **sizes: Any
    ) -> PrivacyPlan:
        """Return the plan of one test run."""
        return make(self.plan, **sizes)

    def clipped_sum(self, rows: Sequence[int], factors: Sequence[float]) -> np.ndarray:
        """See `PrivateStep`: one step of a run without noise, in chunks of eight examples."""
        step, state, loader = self._exact
        indices, position = np.array(list(rows)), int(state.step)
        factor = np.array(list(factors), np.float32)
        parts = [
            Rows([*(part[indices[k]] for part in self.data), factor[k]], mask, k)
            for k, mask in physical_batches(np.arange(len(indices)), _ROWS)
        ]
        state, _ = step(state, loader.hand_out(position, parts))
        self._exact = (step, state, loader)
        leaves = [np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(state.opt_state)]
        return np.concatenate(leaves) * _ROWS

    @cached_property
    def _exact(self) -> tuple[Any, Any, Any]:
        """Step, state and loader of an open-ended run without noise, compiled once."""
        plan = self.plan_of(
            protocol.of_sum, num_rows=_ROWS, num_steps=None, physical_batch_size=_ROWS
        )
        index = np.zeros(_ROWS, np.int64)
        data = (*(part[index] for part in self.data), np.ones(_ROWS, np.float32))

        def loss_fn(params: PyTree, *example: Array, **key: Array) -> Array:
            return self.loss_fn(params, *example[:-1], **key) * example[-1]

        return self._private(loss_fn, self.params, data, plan)

    def releases(
        self,
        num_steps: int,
        *,
        rows: Array,
        num_canaries: int,
        expected_batch_size: float,
        seed: int | None,
    ) -> Iterator[Release]:
        """See `PrivateStep`."""
        scale = CANARY_FACTOR * self.claims.max_grad_norm
        index = np.arange(len(rows)) % self.num_examples
        plan = self.plan_of(
            num_examples=len(rows),
            expected_batch_size=expected_batch_size,
            num_steps=num_steps,
            seed=seed,
        )
        data = (*(part[index] for part in self.data), np.asarray(rows, np.int32))
        params = {"model": self.params, "canaries": jnp.zeros(num_canaries)}

        def loss_fn(params: PyTree, *example: Array, **key: Array) -> Array:
            own = self.loss_fn(params["model"], *example[:-1], **key)
            return LOSS_FACTOR * own + scale * params["canaries"][example[-1]]

        step, state, loader = self._private(loss_fn, params, data, plan)
        for batch in loader.remaining():
            state, _ = step(state, batch)
            mean = state.opt_state  # noisy
            sums = jax.tree.map(lambda leaf: np.asarray(leaf) * expected_batch_size, mean)
            leaves = jax.tree.leaves(sums["model"])
            yield Release(sums["canaries"], leaves, batch.indices[batch.mask])

    def events(self) -> list[Event]:
        """See `PrivateStep`."""
        return events_of(self._engine.accountant.history if self._engine else ())

    def _private(
        self, loss_fn: LossFn, params: PyTree, data: tuple[Array, ...], plan: PrivacyPlan
    ) -> tuple[Any, Any, Any]:
        """`make_private` with an optimizer that stores the noisy mean and updates nothing."""
        keeper = optax.GradientTransformation(
            lambda params: jax.tree.map(jnp.zeros_like, params),
            lambda updates, state, params=None: (jax.tree.map(lambda u: 0 * u, updates), updates),
        )
        self._engine = PrivacyEngine()
        return self._engine.make_private(
            loss_fn=loss_fn,
            params=params,
            optimizer=keeper,
            data=data,
            plan=plan,
            checks=0,  # the audit replaces spot checks
            **self._options,
        )


def small_step(plan: PrivacyPlan) -> EngineStep:
    """Return an `EngineStep` of a small classifier on random data, for `dualdp audit`."""
    rng = np.random.default_rng(0)
    params = {
        "first": rng.normal(size=(16, 32)).astype(np.float32) / 4,
        "second": rng.normal(size=(32, 4)).astype(np.float32) / 6,
    }
    data = rng.normal(size=(256, 16)).astype(np.float32), rng.integers(0, 4, 256)

    def loss_fn(params: PyTree, x: Array, y: Array) -> Array:
        return -jax.nn.log_softmax(jax.nn.relu(x @ params["first"]) @ params["second"])[y]

    return EngineStep(params, loss_fn, data, plan)
