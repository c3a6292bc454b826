# SPDX-License-Identifier: Apache-2.0
"""Noise: its size, its key, its streams."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dualdp_torch as dpt
from dualdp import AccountingError
from dualdp.plan import PrivacyPlan
from dualdp.randomness import counter
from dualdp_torch.noise import keyed_generator


def plan(**changes):
    """A small plan with a fixed key."""
    arguments = {
        "num_examples": 1000,
        "expected_batch_size": 50,
        "num_steps": 10,
        "noise_multiplier": 1.3,
        "max_grad_norm": 0.7,
        "delta": 1e-5,
        "seed": 3,
        "accountant": "rdp",
    }
    return PrivacyPlan(**{**arguments, **changes})


ZEROS = {"a": torch.zeros(300, 200), "b": torch.zeros(40_000, dtype=torch.float64)}


@pytest.mark.parametrize("noise", ["fast", "portable"])
def test_noise_has_the_planned_stddev(noise):
    found = dpt.noisy_mean(ZEROS, plan(noise=noise), 2)
    for name, value in found.items():
        assert value.dtype == ZEROS[name].dtype
        sample = value.double() * 50 / (1.3 * 0.7)
        assert abs(float(sample.std()) - 1) < 5 / np.sqrt(2 * sample.numel())
        assert abs(float(sample.mean())) < 5 / np.sqrt(sample.numel())
        assert abs(float((sample**4).mean()) - 3) < 5 * np.sqrt(96 / sample.numel())


@pytest.mark.parametrize("noise", ["fast", "portable"])
def test_noise_is_a_function_of_key_and_step(noise):
    first = dpt.noisy_mean(ZEROS, plan(noise=noise), 2)
    torch.manual_seed(123)
    again = dpt.noisy_mean(ZEROS, plan(noise=noise), 2)
    assert all(torch.equal(first[name], again[name]) for name in ZEROS)
    for other in (
        dpt.noisy_mean(ZEROS, plan(noise=noise), 3),
        dpt.noisy_mean(ZEROS, plan(noise=noise, seed=4), 2),
    ):
        for name in ZEROS:
            overlap = np.corrcoef(first[name].flatten(), other[name].flatten())[0, 1]
            assert abs(overlap) < 0.03
    flat = first["b"][:10_000].numpy(), first["a"].flatten()[:10_000].numpy()
    assert abs(np.corrcoef(*flat)[0, 1]) < 0.05


def test_noise_depends_on_the_whole_key():
    """Torch's own seeding of the CPU generator drops the upper half of the key."""
    device = torch.device("cpu")
    keys = [np.array([high, 7], np.uint32) for high in (0, 1, 2)]
    drawn = [torch.randn(1000, generator=keyed_generator(key, device)) for key in keys]
    assert not torch.equal(drawn[0], drawn[1])
    assert abs(float(torch.corrcoef(torch.stack(drawn))[0, 1])) < 0.15
    again = torch.randn(1000, generator=keyed_generator(keys[1], device))
    assert torch.equal(drawn[1], again)
    other = torch.randn(1000, generator=keyed_generator(keys[1], device, stream=1))
    assert not torch.equal(again, other)


def test_noise_is_the_counter_generator():
    key = plan().step_key("noise", 4)
    grads = {"a": torch.ones(3, 2), "b": torch.ones(5, dtype=torch.float64)}
    found = dpt.noisy_mean(grads, plan(noise="portable"), 4)
    for index, (name, dtype) in enumerate([("a", np.float32), ("b", np.float64)]):
        normals = counter.normal(counter.fold_in(key, index), grads[name].shape, dtype=dtype)
        expected = (1 + torch.from_numpy(normals) * (1.3 * 0.7)) / 50
        torch.testing.assert_close(found[name], expected)


def test_layout_draws_in_the_other_stacks_shapes():
    leaf = SimpleNamespace(
        torch_name="a", jax_index=6, jax_shape=(2, 3), to_torch=lambda array: array.T
    )
    key = plan().step_key("noise", 4)
    found = dpt.noisy_mean({"a": torch.zeros(3, 2)}, plan(noise="portable"), 4, layout=(leaf,))
    normals = counter.normal(counter.fold_in(key, 6), (2, 3), dtype=np.float32)
    torch.testing.assert_close(found["a"], torch.from_numpy(normals.T.copy()) * (1.3 * 0.7) / 50)
    with pytest.raises(ValueError, match=r"layout lacks the parameters \['b'\]"):
        dpt.noisy_mean({"b": torch.zeros(2)}, plan(noise="portable"), 4, layout=(leaf,))


def test_no_noise_is_the_mean_and_half_precision_is_widened():
    grads = {"a": torch.full((3,), 2.0, dtype=torch.bfloat16)}
    found = dpt.noisy_mean(grads, plan(noise_multiplier=0.0), 0)
    assert found["a"].dtype == torch.float32
    assert torch.equal(found["a"], torch.full((3,), 2 / 50))
    assert torch.equal(grads["a"], torch.full((3,), 2.0, dtype=torch.bfloat16))


def test_a_step_past_the_plan_is_refused():
    with pytest.raises(AccountingError, match="step=10 is past the plan's num_steps=10"):
        dpt.noisy_mean(ZEROS, plan(), 10)
    with pytest.raises(ValueError, match="step=-1 is out of range"):
        dpt.noisy_mean(ZEROS, plan(), -1)
