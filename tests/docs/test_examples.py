# SPDX-License-Identifier: Apache-2.0
"""Every file of examples/ runs at toy size and prints a result."""

from pathlib import Path

import pytest

from tests.docs import programs

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
#: It runs at full size in test_docs_porting.py.
IN_FULL = {"port_digits.py"}


def example(path):
    # A process that trains takes longer than a fast test may.
    return pytest.param(path, id=path.name, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def run():
    with programs.runner("-W", "error") as run:
        yield run


@pytest.mark.parametrize("path", [example(path) for path in EXAMPLES if path.name not in IN_FULL])
def test_the_example_runs_and_prints_a_result(path, run, tmp_path):
    done = run(path.read_text(), tmp_path, "--toy", path=path)
    assert done.returncode == 0, done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    assert any(character.isdigit() for character in last) or "True" in last
    assert "False" not in last


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_example_is_a_flat_file_with_a_main(path):
    text = path.read_text()
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert text.rstrip().endswith('if __name__ == "__main__":\n    main()')
    assert len(text.splitlines()) <= 200
