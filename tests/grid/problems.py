# SPDX-License-Identifier: Apache-2.0
"""Problems of the grid, and how each stack answers them.

A problem is a model with a batch of `ROWS` rows. Its truth is float64, one row at a time, by plain
autograd (`tests.reference`). An answer is what one stack gives for it in one setting.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import torch
from torch import nn

import dualdp_jax as dpj
import dualdp_torch as dpt
from dualdp_jax.rules.base import forced
from dualdp_torch.rules import base
from tests import reference
from tests.backends import _jax
from tests.cases import layers
from tests.conftest import DEVICE
from tests.dualdp_torch.checks import randomise, truth_of
from tests.grid.torch_layers import CASES, N

ROWS = N
Grads = dict[str, np.ndarray]
#: Unit -> rows of a unit, and weights of all rows (None for means).
UNITS: dict[str, tuple[int, list[float] | None]] = {
    "rows": (1, None),
    "pairs": (2, None),
    "weighted": (4, [0.5, -1.0, 0.25, 0.0, 2.0, 0.375, 0.0, -0.25]),
}
METHODS = ("auto", "book_keeping", "two_pass", "materialize", "vmap", "loop")
USUAL = "usual"
#: Ways of a norm that the cost model chooses from, by stack and kind of layer.
FORMS = {
    ("torch", "convolution"): (USUAL, "gram", "folded", "unfold", "crb"),
    ("torch", "linear"): (USUAL, "gram", "keep", "discard"),
    ("jax", "convolution"): (USUAL, "gram", "patches", "offsets"),
    ("jax", "linear"): (USUAL, "lengths", "gram", "gradients"),
    ("jax", "table"): (USUAL, "table", "sort"),
    ("jax", "several uses"): (USUAL, "pairs", "formed"),
}


class Setting(NamedTuple):
    """How a problem is solved; `form` is taken wherever a layer has it."""

    method: str
    clipping: str
    unit: str
    dtype: str
    form: str

    @property
    def units(self) -> dict[str, Any]:
        """Options of a call: `rows_per_unit`, `row_weights`."""
        size, weights = UNITS[self.unit]
        return {"rows_per_unit": size, "row_weights": weights} if size > 1 else {}


class Answer(NamedTuple):
    """Gradients and norms of units, and the clipped sum of those that a mask leaves."""

    grads: Grads
    norms: np.ndarray
    parts: Grads
    clipped: Callable[[np.ndarray], tuple[Grads, np.ndarray]]


@dataclass(frozen=True, eq=False)
class Problem:
    """A model with its batch; `case` is one of the shared grid, or None for torch alone."""

    name: str
    kind: str
    way: str = "Captured"
    case: layers.Case | None = None

    def torch_model(self, dtype: str) -> tuple[nn.Module, Any, tuple[torch.Tensor, ...]]:
        """Model, loss and batch, in `dtype`."""
        kind = getattr(torch, dtype)
        if self.case is not None:
            batch: tuple[torch.Tensor, ...] = (reference.batch_of(self.case, kind),)
            return reference.model_of(self.case, kind), reference.loss_fn, batch
        made, batch, _ = CASES[self.name]
        model = randomise(copy.deepcopy(made)).to(kind)
        return model, losses, tuple(x.to(kind) if x.is_floating_point() else x for x in batch)


def losses(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    """(n,) losses of a model with several inputs."""
    return reference.loss_fn(lambda _: model(*batch), None)


@functools.cache
def truth(problem: Problem) -> Grads:
    """Name -> (ROWS, *shape), float64, of the parameters as float32 has them."""
    model, loss, batch = problem.torch_model("float32")
    return truth_of(model, loss, *batch)


def truth_of_units(problem: Problem, unit: str) -> Grads:
    """Name -> (units, *shape): means or weighted sums over the rows of each unit."""
    size, weights = UNITS[unit]
    shares = np.full(ROWS, 1 / size) if weights is None else np.asarray(weights)
    rows = truth(problem).items()
    weighted = {name: (g.T * shares).T.reshape(-1, size, *g.shape[1:]) for name, g in rows}
    return {name: grad.sum(1) for name, grad in weighted.items()}


def by_torch(problem: Problem, setting: Setting, bound: float) -> Answer:
    """Eager calls."""
    model, loss, batch = problem.torch_model(setting.dtype)
    model, batch = model.to(DEVICE), tuple(x.to(DEVICE) for x in batch)
    options = {**setting.units, "method": setting.method, "check": "off"}
    if options.get("row_weights"):
        options["row_weights"] = torch.tensor(options["row_weights"], device=DEVICE)

    def clipped(mask: np.ndarray) -> tuple[Grads, np.ndarray]:
        settings = {"max_grad_norm": bound, "clipping": setting.clipping, **options}
        with torch_form(setting.form):
            found = dpt.clipped_grad_sum(
                loss, model, *batch, mask=torch.from_numpy(mask).to(DEVICE), **settings
            )
        return of_tensors(found.grads), found.norms.cpu().numpy()

    with torch_form(setting.form):
        grads = dpt.per_sample_grads(loss, model, *batch, **options)
        norms = dpt.per_sample_norms(loss, model, *batch, **options)
        parts = dpt.per_sample_norms(loss, model, *batch, per_parameter=True, **options)
    return Answer(of_tensors(grads), norms.cpu().numpy(), of_tensors(parts), clipped)


def of_tensors(found: dict[str, torch.Tensor]) -> Grads:
    """Name -> array."""
    return {name: value.cpu().numpy() for name, value in found.items()}


@contextlib.contextmanager
def torch_form(form: str) -> Iterator[None]:
    """Take a form wherever a layer has it; `base.FORCED` refuses the layers that have it not."""

    def choose(operation: str, usual: str, methods: Any, sizes: Any) -> str:
        return form if form in methods else usual

    with mock.patch.object(base, "choose", choose):
        yield


def by_jax(problem: Problem, setting: Setting, bound: float) -> Answer:
    """One jitted program; parameters of a module are a branch of the tree, as in torch."""
    wide = jax.enable_x64(setting.dtype == "float64")
    with wide, forced(*(() if setting.form == USUAL else (setting.form,))):
        model = _jax.build(problem.case)  # the numbers of float32, as in the truth
        x = model.x.astype(setting.dtype) if problem.case.kind == "float" else model.x
        options = {**setting.units, "method": setting.method, "check": "off"}
        if options.get("row_weights"):
            options["row_weights"] = np.asarray(options["row_weights"], setting.dtype)
        options["trainable"] = tree_of(model.trainable)
        loss = lambda params, x: model.loss_fn(flat(params), x)  # noqa: E731

        @jax.jit
        def compute(params: Any, x: Any, mask: Any, bound: Any) -> Any:
            settings = {"max_grad_norm": bound, "clipping": setting.clipping, **options}
            return (
                dpj.per_sample_grads(loss, params, x, **options),
                dpj.per_sample_norms(loss, params, x, **options),
                dpj.per_sample_norms(loss, params, x, per_parameter=True, **options),
                dpj.clipped_grad_sum(loss, params, x, mask=mask, **settings),
            )

        params = tree_of({name: p.astype(setting.dtype) for name, p in model.params.items()})
        everybody = np.ones(ROWS // UNITS[setting.unit][0], bool)
        program = compute.lower(params, x, everybody, bound).compile()
        grads, norms, parts, _ = program(params, x, everybody, bound)

    def clipped(mask: np.ndarray) -> tuple[Grads, np.ndarray]:
        with jax.enable_x64(setting.dtype == "float64"):
            found = program(params, x, mask, bound)[3]
        return arrays(found.grads), np.asarray(found.norms)

    return Answer(arrays(grads), np.asarray(norms), arrays(parts), clipped)


def tree_of(named: dict[str, Any]) -> dict[str, Any]:
    """{"0.weight": leaf} -> {"0": {"weight": leaf}}."""
    tree: dict[str, Any] = {}
    for name, leaf in named.items():
        *path, last = name.split(".")
        owner = functools.reduce(lambda branch, key: branch.setdefault(key, {}), path, tree)
        owner[last] = leaf
    return tree


def flat(tree: Any) -> dict[str, Any]:
    """The other way; leaves that are None are left out."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {".".join(key.key for key in path): leaf for path, leaf in paths}


def arrays(tree: Any) -> Grads:
    """Name -> array."""
    return {name: np.asarray(leaf) for name, leaf in flat(tree).items()}


ANSWERS = {"torch": by_torch, "jax": by_jax}


def kind_of(case: layers.Case) -> str:
    """What decides which forms a model has."""
    kinds = {kind for kind, _ in case.layers}
    if case.special in ("tied", "reuse", "reuse_ranks", "functional", "shared"):
        return "several uses"
    if kinds & {"conv1d", "conv2d"}:
        return "convolution"
    return "table" if kinds == {"embedding"} else "linear"


#: Cases of which all parts are in others.
IN_OTHERS = {
    *("linear_nobias", "mlp_relu", "conv1d_groups", "conv1d_dilation", "conv1d_circular"),
    *("conv2d_nobias", "conv2d_same", "conv2d_valid", "conv2d_dilation", "layernorm_2d"),
}
SHARED = tuple(
    Problem(case.name, kind_of(case), case=case.but(n=ROWS))
    for case in layers.ALL
    if case.dtype == "float32" and case.n == layers.Case.n and case.seed == layers.Case.seed
    if case.name not in IN_OTHERS
)
OF_TORCH = tuple(
    Problem(name, "convolution" if "conv" in name else "linear", way)
    for name, (_, _, way) in CASES.items()
)
