# SPDX-License-Identifier: Apache-2.0
"""Data of one stack feeds the private step of the other, without a copy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import PrivacyPlan, port

STEPS = 3


class Images(Dataset):
    """Examples that are made on demand, as a torch pipeline makes them."""

    def __len__(self):
        return 40

    def __getitem__(self, k):
        rng = np.random.default_rng(int(k))
        return torch.as_tensor(rng.normal(size=6), dtype=torch.float32), torch.tensor(k % 3)


def plan():
    return PrivacyPlan(
        num_examples=40, expected_batch_size=10, num_steps=STEPS, noise_multiplier=1.0,
        max_grad_norm=1.0, delta=1e-2, noise="portable", seed=2,
    )  # fmt: skip


@pytest.fixture
def models():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    return model, port.to_jax(model, like={"kernel": jnp.zeros((6, 3)), "bias": jnp.zeros(3)})


def torch_loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def jax_loss(params, x, y):
    return -jax.nn.log_softmax(x @ params["kernel"] + params["bias"])[y]


def jax_step(params, x, y, step):
    whole = np.ones(len(x), bool)  # no padding, which an open loop's chunks of that size may have
    total = dpj.clipped_grad_sum(jax_loss, params, x, y, mask=whole, max_grad_norm=1.0)
    return dpj.noisy_mean(total.grads, plan(), step)


def assert_same(torch_grads, jax_grads, params):
    for name, leaf in (("weight", "kernel"), ("bias", "bias")):
        np.testing.assert_allclose(
            torch_grads[name].numpy().T, jax_grads[leaf], rtol=1e-5, atol=1e-6
        )
    assert jax.tree.structure(jax_grads) == jax.tree.structure(params)


@pytest.mark.slow
def test_a_torch_pipeline_feeds_the_jax_step(models):
    model, params = models
    batches = [plan().batch_indices(step) for step in range(STEPS)]
    layout = port.match(model, params)
    for step, (x, y) in enumerate(DataLoader(Images(), batch_sampler=batches)):
        images = port.array_to_jax(x)
        assert images.unsafe_buffer_pointer() == x.data_ptr() or x.data_ptr() % 64
        ours = jax_step(params, images, port.array_to_jax(y), step)
        total = dpt.clipped_grad_sum(torch_loss, model, x, y, max_grad_norm=1.0)
        theirs = dpt.noisy_mean(total.grads, plan(), step, layout=layout)
        assert_same(theirs, ours, params)


@pytest.mark.slow
def test_a_jax_pipeline_feeds_the_torch_step(models):
    """The JAX engine's own loader, in padded chunks: torch takes its masks too."""
    model, params = models
    columns = zip(*(Images()[k] for k in range(40)), strict=True)
    data = [torch.stack(column).numpy() for column in columns]
    engine = dpj.PrivacyEngine()
    loader = engine.make_loader(data=tuple(data), plan=plan())
    layout = port.match(model, params)
    for batch in loader.remaining():
        (step,) = engine.record()
        sums = []
        for chunk in batch.chunks:
            x, y, mask = (port.array_to_torch(jnp.asarray(a)) for a in (*chunk.args, chunk.mask))
            total = dpt.clipped_grad_sum(
                torch_loss, model, x, y.long(), max_grad_norm=1.0, mask=mask
            )
            sums.append(total.grads)
        added = {name: sum(part[name] for part in sums) for name in sums[0]}
        theirs = dpt.noisy_mean(added, plan(), step, layout=layout)
        rows = plan().batch_indices(step)
        ours = jax_step(params, data[0][rows], data[1][rows], step)
        assert_same(theirs, ours, params)
    assert engine.ledger.position == STEPS
