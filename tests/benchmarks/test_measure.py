# SPDX-License-Identifier: Apache-2.0
"""Measurement: calls take turns, the gate refuses wrong sums, both stacks have one model."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import gate, measure, suites, systems, workloads
from benchmarks.measure import Protocol
from benchmarks.results import Row
from benchmarks.systems import LOOP, MULTI, NON_PRIVATE, OURS, Setting

SMALL = {
    "mlp": {"width": 8},
    "embed": {"length": 4, "vocabulary": 20},
    "lstm": {"length": 4},
    "gpt": {"layers": 1, "width": 8, "heads": 2, "length": 4, "vocabulary": 11},
    "resnet18_gn": {"image": 16},
    "vit_tiny": {"layers": 1, "width": 12, "image": 32},
}


def test_every_call_gets_its_rounds_and_warm_calls():
    calls = Counter()
    steps = {name: lambda name=name: calls.update([name]) for name in ("a", "b")}
    found = measure.interleave(steps, Protocol(rounds=5, warmup=2))
    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 5, "b": 5}
    assert calls == {"a": 2 + 2 * 5, "b": 2 + 2 * 5}  # a short call runs twice in a turn


def test_a_ratio_is_of_medians():
    found = {NON_PRIVATE: [1.0, 2.0, 3.0], "x": [3.0, 4.0, 9.0]}
    assert measure.ratio(found, "x") == measure.Ratio(2.0, 2.0, 1.5)


@pytest.mark.parametrize("stack", systems.STACKS)
@pytest.mark.parametrize("factor", [1.01, 0.98])
def test_the_gate_refuses_a_wrong_sum(stack, factor):
    made = systems.stack(stack)
    setting = gate.calibrate(made, Setting(workloads.create("mlp", width=8), 4))
    batch = made.load(setting, *setting.workload.batch(4))
    truth = gate.truth(made, setting, batch)
    gate.check("itself", truth, truth, setting)
    sums = dict(truth.sums)
    name = max(sums, key=lambda key: np.linalg.norm(sums[key]))
    sums[name] = factor * sums[name]
    with pytest.raises(gate.WrongSystem, match=r"is not timed: the sum of .* differs from the lo"):
        gate.check("wrong", truth._replace(sums=sums), truth, setting)
    with pytest.raises(gate.WrongSystem, match="the loop has"):
        gate.check("less", truth._replace(sums={}), truth, setting)


@pytest.mark.slow
@pytest.mark.parametrize("stack", systems.STACKS)
def test_a_row_is_measured(stack):
    made = systems.stack(stack)
    row = Row(suite="speed", stack=stack, workload="mlp", options={"width": 8}, batch=4, system="")
    for name in (NON_PRIVATE, OURS):
        setting = measure.setting_of(row, "cpu")
        found = measure.measure(
            made, replace(row, system=name), setting, measure.Protocol(rounds=3, warmup=1)
        )
        numbers = found.seconds, found.sum, found.step, found.first, found.memory
        assert all(number and number > 0 for number in numbers), found


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_both_stacks_have_the_same_model(name):
    """Clipped sums of the loop on both stacks, in the layout of PyTorch, have one norm each."""
    setting = Setting(workloads.create(name, **SMALL[name]), 2)
    norms = {}
    for stack in map(systems.stack, systems.STACKS):
        batch = stack.load(setting, *setting.workload.batch(2))
        norms[stack.name] = gate.truth(stack, setting, batch).norms
    np.testing.assert_allclose(norms["torch"], norms["jax"], rtol=2e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("stack", systems.STACKS)
def test_vmap_passes_the_gate(stack):
    made = systems.stack(stack)
    setting = gate.calibrate(made, Setting(workloads.create("gpt", **SMALL["gpt"]), 3))
    batch = made.load(setting, *setting.workload.batch(3))
    truth = gate.truth(made, setting, batch)
    for name in (MULTI, OURS, LOOP):
        system = made.system(name)(setting)
        gate.check(name, system.read(made.wait(system.gradient(batch))), truth, setting)


def test_a_suite_has_a_row_for_each_system():
    rows = suites.rows("gpu", "jax", workloads=["mlp"])
    assert [row.system for row in rows] == [NON_PRIVATE, OURS, "jax_privacy", MULTI, LOOP]
    with pytest.raises(ValueError, match=r"workload=\['rnn'\] is not in the suite 'speed'"):
        suites.rows("speed", "torch", workloads=["rnn"])
    with pytest.raises(ValueError, match="system='x' is not known for torch"):
        systems.stack("torch").system("x")
    with pytest.raises(ValueError, match="stack='tf' is not known"):
        systems.stack("tf")
    with pytest.raises(ValueError, match="workload='rnn' is not known"):
        workloads.create("rnn")
