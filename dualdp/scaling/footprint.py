# SPDX-License-Identifier: Apache-2.0
"""Bytes that are alive on one rank at the fullest moment of a step."""

from __future__ import annotations

from dualdp import costs

from .presets import Transformer
from .traffic import SUM_BYTES, gathers_whole

#: Numbers per position and unit of width that a block keeps from forward to backward (attention
#: that forms no T x T matrix), inputs of what has weights, and gradients of its outputs: four
#: products and two norms.
ACTIVATIONS, INPUTS, OUTPUTS = 16, 9, 11
#: Copies of the clipped sum while noise is added to it, and of gradients while the optimizer works:
#: the private one also keeps the clipped sum (`engine.stages()`).
RELEASED, UPDATED = 3, {True: 2, False: 1}


def activations(model: Transformer) -> int:
    """Numbers of one example when the backward begins: those of the blocks, three times logits."""
    t, d = model.positions, model.width
    return ACTIVATIONS * t * d * model.layers + t * (d + 3 * model.vocabulary)


def captured(model: Transformer) -> int:
    """Numbers of one example that see a weight: inputs, gradients of outputs, all layers."""
    t, d = model.positions, model.width
    return (INPUTS + OUTPUTS) * t * d * model.layers + t * (3 * d + model.vocabulary)


def widest_use(model: Transformer) -> int:
    """Inputs and outputs of the largest product, of one example."""
    return max(t * (i + o) for _, t, i, o in model.products)


def norm_workspace(model: Transformer) -> int:
    """Numbers per example that the norms of the most demanding product need at once."""
    return max(
        2 * t * t if costs.prefers_gram(t=t, d_in=i, d_out=o) else i * o
        for _, t, i, o in model.products
    )


def memory(
    method: str,
    model: Transformer,
    *,
    physical_batch_size: int,
    shards: int = 1,
    chunks: int = 1,
    compute_bytes: int = SUM_BYTES,
    optimizer_numbers: int = 2,
    stack: str = "torch",
) -> dict[str, float]:
    """What fills the memory of one rank, item by item; `sum(...values())` is the peak.

    Some items are always there; to them come those of the fullest moment of a step.

    Args:
        method: as in `messages`.
        model: sizes.
        physical_batch_size: n, examples that a rank works on at once.
        shards: g, ranks that share one copy of the weights.
        chunks: c, physical batches in one step.
        compute_bytes: b, of a number in forward and backward.
        optimizer_numbers: of state per parameter.
        stack: as in `messages`.
    """
    share = SUM_BYTES * model.num_parameters / shards
    always = {"weights": share, "optimizer": optimizer_numbers * share}
    if chunks > 1:
        always["sums so far"] = share
    in_pieces = shards > 1 and not gathers_whole(method, stack)
    sums = {"sums": share, "full gradients": _full_gradients(method, model, shards)}
    used = {"weights in use": _in_use(model, shards, compute_bytes, in_pieces)}
    sizes = method, model, physical_batch_size, compute_bytes, in_pieces
    moments = [used | moment for moment in _of_examples(*sizes, sums)]
    if method != "plain":
        moments.append({"sums, copy and noise": RELEASED * share})
    temporary = 2 * SUM_BYTES * model.largest / shards
    gradients = UPDATED[method != "plain"] * share
    moments.append({"gradients": gradients, "optimizer's temporaries": temporary})
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    return always | {name: size for name, size in fullest.items() if size}


def _in_use(model: Transformer, shards: int, compute_bytes: int, in_pieces: bool) -> float:
    """Weights in the form that computes: a cast copy, all gathered ones, or what FSDP2 gathers.

    These are two blocks, the root, and the buffer that the larger of them came in.
    """
    if in_pieces:
        return compute_bytes * (2 * model.block + model.root + max(model.block, model.root))
    is_copy = shards > 1 or compute_bytes != SUM_BYTES
    return float(compute_bytes * model.num_parameters if is_copy else 0)


def _full_gradients(method: str, model: Transformer, shards: int) -> float:
    """Gradients that are not yet sums over shards: one weight's, or FSDP2's own of one block."""
    if shards == 1:
        return 0.0
    size = max(model.block, model.root) if method == "plain" else model.largest
    return float(SUM_BYTES * size)


def _of_examples(
    method: str, model: Transformer, n: int, b: int, in_pieces: bool, sums: dict[str, float]
) -> list[dict[str, float]]:
    """What a physical batch keeps at each moment that may be the fullest."""
    forward: dict[str, float] = {"activations": b * n * activations(model)}
    if method == "plain":
        return [forward, sums]
    # What bfloat16 computed is kept as it came, and one product at a time is widened.
    widened = SUM_BYTES * n * widest_use(model) if b < SUM_BYTES else 0
    norms = {"norms": SUM_BYTES * n * norm_workspace(model) + widened}
    kept = b * n * captured(model)
    if method == "materialize":
        # The first is formed from what was captured, which goes as the others come.
        first = kept + widened + SUM_BYTES * n * model.largest
        formed = max(first, SUM_BYTES * n * model.num_parameters)
        return [forward, {"per-sample gradients": formed} | sums]
    if method == "per_layer" and in_pieces:  # layer by layer while the backward runs
        # Of the logits, their gradient stays: the loop's loss is checked against it.
        blocks = b * n * (activations(model) - 2 * model.positions * model.vocabulary)
        highway = b * n * OUTPUTS * model.positions * model.width
        one = {"activations": blocks, "one layer's highway gradients": highway}
        return [forward, one | norms | sums]
    first_pass = {"inputs and highway gradients": kept} | norms | sums
    if method == "two_pass":
        logits = 2 * b * n * model.positions * model.vocabulary
        return [forward, first_pass, forward | {"gradients of outputs": logits} | sums]
    return [forward, first_pass]
