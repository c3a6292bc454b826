# SPDX-License-Identifier: Apache-2.0
"""The site of docs/ builds without a warning, and every page is reachable from its front."""

import ast
import importlib.util
import os
import pkgutil
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from dualdp.plan.samplers import SAMPLERS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)")


def settings():
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def named(nav):
    """(title, page or pages) of every entry of a navigation."""
    for entry in nav:
        for title, value in entry.items():
            yield title, value
            yield from [] if isinstance(value, str) else named(value)


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
    "dualdp": {
        *("__version__", "plan.PrivacyPlan", "testing.FALSE_ALARM"),
    },
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


def hooks(monkeypatch):
    """docs/hooks.py with the only thing that it takes from mkdocs replaced."""
    files = types.ModuleType("mkdocs.structure.files")
    files.File = types.SimpleNamespace(generated=lambda config, name, **content: (name, content))
    for name in ("mkdocs", "mkdocs.structure"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "mkdocs.structure.files", files)
    return types.SimpleNamespace(**runpy.run_path(str(DOCS / "hooks.py")))


def test_no_two_entries_of_the_navigation_share_a_name(monkeypatch):
    config = types.SimpleNamespace(nav=settings()["nav"])
    titles = [title for title, _ in named(hooks(monkeypatch).on_config(config).nav)]
    assert len(titles) > 40
    assert sorted(titles) == sorted(set(titles))


def test_the_gallery_says_what_every_example_shows(monkeypatch):
    page = hooks(monkeypatch).gallery()
    for path in (ROOT / "examples").glob("*.py"):
        first = ast.get_docstring(ast.parse(path.read_text())).split("\n\n")[0]
        assert f"**[{path.name}]({path.stem}.md)**\n\n    {' '.join(first.split())}" in page
    assert "](../images/torch_digits.png)" in page


def test_the_front_has_the_programs_of_the_readme(monkeypatch):
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="index.md"))
    text = hooks(monkeypatch).on_page_markdown((DOCS / "index.md").read_text(), page, None, None)
    for block in re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S
    )[:2]:
        assert "".join(f"    {line}" for line in block.splitlines(keepends=True)) in text


def test_choices_are_spelled_out(monkeypatch):
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="api.md"))

    def spelled(text):
        return hooks(monkeypatch).on_page_content(text, page, None, None)

    html = spelled("one of <code>dualdp.plan.samplers.SAMPLERS</code>.")
    assert html == "one of " + ", ".join(f"<code>{name!r}</code>" for name in SAMPLERS) + "."
    assert "<code>'pld'</code>" in spelled("one of <code>accountants.names()</code>")
    assert spelled("one of <code>them</code>") == "one of <code>them</code>"


def test_doctests_are_code_and_guarantees_a_list(monkeypatch):
    monkeypatch.setitem(sys.modules, "griffe", types.SimpleNamespace(Extension=object))
    markdown = runpy.run_path(str(DOCS / "docstrings.py"))["markdown"]
    text = """Do.

Guarantees:
    One holds.
    Another holds, and
        goes on.

>>> f(["a"])
1
"""
    expected = text.replace("    One", "    - One").replace("    Another", "    - Another")
    expected = expected.replace('>>> f(["a"])\n1\n', '```pycon\n>>> f(["a"])\n1\n```\n')
    assert markdown(text) == expected


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
    html = {path.relative_to(tmp_path / "site") for path in tmp_path.glob("site/**/*.html")}
    assert Path("examples/torch_digits/index.html") in html
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    assert 'id="dualdp.PrivacyPlan"' in api
    assert "SAMPLERS" not in api
    for stack, names in {"torch": ("weights.fold_biases", "explain"), "jax": ("validate",)}.items():
        api = (tmp_path / "site" / f"api_{stack}" / "index.html").read_text()
        engine = [
            f"PrivacyEngine.{name}" for name in ("get_epsilon", "plan", "ledger", "accountant")
        ]
        for name in (*names, *engine, "register_rule", "Finding"):
            assert re.search(rf'id="dualdp(\.|_){stack}(\.validate)?\.{re.escape(name)}"', api), (
                name
            )
