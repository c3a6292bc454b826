# SPDX-License-Identifier: Apache-2.0
"""Checkpoints cross: what fits is carried, what does not is refused."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import PrivacyPlan, checkpoint
from tests.mistakes import refused

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(20, 3)).astype(np.float32), RNG.integers(0, 4, 20)


class Flax(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4, name="head")(jnp.tanh(linen.Dense(5, name="body")(x)))


class Torch(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 4)
        self.register_buffer("count", torch.arange(2))

    def forward(self, x):
        return self.head(self.body(x).tanh())


def torch_parts(kind=torch.optim.Adam, **options):
    torch.manual_seed(0)
    model = Torch()
    return model, kind(model.parameters(), lr=0.1, **options)


def jax_state(optimizer=None, dtype=jnp.float32, trainable=None):
    params = Flax().init(jax.random.key(0), X[0])
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    return dpj.TrainState.create(params, optimizer or optax.adam(0.1), trainable)


def plan(**options):
    return PrivacyPlan(
        num_examples=20, expected_batch_size=5, num_steps=6, noise_multiplier=1.0,
        max_grad_norm=1.0, delta=1e-2, **options,
    )  # fmt: skip


def saved_by_torch(folder, parts=None, until=2, **options):
    """A checkpoint after two steps, of a run that may have gone on."""
    path = folder / "torch.ckpt"
    model, optimizer = parts or torch_parts()
    engine = dpt.PrivacyEngine()
    data = TensorDataset(torch.as_tensor(X), torch.as_tensor(Y))
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data), plan=plan(**options)
    )
    for x, y in loader.remaining():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if engine.ledger.position == 2:
            dpt.save_checkpoint(path, model=model, optimizer=optimizer, engine=engine)
        if engine.ledger.position == until:
            break
    engine.detach()
    return path, model, optimizer


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(Flax().apply(params, x), y)


RUN = {"loss_fn": loss_fn, "optimizer": optax.adam(0.1), "data": (X, Y)}


def saved_by_jax(folder, until=2, **options):
    engine, path = dpj.PrivacyEngine(), folder / "jax.ckpt"
    run = {"params": jax_state().params, "plan": plan(seed=1), **RUN, **options}
    step, state, loader = engine.make_private(**run)
    for batch in loader.remaining():
        state, _ = step(state, batch)
        if engine.ledger.position == until:
            break
    dpj.save_checkpoint(path, state=state, engine=engine)
    engine.detach()
    return path, state


def test_torch_to_jax_to_torch_is_bitwise(tmp_path):
    """Parameters, both moments, the count, plan and ledger."""
    path, model, optimizer = saved_by_torch(tmp_path)
    state, engine = dpj.load_checkpoint(path, like=jax_state())
    assert state.step == 2 == int(state.opt_state[0].count) == engine.ledger.position
    np.testing.assert_array_equal(
        state.params["params"]["head"]["kernel"], model.head.weight.detach().numpy().T
    )
    there = tmp_path / "there.ckpt"
    dpj.save_checkpoint(there, state=state, engine=engine)
    other, again = torch_parts()
    engine.ledger.close()
    back = dpt.load_checkpoint(there, model=other, optimizer=again)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    ours, theirs = optimizer.state_dict()["state"], again.state_dict()["state"]
    torch.testing.assert_close(theirs, ours, rtol=0, atol=0)
    assert back.ledger.position == 2
    assert [leaf.torch_name for leaf in back.noise_layout] == [
        n for n, _ in other.named_parameters()
    ]


def test_steps_run_again_on_the_other_stack_are_accounted(tmp_path):
    """Torch went on to step 6 after the checkpoint at 2; JAX takes four steps again."""
    path, _, _ = saved_by_torch(tmp_path, until=6)
    like = jax_state(RUN["optimizer"])
    state, engine = dpj.load_checkpoint(path, like=like)
    step, state, loader = engine.resume(params=like.params, **RUN)
    for batch in loader.remaining():
        state, _ = step(state, batch)
    assert (engine.ledger.position, len(engine.ledger)) == (6, 10)
    assert engine.get_epsilon(delta=1e-2) > plan().epsilon()


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (lambda: jax_state(dtype=jnp.bfloat16), r"parameters are \['float32'\], .* \['bfloat16'\]"),
        (
            lambda: jax_state(trainable={"params": {"body": False, "head": True}}),
            r"trains \['params/body/bias', 'params/body/kernel'\]",
        ),
    ],
)
def test_what_does_not_fit_jax_is_refused(tmp_path, like, message):
    path, _, _ = saved_by_torch(tmp_path, seed=1)
    state = like()
    refused(lambda: dpj.load_checkpoint(path, like=state), ValueError, message)


def test_what_does_not_fit_torch_is_refused(tmp_path):
    path, _ = saved_by_jax(tmp_path)

    def load(parts):
        return lambda: dpt.load_checkpoint(path, model=parts[0], optimizer=parts[1])

    other, frozen = torch_parts(torch.optim.SGD, momentum=0.9), torch_parts()
    before = {name: value.clone() for name, value in other[0].state_dict().items()}
    refused(load(other), ValueError, r"SGD keeps \['trace'\] .* has \['mu', 'nu'\]")
    torch.testing.assert_close(other[0].state_dict(), before, rtol=0, atol=0)
    frozen[0].body.bias.requires_grad_(False)
    words = r"Only one of the two optimizers trains \['params/body/bias'\]"
    refused(load(frozen), ValueError, words)


def test_bfloat16_keeps_its_bits(tmp_path):
    """As the file has it, whatever made it: two bytes a number, listed by name."""
    path, _, _ = saved_by_torch(tmp_path, torch_parts(torch.optim.SGD), seed=1)
    arrays, document = checkpoint.read(path)
    for name in [name for name in arrays if name.startswith("params/")]:
        arrays[name] = arrays[name].astype(ml_dtypes.bfloat16).view(np.uint16)
        document["bfloat16"].append(name)
    checkpoint.write(path, arrays, document)
    state, _ = dpj.load_checkpoint(path, like=jax_state(optax.sgd(0.1), jnp.bfloat16))
    expected = arrays["params/head.weight"].view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(state.params["params"]["head"]["kernel"], expected.T)


@pytest.mark.parametrize(
    ("is_trained", "options", "text"),
    [
        (True, {"views": 2, "augment": lambda example, key: example}, "averages views=2"),
        (False, {}, r"The leaves \['params/body/kernel'\] are trained"),
    ],
    ids=["views", "frozen"],
)
def test_views_and_frozen_leaves_of_jax_are_not_dropped(tmp_path, is_trained, options, text):
    trainable = jax.tree.map(lambda leaf: True, jax_state().params)
    trainable["params"]["body"]["kernel"] = is_trained
    run = {"optimizer": optax.sgd(0.1), "trainable": trainable, **options}
    path, _ = saved_by_jax(tmp_path, until=1, **run)
    model, optimizer = torch_parts(torch.optim.SGD)
    load = lambda: dpt.load_checkpoint(path, model=model, optimizer=optimizer)  # noqa: E731
    refused(load, ValueError, text)
