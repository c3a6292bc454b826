# SPDX-License-Identifier: Apache-2.0
"""Noise: its bits, its streams, who may draw it; its size: tests/backends/test_noise.py."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp import AccountingError
from dualdp.plan.correlated import strategies
from dualdp.randomness import key_of, seeded_bits, threefry
from dualdp_torch.noise import noise
from dualdp_torch.noise.noise import NoiseSource, keyed_generator, normals_between

from .releases import flat, plan, release, released

ZEROS = {"a": torch.zeros(300, 200), "b": torch.zeros(40_000, dtype=torch.float64)}
modes = pytest.mark.parametrize("mode", ["fast", "portable", "secure"])


def declared(stddev, numbers):
    """True if the deviation of normals is the declared one, within 5 standard errors."""
    return abs(numbers.std() / stddev - 1) < 5 / np.sqrt(2 * numbers.size)


def independent(one, other):
    """True if two arrays of normals have no correlation, within 5 standard errors."""
    return abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(one.size)


@pytest.mark.parametrize(
    "mode", ["fast", "secure", pytest.param("portable", marks=pytest.mark.slow)]
)
def test_releases_share_no_noise(mode):
    """Thousands of releases without a seed: between steps, parameters and segments."""
    count = 2000
    run = plan(noise=mode, seed=None, num_steps=count)
    sums, source = {"w": torch.zeros(2), "v": torch.zeros(1)}, NoiseSource(run)
    half, found = count // 2, []
    for step in range(count):
        where = {"segment": step // half, "start": half * (step // half)}
        found.append(flat(released(sums, run, step, source, **where)))
    drawn = np.stack(found)  # (steps, parameters)
    assert declared(run.draw_stddev(0, 0.7), drawn)
    for column in range(3):
        assert independent(drawn[:-1, column], drawn[1:, column])
        assert independent(drawn[:half, column], drawn[half:, column])
        assert independent(drawn[:, column], drawn[:, (column + 1) % 3])


def test_noise_depends_on_the_whole_key():
    """Torch's own seeding of the CPU generator drops the upper half of the key."""
    device, zeros = torch.device("cpu"), torch.zeros(1000)
    keys = [np.array([high, 7], np.uint32) for high in (0, 1, 2)]
    for draw in (
        lambda key: torch.randn(1000, generator=keyed_generator(key, device)),
        lambda key: normals_between(key, 1.0, 0, 1000, size=1000, like=zeros),
    ):
        drawn = [draw(key) for key in keys]
        assert not torch.equal(drawn[0], drawn[1])
        assert abs(float(torch.corrcoef(torch.stack(drawn))[0, 1])) < 0.15
        assert torch.equal(drawn[1], draw(keys[1]))
    states = [keyed_generator(key, device).get_state().numpy() for key in keys[:2]]
    words = [state[24 : 24 + 8 * 624].view(np.uint64) for state in states]
    words += [np.random.RandomState(7).get_state()[1]]  # noqa: NPY002 - that of a 32-bit seed
    # What Knuth's recurrence of an integer seed would make of the first word.
    seeded = torch.Generator().manual_seed(int(words[1][0])).get_state().numpy()
    words += [seeded[24 : 24 + 8 * 624].view(np.uint64)]
    for one, other in ((0, 1), (1, 2), (1, 3)):
        assert (words[one] != words[other]).mean() > 0.99


def test_devices_and_dtypes_have_noise_of_their_own(monkeypatch):
    keys = []

    def seen(key, *rest, **options):
        keys.append(tuple(key))
        return normals_between(key, *rest, **options)

    monkeypatch.setattr(noise, "normals_between", seen)
    dpt.noisy_mean(ZEROS, plan(), 0)
    assert len(set(keys)) == len(ZEROS)
    found = released(ZEROS, plan(noise="secure", seed=None), 0)
    assert independent(found["a"].flatten()[:40_000].numpy(), found["b"].numpy())


BLT = {"sampler": "fixed_order", "accountant": "pld", "num_examples": 500}
BLT["correlation"] = strategies.blt(decays=[0.9], scales=[0.2])


@pytest.mark.parametrize("changes", [{"noise": "fast"}, {"noise": "secure"}, BLT])
def test_noise_does_not_depend_on_threads(changes, monkeypatch):
    """Blocks of fixed size, each with its own generator: bit for bit, and no block twice."""
    monkeypatch.setattr(noise, "FEW", 0)  # so that these blocks are drawn in parallel, too
    run, bits = plan(**changes, seed=None), bytes(range(64))
    sums = {"a": torch.zeros(200_000), "b": torch.zeros(3, 70_000, dtype=torch.float64)}
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(flat(released(sums, run, 2, bits=bits)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)
    blocks = found[0][: 3 << 16].reshape(3, -1)
    assert abs(np.corrcoef(blocks) - np.eye(3)).max() < 0.03


@modes
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
    found = released(sums, run, 0)
    assert list(found) == list(sums)
    for name, total in sums.items():
        expected = (total.detach() / 50).to(torch.promote_types(total.dtype, torch.float32))
        torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(wide, torch.arange(12.0).view(3, 4))
    assert released({}, run, 0) == {}


def test_noise_is_the_counter_generator():
    """And a layout draws in the other stack's shapes."""
    run, key = plan(noise="portable"), key_of(seeded_bits(3, "noise", 4))
    grads = {"a": torch.ones(3, 2), "b": torch.ones(5, dtype=torch.float64)}
    found = dpt.noisy_mean(grads, run, 4)
    for index, (name, dtype) in enumerate([("a", np.float32), ("b", np.float64)]):
        normals = threefry.normal(threefry.fold_in(key, index), grads[name].shape, dtype=dtype)
        expected = (1 + torch.from_numpy(normals) * (1.3 * 0.7)) / 50
        torch.testing.assert_close(found[name], expected)
    leaf = SimpleNamespace(torch_name="a", normals=lambda draw: draw(6, (2, 3)).T)
    found = dpt.noisy_mean({"a": torch.zeros(3, 2)}, run, 4, layout=(leaf,))
    normals = threefry.normal(threefry.fold_in(key, 6), (2, 3), dtype=np.float32)
    torch.testing.assert_close(found["a"], torch.from_numpy(normals.T.copy()) * (1.3 * 0.7) / 50)
    with pytest.raises(ValueError, match=r"layout lacks the parameters \['b'\]"):
        dpt.noisy_mean({"b": torch.zeros(2)}, run, 4, layout=(leaf,))


def test_no_noise_is_the_mean_and_half_precision_is_widened():
    grads = {"a": torch.full((3,), 2.0, dtype=torch.bfloat16)}
    found = dpt.noisy_mean(grads, plan(noise_multiplier=0.0), 0)
    assert found["a"].dtype == torch.float32
    assert torch.equal(found["a"], torch.full((3,), 2 / 50))
    assert torch.equal(grads["a"], torch.full((3,), 2.0, dtype=torch.bfloat16))


# ---------------------------------------------------------------------- who may draw it

ONES = {"w": torch.ones(3)}


def loop(run):
    """A loop of one's own that is open on a plan: engine."""
    engine = dpt.PrivacyEngine()
    engine.make_loader(data_loader=DataLoader(TensorDataset(torch.zeros(1000, 1))), plan=run)
    return engine


@pytest.mark.parametrize("seed", [None, 3])
def test_noise_is_handed_out_once_for_releases_on_record(seed):
    """known_failures 79, 85; with a seed it is free as long as no loop is open."""
    run = plan(seed=seed)
    if seed is None:
        with pytest.raises(AccountingError, match="no loop that is open records the releases of"):
            dpt.noisy_mean(ONES, run, 0)
    else:
        free = [dpt.noisy_mean(ONES, run, 0)["w"] for _ in range(2)]
        assert torch.equal(*free)
    engine, drawn = loop(run), []
    for step in range(2):
        with pytest.raises(AccountingError, match=f"step={step}"):
            dpt.noisy_mean(ONES, run, step)
        engine.record()
        drawn.append(dpt.noisy_mean(ONES, run, step)["w"])
        with pytest.raises(AccountingError, match=f"step={step}"):
            dpt.noisy_mean({"w": torch.zeros(3)}, run, step)
    assert not torch.equal(*drawn)
    assert engine.ledger.get_epsilon() > 0
    engine.detach()
    if seed is not None:
        assert torch.equal(drawn[0], free[0])
        assert torch.equal(dpt.noisy_mean(ONES, run, 0)["w"], free[0])


def test_another_bound_than_that_on_record_is_refused():
    run = plan(seed=None)
    loop(run).record()
    with pytest.raises(ValueError, match=r"max_grad_norm=0.9 came for a release that is on record"):
        dpt.noisy_mean(ONES, run, 0, max_grad_norm=0.9)


def test_noise_inside_a_cuda_graph_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(TypeError, match="inside the capture of a CUDA graph, which would add the"):
        dpt.noisy_mean(ZEROS, plan(), 0)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: dpt.noisy_mean(ZEROS, plan(), -1), ValueError, "step=-1 is out of range"),
        (lambda: dpt.noisy_mean(ZEROS, 3, 0), TypeError, "plan is an int"),
        (
            lambda: torch.func.vmap(lambda w: dpt.noisy_mean({"w": w}, plan(), 0)["w"])(ZEROS["a"]),
            TypeError,
            r"noisy_mean is inside torch.func.vmap or grad, where all",
        ),
    ],
)
def test_wrong_calls_are_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()
    assert release(plan(), 2).draw_stddev == 1.3 * 0.7
