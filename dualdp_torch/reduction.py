# SPDX-License-Identifier: Apache-2.0
"""Whether a loss is the mean or the sum that was declared, as far as its graph shows it.

The graph is looked at while its backward runs, when what its nodes saved is gone and their kinds,
sizes and axes are left; so a factor can't be read, and a sum that is divided by one is refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .rules.base import Tensor

REDUCTIONS = ("mean", "sum")
_SAVED = {1: "mean", 2: "sum"}  # torch's numbers in `_saved_reduction`
_REDUCE = {
    **{"MeanBackward0": "mean", "MeanBackward1": "mean"},
    **{"SumBackward0": "sum", "SumBackward1": "sum", "DotBackward0": "sum"},
}
#: Nodes between a scalar and its reduction that leave the kind of reduction as it is.
_THROUGH = {
    *("AddBackward0", "SubBackward0", "NegBackward0", "ViewBackward0", "SqueezeBackward0"),
    *("UnsqueezeBackward0", "ToCopyBackward0", "CloneBackward0", "AliasBackward0"),
    *("ReshapeAliasBackward0", "UnsafeViewBackward0", "RsubBackward0", "RsubBackward1"),
}
_SCALE = {"MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1"}
#: Nodes that no sum or mean of the examples' losses ends in.
_NOT_LINEAR = {
    *("SqrtBackward0", "PowBackward0", "PowBackward1", "LogBackward0", "Log1PBackward0"),
    *("ExpBackward0", "ReciprocalBackward0", "TanhBackward0", "SigmoidBackward0", "ProdBackward0"),
    *("MaxBackward1", "MinBackward1", "LogsumexpBackward0", "LinalgVectorNormBackward0"),
    *(
        "NormBackward0",
        "NormBackward1",
        "VarBackward0",
        "StdBackward0",
        "CosineSimilarityBackward0",
    ),
}
#: Nodes that join what lies on the axes in `_saved_dim`, or on all of them without it.
_JOINS = {
    *("SoftmaxBackward0", "LogSoftmaxBackward0", "LogsumexpBackward0", "VarBackward0"),
    *("StdBackward0", "LinalgVectorNormBackward0", "NormBackward1", "CumsumBackward0"),
    *("AmaxBackward0", "AminBackward0", "SortBackward0", "MeanBackward1", "SumBackward1"),
    *("MeanBackward0", "SumBackward0", "MaxBackward1", "MinBackward1", "NormBackward0"),
    *("ProdBackward0", "VarMeanBackward0", "StdMeanBackward0"),
}
#: Nodes after which the examples may lie on another axis, so that nothing can be said.
_MOVES = {
    *("TBackward0", "TransposeBackward0", "PermuteBackward0", "StackBackward0"),
    *("UnsqueezeBackward0", "ExpandBackward0"),
}
_UNSIGNED = 1 << 64


def check_reduction(
    loss: Tensor,
    declared: str,
    *,
    n: int | None = None,
    after: int | None = None,
    labels: Iterable[Tensor] = (),
) -> None:
    """Refuse a loss whose graph contradicts the declaration, and weighted means.

    Args:
        loss: the scalar that backward is called on.
        declared: "mean" or "sum".
        n: examples, if known.
        after: sequence number of the last node of the model, if known: nodes above it belong to
            the criterion and must keep the examples apart.
        labels: what the loader gave, where ignored targets are looked for.

    Raises:
        ValueError: the loss is no scalar, is reduced otherwise, or its weights depend on the batch.
    """
    if loss.numel() != 1:
        raise ValueError(
            f"backward was called on a loss of shape {tuple(loss.shape)}. Expected a scalar, the "
            f"{declared} over the examples."
        )
    found = list(_reductions(loss.grad_fn, n))
    for node, kind, divided in found:
        if divided and kind == "sum":
            if _smooths_labels(node, [other for other, _, _ in found]):
                continue
            raise ValueError(
                "The loss is a sum divided by something that its graph does not show; if that "
                "depends on the batch, so does what one example weighs. Use .mean(), or divide "
                "each example's loss and not their sum."
            )
        if kind != declared:
            raise ValueError(
                f"loss_reduction={declared!r}, but the loss is a {kind} ({node.name()}). Declare "
                f"loss_reduction={kind!r}: the clipping bound depends on it."
            )
        if kind == "mean":
            _check_mean(node, n, labels)
        if after is not None:
            _check_apart(node, after)


def current_loss(thread: int | None = None) -> Tensor | None:
    """The loss whose backward is running, seen from inside one of its hooks.

    Autograd does not tell a hook where its backward began, but the call stands on the stack of the
    thread that made it; on a GPU hooks run in another one.

    Args:
        thread: identity of the thread that calls backward; None for this one.
    """
    if thread is None or thread == threading.get_ident():
        frame: Any = sys._getframe(1)
    else:
        frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is torch.Tensor.backward.__code__:
            loss: Tensor = frame.f_locals["self"]
            return loss
        if frame.f_code is torch.autograd.backward.__code__:
            tensors = frame.f_locals["tensors"]
            return tensors if torch.is_tensor(tensors) else tensors[0]
        frame = frame.f_back
    return None


def last_node(outputs: Iterable[Tensor]) -> int | None:
    """Sequence number of the last node that made these tensors."""
    nodes = [out.grad_fn for out in outputs if out.grad_fn is not None]
    return max((int(node._sequence_nr()) for node in nodes), default=None)


def _kind(node: Any) -> str | None:
    """What a node does to all of its input, if it reduces."""
    if node.name() in ("MeanBackward1", "SumBackward1") and 0 not in _axes(node):
        return None
    return _SAVED.get(getattr(node, "_saved_reduction", 0)) or _REDUCE.get(node.name())


def _children(node: Any) -> list[Any]:
    """The nodes below, without constants."""
    return [child for child, _ in node.next_functions if child is not None]


def _reductions(root: Any, n: int | None) -> Iterator[tuple[Any, str, bool]]:
    """(node, kind, whether it was divided) of the first reductions over examples below a scalar."""
    seen, stack = set(), [(root, False)]
    while stack:
        node, divided = stack.pop()
        if node is None or (node, divided) in seen:
            continue
        seen.add((node, divided))
        kind, name, below = _kind(node), node.name(), _children(node)
        if kind is not None and not (_is_after_another(node, n) and below):
            yield node, kind, divided
        elif kind is not None or name in _THROUGH:
            stack += [(child, divided) for child in below]
        elif name in _SCALE and len(below) == 1 and node.next_functions[0][0] is not None:
            stack.append((below[0], divided or name.startswith("Div")))
        elif name in _NOT_LINEAR or name in _SCALE:
            raise ValueError(
                f"The loss is {name.partition('Backward')[0].lower()} of something over the whole "
                "batch, so the gradient of one example depends on the others. Expected the mean or "
                "the sum of one loss per example."
            )


def _smooths_labels(node: Any, reductions: list[Any]) -> bool:
    """Whether a divided sum is the second term of a cross entropy with label_smoothing.

    Both terms stand on the logarithm that `cross_entropy` took for itself; the first one, whose
    divisor is the same, is checked.
    """
    logs = [below for r in reductions if r.name().startswith("NllLoss") for below in _children(r)]
    while node is not None and node not in logs:
        below = _children(node)
        node = below[0] if len(below) == 1 else None
    return node is not None


def _is_after_another(node: Any, n: int | None) -> bool:
    """Whether the examples were reduced before: (n, t).mean(0).sum()."""
    sizes = getattr(node, "_saved_self_sym_sizes", ())
    below = _children(node)
    return bool(n and sizes and sizes[0] % n and below and _kind(below[0]))


def _axes(node: Any) -> tuple[int, ...]:
    """Axes that a node reduces or joins; (0,) stands for all."""
    dim = getattr(node, "_saved_dim", None)
    if dim is None or dim == ():
        return (0,)
    axes = (dim,) if isinstance(dim, int) else tuple(dim)
    count = len(getattr(node, "_saved_self_sym_sizes", ())) or _UNSIGNED
    return tuple((a - _UNSIGNED if a >= _UNSIGNED // 2 else a) % count for a in axes)


def _check_mean(node: Any, n: int | None, labels: Iterable[Tensor]) -> None:
    """Refuse a mean whose divisor depends on the batch."""
    numel = getattr(node, "_saved_self_sym_numel", 0)
    if n and numel % n and 0 in _axes(node):
        raise ValueError(
            f"The loss is a mean over {numel} numbers of {n} examples: how much one example weighs "
            "depends on the others. Average each example's own first, then take the mean over all."
        )
    if _is_weighted(node, labels):
        raise ValueError(
            "The loss is a weighted mean: class weights or ignored targets make one example's "
            'weight depend on the others. Use reduction="sum", or average each example alone.'
        )


def _is_weighted(node: Any, labels: Iterable[Tensor]) -> bool:
    """Whether a mean divides by the sum of weights, or by how many targets count."""
    if not node.name().startswith("NllLoss"):
        return False
    try:
        if node._saved_weight is not None:
            return True
    except RuntimeError:  # there was one, which backward has freed
        return True
    ignored = node._saved_ignore_index
    ignored = ignored - _UNSIGNED if ignored >= _UNSIGNED // 2 else ignored
    try:
        labels = [node._saved_target]
    except RuntimeError:  # freed
        if ignored >= 0:
            return True  # asked for by the user
    return any(bool((t == ignored).any()) for t in labels)


def _check_apart(reduction: Any, after: int) -> None:
    """Refuse what joins examples between the model's outputs and the reduction."""
    for node in _above(_children(reduction), after):
        joins = node.name() in _JOINS and 0 in _axes(node)
        if not joins and not _multiplies_examples(node):
            continue
        below = _above(_children(node), after)
        if joins and any(other.name() in _MOVES for other in below):
            continue  # the axis may be another one
        raise ValueError(
            f"The criterion joins examples ({node.name()} below the {_kind(reduction)}), so the "
            "gradient of one example depends on the others. Expected one loss per example and "
            "their mean or sum."
        )


def _above(nodes: list[Any], after: int) -> Iterator[Any]:
    """These nodes and all below them, down to the model's outputs."""
    seen, stack = set(), list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen and node._sequence_nr() > after:
            seen.add(node)
            yield node
            stack += _children(node)


def _multiplies_examples(node: Any) -> bool:
    """Whether a matrix product contracts or pairs examples: anything but outputs @ constant."""
    return node.name() == "MmBackward0" and node.next_functions[1][0] is not None
