# SPDX-License-Identifier: Apache-2.0
"""Maps from a function of one example to one of all examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from dualdp_jax import compat


def mapping(
    convolves: Callable[[], bool], arrays: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the map from a function of one example to one of all: `jax.vmap` where XLA is right.

    `convolves` () is True if examples have kernels, or kernel gradients, of their own.
    Convolutions with a kernel per example become one with batch groups, of which XLA's partitioner
    loses most when arrays are spread over devices (found in jax 0.10.2; a test watches it). There,
    and for an operation without a batching rule (`jax.lax.ragged_dot`), examples go one by one.
    """
    if compat.may_span_devices(arrays) and convolves():
        return one_by_one
    return all_at_once


def all_at_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Map a function of one example over all by `jax.vmap`, or one by one if jax cannot."""

    def each(rows: Any) -> Any:
        try:
            return jax.vmap(function)(rows)
        except NotImplementedError:  # an operation without a batching rule
            return one_by_one(function)(rows)

    return each


def one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Map a function of one example over all with `jax.lax.map`."""
    return lambda rows: jax.lax.map(function, rows)
