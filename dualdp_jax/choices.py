# SPDX-License-Identifier: Apache-2.0
"""What is decided about a model by shapes alone: what "auto" does, and what XLA gets wrong."""

from __future__ import annotations

from typing import Any

import jax

from dualdp import UnsupportedLayerError
from dualdp_jax import compat, ghost
from dualdp_jax.call import Call, Row, traced
from dualdp_jax.capture import Capture, capture
from dualdp_jax.interpret import CONVOLUTION
from dualdp_jax.rules import Choice, small
from dualdp_jax.rules.kinds import num_examples


def survey(call: Call, rows: Row) -> tuple[Capture, list[Choice]]:
    """What a capture finds, as shapes, and the cost model's word on each use; nothing is run."""
    found: list[Capture] = []

    def arrays(rows: Row) -> Any:
        found.append(capture(call, rows))
        return found[0].operands, found[0].cotangents, found[0].kept

    operands, cotangents, kept = jax.eval_shape(arrays, rows)
    taken = found[0]._replace(operands=operands, cotangents=cotangents, kept=kept)
    uses = zip(taken.uses, operands, cotangents, strict=True)
    return taken, [ghost.choice(*use) for use in uses]


def is_small(call: Call, rows: Row) -> bool:
    """Whether "auto" leaves the whole model to `vmap(grad)`."""
    parameters = sum(leaf.size for leaf in call.parameters.trained)
    if not small.is_worth_a_look(num_examples(rows[1]), parameters):
        return False
    return all(choice.is_small for choice in survey(call, rows)[1])


def has_own_kernels(call: Call, rows: Row, *, of_weights: bool = True) -> bool:
    """Whether examples have convolution kernels of their own, or (of weights) their gradients."""
    taken, _ = survey(call, rows)
    return taken.convolves or (
        of_weights and any(use.primitive == CONVOLUTION for use in taken.uses)
    )


def prepared(call: Call, method: str) -> Call:
    """The call as a method takes it: traced once, and refused where XLA would get it wrong.

    Examples that each have a convolution kernel, or a gradient of one, are one convolution with
    batch groups, whose partitioning loses most of them (found in jax 0.10.2; a test watches it).

    Raises:
        UnsupportedLayerError: such a convolution is needed; or the mesh has explicit axes.
    """
    arrays = (call.rows, call.parameters.trained)
    if compat.is_sharded_in_type(arrays):
        raise UnsupportedLayerError(
            "The arrays are spread over a mesh with explicit axes, for which every operation would "
            "have to name its sharding. Expected a mesh of automatic axes: jax.make_mesh(shape, "
            "names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))."
        )
    if method == "loop" or call.num_examples == 0:
        return call
    spans_devices = compat.spans_devices(arrays)
    if method != "vmap" or spans_devices:
        call = traced(call)
    if spans_devices and has_own_kernels(call, call.rows, of_weights=method == "vmap"):
        raise UnsupportedLayerError(
            "XLA computes wrong gradients for convolutions with a kernel per example when arrays "
            f"are spread over several devices, and method={method!r} needs one here. Use "
            "method='auto' or 'book_keeping' for kernels that are parameters, else one device."
        )
    return call
