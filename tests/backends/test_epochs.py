# SPDX-License-Identifier: Apache-2.0
"""A pass over the loader is one epoch on both stacks, and `remaining` is the rest of the plan."""

import itertools

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dualdp import AccountingError
from tests.backends.runs import FACES, Run, X, Y, make_plan, stacks

MESH = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
ON_MESH = {"data_sharding": NamedSharding(MESH, PartitionSpec("data"))}
places = pytest.mark.parametrize(
    ("stack", "place"), [("torch", {}), ("jax", {}), ("jax", ON_MESH)], ids=["torch", "jax", "mesh"]
)


def plan(**changes):
    """An epoch is ceil(60 / 14) = 5 steps."""
    return make_plan(**{"expected_batch_size": 14.0, "num_steps": 12, **changes})


def steps(run, batches):
    """Steps of the ledger that a loop over some batches takes; on JAX it only records them."""
    start = run.engine.ledger.position
    for batch in batches:
        if run.stack == "torch":
            run.step(batch)
        else:
            assert run.engine.record() == range(batch.step, batch.step + 1)
    return range(start, run.engine.ledger.position)


@places
@pytest.mark.parametrize("physical", [None, 3])
def test_a_pass_is_an_epoch_or_what_is_left(stack, place, physical):
    """known_failures 88: on JAX the first pass spent the whole plan."""
    run = Run(stack, plan=plan(physical_batch_size=physical), **place)
    assert steps(run, run.loader) == range(5)
    rest = run.loader.remaining()
    if physical is None:  # a physical batch is an item of PyTorch's loader
        assert (len(rest), len(run.loader)) == (7, 5)
    assert steps(run, run.loader) == range(5, 10)
    assert steps(run, run.loader) == range(10, 12)
    assert run.engine.get_epsilon() == pytest.approx(plan().epsilon())
    assert steps(run, run.loader.remaining()) == range(12, 12)
    with pytest.raises(AccountingError, match="All 12 planned steps are taken"):
        steps(run, run.loader)


@stacks
def test_epochs_of_the_arguments_are_passes(stack):
    run = Run(stack, noise_multiplier=1.0, max_grad_norm=1.0, epochs=3)
    assert [len(steps(run, run.loader)) for _ in range(3)] == [5, 5, 5]
    assert run.engine.plan.num_steps == 15


def test_a_loader_that_drops_its_last_batch_has_shorter_epochs():
    numbers = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "epochs": 2}
    run = Run("torch", x=X[:59], y=Y[:59], drop_last=True, **numbers)
    assert [len(steps(run, run.loader)) for _ in range(2)] == [4, 4]
    assert run.engine.plan.num_steps == 8


@stacks
def test_an_epoch_has_the_size_at_its_first_step(stack):
    growing = plan(expected_batch_size=lambda step: 20.0 if step < 3 else 30.0, num_steps=6)
    run = Run(stack, plan=growing)
    assert [steps(run, run.loader) for _ in range(3)] == [range(3), range(3, 5), range(5, 6)]


@stacks
def test_an_open_ended_run_has_epochs_and_no_rest(stack):
    run = Run(stack, plan=plan(num_steps=None))
    assert [steps(run, run.loader) for _ in range(2)] == [range(5), range(5, 10)]
    with pytest.raises(AccountingError, match="num_steps=None has none. Expected num_steps="):
        steps(run, run.loader.remaining())
    target = {"target_epsilon": plan().epsilon(7) * (1 + 1e-9), "on_budget": "stop"}
    run = Run(stack, plan=plan(num_steps=None, **target))
    assert steps(run, run.loader.remaining()) == range(7)
    assert steps(run, run.loader) == range(7, 7)


@pytest.mark.parametrize("saved_by", FACES)
@places
def test_a_resumed_run_ends_the_pass_that_was_interrupted(saved_by, stack, place, tmp_path):
    run = Run(saved_by, plan=plan())
    steps(run, run.loader)
    steps(run, itertools.islice(run.loader, 2))
    run.save(tmp_path / "run.ckpt")
    again = Run(stack, load=tmp_path / "run.ckpt", **place)
    assert [steps(again, again.loader) for _ in range(2)] == [range(7, 10), range(10, 12)]


@stacks
def test_a_pass_after_a_resumed_rest_of_the_plan_is_an_epoch(stack, tmp_path):
    run = Run(stack, plan=plan())
    steps(run, itertools.islice(run.loader.remaining(), 1))
    run.save(tmp_path / "run.ckpt")
    again = Run(stack, load=tmp_path / "run.ckpt")
    assert steps(again, again.loader) == range(1, 6)
    assert steps(again, again.loader.remaining()) == range(6, 12)
