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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dualdp.ledger.ledger import Ledger
from dualdp.plan.plan import PrivacyPlan

PyTree = Any
Array = jax.Array | np.ndarray
P = ParamSpec("P")
T = TypeVar("T")


class Rows(NamedTuple):
    """Physical batch: examples of one static number, padded, and K rows of each."""

    arrays: list[Any]  # those of the data, (examples K, ...)
    mask: Any  # (examples,) bool, False for padding
    indices: Any  # (examples,) index of each example in the data, or of each user; 0 for padding
    weights: Any = None  # (examples K,) weight of a row in the loss of its example; None for a mean
    factors: Any = None  # (examples,) nan for the clip factors, else weights that a check takes


class Frame:
    """Arguments of the loss after the parameters, without their arrays."""

    def __init__(self, tree: PyTree) -> None:
        leaves, self._treedef = jax.tree.flatten(tree)
        self._others = [None if is_array(leaf) else (leaf,) for leaf in leaves]

    def rebuild(self, arrays: Iterable[Array]) -> PyTree:
        """Return the arguments with these arrays in the place of their own."""
        rest = iter(arrays)
        leaves = [next(rest) if other is None else other[0] for other in self._others]
        return jax.tree.unflatten(self._treedef, leaves)


class Origin(Frame):
    """What all chunks of one loader have in common; compiled functions are those of one loader.

    Args:
        plan: `PrivacyPlan` that draws them.
        data: arguments of the loss after the parameters, with the whole data in the place of rows.
    """

    def __init__(self, plan: PrivacyPlan, data: tuple[PyTree, ...]) -> None:
        super().__init__(data)
        self.plan = plan
        self._loop: weakref.ref[Ledger] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loop": None}  # a pickle leads to no run

    @property
    def loop(self) -> Ledger | None:
        """Loop of the user's own that records the releases; None if there is none, or it ended."""
        ledger = None if self._loop is None else self._loop()
        return None if ledger is None or ledger.unused is None else ledger

    @loop.setter
    def loop(self, loop: Ledger) -> None:
        self._loop = weakref.ref(loop)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["parts", "bound", "step"],  # what may be traced
    meta_fields=["origin"],  # what is compiled in
)
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

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "A batch of the loader can't be unpacked: it has a mask, and a bound of its own. "
            "Expected step(state, batch), or clipped_grad_sum(loss_fn, params, batch) in a loop of "
            "your own; batch.batch has the arguments of the loss."
        )

    def options(self, *, of_sum: bool) -> dict[str, Any]:
        """Return the keyword arguments of `clipped_grad_sum`, or another call, for this chunk."""
        plan, found = self.plan, dict[str, Any](origin=self.origin)
        if plan.unit == "user":
            found |= {"rows_per_unit": plan.rows_per_unit, "row_weights": self.weights}
        if len(self.parts) > 1:
            found["physical_batch_size"] = len(self.parts[0].mask)
        if of_sum:
            bounds = plan.clipping_bounds(self.bound)
            found |= {"mask": self.mask, "max_grad_norm": bounds, "clipping": plan.clipping}
        return found


def taking_chunks(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a per-sample call (loss_fn, what, *batch, ...) to take a `Chunk` as its batch."""
    of_sum = "max_grad_norm" in inspect.signature(function).parameters

    @wraps(function)
    def call(*args: P.args, **given: P.kwargs) -> T:
        if len(args) != 3 or not isinstance(args[2], Chunk):
            return function(*args, **given)
        for name in ("mask", "max_grad_norm", "clipping", "rows_per_unit", "row_weights"):
            if given.get(name) is not None:
                raise ValueError(
                    f"{name}= came beside a Chunk, which has its own: the noise of its plan is "
                    "made for that. Expected it left out."
                )
        options = args[2].options(of_sum=of_sum) | given
        return function(*args[:2], *args[2].batch, **options)  # type: ignore[arg-type]

    return call


def is_array(leaf: PyTree) -> bool:
    """True for an array of JAX or NumPy."""
    return isinstance(leaf, jax.Array | np.ndarray)


def _joined(columns: Sequence[Array]) -> Array:
    """Arrays one after the other; a single one as it is."""
    if len(columns) == 1:
        return columns[0]
    xp = np if all(isinstance(column, np.ndarray) for column in columns) else jnp
    return xp.concatenate(columns)
