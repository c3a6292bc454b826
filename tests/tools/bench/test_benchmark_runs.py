# SPDX-License-Identifier: Apache-2.0
"""Runs that are stopped and go on; marks, READMEs, and what is committed."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dualdp_tools.bench import (
    command_line,
    marks,
    measure,
    profile,
    readme,
    report,
    results,
    session,
    suites,
    systems,
)
from dualdp_tools.bench.measure import Protocol
from dualdp_tools.bench.results import Row
from dualdp_tools.cli import app

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
OURS = Row(suite="run", stack="torch", workload="mlp", system="dualdp:auto", quantity="gradient",
           batch=4, seconds=0.1, spread=0.01, rounds=3, ratio=2.0, memory=100,
           memory_ratio=1.5)  # fmt: skip
PEER = replace(OURS, system="peer", seconds=0.08, ratio=1.6)
PLAIN = replace(OURS, system="non-private", seconds=0.05, ratio=1.0, memory_ratio=1.0)


def _results(*rows):
    return results.collect(rows, device="A processor", threads=1, command="test")


# Stopped and resumed


def _two_points_and_a_crash():
    yield [PLAIN, OURS]
    yield [PEER]
    raise KeyboardInterrupt


def test_a_run_that_is_stopped_loses_nothing(tmp_path, capsys):
    run = results.RunFile(_results(), tmp_path, "-run")
    with pytest.raises(KeyboardInterrupt):
        command_line.keep(run, _two_points_and_a_crash())
    (path,) = tmp_path.iterdir()
    assert path.name.endswith("-run.partial.json")
    assert results.read(path).rows == [PLAIN, OURS, PEER]
    said = capsys.readouterr().err
    assert f"Stopped after 3 rows, kept in {path}" in said
    assert f"--resume {path}" in said


def test_a_run_that_ends_leaves_the_whole_file_only(tmp_path):
    path = command_line.keep(results.RunFile(_results(), tmp_path, "-run"), [[PLAIN], [], [OURS]])
    assert list(tmp_path.iterdir()) == [path]
    assert results.read(path).rows == [PLAIN, OURS]
    assert results.PARTIAL not in path.name


def test_a_run_says_how_long_it_took(tmp_path, monkeypatch):
    """One that goes on adds the seconds of the run before it."""
    clock = iter([100.0, 130.0, 160.0])
    monkeypatch.setattr(results.time, "monotonic", lambda: next(clock))
    start = replace(_results(), took=60.0)
    found = results.read(command_line.keep(results.RunFile(start, tmp_path, "-run"), [[PLAIN]]))
    assert found.took == 60 + 60
    assert "Command: `test` (2 minutes)" in report.circumstances(found)


def test_a_processor_whose_name_is_cut_short_is_known_by_its_family(monkeypatch):
    described = "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\n"
    monkeypatch.setattr(results.Path, "read_text", lambda path: described)
    assert results.processor() == "AMD EPYC (family 25, model 17)"
    monkeypatch.setattr(results.Path, "read_text", lambda path: "processor\t: 0\n")
    assert results.processor()
    assert "(" not in results.processor()


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(command_line, "limit_threads", lambda threads: threads)
    monkeypatch.setattr(session, "QUICK", Protocol(rounds=3, warmup=1))
    monkeypatch.setattr(suites, "QUICK_SPEED", [("mlp", {"width": 8}, 4), ("ffnn", {}, 4)])


def _run(*arguments):
    usual = ("--backend", "torch", "--system", "vmap(grad)", "--quick")
    return CliRunner().invoke(command_line.app, [*map(str, (*arguments, *usual))])


def test_a_run_goes_on_where_it_was_stopped(toy, tmp_path, monkeypatch):
    point, asked = measure.point, []

    def stopped(stack, workload, n, **keywords):
        asked.append(workload.name)
        if workload.name == "ffnn" and len(asked) == 2:
            raise KeyboardInterrupt
        return point(stack, workload, n, **keywords)

    monkeypatch.setattr(measure, "point", stopped)
    assert _run("run", "--out", tmp_path).exit_code != 0
    (partial,) = tmp_path.glob("*.partial.json")
    before, took = results.read(partial).rows, results.read(partial).took
    assert {row.workload for row in before} == {"mlp"}
    assert _run("run", "--out", tmp_path, "--resume", partial).exit_code == 0
    assert asked == ["mlp", "ffnn", "ffnn"]
    (path,) = tmp_path.glob("*.json")
    assert path.stem.endswith("-run-torch")  # the stacks of one day do not overwrite each other
    assert results.read(path).took > took > 0
    found = results.read(path).rows
    assert found[: len(before)] == before
    assert {row.workload for row in found} == {"mlp", "ffnn"}


@pytest.mark.parametrize("suite", suites.SUITES)
def test_every_suite_knows_its_own_points_again(suite, toy, tmp_path, monkeypatch):
    """A finished file resumed measures nothing, and gives the same rows."""
    monkeypatch.setattr(suites.single, "LAYERS", {})
    monkeypatch.setattr(suites, "QUICK_SCALE", [("mlp", {}, "width", (8, 16), 4)])
    tiny = {"depth": 1, "rate": 1.0, "first": 2, "kernel": 3, "image": 8}
    monkeypatch.setitem(suites.single.SWEEPS, "quick", [("rate", "toy_cnn", tiny, 2)])
    assert _run(suite, "--out", tmp_path / "a").exit_code == 0
    (first,) = (tmp_path / "a").glob("*.json")

    def never(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr(measure, "point", never)
    monkeypatch.setattr(suites.gate, "admit", never)
    outcome = _run(suite, "--out", tmp_path / "b", "--resume", first)
    assert outcome.exit_code == 0, outcome.output
    (second,) = (tmp_path / "b").glob("*.json")
    assert results.read(second).rows == results.read(first).rows


def test_rows_of_other_circumstances_are_not_mixed_in():
    earlier = replace(_results(OURS), commit="another")
    with pytest.raises(ValueError, match="is of commit='another', but here it is .* without --res"):
        results.check_same(earlier, _results(), Path("a.partial.json"))


# Marks


def test_a_row_that_is_not_the_fastest_is_marked(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    slow = "dualdp:auto on mlp: peer takes 0.80 of its time and the aim is 1.15; "
    (time, _) = report.tables(_results(PLAIN, OURS, PEER))
    assert time.lines[1] == ["dualdp:auto", "2.00 ± 0.20 (1)"]
    assert time.remarks == [f"(1) {slow}see `profile --backend torch --workload mlp`"]
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "mlp-torch.md").touch()
    (time, _) = report.tables(_results(PLAIN, OURS, PEER))
    assert time.remarks == [f"(1) {slow}[where the time goes](../profiles/mlp-torch.md)"]


def test_other_points_and_our_own_methods_are_no_peers():
    ours = replace(OURS, ratio=1.0)
    beside = [
        replace(PEER, system="dualdp:two_pass"),
        replace(PEER, system="non-private"),
        replace(PEER, batch=8),
        replace(PEER, options={"width": 3}),
        replace(PEER, quantity="update"),
        replace(PEER, seconds=None, error="no"),
        replace(PEER, seconds=0.2),
    ]
    assert marks.reasons(ours, beside) == []
    assert marks.reasons(PEER, [ours]) == []
    assert marks.reasons(ours, [PEER]) == ["peer takes 0.80 of its time"]


@pytest.mark.parametrize("table", readme.TABLES)
def test_every_committed_row_that_is_marked_has_its_page(table):
    """On a GPU, whose time is rare: every row of clipped sums."""
    stack = table.removesuffix("-cuda")
    path = readme.newest(RESULTS).get(table)
    assert path or table not in systems.STACKS
    if path:
        found = results.read(path)
        rows, kind = found.rows, found.device_type
        mine = [r for r in rows if r.stack == stack and marks.reasons(r, rows, kind)]
        marked = {r.workload for r in mine if kind == "cpu" or r.quantity == "gradient"}
        pages = {name: RESULTS / profile.path_of(name, stack, kind) for name in marked}
        missing = [name for name, page in pages.items() if not page.exists()]
        assert not missing, f"run: {profile.command('...', stack, kind)}"


# The tables of a README


def test_a_readme_gets_its_tables(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("a\n<!-- benchmarks:torch -->\nold\n<!-- /benchmarks:torch -->\nz\n")
    missing = replace(PEER, system="other", seconds=None, ratio=None, error="TypeError: no")
    path = results.write(_results(PLAIN, OURS, PEER, missing), tmp_path / "results")
    readme.update(page, [path])
    text = page.read_text()
    assert text.startswith("a\n<!-- benchmarks:torch -->\n\nPyTorch ")
    assert text.endswith("`test`\n\n<!-- /benchmarks:torch -->\nz\n")
    assert "old" not in text
    assert "| non-private | 50 ms / 100 B |" in text
    assert "| dualdp:auto | 2.00 ± 0.20 / 1.50 (1) |" in text
    assert "| peer | **1.60** ± 0.20 / 1.50 |" in text
    assert "| other | (2) |" in text
    assert "- (2) other: TypeError: no" in text
    assert f"](results/{path.stem}/run-torch.png)" in text
    readme.update(page, [path])
    assert page.read_text() == text


def test_a_page_gets_the_three_fastest(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    page = tmp_path / "README.md"
    page.write_text("<!-- speed:torch -->\n<!-- /speed:torch -->\n")
    others = [replace(PEER, system=f"slow {k}", seconds=k, ratio=20.0 * k) for k in (1, 2)]
    missing = replace(PEER, system="other", seconds=None, ratio=None, error="TypeError: no")
    path = results.write(_results(PLAIN, missing, OURS, *others[::-1], PEER), tmp_path)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "mlp-torch.md").touch()
    readme.update(page, [path])
    cells = "50 ms / 100 B | [2.00](profiles/mlp-torch.md) ± 0.20 / 1.50 | peer **1.60** ± 0.20"
    line = f"| mlp, B 4 | {cells} / 1.50 | slow 1 20.00 ± 0.20 / 1.50 |"
    assert page.read_text().splitlines()[6:] == [line, "", "<!-- /speed:torch -->"]


def test_a_readme_without_markers_and_a_file_without_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="The page has no pair of markers <!-- benchmarks:jax -->"):
        readme.put("text", "benchmarks:jax", "body")
    path = results.write(_results(replace(OURS, suite="scale")), tmp_path)
    for write in readme.WRITERS.values():
        with pytest.raises(ValueError, match="has no rows of `run` on torch. Expected a file"):
            write("torch", path, tmp_path / "README.md")
    assert readme.newest(tmp_path) == {}


def test_the_newest_complete_run_is_shown(tmp_path):
    for day, suffix in (("2026-01-02", ""), ("2026-01-01", ""), ("2026-01-03", ".partial")):
        results.write(replace(_results(OURS), date=day), tmp_path, suffix)
    assert readme.newest(tmp_path)["torch"].name.startswith("2026-01-02")


@pytest.mark.parametrize("table", readme.TABLES)
@pytest.mark.parametrize(
    ("page", "kind"), [("README.md", "speed"), ("benchmarks/README.md", "benchmarks")]
)
def test_the_pages_show_the_newest_committed_run(page, kind, table):
    """Otherwise: python -m benchmarks report --readme README.md --readme benchmarks/README.md."""
    newest, text = readme.newest(RESULTS), (ROOT / page).read_text()
    if table in systems.STACKS or (table in newest and kind == "benchmarks"):
        stack = table.removesuffix("-cuda")
        body = readme.WRITERS[kind](stack, newest[table], ROOT / page)
        assert readme.put(text, f"{kind}:{table}", body) == text
    else:
        assert f"<!-- {kind}:{table} -->" not in text


# Runs on a GPU


def _on_a_gpu(*rows):
    return replace(_results(*rows), device="A GPU", device_type="cuda", date="2999-01-01")


def test_a_run_on_a_gpu_is_not_the_newest_on_a_cpu(tmp_path):
    paths = [results.write(found(OURS), tmp_path) for found in (_results, _on_a_gpu)]
    assert readme.newest(tmp_path) == dict(zip(("torch", "torch-cuda"), paths, strict=True))


def test_a_run_on_a_gpu_has_tables_of_its_own(tmp_path, monkeypatch):
    """Only on pages with their markers."""
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    path = results.write(_on_a_gpu(PLAIN, OURS, PEER), tmp_path)
    page = tmp_path / "README.md"
    for kind in ("benchmarks", "speed"):
        before = f"<!-- {kind}:torch -->\n<!-- /{kind}:torch -->\n"
        page.write_text(before)
        readme.update(page, [path])
        assert page.read_text() == before
        page.write_text(f"{before}<!-- {kind}:torch-cuda -->\n<!-- /{kind}:torch-cuda -->\n")
        readme.update(page, [path])
        assert page.read_text().startswith(f"{before}<!-- {kind}:torch-cuda -->\n\nPyTorch ")
        assert "A GPU, 1 threads" in page.read_text()
        assert "2.00 ± 0.20 / 1.50" in page.read_text()


def test_the_newest_of_several_runs_is_shown(tmp_path, monkeypatch):
    """Whatever their order: a file of both stacks may be the newest of one of them only."""
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    on_jax = [replace(row, stack="jax") for row in (PLAIN, OURS)]
    old = replace(_results(PLAIN, OURS, *on_jax), date="2026-01-01", device="Old")
    new = replace(_results(PLAIN, OURS), date="2026-01-02", device="New")
    paths = [results.write(found, tmp_path) for found in (new, old)]
    page, stacks = tmp_path / "README.md", ("torch", "jax")
    for order in (paths, paths[::-1]):
        page.write_text("".join(f"<!-- speed:{s} -->\n<!-- /speed:{s} -->\n" for s in stacks))
        readme.update(page, order)
        of_torch, of_jax = page.read_text().split("<!-- /speed:torch -->")
        assert "New, 1 threads" in of_torch
        assert "Old, 1 threads" in of_jax


def test_a_row_of_a_gpu_has_no_aim_and_a_page_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    assert marks.reasons(OURS, []) == ["the aim is 1.15"]
    assert marks.reasons(OURS, [], "cuda") == []
    (time, _) = report.tables(_on_a_gpu(PLAIN, OURS, PEER))
    slow = "(1) dualdp:auto on mlp: peer takes 0.80 of its time; "
    assert time.remarks == [f"{slow}see `profile --backend torch --workload mlp --device cuda`"]
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "mlp-torch.md").touch()
    assert report.tables(_on_a_gpu(PLAIN, OURS, PEER))[0].remarks == time.remarks
    profile.write("", "mlp", "torch", device_type="cuda")
    (time, _) = report.tables(_on_a_gpu(PLAIN, OURS, PEER))
    assert time.remarks == [f"{slow}[where the time goes](../profiles/mlp-torch-cuda.md)"]


def test_profiles_of_what_is_marked_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    results.write(_on_a_gpu(PLAIN, OURS, PEER), tmp_path)
    assert command_line.marked("torch", "cuda") == ["mlp"]
    assert command_line.marked("torch") == []


# The commands


def test_dualdp_bench_is_the_same_command_line():
    outcome = CliRunner().invoke(app, ["bench", "workloads"])
    assert "1,081,002" in outcome.output
    helped = CliRunner().invoke(app, ["bench", "layers", "--help"])
    assert "--resume" in helped.output


def test_the_command_that_is_noted_can_be_typed(monkeypatch):
    monkeypatch.setattr(command_line.sys, "argv", ["/bin/dualdp", "bench", "run", "--quick"])
    assert command_line.command_text() == "dualdp bench run --quick"
    monkeypatch.setattr(command_line.sys, "argv", ["/x/__main__.py", "run", "--batch", "4"])
    assert command_line.command_text() == "python -m benchmarks run --batch 4"


def test_without_any_framework_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(systems.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"Run: pip install 'dualdp\[torch\]'"):
        systems.installed()


def test_a_report_needs_a_file_somewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    outcome = CliRunner().invoke(command_line.app, ["report"])
    assert "There is no run in" in str(outcome.exception)


def test_profiles_of_what_is_marked(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    assert command_line.marked("torch") == []
    fine = replace(OURS, workload="gpt", ratio=1.0)
    results.write(_results(PLAIN, OURS, PEER, fine), tmp_path)
    assert command_line.marked("torch") == ["mlp"]
    assert command_line.marked("jax") == []
