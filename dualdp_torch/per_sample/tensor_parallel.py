# SPDX-License-Identifier: Apache-2.0
"""Parameter uses and gradients of tensor parallel models, piece by piece.

A use with `DTensor`s becomes one of the plain tensors that lie here, from which the rules compute
this process's piece of the gradient. Norms are then added up over the processes.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from dualdp._validate import UnsupportedLayerError
from dualdp_torch.parallel.fsdp import is_sharded
from dualdp_torch.parallel.tensor_parallel import TensorParallel, local_of
from dualdp_torch.per_sample.gradients import Gradients, Limits, Squares, added_up
from dualdp_torch.per_sample.parameter_use import name_of
from dualdp_torch.per_sample.random_state import RandomState
from dualdp_torch.rules.base import Tensor

#: Function and the axis along which its weight is cut -> if input and output are cut by features.
_CUT = {
    (F.linear, 0): (False, True),
    (F.linear, 1): (True, False),
    (F.embedding, 1): (False, True),
}


class Layout(NamedTuple):
    """Distribution of a use's input and output that leaves its gradient's piece to one process.

    `cuts_acts` and `cuts_grads_out` are True for a tensor cut by its last axis, else it is whole.
    """

    cuts_acts: bool
    cuts_grads_out: bool

    def acts(self, tensor: Any) -> Any:
        """Return the piece here of a saved input, or of each of a tuple."""
        if isinstance(tensor, tuple):
            return tuple(map(self.acts, tensor))
        return tensor if tensor is None else _distributed(tensor, self.cuts_acts)

    def grads_out(self, grad: Tensor) -> Tensor:
        """Return the piece here of the output's gradient."""
        return _distributed(grad, self.cuts_grads_out)

    def shape(self, out: Tensor) -> torch.Size:
        """Return the shape of the piece here of the output."""
        mesh: Any = out.device_mesh if is_sharded(out) else None  # type: ignore[attr-defined]
        size = mesh.size() if mesh is not None and self.cuts_grads_out else 1
        return torch.Size((*out.shape[:-1], out.shape[-1] // size)) if out.dim() else out.shape


def layout_of(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Layout | None:
    """Return the layout of a call with trained parameters, None if no argument is a `DTensor`.

    `parameters` maps arguments of a function with a rule to trained parameters, which may be cut as
    `_CUT` says.
    """
    if not any(map(is_sharded, parameters.values())):
        return None
    axes = {
        slot: p.placements[0].dim
        for slot, p in parameters.items()
        if is_sharded(p) and p.placements[0].is_shard()
    }
    if not axes:
        return Layout(False, False)
    found = _CUT.get((function, axes.get("weight", 0)))
    if found is None or ("bias" in parameters and ("bias" in axes) != found[1]):
        raise UnsupportedLayerError(
            f"{name_of(function)} was called with trained parameters that are cut along the axes "
            f"{axes}. Expected ColwiseParallel or RowwiseParallel of nn.Linear, or ColwiseParallel "
            "of nn.Embedding; leave others whole, or freeze them."
        )
    return Layout(*found)


def _distributed(tensor: Any, is_cut: bool) -> Tensor:
    """Return the piece here of a tensor, cut along its last axis or whole."""
    if not is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]
    from torch.distributed.tensor import Replicate, Shard

    wanted = Shard(tensor.dim() - 1) if is_cut else Replicate()
    return local_of(tensor.detach().redistribute(placements=[wanted]))


class SplitGradients:
    """Per-sample gradients of which this process holds the pieces; norms are those of the whole.

    All processes call it together. Sums are `DTensor`s like their parameters.
    """

    def __init__(self, here: Gradients, split: TensorParallel, n: int) -> None:
        self._here, self._split, self._n = here, split, n
        self.is_narrow, self.scale, self.one_sum = here.is_narrow, here.scale, False

    @property
    def doubt(self) -> Tensor | None:
        """(n,) largest error bound of a norm on any process, or None."""
        found = self._here.doubt
        return None if found is None else self._split.group.largest(found)

    def grads(self) -> dict[str, Tensor]:
        """Refuse to hand out per-sample gradients, of which each process has pieces."""
        refuse_handing_out(self._split)
        return {}

    def sq_norms(self, limits: Limits) -> Squares:
        """Return squared norms, each as precise as its own size asks, so that their sum is, too."""
        found = self._here.sq_norms(Limits(limits.group_of))
        total = added_up(self._split.added(found.of), limits.group_of, self._n)
        is_double = all(p.dtype == torch.float64 for p in self._split.parameters.values())
        precision = "bfloat16" if self.is_narrow else "float64" if is_double else "float32"
        self._split.require_same_norms(found.of, total.whole, precision)
        return total

    def exact_sq_norms(self, rows: Tensor) -> dict[str, Tensor]:
        """Return name -> (rows,) float64 squared norms of the selected examples."""
        return self._split.added(self._here.exact_sq_norms(rows))

    def sums(
        self, factors: Mapping[str, Tensor], rows: Tensor | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weighted sum) for each parameter."""
        for name, total in self._here.sums(factors, rows):
            yield name, self._split.total(name, total)

    def forget(self) -> None:
        """Free the memory of the pieces."""
        self._here.forget()


def whole_norms(gradients: Gradients, split: TensorParallel | None, n: int) -> Gradients:
    """Return gradients whose norms are those of whole parameters, from pieces or as they are."""
    return gradients if split is None else SplitGradients(gradients, split, n)


@contextlib.contextmanager
def same_draws(split: TensorParallel | None, model: nn.Module) -> Iterator[None]:
    """Context of a forward that may draw random numbers only if all processes draw the same."""
    before = None if split is None else RandomState.of(model)
    yield
    require_same_draws(split, model, before)


def require_same_draws(
    split: TensorParallel | None, model: nn.Module, before: RandomState | None
) -> None:
    """Refuse random numbers that a forward drew since `before`, unless all drew the same."""
    if split is not None and before is not None and not before.is_as_before(model):
        state = hashlib.sha256(before.torch.host.numpy().tobytes())
        for device in before.torch.devices:
            state.update(device.numpy().tobytes())
        split.group.require_same(
            "the state of torch's generators",
            state.hexdigest(),
            "A tensor parallel model that draws random numbers (dropout) needs the same seed on "
            "all processes: call torch.manual_seed alike.",
        )


def refuse_handing_out(split: TensorParallel | None) -> None:
    """Refuse to hand out the per-sample gradients of a tensor parallel model."""
    if split is not None:
        raise UnsupportedLayerError(
            "The per-sample gradients of a tensor parallel model (parallelize_module) lie in "
            "pieces and are not handed out, also not for bounds below 1e-10, which need them. "
            "Expected per_sample_norms or clipped_grad_sum."
        )


def refuse_vmap(split: TensorParallel | None, problem: str) -> None:
    """Refuse a tensor parallel model whose gradients captured uses do not give."""
    if split is not None:
        raise UnsupportedLayerError(
            f"{problem}, so its gradients need vmap, which can't run a tensor parallel model "
            '(parallelize_module). Expected layers that a rule covers; or use method="loop".'
        )
