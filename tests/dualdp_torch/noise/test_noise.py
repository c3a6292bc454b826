# SPDX-License-Identifier: Apache-2.0
"""Noise: its size, its bits, its streams."""

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp import AccountingError
from dualdp.randomness import key_of, seeded_bits, threefry
from dualdp_torch.noise import noise
from dualdp_torch.noise.noise import NoiseSource, keyed_generator, normals_between
from tests.dualdp_torch.forks import in_both

from .releases import flat, plan, release, released

ZEROS = {"a": torch.zeros(300, 200), "b": torch.zeros(40_000, dtype=torch.float64)}


@pytest.mark.parametrize("mode", ["fast", "portable"])
def test_noise_is_a_function_of_seed_and_step(mode):
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
    one, two = first["b"][:10_000].numpy(), first["a"].flatten()[:10_000].numpy()
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.05


def declared(stddev, numbers):
    """True if the deviation of normals is the declared one, within 5 standard errors."""
    return abs(numbers.std() / stddev - 1) < 5 / np.sqrt(2 * numbers.size)


def independent(one, other):
    """True if two arrays of normals have no correlation, within 5 standard errors."""
    return abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(one.size)


@pytest.mark.parametrize("mode", ["fast", "portable", "secure"])
def test_releases_share_no_noise(mode):
    """Thousands of releases without a seed: between steps, parameters, segments and copies."""
    count = 10_000 if mode == "fast" else 2000
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


@pytest.mark.parametrize("mode", ["fast", "portable", "secure"])
def test_a_fork_draws_noise_of_its_own(mode):
    run, sums = plan(noise=mode, seed=None), {"w": torch.zeros(20_000)}
    source = NoiseSource(run)
    released(sums, run, 0, source)

    def draw():
        return flat(released(sums, run, 1, source))[:1000]

    theirs, mine = in_both(draw, draw)
    assert declared(run.draw_stddev(1, 0.7), theirs)
    assert independent(mine, theirs)


@pytest.mark.parametrize("mode", ["fast", "portable", "secure"])
def test_noise_has_the_declared_scale(mode):
    run = plan(noise=mode, seed=None)
    found = flat(released(ZEROS, run, 1))
    assert declared(1.3 * 0.7, found[:60_000])
    assert declared(1.3 * 0.7, found[60_000:])


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
    for one, other in ((0, 1), (1, 2)):
        assert (words[one] != words[other]).mean() > 0.99
    # What Knuth's recurrence of an integer seed would make of the first word.
    seeded = torch.Generator().manual_seed(int(words[1][0])).get_state().numpy()
    assert (seeded[24 : 24 + 8 * 624].view(np.uint64) != words[1]).mean() > 0.99


def test_devices_and_dtypes_have_keys_of_their_own(monkeypatch):
    keys = []

    def seen(key, *rest, **options):
        keys.append(tuple(key))
        return normals_between(key, *rest, **options)

    monkeypatch.setattr(noise, "normals_between", seen)
    dpt.noisy_mean(ZEROS, plan(), 0)
    assert len(set(keys)) == len(ZEROS)


@pytest.mark.parametrize("mode", ["fast", "secure"])
def test_noise_does_not_depend_on_threads(mode, monkeypatch):
    """Blocks of fixed size, each with its own generator: bit for bit, and no block twice."""
    monkeypatch.setattr(noise, "FEW", 0)  # so that these blocks are drawn in parallel, too
    run, bits = plan(noise=mode, seed=None), bytes(range(64))
    sums = {"a": torch.zeros(200_000), "b": torch.zeros(3, 70_000, dtype=torch.float64)}
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(released(sums, run, 2, bits=bits))
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
    found = released(sums, run, 0)
    assert list(found) == list(sums)
    for name, total in sums.items():
        expected = (total.detach() / 50).to(torch.promote_types(total.dtype, torch.float32))
        torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(wide, torch.arange(12.0).view(3, 4))
    assert released({}, run, 0) == {}


def test_noise_is_the_counter_generator():
    key = key_of(seeded_bits(3, "noise", 4))
    grads = {"a": torch.ones(3, 2), "b": torch.ones(5, dtype=torch.float64)}
    found = dpt.noisy_mean(grads, plan(noise="portable"), 4)
    for index, (name, dtype) in enumerate([("a", np.float32), ("b", np.float64)]):
        normals = threefry.normal(threefry.fold_in(key, index), grads[name].shape, dtype=dtype)
        expected = (1 + torch.from_numpy(normals) * (1.3 * 0.7)) / 50
        torch.testing.assert_close(found[name], expected)


def test_layout_draws_in_the_other_stacks_shapes():
    leaf = SimpleNamespace(torch_name="a", normals=lambda draw: draw(6, (2, 3)).T)
    key = key_of(seeded_bits(3, "noise", 4))
    found = dpt.noisy_mean({"a": torch.zeros(3, 2)}, plan(noise="portable"), 4, layout=(leaf,))
    normals = threefry.normal(threefry.fold_in(key, 6), (2, 3), dtype=np.float32)
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


def test_a_noise_source_is_not_copied():
    source = NoiseSource(plan(seed=None))
    for take in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="A noise source can't be copied"):
            take(source)


# ---------------------------------------------------------------------- who may draw it


def loop(run):
    """A loop of one's own that is open on a plan: engine."""
    engine = dpt.PrivacyEngine()
    engine.make_loader(data_loader=DataLoader(TensorDataset(torch.zeros(1000, 1))), plan=run)
    return engine


def test_noise_is_handed_out_once_for_releases_on_record():
    """known_failures 79, 85: noisy_mean twice for a step, and for one that nobody recorded."""
    run, sums = plan(seed=None), {"w": torch.ones(3)}
    with pytest.raises(AccountingError, match="no loop that is open records the releases of this"):
        dpt.noisy_mean(sums, run, 0)
    engine = loop(run)
    with pytest.raises(AccountingError, match="step=0"):
        dpt.noisy_mean(sums, run, 0)
    engine.record()
    first = dpt.noisy_mean(sums, run, 0)
    with pytest.raises(AccountingError, match="step=0"):
        dpt.noisy_mean({"w": torch.zeros(3)}, run, 0)
    engine.record()
    assert not torch.equal(dpt.noisy_mean(sums, run, 1)["w"], first["w"])
    assert engine.ledger.get_epsilon() > 0


def test_a_plan_can_be_used_twice_each_time_with_noise_of_its_own():
    run, sums = plan(seed=None), {"w": torch.zeros(30)}
    found = []
    for _ in range(2):
        engine = loop(run)
        engine.record()
        found.append(dpt.noisy_mean(sums, run, 0)["w"])
        assert len(engine.ledger) == 1
        engine.detach()
    assert not torch.equal(*found)


def test_noise_of_a_seed_is_free_without_a_loop():
    run, sums = plan(), {"w": torch.ones(3)}
    free = [dpt.noisy_mean(sums, run, 0)["w"] for _ in range(2)]
    assert torch.equal(*free)
    engine = loop(run)
    with pytest.raises(AccountingError, match="step=0"):
        dpt.noisy_mean(sums, run, 0)
    engine.record()
    assert torch.equal(dpt.noisy_mean(sums, run, 0)["w"], free[0])
    engine.detach()
    assert torch.equal(dpt.noisy_mean(sums, run, 0)["w"], free[0])


def test_another_bound_than_that_on_record_is_refused():
    run, sums = plan(seed=None), {"w": torch.ones(3)}
    loop(run).record()
    with pytest.raises(ValueError, match=r"max_grad_norm=0.9 came for a release that is on record"):
        dpt.noisy_mean(sums, run, 0, max_grad_norm=0.9)


def test_noise_inside_vmap_is_refused():
    run = plan()
    with pytest.raises(TypeError, match=r"noisy_mean is inside torch.func.vmap or grad, where all"):
        torch.func.vmap(lambda w: dpt.noisy_mean({"w": w}, run, 0)["w"])(torch.zeros(2, 3))


def test_noise_inside_a_cuda_graph_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(TypeError, match="inside the capture of a CUDA graph, which would add the"):
        dpt.noisy_mean(ZEROS, plan(), 0)


def test_what_is_no_sum_is_refused():
    for wrong, text in (([1.0], "grads is a list"), ({"w": 1.0}, r"grads\['w'\] is a float")):
        with pytest.raises(TypeError, match=text):
            dpt.noisy_mean(wrong, plan(), 0)
    with pytest.raises(TypeError, match="plan is an int"):
        dpt.noisy_mean(ZEROS, 3, 0)
    assert release(plan(), 2).draw_stddev == 1.3 * 0.7
