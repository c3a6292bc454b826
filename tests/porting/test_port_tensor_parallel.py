# SPDX-License-Identifier: Apache-2.0
"""Weights that are cut on both stacks: a mesh of JAX and tensor parallel PyTorch end alike."""

import jax
import numpy as np
import pytest
import torch

from dualdp import port
from tests.distributed import sharded_models as models
from tests.distributed import tensor_runs
from tests.distributed.spawn import together
from tests.only_jax.workers import launch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")]


def test_a_sharded_weight_and_a_cut_one_end_alike(tmp_path):
    """From the same weights, with JAX's noise, on 2 x 2 devices and on 2 processes."""
    model, data = tensor_runs.build("mlp")
    x, y = (tensor.numpy() for tensor in data.tensors)
    shapes = {
        "body_0": {"kernel": (6, 8), "bias": (8,)},
        "body_2": {"kernel": (8, 5), "bias": (5,)},
    }
    like = {n: {k: np.zeros(shape) for k, shape in of.items()} for n, of in shapes.items()}
    with jax.enable_x64(True):
        given = port.to_jax(model, like=like)
    flat = {f"{n}.{k}": np.asarray(array) for n, of in given.items() for k, array in of.items()}
    np.savez(tmp_path / "start.npz", x=x, y=y, **flat)
    plan = models.plan(num_steps=20, noise="portable")
    (said,) = launch.reports(
        "ported", tmp_path / "start.npz", plan.to_json(), processes=1, devices=4, seconds=200
    )
    layout = port.match(model, like)
    ranks = together(tensor_runs.ported, 2, tmp_path, model.state_dict(), layout, plan.to_json())
    ended = {n: {k: np.array(values) for k, values in of.items()} for n, of in said[0].items()}
    back = port.to_torch(ended, like=model)
    for parameters, epsilon, _ in ranks:
        assert epsilon == said[1]
        for name, value in parameters.items():
            torch.testing.assert_close(back[name], value, rtol=1e-9, atol=1e-11)
            assert not torch.equal(model.state_dict()[name], value)
