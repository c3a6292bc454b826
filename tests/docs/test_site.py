# SPDX-License-Identifier: Apache-2.0
"""The site of docs/ builds without a warning, and every page is reachable from its front."""

import ast
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)")


def settings():
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages_of(nav):
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [value] if isinstance(value, str) else pages_of(value)


def test_the_navigation_holds_every_page():
    listed = list(pages_of(settings()["nav"]))
    assert listed[0] == "index.md"
    assert len(listed) == len(set(listed))
    assert set(listed) == {page.relative_to(DOCS).as_posix() for page in DOCS.glob("**/*.md")}


def test_every_page_can_be_reached_by_links_from_the_front():
    reached, waiting = set(), ["index.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            waiting += LINK.findall((DOCS / page).read_text())
    assert {page.name for page in DOCS.glob("*.md")} <= reached


def exported(face):
    """Names that a public module imports for its users; the backends are re-exported whole."""
    face = {"dualdp.torch": "dualdp_torch", "dualdp.jax": "dualdp_jax"}.get(face, face)
    source = ROOT.joinpath(*face.split("."))
    source = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
    imports = [n for n in ast.walk(ast.parse(source.read_text())) if isinstance(n, ast.ImportFrom)]
    return {a.name for node in imports for a in node.names if a.asname == a.name}


#: Public names that no page shows: modules, tables, and internals.
ELSEWHERE = {
    "dualdp": {"__version__", "plan.PrivacyPlan", "testing.FALSE_ALARM"},
    "dualdp.torch": {"METHODS", "RULES", "weights"},
    "dualdp.jax": {"METHODS", "RULES", "weights"},
}


@pytest.mark.parametrize(
    ("page", "face"), [("api", "dualdp"), ("api_torch", "dualdp.torch"), ("api_jax", "dualdp.jax")]
)
def test_the_api_pages_have_every_name_that_users_import(page, face):
    text = (DOCS / f"{page}.md").read_text()
    shown = re.findall(r"^(?:::: |      heading: )([\w.]+)$", text, re.M)
    assert len(shown) == len(set(shown))
    names = {name.removeprefix(f"{face}.") for name in shown if name.startswith(f"{face}.")}
    modules = {name.split(".")[0] for name in names if "." in name} - {"weights"}
    inside = {f"{module}.{name}" for module in modules for name in exported(f"dualdp.{module}")}
    assert (exported(face) | inside) - names - modules == ELSEWHERE[face]
    for name in names - exported(face):  # of a public module, such as dualdp.schedules.Linear
        assert face == "dualdp" or name == "weights.fold_biases", name
        assert face != "dualdp" or pkgutil.resolve_name(f"dualdp.{name}")


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("material"), reason="needs dualdp[docs]")
def test_the_site_builds_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    front, api, torch_, gallery = (
        (tmp_path / "site" / page / "index.html").read_text()
        for page in ("", "api", "api_torch", "examples/torch_digits")
    )
    assert "PrivacyEngine" in front  # the programs of the README
    assert 'id="dualdp.PrivacyPlan"' in api
    assert "balls_in_bins" in api  # choices are spelled out
    assert "SAMPLERS" not in api
    assert re.search(r'id="dualdp(\.|_)torch\.PrivacyEngine\.get_epsilon"', torch_)
    assert "make_private" in gallery
