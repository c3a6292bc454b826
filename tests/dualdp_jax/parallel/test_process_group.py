# SPDX-License-Identifier: Apache-2.0
"""What processes say to each other, and two real ones that are one run."""

from types import SimpleNamespace

import jax
import pytest

from dualdp_jax.parallel.process_group import Group
from tests.dualdp_jax.workers import launch


@pytest.mark.parametrize("shown", [True, False])
def test_the_first_difference_is_named(shown, monkeypatch):
    ours, theirs = ({"a": {"b": [number]}, "c": 1} for number in (2.0, 3.0))
    group = Group()
    group.size = 2
    others = iter([theirs])
    monkeypatch.setattr(group, "gather", lambda point, value: [value, next(others)])
    says = r"is \[2.0\] on process 0 and \[3.0\]" if shown else "differs on process 0 and"
    said = (
        rf"The processes disagree: plan\['a'\]\['b'\] {says} on process 1. Expected the same on all"
    )
    with pytest.raises(ValueError, match=said):
        group.require_same("plan", ours, shown=shown)


def devices(*owners):
    return [SimpleNamespace(process_index=owner) for owner in owners]


def test_a_mesh_over_some_of_the_processes_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    assert Group.of(devices(1, 1)) is None
    assert Group.of(devices(0, 1, 2, 2)).size == 3
    with pytest.raises(ValueError, match=r"devices of the processes \[0, 2\], but there are 3"):
        Group.of(devices(0, 2))


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_only_a_broken_connection_is_a_lost_process(kind):
    group = Group()
    with (
        pytest.raises(RuntimeError, match=r"lost another process at step 3 \(UNKNOWN: Gloo"),
        group.collective("step 3"),
    ):
        raise kind("UNKNOWN: Gloo all-reduce failed: Connection closed by peer\nmore")
    for text in ("RESOURCE_EXHAUSTED: Out of memory", "shapes differ", ""):
        with pytest.raises(kind) as found, group.collective("step 3"):
            raise kind(text)
        assert str(found.value) == text


def odd():
    """Raises what can't be sent to another process."""

    class Odd(Exception):
        pass

    raise Odd("odd")


def test_one_process_is_a_group_that_agrees_with_itself():
    group = Group()
    assert (group.rank, group.size, group.is_first) == (0, 1, True)
    assert Group.current() is None
    assert group.gather("here", b"word") == [b"word"]
    assert group.gather("here", b"w" * 100) == [b"w" * 100]
    group.require_same("the plan", {"a": 1})
    assert group.on_first("here", lambda: [1, 2]) == [1, 2]
    with pytest.raises(RuntimeError, match="Odd: odd"):
        group.on_first("here", odd)
    with pytest.raises(KeyError, match="gone"):
        group.on_first("here", lambda: {}["gone"])


@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path):
    found = launch.reports("pair", tmp_path, processes=2, devices=2, seconds=500)
    assert len(found) == 2
    for report in found:
        assert len(report) > 10
        assert {name: word for name, word in report.items() if word != "held"} == {}
