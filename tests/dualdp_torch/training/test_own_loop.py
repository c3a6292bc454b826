# SPDX-License-Identifier: Apache-2.0
"""A loop of the user's own: a chunk's sum has its mask, and no larger bound than its noise."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import dualdp
import dualdp.torch as dpt

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))


def chunks(expected_batch_size):
    """The chunks of a run, and its engine."""
    plan = dualdp.PrivacyPlan(
        num_examples=60,
        expected_batch_size=expected_batch_size,
        num_steps=30,
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        delta=1e-3,
        accountant="rdp",
        seed=0,
    )
    engine = dpt.PrivacyEngine()
    loader = engine.make_loader(data_loader=DataLoader(TensorDataset(X)), plan=plan)
    return engine, [chunk for batch in loader.remaining() for chunk in batch.chunks]


def losses(model, x):
    return model(x).square().sum(1)


def test_an_empty_draw_adds_nothing_without_its_mask_too():
    """Its one row of padding was an example that nobody drew."""
    model = torch.nn.Linear(4, 1)
    _, found = chunks(1)
    empty = [chunk for chunk in found if not chunk.mask.any()]
    assert empty
    assert len(empty) < len(found)
    for chunk in found:
        own = dpt.clipped_grad_sum(losses, model, *chunk.args, max_grad_norm=0.5)
        masked = dpt.clipped_grad_sum(
            losses, model, *chunk.args, mask=chunk.mask, max_grad_norm=0.5
        )
        for name, total in own.grads.items():
            assert torch.equal(total, masked.grads[name])
            assert bool(total.any()) == bool(chunk.mask.any())


def test_a_larger_bound_than_that_of_the_noise_is_refused():
    model = torch.nn.Linear(4, 1)
    _, found = chunks(20)
    with pytest.raises(ValueError, match="max_grad_norm=25.0 came for a chunk of engine.make_loa"):
        dpt.clipped_grad_sum(losses, model, *found[0].args, max_grad_norm=25.0)
    for bound in (0.5, torch.tensor(0.5), 0.1):
        dpt.clipped_grad_sum(losses, model, *found[0].args, max_grad_norm=bound)


@pytest.mark.parametrize("physical", [None, 3])
def test_indices_are_those_of_the_chunks(physical):
    """As on JAX: (indices, mask) of each step, whole also where chunks are smaller."""
    data = torch.utils.data.TensorDataset(torch.randn(20, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    plan = dualdp.PrivacyPlan(
        num_examples=20,
        expected_batch_size=8,
        num_steps=4,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        delta=1e-3,
        seed=3,
        physical_batch_size=physical,
    )
    own = dpt.PrivacyEngine().make_loader(data_loader=loader, plan=plan).remaining()
    found = list(own.indices())
    assert len(found) == 4
    for step, (indices, mask) in enumerate(found):
        assert indices[mask].tolist() == plan.batch_indices(step).tolist()
