# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks profile`, and the memory that every benchmark process keeps."""

import pytest
from typer.testing import CliRunner

from benchmarks import __main__ as command_line
from benchmarks import profile, systems


@pytest.fixture(autouse=True)
def processors(monkeypatch):
    """The command line must not take this process's processors away."""
    monkeypatch.setattr(command_line, "limit_threads", lambda threads: threads)


def test_a_page_shows_where_the_time_goes(tmp_path):
    arguments = ["profile", "--workload", "ffnn", "--out", str(tmp_path)]
    outcome = CliRunner().invoke(command_line.app, arguments)
    assert outcome.exit_code == 0, outcome.output
    page = (tmp_path / "ffnn-torch.md").read_text()
    assert page.startswith("# ffnn, 32 examples, torch: ")
    assert "| kernel | non-private | calls | dualdp:auto | calls | more |" in page
    assert "| all | 100.0 |" in page
    rows = [row.split("|") for row in page.splitlines() if row.startswith("| `")]
    assert all(row[1].strip().startswith("`") for row in rows)
    # Which kernels are the longest, and so are listed, depends on the machine.
    assert any("`aten::" in row[1] and float(row[3]) >= 1 and float(row[5]) >= 1 for row in rows)
    more = [float(row[6]) for row in rows[:5]]
    assert more == sorted(more, reverse=True)


def test_a_stack_without_a_tracer_is_refused(monkeypatch):
    monkeypatch.setattr(profile, "TRACERS", {})
    with pytest.raises(ValueError, match="backend='torch' has no tracer. Expected one of"):
        profile.profile(systems.stack("torch"), "ffnn", "dualdp:auto", "cpu", "")


def test_freed_memory_is_kept(monkeypatch):
    given = []

    class Library:
        @staticmethod
        def mallopt(option, value):
            given.append((option, value))

    monkeypatch.setattr(command_line.ctypes, "CDLL", lambda name: Library)
    command_line.keep_freed_memory()
    assert given == [(-1, 2**31 - 1), (-3, 2**31 - 1)]
