# SPDX-License-Identifier: Apache-2.0
"""A forked program ends as one of a fresh interpreter does, and leaves nothing to the next."""

import pytest

from tests.docs import programs


@pytest.fixture(scope="module")
def run():
    with programs.runner("-W", "error") as run:
        yield run


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("print('done')", 0, ""),
        ("import warnings; warnings.warn('old')", 1, "UserWarning: old"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no such folder')", 1, "no such folder"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import atexit; atexit.register(print, 'bye'); raise ValueError('x')", 1, "ValueError: x"),
        ("input()", 1, "EOFError"),
    ],
)
def test_a_program_ends_as_by_itself(text, code, says, run, tmp_path):
    done = run(text, tmp_path)
    assert done.returncode == code
    assert says in done.stderr
    assert bool(done.stderr) == bool(says)
    assert ("done" in done.stdout) == ("done" in text)
    assert ("bye" in done.stdout) == ("bye" in text)


def test_a_file_is_the_main_module_of_its_process(run, tmp_path):
    (tmp_path / "beside.py").write_text("NUMBER = 7")
    path = tmp_path / "program.py"
    path.write_text(
        "import os, sys, tempfile, beside\n"
        "if __name__ == '__main__':\n"
        "    print(sys.argv[1:], os.getcwd(), beside.NUMBER, tempfile.gettempdir())\n"
        "    print(sys.modules['__main__'].__file__ == __file__ == sys.argv[0])\n"
    )
    done = run(path.read_text(), tmp_path, "--toy", path=path)
    assert done.stdout.splitlines() == [f"['--toy'] {tmp_path} 7 {tmp_path}", "True"], done.stderr


def test_a_program_sees_nothing_of_another(run, tmp_path):
    assert run("import sys, json; json.spoilt = 1; sys.x = 1", tmp_path).returncode == 0
    done = run("import sys, json; print(hasattr(json, 'spoilt'), hasattr(sys, 'x'))", tmp_path)
    assert done.stdout == "False False\n"


def test_a_program_that_hangs_is_killed(tmp_path):
    with programs.runner(seconds=1) as run:
        assert run("import time; time.sleep(60)", tmp_path).returncode < 0


def test_imports_that_fail_are_no_program_that_ran(tmp_path, monkeypatch):
    monkeypatch.setitem(programs.AHEAD, "nonsense", ())
    with programs.runner() as run, pytest.raises(AssertionError, match="imports of the programs"):
        run("import nonsense", tmp_path)
