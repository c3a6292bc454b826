# SPDX-License-Identifier: Apache-2.0
"""Other libraries in the benchmarks are set up as they should be."""

import pytest
import torch

from dualdp_tools.bench import layers, systems
from dualdp_tools.bench.systems import Setting

pytest.importorskip("opacus")


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
def test_the_recurrent_layers_of_opacus_are_on_the_device_of_the_model(kind, mode):
    """The meta device stands in for a GPU; each weight is still one, under both of its names."""
    workload = layers.recurrent(kind, 4, 3)
    made = systems.stack("torch").systems[f"opacus:{mode}"](Setting(workload, 2, device="meta"))
    model = made.problem.model
    layer = next(module for module in model.modules() if hasattr(module, "cells"))
    held = [tensor for module in model.modules() for tensor in vars(module)["_parameters"].values()]
    held += model.buffers()
    held += [t for m in model.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)]
    assert {tensor.device.type for tensor in held} == {"meta"}
    assert layer.weight_hh_l0 is layer.cells[0].hh.weight
    assert len(list(model.parameters())) == 4
