# SPDX-License-Identifier: Apache-2.0
"""Noise: its size, its key, its streams."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dualdp_torch as dpt
from dualdp import AccountingError
from dualdp.ledger.ledger import Ledger
from dualdp.plan.plan import PrivacyPlan
from dualdp.randomness import threefry
from dualdp_torch.noise import generators as generators
from dualdp_torch.noise import noise
from dualdp_torch.noise.generators import Normals, keyed_generator


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
        lambda key: Normals([(key, 1.0)], 1000, zeros).add_at(0, zeros),
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

    class Kept(Normals):
        def __init__(self, terms, *rest):
            keys.append(tuple(terms[0][0]))
            super().__init__(terms, *rest)

    monkeypatch.setattr(noise, "Normals", Kept)
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
            found.append(noise.noised_mean(sums, run, 2))
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
    found = noise.noised_mean(sums, run, 0)
    assert list(found) == list(sums)
    for name, total in sums.items():
        expected = (total.detach() / 50).to(torch.promote_types(total.dtype, torch.float32))
        torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(wide, torch.arange(12.0).view(3, 4))
    assert noise.noised_mean({}, run, 0) == {}


def test_noise_is_the_counter_generator():
    key = plan().step_key("noise", 4)
    grads = {"a": torch.ones(3, 2), "b": torch.ones(5, dtype=torch.float64)}
    found = dpt.noisy_mean(grads, plan(noise="portable"), 4)
    for index, (name, dtype) in enumerate([("a", np.float32), ("b", np.float64)]):
        normals = threefry.normal(threefry.fold_in(key, index), grads[name].shape, dtype=dtype)
        expected = (1 + torch.from_numpy(normals) * (1.3 * 0.7)) / 50
        torch.testing.assert_close(found[name], expected)


def test_layout_draws_in_the_other_stacks_shapes():
    leaf = SimpleNamespace(torch_name="a", normals=lambda draw: draw(6, (2, 3)).T)
    key = plan().step_key("noise", 4)
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


# ---------------------------------------------------------------------- who may draw it


def on_record(run, num_steps):
    """A ledger in which so many steps are on record."""
    ledger = Ledger(run)
    for step in range(num_steps):
        ledger.record(step)
        ledger.seal(step, None)
    return ledger


def test_noise_of_a_secret_key_is_handed_out_once_for_releases_on_record():
    """known_failures 79, 85: noisy_mean twice for a step, and for one that nobody recorded."""
    run = plan(seed=None)
    ledger, sums = on_record(run, 1), {"w": torch.ones(3)}
    dpt.noisy_mean(sums, run, 0)
    with pytest.raises(AccountingError, match="The noise of step=0 was handed out before"):
        dpt.noisy_mean({"w": torch.zeros(3)}, run, 0)
    with pytest.raises(AccountingError, match="noise of step=1, but that release is not on record"):
        dpt.noisy_mean(sums, run, 1)
    with pytest.raises(AccountingError, match="noise of step=1, which is not on record, so this"):
        ledger.get_epsilon()
    ledger.record(1)
    ledger.seal(1, None)
    dpt.noisy_mean(sums, run, 1)
    assert ledger.get_epsilon() > 0


def test_a_secret_key_that_nobody_records_for_ends_after_one_step():
    run, sums = plan(seed=None), {"w": torch.ones(3)}
    dpt.noisy_mean(sums, run, 0)
    with pytest.raises(AccountingError, match="step=0 was drawn by noisy_mean and nobody recorded"):
        dpt.noisy_mean(sums, run, 1)
    with pytest.raises(AccountingError, match="noise of this plan was given to noisy_mean, and"):
        on_record(run, 1)


def test_a_seeded_plan_keeps_the_rules_within_a_run_with_a_ledger():
    """Without a ledger its noise is free, as tests and comparisons need it."""
    run, sums = plan(), {"w": torch.ones(3)}
    free = [dpt.noisy_mean(sums, run, 0)["w"] for _ in range(2)]
    assert torch.equal(*free)
    for _ in range(2):  # each ledger is another run of the plan
        ledger = on_record(run, 1)
        assert torch.equal(dpt.noisy_mean(sums, run, 0)["w"], free[0])
        with pytest.raises(AccountingError, match="The noise of step=0 was handed out before"):
            dpt.noisy_mean(sums, run, 0)
        ledger.close()
    assert torch.equal(dpt.noisy_mean(sums, plan(), 0)["w"], free[0])


def test_a_changed_step_gets_the_noise_of_its_branch(tmp_path):
    """A loop of one's own that resumes: the old noise is not added to another sum."""
    run = plan(seed=None)
    ledger = Ledger(run, path=tmp_path / "ledger")
    state = ledger.state()
    ledger.record(0)
    ledger.seal(0, [np.ones(3)])
    first = dpt.noisy_mean({"w": torch.ones(3)}, run, 0)
    ledger.close()
    again = Ledger.resume(run, state, tmp_path / "ledger")
    again.record(0)
    with pytest.raises(AccountingError, match="The noise of step=0|not on record"):
        dpt.noisy_mean({"w": torch.zeros(3)}, run, 0)
    seal = again.seal(0, [np.zeros(3)])
    with pytest.raises(AccountingError, match="The noise of step=0 was handed out before"):
        dpt.noisy_mean({"w": torch.zeros(3)}, run, 0, branch=0)
    second = dpt.noisy_mean({"w": torch.zeros(3)}, run, 0, branch=seal.branch)
    assert seal.branch == 1
    assert not torch.allclose(50 * first["w"] - 1, 50 * second["w"])


def test_noise_inside_vmap_is_refused():
    run = plan()
    with pytest.raises(TypeError, match=r"noisy_mean is inside torch.func.vmap or grad, where all"):
        torch.func.vmap(lambda w: dpt.noisy_mean({"w": w}, run, 0)["w"])(torch.zeros(2, 3))


def test_noise_inside_a_cuda_graph_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(TypeError, match="inside the capture of a CUDA graph, which would add the"):
        dpt.noisy_mean(ZEROS, plan(), 0)


def test_noise_that_can_not_be_made_is_handed_out_again():
    """An error while it is drawn is no release."""
    run = plan(seed=None, noise="portable")
    ledger = on_record(run, 1)
    with pytest.raises(ValueError, match="layout lacks the parameters"):
        dpt.noisy_mean({"w": torch.ones(3)}, run, 0, layout=())
    dpt.noisy_mean({"w": torch.ones(3)}, run, 0)
    ledger.close()
