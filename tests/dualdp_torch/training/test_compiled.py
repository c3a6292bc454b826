# SPDX-License-Identifier: Apache-2.0
"""`torch.compile` of a model, before or after `make_private`, or of the loop's step."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from tests.dualdp_torch.checks import data, ids, randomise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def compiled(what):
    return torch.compile(what, backend="eager")


def compile_in_place(model):
    model.compile(backend="eager")
    return model


def trained(
    before=lambda m: m,
    after=lambda m: m,
    of_step=lambda step: step,
    mode="auto",
    kind=torch.optim.SGD,
):
    """Parameters after three steps; the model is compiled before or after, or the whole step."""
    torch._dynamo.reset()
    model = randomise(Net())
    private, optimizer, loader = dpt.PrivacyEngine().make_private(
        module=before(model),
        optimizer=kind(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(data(24, 6), ids(3, 24)), batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=0.1,
        grad_sample_mode=mode,
        num_steps=3,
        delta=1e-5,
        seed=3,
        checks=1.0,
    )
    private = after(private)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(private(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = of_step(step)
    for x, y in loader:
        step(x, y)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


PLACES = {
    "model before": {"before": compiled},
    "model after": {"after": compiled},
    "in place before": {"before": compile_in_place},
    "in place after": {"after": compile_in_place},
    "step": {"of_step": compiled},
}


@pytest.mark.filterwarnings("ignore")  # of the compiler about torch's own functions
@pytest.mark.parametrize("place", PLACES)
def test_a_compiled_model_or_step_trains_as_the_eager_one(place):
    torch.testing.assert_close(trained(**PLACES[place]), trained(), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_of_adam_bc_is_the_eager_one():
    torch.testing.assert_close(
        trained(of_step=compiled, kind=dpt.AdamBC), trained(kind=dpt.AdamBC), rtol=0, atol=0
    )


def test_a_compiled_model_trains_one_example_at_a_time():
    torch.testing.assert_close(
        trained(before=compile_in_place, mode="loop"), trained(mode="loop"), rtol=0, atol=0
    )
