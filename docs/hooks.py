# SPDX-License-Identifier: Apache-2.0
"""Put examples, benchmark reports and the picture of the packages on the site."""

import re
import runpy
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
TEST = re.compile(r"\[(test_\w+)\](?!\()")
OUTSIDE = re.compile(r"\]\((?:\.\./)+(examples/[\w-]+)\.py\)")
SOURCE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+dualdp[\w/.]*\)")


def examples():
    """Every example."""
    return sorted((ROOT / "examples").glob("*.py"))


def reports():
    """Every report of benchmarks."""
    return sorted((ROOT / "benchmarks" / "results").glob("*/report.md"))


def profiles():
    """Every page on where the time of a step goes."""
    return sorted((ROOT / "benchmarks" / "results" / "profiles").glob("*.md"))


def on_files(files, config):
    """Add a page for each example and profile, and each report with its pictures."""
    for path in examples():
        text = f"# {path.name}\n\n```py title='examples/{path.name}'\n{path.read_text()}```\n"
        files.append(File.generated(config, f"examples/{path.stem}.md", content=text))
    for path in profiles():
        target = f"benchmarks/profiles/{path.name}"
        files.append(File.generated(config, target, content=path.read_text()))
    for path in reports():
        folder = f"benchmarks/{path.parent.name}"
        files.append(File.generated(config, f"{folder}.md", content=report(path)))
        for picture in path.parent.glob("*.png"):
            target = f"{folder}-{picture.name}"
            files.append(File.generated(config, target, abs_src_path=str(picture)))
    draw = runpy.run_path(str(ROOT / "docs" / "house.py"))["draw"]
    files.append(File.generated(config, "images/house.svg", content=draw()))
    return files


def report(path):
    """A report, with its pictures and the folder of profiles beside it."""
    text = path.read_text().replace("](../profiles/", "](profiles/")
    return re.sub(r"\]\(([\w-]+\.png)\)", rf"]({path.parent.name}-\1)", text)


def on_config(config):
    """Add the generated pages to the navigation."""
    pages = {"Examples": [f"examples/{path.stem}.md" for path in examples()]}
    explained = [f"benchmarks/profiles/{path.name}" for path in profiles()]
    pages["Benchmarks"] = [f"benchmarks/{path.parent.name}.md" for path in reports()]
    pages["Benchmarks"] += [{"Where the time goes": explained}]
    config.nav = [*config.nav, *({title: found} for title, found in pages.items())]
    return config


def on_page_markdown(markdown, page, config, files):
    """Links to files of examples/ lead to their pages; source files and tests are no links."""
    return TEST.sub(r"(`\1`)", OUTSIDE.sub(r"](\1.md)", SOURCE.sub(r"`\1`", markdown)))
