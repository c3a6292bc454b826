# SPDX-License-Identifier: Apache-2.0
"""`Chunk`: the batch of a plan's step, with all that a clipped sum of it needs.

for chunk in engine.make_loader(data=(x, y), plan=plan):
    sums = dpj.clipped_grad_sum(loss_fn, params, chunk).grads
    engine.record()
    mean = dpj.noisy_mean(sums, chunk)
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dualdp.ledger.own_loops import OwnLoop
from dualdp.plan.plan import PrivacyPlan

P = ParamSpec("P")
T = TypeVar("T")


class Rows(NamedTuple):
    """Physical batch: examples of one static number, padded, and K rows of each."""

    arrays: list[Any]  # those of the data, (examples K, ...)
    mask: Any  # (examples,) bool, False for padding
    indices: Any  # (examples,) index of each example in the data, or of each user; 0 for padding
    weights: Any = None  # (examples K,) weight of a row in the loss of its example; None for a mean
    factors: Any = None  # (examples,) nan for the clip factors, else weights that a check takes


class Origin:
    """What all chunks of one loader have in common; compiled functions are those of one loader.

    Args:
        plan: `PrivacyPlan` that draws them.
        data: arguments of the loss after the parameters, with the whole data in the place of rows.
    """

    def __init__(self, plan: PrivacyPlan, data: tuple[Any, ...]) -> None:
        leaves, self._treedef = jax.tree.flatten(data)
        self._others = [None if _is_array(leaf) else (leaf,) for leaf in leaves]
        self.plan = plan
        self._loop: weakref.ref[OwnLoop] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loop": None}  # a pickle leads to no run

    def rebuild(self, arrays: Iterable[Any]) -> tuple[Any, ...]:
        """Return the arguments of the loss with these arrays in the place of those of the data."""
        rest = iter(arrays)
        leaves = [next(rest) if other is None else other[0] for other in self._others]
        found: tuple[Any, ...] = jax.tree.unflatten(self._treedef, leaves)
        return found

    @property
    def loop(self) -> OwnLoop | None:
        """Loop of the user's own that records the releases; None if there is none, or it ended."""
        return None if self._loop is None else self._loop()

    @loop.setter
    def loop(self, loop: OwnLoop) -> None:
        self._loop = weakref.ref(loop)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class Chunk:
    """Logical batch of a step, or one physical part of it; a pytree, with read-only arrays.

    It is the argument of `clipped_grad_sum`, `per_sample_norms`, `per_sample_grads` and
    `noisy_mean`, and of functions that the user jits. The number of parts of a logical batch
    depends on its draw; each of `chunks` has one static shape, so that one program does for all.

    Attributes:
        parts: tuple of at least one `Rows`; an empty draw is one that is masked whole.
        bound: scalar, C of the step.
        step: int, index of the step.
        origin: `Origin` of the loader that drew it.
    """

    parts: tuple[Rows, ...]
    bound: Any
    step: Any
    origin: Origin

    @property
    def batch(self) -> tuple[Any, ...]:
        """Arguments of the loss after the parameters, every array leaf (examples K, ...)."""
        columns = zip(*(part.arrays for part in self.parts), strict=True)
        return self.origin.rebuild([_joined(column) for column in columns])

    @property
    def mask(self) -> Any:
        """(examples,) bool, False for padding; (users,) with users."""
        return _joined([part.mask for part in self.parts])

    @property
    def indices(self) -> Any:
        """(examples,) index of each example in the data, or of each user; 0 for padding."""
        return _joined([part.indices for part in self.parts])

    @property
    def weights(self) -> Any:
        """(users K,) weight of each row of the users, with users; None without."""
        weights = [part.weights for part in self.parts]
        return None if weights[0] is None else _joined(weights)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The physical parts, of one static shape; their sums add up to that of the batch."""
        return tuple(Chunk((part,), self.bound, self.step, self.origin) for part in self.parts)

    @property
    def plan(self) -> PrivacyPlan:
        """Plan that drew it."""
        return self.origin.plan

    @property
    def loop(self) -> OwnLoop | None:
        """Loop of the user's own that records its release; None if there is none."""
        return self.origin.loop

    @property
    def args(self) -> tuple[Any, ...]:
        """`batch` by the name that PyTorch's chunks have for it."""
        return self.batch

    @property
    def row_weights(self) -> Any:
        """`weights` by the name that PyTorch's chunks have for them."""
        return self.weights

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "A batch of the loader can't be unpacked: it has a mask, and a bound of its own. "
            "Expected step(state, batch), or clipped_grad_sum(loss_fn, params, batch) in a loop of "
            "your own; batch.batch has the arguments of the loss."
        )

    def tree_flatten(self) -> tuple[tuple[Any, ...], Origin]:
        """Return what may be traced, and what is compiled in."""
        return (self.parts, self.bound, self.step), self.origin

    @classmethod
    def tree_unflatten(cls, origin: Origin, children: tuple[Any, ...]) -> Chunk:
        """Inverse of `tree_flatten`."""
        parts, bound, step = children
        return cls(parts, bound, step, origin)

    def options(self) -> dict[str, Any]:
        """Return keyword arguments of `clipped_grad_sum` for this chunk."""
        plan, weights, found = self.plan, self.weights, dict[str, Any]()
        if plan.unit == "user":
            found |= {"rows_per_unit": plan.rows_per_unit, "row_weights": weights}
        if len(self.parts) > 1:
            found["physical_batch_size"] = len(self.parts[0].mask)
        bound = plan.clipping_bounds(self.bound)
        return found | {"mask": self.mask, "max_grad_norm": bound, "clipping": plan.clipping}


def taking_chunks(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a per-sample call (loss_fn, what, *batch, ...) to take a `Chunk` as its batch."""
    known = inspect.signature(function).parameters

    @wraps(function)
    def call(*args: P.args, **given: P.kwargs) -> T:
        if len(args) == 3 and isinstance(args[2], Chunk):
            chunk, options = args[2], args[2].options()
            for name in ("mask", "max_grad_norm", "clipping", "rows_per_unit", "row_weights"):
                if given.get(name) is not None:
                    raise ValueError(
                        f"{name}= came beside a Chunk, which has its own: the noise of its plan is "
                        "made for that. Expected it left out."
                    )
            options = {name: value for name, value in options.items() if name in known}
            return function(*args[:2], *chunk.batch, **options | given)  # type: ignore[arg-type]
        return function(*args, **given)

    return call


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _joined(columns: Any) -> Any:
    """Arrays one after the other; a single one as it is."""
    if len(columns) == 1:
        return columns[0]
    xp = np if all(isinstance(column, np.ndarray) for column in columns) else jnp
    return xp.concatenate(columns)
