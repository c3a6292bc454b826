# SPDX-License-Identifier: Apache-2.0
"""Put examples and the picture of the packages on the site."""

import ast
import importlib
import re
import runpy
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
TEST = re.compile(r"\[(test_\w+)\](?!\()")
OUTSIDE = re.compile(r"\]\((?:\.\./)+(examples/[\w-]+)\.py\)")
SOURCE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+dualdp[\w/.]*\)")
BLOCK = re.compile(r"^```python\n.*?^```\n", re.MULTILINE | re.DOTALL)
CHOICE = re.compile(r"one of <code>(?:[\w.]+\.)?(\w+)(?:\(\))?</code>")

#: Beginning of an example's name -> its heading in the gallery, in order.
GALLERY = {
    "torch": "PyTorch",
    "jax": "JAX",
    "port": "From one stack to the other",
    "": "Parts of your own, and the literature",
}
#: Table of choices that a docstring names -> its module, by backend.
TABLES = {
    "SAMPLERS": "dualdp.plan.samplers",
    "RELATIONS": "dualdp.mechanisms",
    "CLIPPING": "dualdp.plan.clipping",
    "names": "dualdp.accountants",
    "GRAD_SAMPLE_MODES": "dualdp_torch.training.arguments",
    "METHODS": "dualdp_{stack}",
}


def examples():
    """Every example."""
    return sorted((ROOT / "examples").glob("*.py"))


def docstring(path):
    """First paragraph of an example's docstring, and the others."""
    first, _, rest = ast.get_docstring(ast.parse(path.read_text())).partition("\n\n")
    return " ".join(first.split()), rest


def picture(path):
    """Markdown of the picture that an example draws, docs/images/<its name>.png, if any."""
    name = f"images/{path.stem}.png"
    return f"![What {path.name} draws](../{name})" if (ROOT / "docs" / name).exists() else ""


def example(path):
    """Page of an example: what it shows, its picture, its code."""
    first, rest = docstring(path)
    said = f"{first}\n\n{rest}\n\n{picture(path)}"
    code = f"```py title='examples/{path.name}'\n{path.read_text()}```"
    return f"---\nhide: [toc]\n---\n# {path.name}\n\n{said}\n\n{code}\n"


def gallery():
    """Page with what each example shows, and its picture."""
    groups = {start: [] for start in GALLERY}
    for path in examples():
        start = path.stem.partition("_")[0]
        groups[start if start in GALLERY else ""].append(path)
    text = "# Examples\n\nEach is one file that runs as it is; with `--toy` in seconds.\n"
    for start, paths in groups.items():
        text += f"\n## {GALLERY[start]}\n\n<div class='grid cards' markdown>\n\n"
        for path in paths:
            shown = f"\n\n    {picture(path)}" if picture(path) else ""
            text += f"-   **[{path.name}]({path.stem}.md)**\n\n    {docstring(path)[0]}{shown}\n\n"
        text += "</div>\n"
    return text


def on_files(files, config):
    """Add the gallery and a page for each example."""
    files.append(File.generated(config, "examples/index.md", content=gallery()))
    for path in examples():
        files.append(File.generated(config, f"examples/{path.stem}.md", content=example(path)))
    draw = runpy.run_path(str(ROOT / "docs" / "house.py"))["draw"]
    files.append(File.generated(config, "images/house.svg", content=draw()))
    return files


def on_config(config):
    """Add the generated pages to the navigation."""
    shown = [{path.name: f"examples/{path.stem}.md"} for path in examples()]
    config.nav = [*config.nav, {"Examples": [{"Gallery": "examples/index.md"}, *shown]}]
    return config


def on_page_markdown(markdown, page, config, files):
    """Links to files of examples/ lead to their pages; source files and tests are no links."""
    if page.file.src_uri == "index.md":
        markdown = markdown.replace("<!-- programs of README.md -->\n", programs())
    return TEST.sub(r"(`\1`)", OUTSIDE.sub(r"](\1.md)", SOURCE.sub(r"`\1`", markdown)))


def programs():
    """The two programs of README.md, in tabs."""
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    tabs = []
    for stack, block in zip(("PyTorch", "JAX"), blocks, strict=False):
        indented = "".join(f"    {line}" for line in block.splitlines(keepends=True))
        tabs.append(f'=== "{stack}"\n\n{indented}')
    return "\n".join(tabs)


def on_page_content(html, page, config, files):
    """Spell out the choices of arguments that a docstring names by their table."""
    stack = "jax" if page.file.src_uri == "api_jax.md" else "torch"

    def spelled(match):
        if match[1] not in TABLES:
            return match[0]
        module = importlib.import_module(TABLES[match[1]].format(stack=stack))
        table = getattr(module, match[1])
        names = table() if callable(table) else table
        return "one of " + ", ".join(f"<code>{name!r}</code>" for name in names)

    return CHOICE.sub(spelled, html) if page.file.src_uri.startswith("api") else html
