# SPDX-License-Identifier: Apache-2.0
"""One whole private training step of a zoo model against a plain float64 loop over examples."""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

import dualdp_torch as dpt
from dualdp import PrivacyPlan
from dualdp.plan.clipping import MARGIN
from tests.zoo.entry import Entry, N, Problem

#: Largest distance of two clipped sums, in units of C, and of norms, relative; by precision. Many
#: models do some of their work in float32, whatever their parameters are.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
ROUNDINGS = 8
Grads = dict[str, torch.Tensor]


def doubled(problem: Problem) -> Problem:
    """The same in float64: a copy."""
    batch = pytree.tree_map(
        lambda t: t.double() if torch.is_tensor(t) and t.is_floating_point() else t, problem.batch
    )
    model = copy.deepcopy(problem.model).double()
    if getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("eager")  # the grouped product has no float64
    return Problem(model, problem.loss_fn, batch)


def precisions(problem: Problem) -> list[Problem]:
    """The problem, and the same in float64 where that runs the same code."""
    has_experts = getattr(problem.model, "_can_set_experts_implementation", bool)()
    return [problem] if has_experts else [problem, doubled(problem)]


def rows(batch: Any, index: Any) -> Any:
    """Some examples of a batch."""
    return pytree.tree_map(lambda t: t[index] if torch.is_tensor(t) else t, batch)


class Truth(NamedTuple):
    """What plain autograd gives, one example at a time.

    Attributes:
        grads: name -> (n, *shape).
        norms: (n,) of the whole gradients.
    """

    grads: Grads
    norms: torch.Tensor

    def clipped_sum(self, bound: float, margin: float) -> Grads:
        """Sum of the gradients, each scaled to norm at most C / (1 + margin)."""
        factors = (bound / (1 + margin) / self.norms).clamp(max=1.0)
        return {name: torch.einsum("n,n...->...", factors, g) for name, g in self.grads.items()}


def loop(problem: Problem) -> Truth:
    """The gradients in the problem's own precision, returned in float64."""
    model, loss_fn, batch, _ = problem
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found: dict[str, list[torch.Tensor]] = {name: [] for name in named}
    for k in range(N):
        loss = loss_fn(model, *rows(batch, slice(k, k + 1))).sum()
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        for (name, p), grad in zip(named.items(), grads, strict=True):
            found[name].append((torch.zeros_like(p) if grad is None else grad).double())
    stacked = {name: torch.stack(grads) for name, grads in found.items()}
    norms = torch.stack([g.flatten(1).square().sum(1) for g in stacked.values()]).sum(0).sqrt()
    return Truth(stacked, norms)


@functools.lru_cache(maxsize=16)
def truth_of(entry: Entry) -> Truth:
    """The gradients in float64."""
    return loop(doubled(entry.build()))


def distance(one: Grads, other: Grads) -> float:
    """L2 distance of two sums, in float64."""
    assert one.keys() == other.keys()
    return float(sum((one[n].double() - other[n].double()).square().sum() for n in one)) ** 0.5


def moved_by_rounding(problem: Problem, expected: Grads, bound: float) -> float:
    """Distance that rounding inputs and parameters makes to plain autograd, in units of C.

    A kink that one rounding misses is met by another, so there are several.
    """
    found = []
    for seed in range(ROUNDINGS):
        generator = torch.Generator().manual_seed(seed)

        def rounded(t: Any, generator: torch.Generator = generator) -> Any:
            if not torch.is_tensor(t) or not t.is_floating_point():
                return t
            turns = torch.randint(-1, 2, t.shape, generator=generator)
            return t * (1 + turns * torch.finfo(t.dtype).eps / 2)

        model = copy.deepcopy(problem.model)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(rounded(p))
        other = Problem(model, problem.loss_fn, pytree.tree_map(rounded, problem.batch))
        found.append(distance(loop(other).clipped_sum(bound, MARGIN["float32"]), expected) / bound)
    return max(found)


def assert_exact(
    problem: Problem, truth: Truth, bound: float, sums: Grads, norms: torch.Tensor
) -> None:
    """Sum and norms are the truth's, but for what rounding does to plain autograd, too."""
    dtype = next(iter(sums.values())).dtype
    assert {total.dtype for total in sums.values()} == {dtype}
    for name, p in problem.model.named_parameters():
        assert not p.requires_grad or sums[name].shape == p.shape, name
    expected = truth.clipped_sum(bound, MARGIN[str(dtype).removeprefix("torch.")])
    apart = distance(sums, expected) / bound
    of_norms = float(((norms.double() - truth.norms).abs() / truth.norms).max())
    allowed = TOLERANCE[dtype]
    if max(apart, of_norms) > allowed and dtype == torch.float32:  # kinks may amplify rounding
        allowed = max(allowed, 3 * moved_by_rounding(problem, expected, bound))
    assert apart <= allowed
    assert of_norms <= allowed


class Rows(Dataset):
    """The examples of a batch, one by one, as a user's data set has them."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return N

    def __getitem__(self, k: int) -> Any:
        return rows(self._batch, k)


def engine_step(problem: Problem, bound: float, mode: str = "auto") -> tuple[Grads, torch.Tensor]:
    """Clipped sum, and norms in the batch's order: one step of the user's own loop.

    All examples are in it, shuffled. What is released is the sum, divided: the noise is off.
    """
    plan = PrivacyPlan(
        num_examples=N, expected_batch_size=N, num_steps=1, noise_multiplier=0.0,
        max_grad_norm=bound, delta=1e-5, sampler="shuffle", seed=3,
    )  # fmt: skip
    model, loss_fn, batch, _ = problem
    engine = dpt.PrivacyEngine()
    loader = DataLoader(Rows((*batch, torch.arange(N))), batch_size=N)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        plan=plan,
        grad_sample_mode=mode,
    )
    try:
        for *batch, order in loader:
            loss_fn(model, *batch).mean().backward()
            optimizer.step()
            stages = engine.stages()
            for name, mean in stages.noisy_mean.items():
                torch.testing.assert_close(mean * N, stages.unprotected_sum[name])
            norms = torch.empty(N).index_copy(0, order, stages.unprotected_norms)
            return stages.unprotected_sum, norms
    finally:
        engine.detach()
    raise AssertionError("the loader handed out no batch")
