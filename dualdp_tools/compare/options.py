# SPDX-License-Identifier: Apache-2.0
"""Options of `dualdp compare`, which needs no framework to read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from typer import Option

Model = StrEnum("Model", ["cnn", "mlp"])
Dtype = StrEnum("Dtype", ["float32", "float64"])


@dataclass(frozen=True)
class ExperimentOptions:
    """Options, and three numbers that are none."""

    steps: Annotated[int, Option(help="Noise releases.")] = 400
    batch_size: Annotated[int, Option(help="Expected size of a logical batch.")] = 256
    target_epsilon: Annotated[float, Option(help="Of the whole run at delta = 1e-4.")] = 8.0
    model: Annotated[Model, Option(help="The network.")] = Model.cnn
    dtype: Annotated[Dtype, Option(help="Of the weights and the images.")] = Dtype.float32
    seed: Annotated[int, Option(help="Of the plan and of the initial weights.")] = 0
    switch_at: Annotated[int | None, Option(help="Steps before a third run moves to JAX.")] = None
    max_grad_norm: float = field(default=0.25, init=False)  # C, gradient units
    learning_rate: float = field(default=1.0, init=False)
    momentum: float = field(default=0.9, init=False)

    def __post_init__(self) -> None:
        if self.switch_at is not None and not 1 <= self.switch_at < self.steps:
            raise ValueError(
                f"switch_at={self.switch_at} is not within the run. Expected 1 to {self.steps - 1}."
            )
