# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one rank during a step."""

from __future__ import annotations

from dualdp import costs
from dualdp_tools.scaling.presets import Transformer
from dualdp_tools.scaling.traffic import SUM_BYTES, gathers_whole

#: Numbers per position and unit of width: activations that a block keeps from forward to backward
#: (attention that forms no T x T matrix), inputs of its layers with weights (four products and two
#: norms), and gradients of their outputs.
ACTIVATIONS, INPUTS, OUTPUTS = 16, 9, 11
#: Copies of the clipped sum while noise is added to it, and of gradients during the optimizer's
#: update, where a private step also keeps the clipped sum (`engine.stages()`).
RELEASED, UPDATED = 3, {True: 2, False: 1}


def activations(model: Transformer) -> int:
    """Return one example's activations when the backward begins; logits count three times."""
    t, d = model.positions, model.width
    return ACTIVATIONS * t * d * model.layers + t * (d + 3 * model.vocabulary)


def captured(model: Transformer) -> int:
    """Return the inputs and gradients of outputs of all layers with weights, for one example."""
    t, d = model.positions, model.width
    return (INPUTS + OUTPUTS) * t * d * model.layers + t * (3 * d + model.vocabulary)


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
    """Return the bytes of each item in the memory of one rank; `sum(...values())` is the peak.

    Some items are always present; to them come those of the fullest moment of a step. Arguments are
    those of `messages`, and the number of float32 numbers of optimizer state per parameter.
    """
    share = SUM_BYTES * model.num_parameters / shards
    always = {"weights": share, "optimizer": optimizer_numbers * share}
    if chunks > 1:
        always["sums so far"] = share
    is_sharded = shards > 1 and not gathers_whole(method, stack)
    if is_sharded:  # FSDP2 holds two blocks, the root, and the receive buffer of the larger of them
        numbers = 2 * model.block + model.root + max(model.block, model.root)
    else:  # a cast copy, or all gathered weights
        is_copy = shards > 1 or compute_bytes != SUM_BYTES
        numbers = model.num_parameters if is_copy else 0
    used: dict[str, float] = {"weights in use": compute_bytes * numbers}
    # Gradients before the sum over shards: one weight's, or one block's with FSDP2.
    full = max(model.block, model.root) if method == "plain" else model.largest
    sums = {"sums": share, "full gradients": SUM_BYTES * full if shards > 1 else 0.0}
    sizes = method, model, physical_batch_size, compute_bytes, is_sharded
    moments = [used | moment for moment in _of_examples(*sizes, sums)]
    if method != "plain":
        moments.append({"sums, copy and noise": RELEASED * share})
    temporary = 2 * SUM_BYTES * model.largest / shards
    gradients = UPDATED[method != "plain"] * share
    moments.append({"gradients": gradients, "optimizer's temporaries": temporary})
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    return always | {name: size for name, size in fullest.items() if size}


def _of_examples(
    method: str, model: Transformer, n: int, b: int, is_sharded: bool, sums: dict[str, float]
) -> list[dict[str, float]]:
    """Items of a physical batch, for each moment that may be the fullest."""
    forward: dict[str, float] = {"activations": b * n * activations(model)}
    if method == "plain":
        return [forward, sums]
    # Captured bfloat16 arrays are kept, and the inputs and outputs of one product are widened.
    widest = max(t * (i + o) for _, t, i, o in model.products)
    widened = SUM_BYTES * n * widest if b < SUM_BYTES else 0
    workspace = max(
        2 * t * t if costs.prefers_gram(t=t, d_in=i, d_out=o) else i * o
        for _, t, i, o in model.products
    )
    norms = {"norms": SUM_BYTES * n * workspace + widened}
    kept = b * n * captured(model)
    if method == "materialize":
        # The first gradient is formed from the captured arrays, which are freed as the others come.
        first = kept + widened + SUM_BYTES * n * model.largest
        formed = max(first, SUM_BYTES * n * model.num_parameters)
        return [forward, {"per-sample gradients": formed} | sums]
    if method == "per_layer" and is_sharded:  # layer by layer while the backward runs
        # The gradient of the logits is kept, for the check of the loop's loss.
        blocks = b * n * (activations(model) - 2 * model.positions * model.vocabulary)
        highway = b * n * OUTPUTS * model.positions * model.width
        one = {"activations": blocks, "one layer's highway gradients": highway}
        return [forward, one | norms | sums]
    first_pass = {"inputs and highway gradients": kept} | norms | sums
    if method == "two_pass":
        logits = 2 * b * n * model.positions * model.vocabulary
        return [forward, first_pass, forward | {"gradients of outputs": logits} | sums]
    return [forward, first_pass]
