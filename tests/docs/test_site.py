# SPDX-License-Identifier: Apache-2.0
"""The site of docs/ builds without a warning, and every page is reachable from its front."""

import importlib.util
import os
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


def test_the_api_page_names_what_exists():
    names = re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(), re.M)
    assert len(names) == len(set(names)) > 20
    for name in names:
        parts = name.split(".")
        files = [ROOT.joinpath(*parts[:i]) for i in range(1, len(parts) + 1)]
        found = [f for f in files if f.with_suffix(".py").exists() or (f / "__init__.py").exists()]
        assert found, name
        *_, file = found
        source = file.with_suffix(".py") if file.with_suffix(".py").exists() else file
        rest = parts[len(file.relative_to(ROOT).parts) :]
        if rest:
            written = rf"^(class|def) {rest[0]}\b|^from .* import {rest[0]} as {rest[0]}$"
            assert re.search(written, source.read_text(), re.M), name


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
    assert 'id="dualdp.plan.plan.PrivacyPlan"' in api
    assert 'id="dualdp_torch.training.engine.PrivacyEngine.make_private"' in api
