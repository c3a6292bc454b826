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
from dualdp_torch import noise
from dualdp_torch import normals as generators
from dualdp_torch.noise import add_normal, keyed_generator


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


@pytest.mark.parametrize("mode", ["fast", "portable"])
def test_noise_is_a_function_of_key_and_step(mode):
    first = dpt.noisy_mean(ZEROS, plan(noise=mode), 2)
    torch.manual_seed(123)
    again = dpt.noisy_mean(ZEROS, plan(noise=mode), 2)
    assert all(torch.equal(first[name], again[name]) for name in ZEROS)
    for other in (
        dpt.noisy_mean(ZEROS, plan(noise=mode), 3),
        dpt.noisy_mean(ZEROS, plan(noise=mode, seed=4), 2),
    ):
        for name in ZEROS:
            overlap = np.corrcoef(first[name].flatten(), other[name].flatten())[0, 1]
            assert abs(overlap) < 0.03
    flat = first["b"][:10_000].numpy(), first["a"].flatten()[:10_000].numpy()
    assert abs(np.corrcoef(*flat)[0, 1]) < 0.05


def test_noise_depends_on_the_whole_key():
    """Torch's own seeding of the CPU generator drops the upper half of the key."""
    device, zeros = torch.device("cpu"), torch.zeros(1000)
    keys = [np.array([high, 7], np.uint32) for high in (0, 1, 2)]
    for draw in (
        lambda key: torch.randn(1000, generator=keyed_generator(key, device)),
        lambda key: add_normal(zeros, key, 1.0),
    ):
        drawn = [draw(key) for key in keys]
        assert not torch.equal(drawn[0], drawn[1])
        assert abs(float(torch.corrcoef(torch.stack(drawn))[0, 1])) < 0.15
        assert torch.equal(drawn[1], draw(keys[1]))
    states = [keyed_generator(key, device).get_state().numpy() for key in keys[:2]]
    words = [state[24 : 24 + 8 * 624].view(np.uint64) for state in states]
    words += [np.random.RandomState(7).get_state()[1]]  # noqa: NPY002 - that of a 32-bit seed
    for one, other in ((0, 1), (1, 2)):
        assert (words[one] != words[other]).mean() > 0.99
    # What Knuth's recurrence of an integer seed would make of the first word.
    seeded = torch.Generator().manual_seed(int(words[1][0])).get_state().numpy()
    assert (seeded[24 : 24 + 8 * 624].view(np.uint64) != words[1]).mean() > 0.99


def test_devices_and_dtypes_have_keys_of_their_own(monkeypatch):
    keys = []
    monkeypatch.setattr(noise, "add_normal", lambda sums, key, _: keys.append(tuple(key)) or sums)
    dpt.noisy_mean({name: total.clone() for name, total in ZEROS.items()}, plan(), 0)
    assert len(set(keys)) == len(ZEROS)


@pytest.mark.parametrize("mode", ["fast", "secure"])
def test_noise_does_not_depend_on_threads(mode, monkeypatch):
    """Blocks of fixed size, each with its own generator: bit for bit, and no block twice."""
    monkeypatch.setattr(generators, "_FEW", 0)  # so that these blocks are drawn in parallel, too
    run = plan(noise=mode, seed=None)
    sums = {"a": torch.zeros(200_000), "b": torch.zeros(3, 70_000, dtype=torch.float64)}
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(dpt.noisy_mean(sums, run, 2))
    finally:
        torch.set_num_threads(before)
    for name in sums:
        assert torch.equal(found[0][name], found[1][name])
        assert torch.equal(found[0][name], found[2][name])
    blocks = found[0]["a"][: 3 << 16].view(3, -1)
    assert abs(torch.corrcoef(blocks) - torch.eye(3)).max() < 0.03


@pytest.mark.parametrize("mode", ["fast", "portable", "secure"])
def test_every_layout_of_the_sums_gets_its_own_noise(mode):
    """Two dtypes, a strided tensor, a scalar, one that is empty, one that asks for a gradient."""
    wide = torch.arange(12.0).view(3, 4)
    sums = {
        "t": wide.t(),
        "e": torch.zeros(0, 3),
        "d": torch.ones(2, dtype=torch.float64),
        "s": torch.tensor(5.0),
        "h": torch.ones(3, dtype=torch.float16),
        "g": torch.ones(2, requires_grad=True),
    }
    run = plan(noise=mode, seed=None, noise_multiplier=1e-6)
    found = dpt.noisy_mean(sums, run, 0)
    assert list(found) == list(sums)
    for name, total in sums.items():
        expected = (total.detach() / 50).to(torch.promote_types(total.dtype, torch.float32))
        torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(wide, torch.arange(12.0).view(3, 4))
    assert dpt.noisy_mean({}, run, 0) == {}


def test_noise_is_the_counter_generator():
    key = plan().step_key("noise", 4)
    grads = {"a": torch.ones(3, 2), "b": torch.ones(5, dtype=torch.float64)}
    found = dpt.noisy_mean(grads, plan(noise="portable"), 4)
    for index, (name, dtype) in enumerate([("a", np.float32), ("b", np.float64)]):
        normals = counter.normal(counter.fold_in(key, index), grads[name].shape, dtype=dtype)
        expected = (1 + torch.from_numpy(normals) * (1.3 * 0.7)) / 50
        torch.testing.assert_close(found[name], expected)


def test_layout_draws_in_the_other_stacks_shapes():
    leaf = SimpleNamespace(torch_name="a", normals=lambda draw: draw(6, (2, 3)).T)
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
