# SPDX-License-Identifier: Apache-2.0
"""Models of the field's known failures, put beside a loop over examples in float64."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

import dualdp_torch as dpt
from dualdp_torch.per_sample import call
from tests import reference
from tests.closeness import assert_grads_close, factors_of, whole_norms

METHODS = tuple(dpt.METHODS)


def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Fill the parameters with asymmetric random numbers."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.as_tensor(rng.normal(size=tuple(p.shape)) * 0.4 + 0.05))
    return model


def data(*shape: int, seed: int = 1) -> torch.Tensor:
    """Standard normals."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float()


def ids(high: int, *shape: int, seed: int = 1) -> torch.Tensor:
    """Integers below `high`."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, high, size=shape))


def truth_of(model: torch.nn.Module, loss_fn: Any, *batch: Any) -> dict[str, np.ndarray]:
    """Name -> (n, *shape), float64, one example at a time."""
    exact = copy.deepcopy(model).double()
    leaves, spec = pytree.tree_flatten(batch)
    leaves = [
        leaf.double() if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf
        for leaf in leaves
    ]
    named = {name: p for name, p in exact.named_parameters() if p.requires_grad}
    n = next(len(leaf) for leaf in leaves if torch.is_tensor(leaf))
    found = {name: np.zeros((n, *p.shape)) for name, p in named.items()}
    for k in range(n):
        one = [leaf[k : k + 1] if torch.is_tensor(leaf) else leaf for leaf in leaves]
        loss = loss_fn(exact, *pytree.tree_unflatten(one, spec)).sum()
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        for name, grad in zip(named, grads, strict=True):
            if grad is not None:
                found[name][k] = grad.numpy()
    return found


def assert_exact(
    model: torch.nn.Module,
    *batch: Any,
    loss_fn: Any = reference.loss_fn,
    methods: tuple[str, ...] = METHODS,
    dtype: str = "float32",
) -> None:
    """Gradients, norms and clipped sums of every method are those of the loop."""
    truth = truth_of(model, loss_fn, *batch)
    whole = whole_norms(truth)
    bound = float(np.median(whole)) or 1.0
    factors = factors_of(whole, bound, dtype)
    for method in methods:
        grads = dpt.per_sample_grads(loss_fn, model, *batch, method=method)
        assert_grads_close({k: g.numpy() for k, g in grads.items()}, truth, dtype)
        norms = dpt.per_sample_norms(loss_fn, model, *batch, method=method)
        np.testing.assert_allclose(norms.numpy(), whole, rtol=2e-5, err_msg=method)
        sums = dpt.clipped_grad_sum(loss_fn, model, *batch, max_grad_norm=bound, method=method)
        for name, grad in truth.items():
            expected = np.tensordot(factors, grad, axes=1)
            apart = np.linalg.norm(sums.grads[name].double().numpy() - expected)
            assert apart <= 1e-5 * bound * len(whole), (method, name)


class Ways:
    """Counts how calls were carried out."""

    def __init__(self, monkeypatch: Any) -> None:
        self.taken: list[str] = []
        for way in ("by_vmap", "by_loop", "Captured"):
            monkeypatch.setattr(call, way, self._counted(way, getattr(call, way)))

    def _counted(self, way: str, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.taken.append(way)
            return function(*args, **kwargs)

        return counted
