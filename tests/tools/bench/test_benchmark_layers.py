# SPDX-License-Identifier: Apache-2.0
"""The micro-benchmarks: every way of a layer forced, and what `auto` takes, in the row."""

from dataclasses import replace

import pytest

from dualdp_tools.bench import layers, measure, suites, systems, workloads
from dualdp_tools.bench import session as sessions
from dualdp_tools.bench.measure import Protocol
from dualdp_tools.bench.specs import Conv, children
from dualdp_tools.bench.systems import NothingToForce, Setting

FAST = Protocol(rounds=3)
TOY = {"depth": 1, "rate": 1.0, "first": 2, "kernel": 3, "image": 6}


@pytest.fixture
def session(monkeypatch):
    monkeypatch.setattr(sessions, "QUICK", FAST)
    return sessions.Session(systems.stack("torch"), quick=True)


def test_every_way_is_forced_and_the_choice_is_in_the_row(session, monkeypatch):
    monkeypatch.setattr(layers, "LAYERS", {})
    monkeypatch.setitem(layers.SWEEPS, "quick", [("rate", "toy_cnn", TOY, 8)])
    (rows,) = suites.layers(session)
    found = {row.system: row for row in rows}
    assert not [row.error for row in rows if row.error]
    ways = {"gram", "folded", "unfold", "crb", "keep", "discard", "auto"}
    assert set(found) == {f"dualdp:{way}" for way in ways} | {"non-private", "vmap(grad)", "loop"}
    assert found["dualdp:auto"].note.startswith("takes ")
    assert "convolution 3x6x6" in found["dualdp:auto"].note
    assert (found["loop"].axis, found["loop"].at) == ("rate", 1.0)


def test_a_forced_way_is_taken(session):
    """The choice is really another one: the forms differ in the memory they need."""
    stack = session.stack
    workload = layers.conv(channels=4, kernel=3, height=12, width=12)
    names = ["dualdp:gram", "dualdp:unfold", "dualdp:folded"]
    rows = measure.point(stack, workload, 4, systems=names, protocol=FAST, memory=True)
    peaks = {row.system: row.memory for row in rows}
    assert len({peaks[name] for name in names}) == 3


def test_only_layers_that_have_a_way_are_forced(session):
    forced = session.stack.systems["dualdp:crb"]
    with pytest.raises(NothingToForce):
        forced(Setting(layers.layernorm(), 2))
    rows = measure.point(
        session.stack, layers.layernorm(), 2, systems=["dualdp:crb"], protocol=FAST
    )
    assert [row.system for row in rows] == ["non-private"]


def test_other_suites_do_not_force(session):
    assert not set(session.stack.choose(None)) & set(session.stack.forced)
    assert "dualdp:crb" in session.stack.choose(["dualdp:crb"])


def test_jax_says_what_auto_takes():
    stack = systems.stack("jax")
    wide = workloads.create("mlp", width=512, depth=1)
    for workload, said in ((wide, "lengths: dot_general"), (layers.linear(2), "vmap")):
        rows = measure.point(stack, workload, 4, systems=["dualdp:auto"], protocol=FAST)
        assert rows[1].note.startswith("takes ")
        assert said in rows[1].note


def test_a_processor_gets_at_most_64_channels_and_pixels():
    for _, name, sizes, _ in layers.SWEEPS["cpu"]:
        workload = layers.network(name, sizes)
        assert workload.shape == (3, 64, 64)
        if name == "toy_cnn":
            parts = children(workload.model).values()
            assert max(part.outputs for part in parts if isinstance(part, Conv)) <= 64


def test_what_is_compiled_visits_every_second_point():
    jax = sessions.Session(systems.stack("jax"))
    assert list(jax.thin((16, 64, 256))) == [16, 256]
    assert list(replace(jax, quick=True).thin((16, 64, 256))) == [16, 64, 256]
    assert list(replace(jax, device="cuda").thin((16, 64, 256))) == [16, 64, 256]


def test_the_papers_layers_are_all_there():
    """Yousefpour et al. 2021, Fig. 3: linear, conv, norms, embedding, attention, recurrent."""
    names = "linear conv embedding layernorm groupnorm instancenorm attention"
    assert set(layers.LAYERS) == {*names.split(), "rnn_layer", "gru_layer", "lstm_layer"}
    # Rochette et al. 2019, Fig. 1 and 3 (rates by depth and kernel), Fig. 2 (batches), Table 1.
    cuda = layers.SWEEPS["cuda"]
    rates = {(s["depth"], s["kernel"]) for axis, _, s, _ in cuda if axis == "rate"}
    assert rates == {(depth, kernel) for depth in (2, 3, 4) for kernel in (3, 5)}
    assert [n for axis, _, s, n in cuda if axis == "batch"] == [2, 4, 8, 16, 32]
    assert [(name, n) for axis, name, _, n in cuda if axis is None] == [
        ("alexnet", 16),
        ("vgg16", 8),
    ]


def test_one_layer_can_be_asked_for(session, monkeypatch):
    monkeypatch.setitem(layers.SIZES, "quick", {"linear": {"width": 4}})
    one = replace(session, workloads=["linear"], systems=["vmap(grad)"])
    (rows,) = suites.layers(one)
    assert {row.workload for row in rows} == {"linear"}
    with pytest.raises(ValueError, match="workload='lime' is not known"):
        replace(session, workloads=["lime"])


def test_a_layer_that_is_wrong_is_refused(session):
    """The gate holds for single layers too: here "crb" forgets an example."""
    stack = session.stack
    honest = stack.systems["dualdp:crb"]

    def wrong(setting):
        prepared = honest(setting)
        return replace(prepared, gradient=lambda batch: prepared.gradient([x[1:] for x in batch]))

    stack = replace(stack, systems=stack.systems | {"dualdp:crb": wrong})
    workload = layers.conv(channels=2, kernel=3, height=6, width=6)
    rows = measure.point(stack, workload, 4, systems=["dualdp:crb"], protocol=FAST)
    assert "WrongSystem: dualdp:crb is not timed" in rows[1].error
