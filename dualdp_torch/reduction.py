# SPDX-License-Identifier: Apache-2.0
"""Whether a loss is the mean or the sum that was declared, as far as its graph shows it.

The graph is looked at while its backward runs, when what its nodes saved is gone and their kinds,
sizes and axes are left; so a factor can't be read, and a sum that is divided by one is refused.

Between the model's outputs and the reduction, axis 0 must hold the examples one after the other: n
rows, or n blocks of rows as in (n, t, v) -> (n * t, v). What can't be seen: rows that are chosen by
index tensors (`z[rows]`), and weights that were computed from detached outputs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Container, Iterable, Iterator
from typing import Any, NoReturn

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
    *("SqueezeBackward1", "SqueezeBackward2"),
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
#: Beginnings of the names of nodes that join or reorder rows whatever their axes are.
_MIXES = (
    *("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "Cdist", "EuclideanDist", "Pdist"),
    *("TBackward", "torch::autograd::CopySlices", "AsStrided", "Take", "Put", "MaskedScatter"),
    *("Embedding", "Renorm", "Addbmm", "Addr", "Trilinear", "DiagEmbed", "Trace", "Cholesky"),
    *("MatrixExp", "TriangularSolve", "LuUnpack", "SegmentReduce"),
)
#: Nodes with an axis 0 by name that leave rows as they are if their number stays the same.
_KEEPS_ROWS = ("SqueezeBackward", "SliceBackward")
#: What `cross_entropy` does to the logarithm for label_smoothing.
_SMOOTHING = {"SumBackward0", "MaskedFillBackward0", "NegBackward0", "SumBackward1"}
#: Nodes that lay the same numbers out in other axes, in the same order.
_VIEWS = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}
#: Nodes that add axes behind the first one, unless `_joins` says otherwise.
_ADDS_AXES = {"UnsqueezeBackward0", "StackBackward0", "UnfoldBackward0", "ViewAsRealBackward0"}
#: How many of the first inputs may depend on the outputs; the others are contracted or scattered.
_FIRST = {
    **{"MmBackward0": 1, "AddmmBackward0": 2, "MvBackward0": 1, "AddmvBackward0": 2},
    **{"ConvolutionBackward0": 1, "LinearBackward0": 1, "IndexPutBackward0": 1},
}
#: Where nodes save the axes that they work along.
_NAMED = (
    *("_saved_dim", "_saved_dims", "_saved_dim0", "_saved_dim1", "_saved_dim2"),
    *("_saved_dimension", "_saved_axis"),
)
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
    strict = after is not None and n is not None and n >= 2
    found = list(_reductions(loss.grad_fn, n, after if strict else None))
    for node, kind, divided in found:
        smooths = divided and _smooths_labels(node, [other for other, _, _ in found])
        if divided and kind == "sum" and not smooths:
            raise ValueError(
                "The loss is a sum divided by something that its graph does not show; if that "
                "depends on the batch, so does what one example weighs. Use .mean(), or divide "
                "each example's loss and not their sum."
            )
        if kind != declared and not smooths:
            raise ValueError(
                f"loss_reduction={declared!r}, but the loss is a {kind} ({node.name()}). Declare "
                f"loss_reduction={kind!r}: the clipping bound depends on it."
            )
        if kind == "mean":
            _check_mean(node, n, labels)
        if after is not None and n is not None and n >= 2:
            _check_rows(node, after, n)
        elif after is not None:
            _check_apart(node, after)


def current_losses(thread: int | None = None) -> tuple[Tensor, ...]:
    """The losses whose backward is running, seen from inside one of its hooks; () if not found.

    Autograd does not tell a hook where its backward began, but the call stands on the stack of the
    thread that made it; on a GPU hooks run in another one.

    Args:
        thread: identity of the thread that is looked at after this one and before all others.
    """
    frames = sys._current_frames()
    for other in (threading.get_ident(), thread, *frames):
        frame: Any = frames.get(other) if other is not None else None
        while frame is not None:
            argument = _CALLS.get(frame.f_code)
            if argument is not None:
                losses = frame.f_locals[argument]
                return (losses,) if torch.is_tensor(losses) else tuple(losses)
            frame = frame.f_back
    return ()


#: What begins a backward, and its argument that holds the losses.
_CALLS = {torch.autograd.backward.__code__: "tensors", torch.autograd.grad.__code__: "outputs"}


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


def _reductions(root: Any, n: int | None, after: int | None) -> Iterator[tuple[Any, str, bool]]:
    """(node, kind, whether it was divided) of the first reductions over examples below a scalar."""
    seen, stack = set(), [(root, False)]
    while stack:
        node, divided = stack.pop()
        if node is None or (node, divided) in seen:
            continue
        seen.add((node, divided))
        kind, name, below = _kind(node), node.name(), _children(node)
        if kind is not None and (scalars := _stacked_scalars(node)):
            stack += [(child, divided) for child in scalars]
        elif kind is not None and not (_is_after_another(node, n) and below):
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
        elif after is not None and _in_order(node, after):
            _refuse_opaque(node)
            raise ValueError(
                f"The loss ends in {name}, which is no mean and no sum. Expected the mean or the "
                "sum of one loss per example; use clipped_grad_sum for other losses."
            )


def _stacked_scalars(node: Any) -> list[Any]:
    """The losses of torch.stack([loss, ...]).sum()."""
    below = _children(node)
    if len(below) != 1 or below[0].name() != "StackBackward0":
        return []
    edges = [edge for edge in below[0].next_functions if edge[0] is not None]
    return [] if any(_shape(edge) for edge in edges) else [child for child, _ in edges]


def _smooths_labels(node: Any, reductions: list[Any]) -> bool:
    """Whether a divided sum is the second term of a cross entropy with label_smoothing.

    Both terms stand on the logarithm that `cross_entropy` took for itself; the first one, whose
    divisor is the same, is checked.
    """
    logs = [below for r in reductions if r.name().startswith("NllLoss") for below in _children(r)]
    weighted = any(_is_weighted(r, ()) for r in reductions)  # which is refused as such
    steps = _SMOOTHING | ({"MulBackward0"} if weighted else set())
    while node is not None and node not in logs:
        below = _children(node)
        node = below[0] if len(below) == 1 and node.name() in steps else None
    return node is not None


def _is_after_another(node: Any, n: int | None) -> bool:
    """Whether the examples were reduced before: (n, t).mean(0).sum()."""
    below = _children(node)
    if not n or not getattr(node, "_saved_self_sym_sizes", ()) or not below:
        return False
    views = any(_is_undone(child, below[0]) for child in _children(below[0]))
    return _kind(below[0]) is not None and not views


def _axes(node: Any, name: str = "_saved_dim") -> tuple[int, ...]:
    """Axes that a node reduces, joins or moves; (0,) stands for all."""
    dim = getattr(node, name, None)
    if dim is None or dim == ():
        return (0,)
    axes = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple((a - _UNSIGNED if a >= _UNSIGNED // 2 else a) % _count(node) for a in axes)


def _count(node: Any) -> int:
    """How many axes those that a node names are counted in."""
    own = [(node, 0)] if node.name() in _ADDS_AXES - {"UnfoldBackward0"} else []
    edges = (edge for edge in [*own, *node.next_functions, (node, 0)] if edge[0] is not None)
    return len(_shape(next(edges))) or _UNSIGNED


def _shape(edge: tuple[Any, int]) -> tuple[int, ...]:
    """Shape of one output of a node."""
    node, position = edge
    if node.name() == "torch::autograd::AccumulateGrad":
        return tuple(node.variable.shape)
    return tuple(node._input_metadata[position].shape)


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


def _check_rows(reduction: Any, after: int, n: int) -> None:
    """Refuse what joins or moves examples between the model's outputs and the reduction.

    Every node must put out rows that depend on one example each, in the order of the outputs.
    """
    nodes = _in_order(reduction, after)
    live = set(nodes)
    for node in reversed(nodes):
        late = node.next_functions[_FIRST.get(node.name(), len(node.next_functions)) :]
        contracts = any(_depends(child, live, after) for child, _ in late)
        if contracts or (node is not reduction and _joins(node)):
            _refuse_joining(node, reduction)
    units: dict[Any, int] = {}
    for node in nodes:
        operands = [edge for edge in _operands(node) if _depends(edge[0], live, after)]
        below = {units.get(child, n) for child, _ in operands}
        shapes = [_shape(edge) for edge in operands]
        if node is reduction:
            alike = len({shape[:1] for shape in shapes}) <= 1 >= len(below)
            unit = n if alike else None
        else:
            unit = _unit(node, shapes, below.pop()) if len(below) == 1 else None
        if unit is None:
            _refuse_joining(node, reduction)
        units[node] = unit


def _unit(node: Any, shapes: list[tuple[int, ...]], unit: int) -> int | None:
    """How many blocks of rows a node puts out, one after the other; None if they are mixed."""
    out, name = _shape((node, 0)), node.name()
    if not out:
        return None
    if name in _VIEWS:
        return unit if out[0] % max(unit, 1) == 0 else None
    if name == "IndexBackward0":
        return unit if shapes[0][:1] == out[:1] else out[0]
    aligned = name in _ADDS_AXES or all(len(shape) >= len(out) for shape in shapes)
    return unit if aligned and all(shape[:1] == out[:1] for shape in shapes) else None


def _joins(node: Any) -> bool:
    """Whether a node joins rows or moves them to another place or axis."""
    name = node.name()
    _refuse_opaque(node)
    if name.startswith(_MIXES):
        return True
    if name.startswith("Linalg") and not name.startswith(("LinalgVectorNorm", "LinalgCross")):
        return True
    if name.startswith(_KEEPS_ROWS) or any(_is_undone(c, node) for c in _children(node)):
        return False
    if name == "PermuteBackward0":
        return _axes(node, "_saved_dims")[0] != 0
    if hasattr(node, "_saved_normalized_shape"):
        return len(node._saved_normalized_shape) >= len(_shape((node, 0)))
    named = [axes for axes in _NAMED if hasattr(node, axes)]
    return any(0 in _axes(node, axes) for axes in named) or (name in _JOINS and not named)


def _refuse_opaque(node: Any) -> None:
    """Refuse functions written by the user, which may join examples unseen."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        raise ValueError(
            f"The criterion calls an autograd.Function ({type(node).__name__}), where nobody can "
            "see whether it keeps the examples apart. Expected functions of torch; use "
            "clipped_grad_sum for others."
        )


def _refuse_joining(node: Any, reduction: Any) -> NoReturn:
    """Say which node joins or moves examples."""
    raise ValueError(
        f"The criterion joins or moves examples ({node.name()} below the {_kind(reduction)}), so "
        "the gradient of one example may depend on the others. Expected one loss per example, "
        "with the examples on axis 0, and their mean or sum; use clipped_grad_sum for others."
    )


def _operands(node: Any) -> list[tuple[Any, int]]:
    """The inputs of a node, or those of the nodes below that it undoes."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    lists = [e[0].next_functions if _is_undone(e[0], node) else (e,) for e in edges]
    return [edge for edges in lists for edge in edges if edge[0] is not None]


def _is_undone(node: Any, above: Any) -> bool:
    """Whether the node above puts the examples back on axis 0.

    A reduction of `stack([a, b])` along the new axis does, and so does the loss of CTC, which takes
    (t, n, v).
    """
    if node.name() == "StackBackward0":
        return _kind(above) is not None and _axes(node) == _axes(above) == (0,)
    if node.name() != "TransposeBackward0" or above.name() != "CtcLossBackward0":
        return False
    return {*_axes(node, "_saved_dim0"), *_axes(node, "_saved_dim1")} == {0, 1}


def _in_order(root: Any, after: int) -> list[Any]:
    """The nodes above the model's outputs that depend on them, each after its inputs."""
    live: dict[Any, None] = {}
    seen, stack = set(), [(root, False)]
    while stack:
        node, is_ready = stack.pop()
        below = [child for child, _ in _operands(node)]
        if is_ready and any(_depends(child, live, after) for child in below):
            live[node] = None
        elif not is_ready and node not in seen and node._sequence_nr() > after:
            seen.add(node)
            stack += [(node, True), *((child, False) for child in below)]
    return list(live)


def _depends(node: Any, live: Container[Any], after: int) -> bool:
    """Whether a node is one of the model's, or one above it that is known to depend on them."""
    return node is not None and (node._sequence_nr() <= after or node in live)


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
