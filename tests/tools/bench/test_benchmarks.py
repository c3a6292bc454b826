# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: right models, right numbers, and no time for a wrong system."""

from __future__ import annotations

import json
import math
import sys
import weakref
from dataclasses import asdict, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dualdp.plan.plan import NOISE
from dualdp_tools.bench import (
    command_line,
    figures,
    finetuning,
    finetuning_torch,
    gate,
    layers,
    measure,
    noise,
    report,
    results,
    session,
    specs,
    suites,
    systems,
    systems_torch,
    workloads,
    workloads_jax,
    workloads_torch,
)
from dualdp_tools.bench.gate import WrongSystem
from dualdp_tools.bench.measure import Protocol
from dualdp_tools.bench.results import Row
from dualdp_tools.bench.systems import AUTO, MULTI, NON_PRIVATE, Clipped, Setting

BACKENDS = ("torch", "jax")
SMALL = {
    "mlp": {"width": 16},
    "embed": {"length": 12},
    "lstm": {"length": 8},
    "gpt": {"layers": 2, "width": 24, "heads": 3, "length": 10, "vocabulary": 40},
    "vit_tiny": {"layers": 2, "width": 24, "image": 32, "patch": 8},
    "alexnet": {"image": 80, "hidden": 16},
    "vgg16": {"image": 32, "hidden": 16},
    "vit_base": {"layers": 2, "width": 24, "image": 32, "patch": 8},
    "resnet18_gn": {"image": 32},
    "resnet50_gn": {"image": 32},
    "wrn16_4": {"image": 8},
}
SLOW = {"alexnet", "vgg16", "resnet18_gn", "resnet50_gn", "wrn16_4", "vit_tiny", "cifar10"}
# Numbers of trained parameters in the papers (logreg, ffnn: in the study's code; wrn16_4: by hand).
PUBLISHED = {
    "logreg": 105,
    "ffnn": 5_352,
    "mnist": 26_010,
    "cifar10": 605_226,
    "embed": 160_098,
    "lstm": 1_081_002,
    "wrn16_4": 2_748_890,
}
# Torchvision's networks with its 1000 classes; ours have 10.
TORCHVISION = {
    "alexnet": 61_100_840 - 990 * 4_097,
    "vgg16": 138_357_544 - 990 * 4_097,
    "resnet18_gn": 11_689_512 - 990 * 513,
    "resnet50_gn": 25_557_032 - 990 * 2_049,
    "vit_base": 86_567_656 - 990 * 769,
}
FAST = Protocol(rounds=3, far=math.inf)


@pytest.mark.parametrize(("name", "parameters"), (PUBLISHED | TORCHVISION).items())
def test_counts_are_the_published_ones(name, parameters):
    assert workloads.create(name).parameters == parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_both_stacks_hold_the_published_counts(name):
    workload = workloads.create(name)
    model = workloads_torch.model(workload)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    leaves = jax.tree.leaves(workloads_jax.params(workload))
    assert trained == sum(leaf.size for leaf in leaves) == PUBLISHED[name]


def _norms_torch(workload, x, y):
    model = workloads_torch.model(workload)
    model = model.double() if x.dtype == torch.float64 else model
    losses = workloads_torch.losses(workload, model(x), y)
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms = []
    for loss in losses:
        grads = torch.autograd.grad(loss, parameters, retain_graph=True)
        norms.append(torch.stack([g.norm() for g in grads]).norm())
    return losses.detach().numpy(), torch.stack(norms).numpy()


def _norms_jax(workload, x, y):
    loss = jax.value_and_grad(partial(workloads_jax.loss, workload))
    run = jax.jit(jax.vmap(loss, (None, 0, 0)))
    params = workloads_jax.params(workload)
    if x.dtype == jnp.float64:
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
    losses, grads = run(params, x, y)
    squares = [jnp.square(g).reshape(len(x), -1).sum(1) for g in jax.tree.leaves(grads)]
    return np.asarray(losses), np.sqrt(np.asarray(sum(squares)))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in workloads.WORKLOADS
    ],
)
def test_both_stacks_compute_the_same(name):
    """In float64 where inputs are no ids: roundings of a deep network add up to 2e-5 in float32."""
    workload = workloads.create(name, **SMALL.get(name, {}))
    is_wide = workload.vocabulary is None
    x, y = workload.batch(3)
    arrays = (x.astype(np.float64), y) if is_wide else (x, y)
    ours = _norms_torch(workload, *map(torch.from_numpy, arrays))
    with jax.enable_x64(is_wide):
        theirs = _norms_jax(workload, *workloads_jax.load(*arrays))
    for found, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-7 if is_wide else 2e-5)


@pytest.mark.parametrize("workload", layers.layers("quick"), ids=lambda workload: workload.name)
def test_single_layers_compute_the_same(workload):
    arrays = workload.batch(2)
    ours = _norms_torch(workload, *map(torch.from_numpy, arrays))
    theirs = _norms_jax(workload, *workloads_jax.load(*arrays))
    np.testing.assert_allclose(ours[1], theirs[1], rtol=2e-5)


def test_the_toy_network_is_the_papers():
    """Channels grow by the rate from the first; a pool follows every second convolution."""
    parts = specs.children(layers.toy_cnn(depth=4, rate=1.5, first=25).model)
    channels = [part.outputs for part in parts.values() if isinstance(part, specs.Conv)]
    assert channels == [25, 38, 56, 84]
    assert [name for name in parts if name.startswith("pool")] == ["pool1", "pool2"]


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="workload='resnet' is not known. Expected one of"):
        workloads.create("resnet")
    with pytest.raises(ValueError, match="backend='tensorflow' is not known"):
        systems.stack("tensorflow")
    with pytest.raises(ValueError, match=r"systems=\['opaque'\] are not known for torch"):
        systems.stack("torch").choose(["opaque"])
    with pytest.raises(ValueError, match="device='tpu' is not known. Expected 'cpu' or 'cuda'"):
        session.Session(systems.stack("torch"), device="tpu")
    with pytest.raises(TypeError, match="object has no PyTorch module"):
        workloads_torch.module(object())
    with pytest.raises(TypeError, match="object has no JAX function"):
        workloads_jax.forward(object(), {}, None)


def _addresses(leaves):
    return {leaf.unsafe_buffer_pointer() for leaf in leaves}


def test_weights_are_drawn_once_and_no_system_can_change_those_of_another():
    workload = workloads.create("lstm", length=4)
    weights = workload.weights()
    again = workloads.create("lstm", length=4).weights()
    assert all(again[name] is array for name, array in weights.items())
    with pytest.raises(ValueError, match="read-only"):
        weights["lstm1.bias"] += 1
    first, second = (workloads_torch.model(workload).state_dict() for _ in range(2))
    assert not {t.data_ptr() for t in first.values()} & {t.data_ptr() for t in second.values()}
    first["lstm1.cell.bias_ih_l0"].add_(1)
    assert torch.equal(second["lstm1.cell.bias_ih_l0"], torch.tensor(weights["lstm1.bias"]))
    first, second = (jax.tree.leaves(workloads_jax.params(workload)) for _ in range(2))
    drawn = {array.ctypes.data for array in weights.values()}
    assert len(_addresses(first) | _addresses(second) | drawn) == 3 * len(weights)
    assert not np.array_equal(workload.weights(1)["lstm1.bias"], weights["lstm1.bias"])


# The gate and the clock


def _broken(stack, change):
    """The stack with one more system: the loop, its outcome changed before it is read."""
    loop = stack.systems["loop"]

    def wrong(setting):
        prepared = loop(setting)
        return replace(prepared, read=lambda outcome: change(prepared.read(outcome)))

    return replace(stack, systems=stack.systems | {"wrong": wrong})


def _forget_a_bias(clipped):
    name = next(name for name in clipped.sums if "bias" in name)
    return clipped._replace(sums=clipped.sums | {name: np.zeros_like(clipped.sums[name])})


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_system_is_refused(backend):
    stack = _broken(systems.stack(backend), _forget_a_bias)
    workload = workloads.create("mlp", width=8)
    rows = measure.point(stack, workload, 6, systems=["vmap(grad)", "wrong"], protocol=FAST)
    by_system = {row.system: row for row in rows}
    assert list(by_system) == [NON_PRIVATE, "vmap(grad)", "wrong"]
    assert by_system["wrong"].seconds is None
    assert "WrongSystem: wrong is not timed: the sum of" in by_system["wrong"].error
    assert by_system["vmap(grad)"].error is None
    assert by_system["vmap(grad)"].ratio > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_system_that_clips_each_view_alone_is_refused(backend):
    stack = systems.stack(backend)
    alone = lambda setting: stack.systems[AUTO](replace(setting, rows_per_unit=1))  # noqa: E731
    wrong = replace(stack, systems=stack.systems | {"alone": alone})
    workload, names = workloads.create("mlp", width=8), [AUTO, MULTI, "alone"]
    rows = measure.point(wrong, workload, 6, systems=names, protocol=FAST, rows_per_unit=3)
    errors = {row.system: row.error for row in rows}
    assert "WrongSystem: alone is not timed" in errors.pop("alone")
    assert errors == dict.fromkeys([NON_PRIVATE, AUTO, MULTI])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sums": {}}, "x is not timed: it returned sums of"),
        ({"sums": {"w": np.ones((2, 1))}}, "the sum of 'w' has shape"),
        ({"sums": {"w": np.full(2, 1.002)}}, "the sum of 'w' differs from the loop by 2.8e-03"),
        ({"sums": {"w": np.full(2, np.nan)}}, "the sum of 'w' differs from the loop by nan"),
        ({"norms": np.array([3.0, 4.1])}, "the norms differs from the loop"),
    ],
)
def test_the_gate_says_what_differs(change, sentence):
    truth = Clipped({"w": np.ones(2)}, np.array([3.0, 4.0]))
    gate.check("x", truth, truth)
    with pytest.raises(WrongSystem, match=sentence):
        gate.check("x", truth._replace(**change), truth)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_system_that_is_not_installed_gives_its_reason(backend, monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus", None)
    monkeypatch.setitem(sys.modules, "jax_privacy", None)
    name = {"torch": "opacus:hooks", "jax": "jax_privacy"}[backend]
    workload = workloads.create("logreg")
    rows = measure.point(systems.stack(backend), workload, 4, systems=[name], protocol=FAST)
    assert rows[-1].system == name
    assert rows[-1].error.startswith("ModuleNotFoundError")


def test_about_half_of_a_batch_is_clipped():
    stack = systems.stack("torch")
    setting = gate.calibrate(stack, Setting(workloads.create("ffnn"), 8))
    loop = stack.systems["loop"](setting)
    norms = loop.read(loop.gradient(stack.load(setting, *setting.workload.batch(8)))).norms
    assert (norms > setting.max_grad_norm).sum() == 4


def test_rounds_are_interleaved_in_an_order_drawn_for_each():
    calls = []
    steps = {name: partial(calls.append, name) for name in "abcd"}
    timings = measure.interleave(steps, Protocol(rounds=30, warmup=2, short=0.0))
    turns = ["".join(calls[k : k + 4]) for k in range(8, len(calls), 4)]
    assert {len(timing.seconds) for timing in timings.values()} == {30}
    assert {"".join(sorted(turn)) for turn in turns} == {"abcd"}
    before_a = {turn[turn.index("a") - 1] for turn in turns if turn[0] != "a"}
    assert before_a == {"b", "c", "d"}  # nobody always follows the same system


def test_of_a_short_step_the_second_counts(monkeypatch):
    """What another system left in the caches is not in the time of a step that is done at once."""
    calls = []
    monkeypatch.setattr(measure, "_seconds", lambda step: (step(), float(len(calls)))[1])
    protocol = Protocol(rounds=3, warmup=2, patience=math.inf, longest=math.inf)
    for short, counted in ((math.inf, (4.0, 6.0, 8.0)), (0.0, (3.0, 4.0, 5.0))):
        calls.clear()
        found = measure.interleave({"a": partial(calls.append, 0)}, replace(protocol, short=short))
        assert found["a"].seconds == counted


def test_a_slow_system_sits_out():
    slow = Protocol(rounds=9, warmup=1, patience=-1, fewest=4)
    assert len(measure.interleave({"a": lambda: None}, slow)["a"].seconds) == 4


def test_a_system_far_behind_gets_few_turns_and_none_with_noise(monkeypatch):
    """Ten times the non-private step: its second digit is not worth a minute."""
    stack, workload = systems.stack("torch"), workloads.create("logreg")
    names, loop = [NON_PRIVATE, "dualdp:auto", "loop"], stack.systems["loop"]

    def prepared(cost):
        def made(setting):
            real = loop(setting)
            return replace(
                real,
                gradient=lambda batch: (real.gradient(batch), seconds.append(cost))[0],
                update=lambda batch: seconds.append(cost),
            )

        return made

    seconds = []
    monkeypatch.setattr(measure, "_seconds", lambda step: (step(), seconds[-1])[1])
    made = dict(zip(names, map(prepared, (1.0, 1.5, 10.0)), strict=True))
    stack = replace(stack, systems=stack.systems | made)
    protocol = Protocol(rounds=5, patience=math.inf, longest=math.inf)
    rows = measure.point(
        stack, workload, 2, systems=names, quantities=("gradient", "update"), protocol=protocol
    )
    found = {(row.system, row.quantity): row for row in rows}
    assert [found[name, "gradient"].rounds for name in names] == [5, 5, 3]
    assert [found[name, "update"].rounds for name in names] == [5, 5, None]
    assert found["dualdp:auto", "update"].ratio == 1.5
    why = "not timed: over 2.5 times the non-private step without noise"
    assert found["loop", "update"].error == why


def test_a_hopeless_system_gets_no_turns_and_says_so():
    stack, workload = systems.stack("torch"), workloads.create("logreg")
    hopeless = Protocol(longest=-1.0, far=1e-9)
    rows = measure.point(stack, workload, 2, systems=["loop"], protocol=hopeless)
    assert [row.seconds for row in rows] == [None, None]
    assert rows[1].error == "too slow here: 0.0 s a step"


def test_without_the_loops_answer_nothing_is_timed():
    stack = systems.stack("torch")

    def broken(setting):
        raise MemoryError("too large")

    stack = replace(stack, systems=stack.systems | {"loop": broken})
    workload = workloads.create("logreg")
    rows = measure.point(stack, workload, 2, systems=["vmap(grad)"], protocol=FAST)
    reason = "the loop failed: MemoryError: too large"
    assert [(row.system, row.error) for row in rows] == [
        (NON_PRIVATE, reason),
        ("vmap(grad)", reason),
    ]


def test_a_system_that_fails_with_noise_has_a_reason_there_and_stays_cleared():
    """On a GPU a step may need more memory than its gradient; the others are timed."""
    stack, cleared = systems.stack("torch"), []

    def prepared(setting):
        def update(batch):
            raise MemoryError("too large")

        real = stack.systems[MULTI](setting)
        return replace(real, update=update, clear=lambda: cleared.append(1))

    made = replace(stack, systems=stack.systems | {MULTI: prepared})
    rows = measure.point(
        made,
        workloads.create("logreg"),
        2,
        systems=[MULTI],
        quantities=("gradient", "update"),
        protocol=FAST,
    )
    found = {(row.system, row.quantity): row.error for row in rows}
    assert found.pop((MULTI, "update")) == "MemoryError: too large"
    assert found == {(NON_PRIVATE, "gradient"): None, (MULTI, "gradient"): None,
                     (NON_PRIVATE, "update"): None}  # fmt: skip
    turns = 1 + (FAST.warmup - 1) + FAST.rounds
    assert len(cleared) == turns + 2  # the gate's, the clock's, the failed update's, the choice's


@pytest.mark.parametrize(
    ("fails_at", "timed"), [(2, False), (4, False), ("memory", True), ("chosen", True)]
)
def test_a_system_that_fails_later_has_a_reason_and_the_others_go_on(fails_at, timed):
    """In a later call than the gate's, or when its memory or its choice is asked for."""
    stack, calls, cleared = systems.stack("torch"), [], []

    def fail(batch=None):
        raise MemoryError("too large")

    def prepared(setting):
        real = stack.systems[MULTI](setting)

        def gradient(batch):
            calls.append(1)
            return fail() if len(calls) == fails_at else real.gradient(batch)

        later = {fails_at: fail} if timed else {}
        return replace(real, gradient=gradient, clear=lambda: cleared.append(1), **later)

    made = replace(stack, systems=stack.systems | {MULTI: prepared})
    rows = measure.point(
        made,
        workloads.create("logreg"),
        2,
        systems=[MULTI, "loop"],
        quantities=("gradient", "update"),
        protocol=FAST,
        memory=True,
    )
    found = {(row.system, row.quantity): row for row in rows}
    assert all(found[name, "gradient"].memory > 0 for name in (NON_PRIVATE, "loop"))
    assert all(found[name, "update"].ratio > 0 for name in (NON_PRIVATE, "loop"))
    for quantity in ("gradient", "update"):
        row = found[MULTI, quantity]
        assert (row.seconds is not None, row.error is None) == (timed, timed)
        assert (row.memory is None) == (fails_at != "chosen")
        if not timed:
            assert row.error == "MemoryError: too large"
            assert len(calls) == fails_at  # it is not called again
    note = {"memory": "peak memory", "chosen": "choice"}.get(fails_at)
    expected = note and f"{note} not known: MemoryError: too large"
    assert found[MULTI, "gradient"].note == expected
    assert not timed or len(cleared) >= 2


def test_what_a_peer_leaves_when_its_memory_is_measured_is_cleared():
    """On a GPU the gradients of every example, for which the next system needs the place."""
    stack, events = systems.stack("torch"), []

    def prepared(name, setting):
        real = stack.systems[name](setting)
        told = {kind: partial(events.append, (kind, name)) for kind in ("memory", "clear")}
        return replace(real, memory=lambda batch: told["memory"](), clear=told["clear"])

    names = (NON_PRIVATE, MULTI)
    made = replace(stack, systems=stack.systems | {name: partial(prepared, name) for name in names})
    measure.point(made, workloads.create("logreg"), 2, systems=[MULTI], protocol=FAST, memory=True)
    first = events.index(("memory", NON_PRIVATE))
    assert events[first + 1] == ("clear", NON_PRIVATE)
    assert events[-2:] == [("memory", MULTI), ("clear", MULTI)]


def test_a_system_that_cannot_be_made_again_has_no_epoch():
    stack, made = systems.stack("torch"), []

    def prepared(setting):
        made.append(1)
        if len(made) == 2:
            raise MemoryError("too large")
        return stack.systems[MULTI](setting)

    changed = replace(stack, systems=stack.systems | {MULTI: prepared})
    workload, protocol = workloads.create("logreg"), Protocol(rounds=3, warmup=2, short=0.0)
    rows = measure.point(
        changed, workload, 2, systems=[MULTI], quantities=("epoch",), protocol=protocol
    )
    errors = [(row.system, row.error) for row in rows]
    assert errors == [(NON_PRIVATE, None), (MULTI, "MemoryError: too large")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_refused_system_held_is_let_go(backend):
    """Even in a cycle, so that the next system has the memory."""
    held, seen = [], []

    class Model:
        pass

    def refused(setting):
        model = Model()
        model.itself = model
        held.append(weakref.ref(model))

        def gradient(batch):
            raise MemoryError(f"of {model}")

        return systems.Prepared(gradient)

    def after(setting):
        seen.append(held[0]())
        raise MemoryError("looked")

    stack = systems.stack(backend)
    stack = replace(stack, systems=stack.systems | {"refused": refused, "after": after})
    workload = workloads.create("logreg")
    rows = measure.point(stack, workload, 2, systems=["refused", "after"], protocol=FAST)
    assert [row.error is None for row in rows] == [True, False, False]
    assert seen == [None]


def test_an_epoch_starts_from_nothing_and_holds_its_updates():
    """A system made anew: its first epoch pays for what is found out once."""
    stack, calls = systems.stack("torch"), []

    def counted(setting):
        calls.append("made")
        return systems.Prepared(lambda batch: None, None, lambda batch: calls.append("update"))

    stack = replace(stack, systems=stack.systems | {NON_PRIVATE: counted})
    protocol = Protocol(rounds=3, warmup=2, short=0.0)
    (row,) = measure.point(
        stack,
        workloads.create("logreg"),
        2,
        systems=[NON_PRIVATE],
        quantities=("epoch",),
        protocol=protocol,
        together=4,
    )
    assert calls == ["made", "made"] + ["update"] * 4 * (2 + 3)
    row = replace(row, seconds=2.0, spread=0.1, first=5.0)
    assert suites._epoch(row, 10).seconds == 20
    assert suites._epoch(row, 10).first == 5 + 9 * 2
    assert suites._epoch(row, 1).first == 5


def test_median_and_spread():
    timing = measure.Timing((1.0, 2.0, 3.0, 4.0, 100.0))
    assert (timing.median, timing.spread) == (3.0, 2.0)


# Results and reports

ROW = Row(suite="run", stack="torch", workload="mlp", system="loop", quantity="gradient",
          batch=4, seconds=0.1, spread=0.01, rounds=3, ratio=2.0)  # fmt: skip


def _results(*rows):
    return results.collect(rows or (ROW,), device="A processor", threads=1, command="test")


def test_results_survive_the_file(tmp_path):
    written = _results()
    path = results.write(written, tmp_path, "-run")
    assert path.name == f"{written.date[:10]}-a-processor-run.json"
    assert results.read(path) == written
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seconds": float("nan")}, "Row 0 has seconds=nan. Expected a finite number"),
        ({"seconds": None}, "neither a number nor an error"),
        ({"suite": "walk"}, "Row 0 has suite='walk'. Expected one of"),
        ({"batch": "four"}, "Row 0 has batch='four'. Expected"),
        ({"color": "red"}, r"Row 0 lacks or adds the fields \['color'\]"),
    ],
)
def test_a_wrong_row_is_refused(change, sentence):
    data = asdict(_results())
    data["rows"][0].update(change)
    with pytest.raises(ValueError, match=sentence):
        results.validate(data)


def test_a_wrong_file_is_refused(tmp_path):
    data = asdict(_results())
    with pytest.raises(ValueError, match="schema=0 cannot be read. Expected 2"):
        results.validate(data | {"schema": 0})
    with pytest.raises(ValueError, match="The results file is list. Expected an object"):
        results.validate([])
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match="broken.json is not JSON"):
        results.read(tmp_path / "broken.json")
    (tmp_path / "fine.json").write_text(json.dumps(data))
    assert results.read(tmp_path / "fine.json").rows == [ROW]


def test_a_file_of_before_there_were_gpus_is_of_a_cpu(tmp_path):
    data = asdict(_results())
    with pytest.raises(ValueError, match=r"device_type='tpu'. Expected one of \('cpu', 'cuda'\)"):
        results.validate(data | {"device_type": "tpu"})
    del data["device_type"]
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert results.read(tmp_path / "old.json").device_type == "cpu"


def test_the_points_of_a_gpu_are_those_of_both_stacks():
    for backend in BACKENDS:
        stack = systems.stack(backend)
        gpu = session.Session(stack, device="cuda")
        assert suites.speed_points(gpu) == suites.GPU_SPEED
        assert suites.speed_points(replace(gpu, quick=True)) == suites.QUICK_SPEED
        one = replace(gpu, workloads=["gpt", "ffnn"], batch=3)
        assert suites.speed_points(one) == [("gpt", suites.GPT2_SMALL, 3), ("ffnn", {}, 3)]


def test_jax_on_another_device_is_refused():
    with pytest.raises(ValueError, match="device='cuda', but JAX computes on 'cpu'"):
        systems.stack("jax").use_device("cuda")


def test_nothing_half_written_is_left(tmp_path):
    with pytest.raises(ValueError, match="neither a number nor an error"):
        results.write(_results(replace(ROW, seconds=None)), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_table_shows_ratios_and_reasons():
    baseline = replace(ROW, system=NON_PRIVATE, seconds=0.05, ratio=1.0)
    failed = replace(ROW, system="peer", seconds=None, ratio=None, error="TypeError: no")
    table = report.tables(_results(ROW, failed, baseline))[0]
    assert table.header == ["", "mlp, B 4"]
    assert table.lines == [[NON_PRIVATE, "50 ms"], ["loop", "2.00 ± 0.20"], ["peer", "(1)"]]
    assert table.remarks == ["(1) peer: TypeError: no"]
    assert "| loop | 2.00 ± 0.20 |" in table.markdown()


# The commands


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    """Runs a command at toy size, in one thread count, into a temporary folder."""
    monkeypatch.setattr(command_line, "limit_threads", lambda threads: threads)
    monkeypatch.setattr(session, "QUICK", FAST)
    monkeypatch.setattr(layers, "LAYERS", {"linear": partial(layers.linear, 8)})
    tiny = {"depth": 1, "rate": 1.0, "first": 2, "kernel": 3, "image": 8}
    monkeypatch.setitem(layers.SIZES, "quick", {})
    monkeypatch.setitem(layers.SWEEPS, "quick", [("rate", "toy_cnn", tiny, 2)])
    monkeypatch.setattr(suites, "QUICK_SPEED", [("mlp", {"width": 8}, 4)])
    monkeypatch.setattr(suites, "QUICK_SCALE", [("mlp", {}, "width", (8, 16), 4)])

    def run(*arguments):
        quick = () if arguments[0] in ("report", "workloads") else ("--quick", "--out", tmp_path)
        outcome = CliRunner().invoke(command_line.app, [*map(str, (*arguments, *quick))])
        assert outcome.exit_code == 0, outcome.output
        files = list(tmp_path.glob("*.json"))
        return results.read(files[0]) if files else None, outcome.output, tmp_path

    return run


@pytest.mark.parametrize("suite", suites.SUITES)
@pytest.mark.parametrize("backend", [BACKENDS[0], pytest.param("jax", marks=pytest.mark.slow)])
def test_every_suite_runs(suite, backend, invoke):
    if suite in ("checkpoints", "frozen", "compiled", "tensor-parallel") and backend == "jax":
        return  # of PyTorch
    asked = AUTO if suite == "finetuning" else "vmap(grad)"
    arguments = (suite, "--backend", backend, "--system", asked, "--batch", "4")
    found, output, folder = invoke(*arguments)
    assert {row.suite for row in found.rows} == {suite}
    saved = (f"{name}, checkpointed" for name in (NON_PRIVATE, AUTO))
    engines = {"checks": {*suites.RATES, AUTO}, "correlated": {*suites.CORRELATED}}
    compiled = {AUTO, AUTO + suites.COMPILED, NON_PRIVATE + suites.COMPILED}
    narrow = (f"{name}, base in bfloat16" for name in (NON_PRIVATE, AUTO))
    ours = {**engines, "checkpoints": {AUTO, *saved}, "compiled": compiled}
    ours["frozen"], ours["tensor-parallel"] = {AUTO, *narrow}, {AUTO}
    ours["finetuning"] = {AUTO, finetuning.ADAM_BC, finetuning.SPARSE}
    ours = ours.get(suite, {"vmap(grad)"})
    assert {row.system for row in found.rows} == {NON_PRIVATE, *ours}
    assert not [row.error for row in found.rows if row.error]
    assert min(ours) in output
    assert "### " in (next(folder.glob("*/report.md"))).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", systems.METHODS)
def test_our_methods_pass_the_gate(backend, method):
    workload, quantities = workloads.create("mlp", width=8), ("gradient", "update")
    rows = measure.point(
        systems.stack(backend),
        workload,
        4,
        systems=[f"dualdp:{method}"],
        quantities=quantities,
        protocol=FAST,
        memory=True,
    )
    found = [(row.system, row.quantity, row.error) for row in rows if row.system != NON_PRIVATE]
    assert found == [(f"dualdp:{method}", quantity, None) for quantity in quantities]
    assert all(row.memory > 0 for row in rows)


def test_accounting_and_report_commands(invoke, monkeypatch, tmp_path):
    row = Row(suite="accounting", stack="core", workload="w", system="s", quantity="epsilon",
              value=1.5, seconds=0.1)  # fmt: skip
    monkeypatch.setitem(command_line.MODULES, "accounting", lambda *, quick: iter([[row]]))
    found, output, _ = invoke("accounting")
    assert found.rows == [row]
    assert "1.5 in 100 ms" in output
    file = next(tmp_path.glob("*.json"))
    assert "report.md" in invoke("report", file, "--out", tmp_path / "again")[1]
    assert (tmp_path / "again" / file.stem / "report.md").exists()


@pytest.mark.slow
@pytest.mark.parametrize("stack", noise.STACKS)
def test_noise_is_timed_in_every_mode(stack, tmp_path):
    rows = noise.point(stack, noise.STACKS[stack], 1000, FAST)
    ours = [f"dualdp {kind}" for kind in (*NOISE, *noise.CORRELATED)]
    assert [row.system for row in rows] == ["float32", "float64", *ours]
    assert [row.ratio for row in rows[:2]] == [1.0, 1.0]
    assert all(row.value > 0 and row.ratio > 0 for row in rows)
    found = results.collect(rows, device="cpu", threads=1, command="")
    assert results.read(results.write(found, tmp_path, "-noise")).rows == rows
    (table,) = report.tables(found)
    assert "ns per number" in table.markdown()


def test_a_run_draws_its_figures(invoke):
    arguments = ("run", "--backend", "torch", "--system", "vmap(grad)", "--batch", "3")
    _, output, folder = invoke(*arguments)
    drawn = {path.name for path in folder.glob("*/*.png")}
    assert drawn == {"run-torch.png"}
    assert "run-torch.png" in output


@pytest.mark.parametrize("stack", ["torch", "jax"])
def test_no_figure_has_more_than_six_colours(stack):
    """Two systems of a figure never look alike, and every system is in one."""
    names = systems.stack(stack).systems
    point = {"suite": "run", "stack": stack, "workload": "mlp", "quantity": "gradient"}
    rows = [Row(system=name, **point) for name in names]
    shown = figures.families(rows)
    assert {row.system for part in shown.values() for row in part} == set(names)
    for part in shown.values():
        looks = figures.styles(part).values()
        assert len({look["color"] for look in looks}) <= 6
        for kind in ("linestyle", "marker", "hatch"):
            assert len({(look["color"], look[kind]) for look in looks}) == len(looks)
        assert {row.system for row in part} >= {NON_PRIVATE, AUTO}


def test_epochs_draw_the_cumulative_curve(invoke):
    arguments = ("end-to-end", "--backend", "torch", "--system", "vmap(grad)", "--batch", "3")
    found, output, folder = invoke(*arguments)
    drawn = {path.name for path in folder.glob("*/*.png")}
    assert drawn == {"epochs-torch.png", "first-epochs-torch.png"}
    assert "time of the first epoch" in " ".join(output.split())
    assert all(row.first > 0 for row in found.rows)


def test_workloads_are_listed(invoke):
    assert "1,081,002" in invoke("workloads")[1]


def test_a_wrong_system_of_finetuning_has_a_reason_and_no_time(monkeypatch, invoke):
    """The sum of a system that clips to another bound is not that of the loop."""

    def wrong(setting, **options):
        twice = replace(setting, max_grad_norm=2 * setting.max_grad_norm)
        return systems_torch.dualdp(twice, "auto", kind=finetuning_torch.Llama)

    monkeypatch.setitem(finetuning_torch.SYSTEMS["llama"], AUTO, wrong)
    found, _, _ = invoke("finetuning", "--backend", "torch", "--system", AUTO)
    rows = [row for row in found.rows if (row.workload, row.system) == ("llama_lora", AUTO)]
    assert [row.quantity for row in rows] == ["update", "loss"]
    assert all("differs from the loop" in row.error and not row.seconds for row in rows)
