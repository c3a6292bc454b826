# SPDX-License-Identifier: Apache-2.0
"""A loop of the user's own: a chunk's sum has its mask, and no larger bound than its noise."""

import pytest
import torch
from torch.utils.data import DataLoader

import dualdp.torch as dpt
from tests.dualdp_torch.loop import dataset, plan


def own_loop(run):
    """The loader of a run, to the end of its plan."""
    made = DataLoader(dataset(), batch_size=12)
    return dpt.PrivacyEngine().make_loader(data_loader=made, plan=run).remaining()


def chunks(expected_batch_size):
    """The chunks of a run."""
    run = plan(expected_batch_size=expected_batch_size, num_steps=30)
    return [chunk for batch in own_loop(run) for chunk in batch.chunks]


def losses(model, x, *others):
    return model(x).square().sum(1)


def test_an_empty_draw_adds_nothing_without_its_mask_too():
    """Its one row of padding was an example that nobody drew."""
    model = torch.nn.Linear(6, 1)
    found = chunks(1)
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
    model = torch.nn.Linear(6, 1)
    found = chunks(20)
    with pytest.raises(ValueError, match="max_grad_norm=25.0 came for a chunk of engine.make_loa"):
        dpt.clipped_grad_sum(losses, model, *found[0].args, max_grad_norm=25.0)
    for bound in (0.5, torch.tensor(0.5), 0.1):
        dpt.clipped_grad_sum(losses, model, *found[0].args, max_grad_norm=bound)


@pytest.mark.parametrize("physical", [None, 3])
def test_indices_are_those_of_the_chunks(physical):
    """As on JAX: (indices, mask) of each step, whole also where chunks are smaller."""
    run = plan(num_steps=4, physical_batch_size=physical)
    found = list(own_loop(run).indices())
    assert len(found) == 4
    for step, (indices, mask) in enumerate(found):
        assert indices[mask].tolist() == run.batch_indices(step).tolist()
