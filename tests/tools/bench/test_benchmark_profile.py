# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks profile`, and the memory that every benchmark process keeps."""

import pytest
from typer.testing import CliRunner

from dualdp_tools.bench import command_line, profile, systems


@pytest.fixture(autouse=True)
def processors(monkeypatch):
    """The command line must not take this process's processors away."""
    monkeypatch.setattr(command_line, "limit_threads", lambda threads: threads)


def _page(folder, backend):
    arguments = ["profile", "--workload", "ffnn", "--out", str(folder), "--backend", backend]
    outcome = CliRunner().invoke(command_line.app, arguments)
    assert outcome.exit_code == 0, outcome.output
    page = (folder / f"ffnn-{backend}.md").read_text()
    assert page.startswith(f"# ffnn, 32 examples, {backend}: ")
    assert "| system | step, ms |\n|---|---:|\n| non-private | " in page
    assert "| kernel | non-private | calls | dualdp:auto | calls | more |" in page
    assert "| all | 100.0 |" in page
    rows = [row.split("|") for row in page.splitlines() if row.startswith("| `")]
    more = [float(row[6]) for row in rows[:5]]
    assert more == sorted(more, reverse=True)
    return page, rows


def test_a_page_shows_where_the_time_goes(tmp_path):
    page, rows = _page(tmp_path, "torch")
    assert "`dualdp:auto` takes gram: linear 1x" in page
    # Which kernels are the longest, and so are listed, depends on the machine.
    assert any("`aten::" in row[1] and float(row[3]) >= 1 and float(row[5]) >= 1 for row in rows)


def test_a_page_of_jax_names_primitives(tmp_path):
    _, rows = _page(tmp_path, "jax")
    assert any(row[1].strip().startswith("`dot_general f32[") for row in rows)


def test_a_single_layer_has_a_page_in_the_sizes_of_its_suite():
    page = profile.profile(systems.stack("torch"), "instancenorm", "dualdp:auto", batch=2)
    assert page.startswith("# instancenorm, 2 examples, torch: ")
    with pytest.raises(ValueError, match="workload='lime' is not known"):
        profile.profile(systems.stack("torch"), "lime", "dualdp:auto")


def test_a_system_of_several_programs_has_a_page_too(tmp_path):
    stack = systems.stack("jax")
    page = profile.profile(stack, "logreg", "loop", batch=2)
    assert "| loop |" in page


def test_freed_memory_is_kept(monkeypatch):
    given = []

    class Library:
        @staticmethod
        def mallopt(option, value):
            given.append((option, value))

    monkeypatch.setattr(command_line.ctypes, "CDLL", lambda name: Library)
    command_line.keep_freed_memory()
    assert given == [(-1, 2**31 - 1), (-3, 2**31 - 1)]


def test_freed_memory_is_given_back_between_points(monkeypatch, tmp_path):
    events = []

    class Library:
        @staticmethod
        def malloc_trim(pad):
            events.append(pad)

    class Run:
        partial = None

        def add(self, rows):
            events.append(rows)

        def finish(self):
            return tmp_path

    monkeypatch.setattr(command_line.ctypes, "CDLL", lambda name: Library)
    assert command_line.keep(Run(), [["a"], [], ["b"]]) == tmp_path
    assert events == [["a"], 0, 0, ["b"], 0]
