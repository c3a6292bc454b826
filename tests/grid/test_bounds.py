# SPDX-License-Identifier: Apache-2.0
"""The norm of one example's contribution to the clipped sum: at most C, and C where it is clipped.

Batches of eight, seven of them masked, after a call with all of them: a batch of one goes another
way. What is summed is measured in float64; the true gradient comes from plain autograd in float64.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import dualdp_torch as dpt
from dualdp.plan.clipping import CLIPPING
from tests import reference
from tests.cases import layers
from tests.cases.layers import Case

N = 8
#: What is lost by the margin that clip factors are divided by, and rounding.
BELOW = 1 - 3e-4
BOUNDS = (1e-4, 0.1, 100.0)
MAGNITUDES = (1e-20, 1e-10, 1.0, 30.0, 1e10, 1e20)
DTYPES = ("float32", "float64", "bfloat16")
METHODS = tuple(dpt.METHODS)
#: Norms whose squares no float32 holds.
HUGE = 1e18
#: Combinations of a model that the fast tier looks at.
SAMPLE = 24
_EXACT = torch.float64


class Hidden(nn.Module):
    """A layer whose positions cancel beside one whose gradient is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 40), nn.Linear(48, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.first(x), 3e3 * self.second(x[:, :1])], 1)


def _wide(name: str, *parts: Any, x: tuple[int, ...], **options: Any) -> Case:
    return Case(name, tuple(parts), x, **options)


#: Layers that are wide and see few positions, whose norms come from products of positions.
WIDE = (
    _wide("wide_linear", layers._linear_layer(48, 40), x=(4, 48)),
    _wide(
        "wide_two",
        layers._linear_layer(40, 48),
        layers._TANH,
        layers._linear_layer(48, 40),
        x=(4, 40),
    ),
    _wide("wide_conv", layers._conv_layer(2, 16, 24, 3), x=(16, 4, 4)),
    _wide("wide_conv1d", layers._conv_layer(1, 24, 32, 3, padding=1), x=(24, 4)),
    _wide(
        "wide_embedding", ("embedding", {"num": 50, "dim": 40}), x=(4,), kind="ids", vocabulary=50
    ),
)
#: One model of every kind of the grid; sizes of the batch and precisions are this test's own.
CASES = tuple(
    dataclasses.replace(case, n=N)
    for case in (
        *(*layers._LINEAR, *layers._CONV, *layers._EMBEDDING, *layers._NORM, *layers._SPECIAL),
        *WIDE,
    )
)
MODELS = (*(case.name for case in CASES), "hidden")


class Combination(NamedTuple):
    """What a contribution is asked of.

    Attributes:
        dtype: of parameters and inputs.
        method: one of `METHODS`.
        clipping: one of `CLIPPING`.
        inputs: factor of the inputs (of tables of ids: 1).
        loss: factor of the loss.
        bound: C.
        row: the example that is not masked.
    """

    dtype: str
    method: str
    clipping: str
    inputs: float
    loss: float
    bound: float
    row: int


def scales() -> list[tuple[float, float]]:
    """(of the inputs, of the loss): one of them, or both in opposite directions."""
    found = [(1.0, size) for size in MAGNITUDES] + [(size, 1.0) for size in MAGNITUDES]
    return sorted({*found, *((size, 1 / size) for size in MAGNITUDES)})


def combinations() -> list[Combination]:
    """All of them; the rows take turns."""
    ways = [
        (method, clipping)
        for method, clipping in itertools.product(METHODS, CLIPPING)
        if (method, clipping) != ("two_pass", "per_layer")  # refused
    ]
    every = itertools.product(DTYPES, ways, scales(), BOUNDS)
    return [
        Combination(dtype, method, clipping, inputs, loss, bound, turn % N)
        for turn, (dtype, (method, clipping), (inputs, loss), bound) in enumerate(every)
    ]


def loss_fn(
    model: nn.Module, x: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """(n,) weighted sums of the outputs: every gradient of an output is the caller's."""
    return (model(x).flatten(1) * weights).sum(1) * scale


class Norms(NamedTuple):
    """Norms of one example's gradient by plain autograd, by parameter.

    Attributes:
        rounded: in the precision of the model.
        exact: in float64.
        moved: in float64, of numbers that differ by one rounding of that precision.
    """

    rounded: dict[str, float]
    exact: dict[str, float]
    moved: dict[str, float]


class Problem:
    """One model, its batch, and the true gradients of its rows."""

    def __init__(self, name: str, dtype: str) -> None:
        self.dtype = getattr(torch, dtype)
        self.eps = torch.finfo(self.dtype).eps
        case = next((case for case in CASES if case.name == name), None)
        if case is None:
            torch.manual_seed(0)
            self.model, inputs = Hidden().to(self.dtype), torch.randn(N, 4, 48)
        else:
            self.model = reference.model_of(case, self.dtype)
            inputs = reference.batch_of(case, torch.float64)
        self.is_float = inputs.is_floating_point()
        if self.is_float and inputs.dim() > 2:  # half of the rows: positions that are nearly equal
            first = inputs[::2, :1] if case is None or "conv" not in name else inputs[::2, ..., :1]
            inputs[::2] = first + 1e-4 * inputs[::2]
        self.inputs = inputs
        with torch.no_grad():
            shape = self.model(self.batch(1.0, 1.0)[0]).shape
        generator = torch.Generator().manual_seed(5)
        weights = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) > 2:  # whose gradients cancel over the positions, but for a rest
            axes = (
                tuple(range(2, len(shape))) if "conv" in name else tuple(range(1, len(shape) - 1))
            )
            some = weights[::2] if case is not None else weights[::2, :-1]  # a view
            some -= some.mean(axes, keepdim=True) * (1 - 1e-4)
        self.weights = weights.flatten(1).to(self.dtype)
        self._known: dict[tuple[float, float, int], Norms] = {}
        dpt.clipped_grad_sum(loss_fn, self.model, *self.batch(1.0, 1.0), max_grad_norm=1.0)

    def batch(self, inputs: float, loss: float) -> tuple[torch.Tensor, ...]:
        """Arguments of `loss_fn`; before the weights are known, the inputs alone."""
        x = (self.inputs * inputs).to(self.dtype) if self.is_float else self.inputs
        scale = torch.full((N,), loss, dtype=self.dtype)
        return x, getattr(self, "weights", scale), scale

    def norms(self, inputs: float, loss: float, row: int) -> Norms:
        """Of the gradient of one row."""
        key = inputs, loss, row
        if key not in self._known:
            alone = [part[row : row + 1] for part in self.batch(inputs, loss)]
            self._known[key] = Norms(
                self._alone(alone),
                self._alone(alone, _EXACT),
                self._alone(self._moved(alone), _EXACT),
            )
        return self._known[key]

    def _moved(self, example: list[torch.Tensor]) -> list[torch.Tensor]:
        """The example, its numbers rounded once more, up or down."""
        generator = torch.Generator().manual_seed(6)
        signs = [torch.randint(0, 2, t.shape, generator=generator) * 2 - 1 for t in example]
        return [
            t.double() * (1 + self.eps * sign) if t.is_floating_point() else t
            for t, sign in zip(example, signs, strict=True)
        ]

    def _alone(
        self, example: list[torch.Tensor], dtype: torch.dtype | None = None
    ) -> dict[str, float]:
        """Parameter -> norm by plain autograd, in another precision if one is given."""
        cast = lambda t: t.to(dtype) if dtype and t.is_floating_point() else t  # noqa: E731
        values = {
            name: cast(p.detach()).requires_grad_() for name, p in self.model.named_parameters()
        }
        prefixed = {f"model.{name}": value for name, value in values.items()}
        losses = torch.func.functional_call(_Loss(self.model), prefixed, tuple(map(cast, example)))
        grads = torch.autograd.grad(losses.sum(), list(values.values()), allow_unused=True)
        return {
            name: 0.0 if grad is None else float(grad.double().norm())
            for name, grad in zip(values, grads, strict=True)
        }


class _Loss(nn.Module):
    """`loss_fn` as a module, for `functional_call`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return loss_fn(self.model, *batch)


def group_of(name: str, clipping: str) -> str:
    """The clipping group of a parameter."""
    return name.rpartition(".")[0] if clipping == "per_layer" else ""


def grouped(norms: dict[str, float], clipping: str) -> dict[str, float]:
    """Clipping group -> norm, of the norms of its parameters."""
    names: dict[str, list[float]] = {}
    for name, norm in norms.items():
        names.setdefault(group_of(name, clipping), []).append(norm)
    return {group: math.hypot(*found) for group, found in names.items()}


def fault(problem: Problem, asked: Combination, *, huge: bool = False) -> str | None:
    """What is wrong with the contribution of one example, or None.

    With `huge` norms above `HUGE` are bounded from below, without it all others.
    """
    mask = torch.arange(N) == asked.row
    batch = problem.batch(asked.inputs, asked.loss)
    found = dpt.clipped_grad_sum(
        loss_fn,
        problem.model,
        *batch,
        max_grad_norm=asked.bound,
        clipping=asked.clipping,
        method=asked.method,
        mask=mask,
    )
    sizes = grouped(
        {name: float(total.double().norm()) for name, total in found.grads.items()}, asked.clipping
    )
    bound = asked.bound / math.sqrt(len(sizes))
    norms = problem.norms(asked.inputs, asked.loss, asked.row)
    rounded, moved = (grouped(n, asked.clipping) for n in (norms.rounded, norms.moved))
    is_finite = all(map(math.isfinite, rounded.values()))
    for group, norm in grouped(norms.exact, asked.clipping).items():
        size = sizes[group]
        if not size <= bound:
            return f"{asked} group {group!r}: {size / bound:.6g} of its bound"
        is_huge = norm > HUGE and asked.dtype != "float64"
        if not is_finite or is_huge != huge:  # what is not finite contributes nothing
            continue
        members = [name for name in norms.exact if group_of(name, asked.clipping) == group]
        lost = [norms.exact[name] for name in members if norms.rounded[name] == 0]
        if math.hypot(*lost) > norm / 4:  # in plain autograd, too: a variance overflowed, say
            continue
        # What plain autograd loses where positions cancel; and what it may lose, if it was lucky.
        error = max(4 * abs(rounded[group] - norm), abs(moved[group] - norm))
        rounding = 1 + error / norm + 64 * problem.eps if norm else 1.0
        least = bound * BELOW / rounding
        if asked.clipping == "automatic":
            least *= norm / (norm + 0.01)
        if norm > bound * rounding and not size >= least:
            return f"{asked} group {group!r}: {size / bound:.6g} of its bound for {norm:.3g}"
    return None


def faults(name: str, chosen: list[Combination], *, huge: bool = False) -> list[str]:
    """What is wrong with a model."""
    problems = {dtype: Problem(name, dtype) for dtype in {one.dtype for one in chosen}}
    found = [fault(problems[one.dtype], one, huge=huge) for one in chosen]
    return [message for message in found if message is not None]


@pytest.mark.parametrize("name", MODELS)
def test_one_contribution_is_at_most_the_bound_and_reaches_it(name):
    chosen = random.Random(name).sample(combinations(), SAMPLE)
    found = faults(name, chosen)
    assert not found, "\n".join(found[:10])


def ordinary(clipping):
    """The combinations of one clipping at scales that float32 can square."""
    return [
        one
        for one in combinations()
        if one.clipping == clipping
        and one.dtype == "float32"
        and 1e-20 < one.inputs * one.loss < 1e20
        and max(one.inputs, one.loss) < 1e20
    ]


def test_a_large_layer_hides_no_other():
    """The error of a group's norm is judged by that group, and not by the whole model."""
    found = faults("hidden", ordinary("per_layer"))
    assert not found, "\n".join(found[:10])


@pytest.mark.parametrize("name", [case.name for case in WIDE])
def test_automatic_clipping_has_no_bound_to_judge_by(name):
    """The factor is C / (norm + 0.01), so that an error of the norm counts however large C is."""
    found = faults(name, ordinary("automatic"))
    assert not found, "\n".join(found[:10])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["linear_2d", "linear_3d", "cnn", "token_net", "raw", "wide_linear"]
)
def test_a_huge_gradient_is_clipped_and_not_dropped(name):
    """Its norm is finite, though its square is not in float32."""
    found = faults(name, [one for one in combinations() if one.loss == 1e20], huge=True)
    assert not found, f"{len(found)}:\n" + "\n".join(found[:10])
