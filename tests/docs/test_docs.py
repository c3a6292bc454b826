# SPDX-License-Identifier: Apache-2.0
"""README and docs: every Python block runs as printed and prints what its comments say."""

import re
from pathlib import Path

import pytest

from tests.docs import programs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)")


#: Pictures that the build of the site draws.
GENERATED = {ROOT / "docs" / "images" / "house.svg"}
#: Pages whose programs the fast tier runs.
FIRST = ("README.md", "quickstart.md")


def blocks():
    for page in PAGES:
        marks = [] if page.name in FIRST else [pytest.mark.slow]
        for number, match in enumerate(BLOCK.finditer(page.read_text()), 1):
            yield pytest.param(match.group(1), id=f"{page.name}-{number}", marks=marks)


@pytest.fixture(scope="module")
def run():
    with programs.runner() as run:
        yield run


@pytest.mark.parametrize("code", list(blocks()))
def test_code_runs_and_prints_what_it_says(code, run, tmp_path):
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    promised = PRINTED.findall(code)
    assert done.stdout.splitlines()[: len(promised)] == promised


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        place = page.parent / target
        assert place.exists() or place in GENERATED, f"{page.name}: {target}"


def test_the_readme_has_two_programs_and_two_commands():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    for face, program in zip(("dualdp.torch", "dualdp.jax"), BLOCK.findall(text), strict=False):
        assert face in program
        assert len(program.strip().splitlines()) <= 15
        assert PRINTED.search(program), "the printed epsilon stands beside the print"
    shell = re.search(r"^```(?:sh|bash|console)\n(.*?)^```", text, re.M | re.S)[1]
    commands = [line.split("#")[0].strip() for line in shell.splitlines() if line.strip()]
    assert commands == ["make demo", "make test"]


def test_a_program_that_fails_is_seen(run, tmp_path):
    """In a process of its own, which sees nothing of the one before."""
    assert run("import sys; sys.x = 1", tmp_path).returncode == 0
    done = run("import sys; print(hasattr(sys, 'x')); 1 / 0", tmp_path)
    assert done.returncode == 1
    assert done.stdout == "False\n"
    assert "ZeroDivisionError" in done.stderr


def existing_tests():
    """Names of all test functions of the suite."""
    sources = (path.read_text() for path in (ROOT / "tests").glob("**/*.py"))
    return {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.M)}


@pytest.mark.parametrize("package", ["dualdp", "dualdp_torch", "dualdp_jax", "docs", "tests"])
def test_every_promise_names_a_test_that_exists(package):
    """`Guarantees:` in docstrings and tables in docs name the test that holds them."""
    named, pages = set(), ROOT.glob("*.md")
    for path in (*(ROOT / package).glob("**/*.py"), *(ROOT / package).glob("**/*.md"), *pages):
        lists = re.findall(r"\[(test_\w+(?:,\s+test_\w+)*)\]|`(test_\w+)`", path.read_text())
        named |= {name for pair in lists for names in pair for name in re.findall(r"\w+", names)}
    missing = named - existing_tests()
    assert not missing
