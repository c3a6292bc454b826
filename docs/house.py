# SPDX-License-Identifier: Apache-2.0
"""Draw the packages and their folders, with every import between them, from the source."""

import ast
import html
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
WIDTH, HEIGHT, GAP, LEFT = 150, 30, 14, 20


#: Folders and files of each package, from the ground up: each may import those before it.
ORDER = {
    "dualdp": (
        *("_version", "_validate", "arrays", "mechanisms", "costs", "accountants"),
        *("randomness", "plan", "adam", "finetuning", "exactness", "ledger", "log", "checkpoint"),
        *("porting", "audit"),
        *("testing", "schedules", "samplers", "correlated", "units", "torch", "jax", "port"),
    ),
    "dualdp_torch": (
        *("rules", "finetuning", "noise", "parallel", "per_sample", "training", "checkpoint"),
        *("integrations", "testing", "lightning", "trainer"),
    ),
    "dualdp_jax": (
        *("compat", "rules", "finetuning", "chunk", "noise", "parallel", "per_sample", "validate"),
        *("training", "checkpoint", "testing"),
    ),
    "dualdp_tools": ("compare", "cli"),
}


def folder_of(module):
    """Return (package, folder) of a module, ("dualdp_torch", "rules") say; "" for a root name."""
    package, *rest = module.split(".")
    return package, rest[0] if rest and rest[0] in ORDER[package] else ""


def imports():
    """Counter of (importing folder, imported folder), and Counter of lines by folder."""
    edges, lines = Counter(), Counter()
    for package in ORDER:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            here = folder_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
            lines[here] += text.count("\n")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and node.module:
                    found = [f"{node.module}.{alias.name}" for alias in node.names]
                elif isinstance(node, ast.Import):
                    found = [alias.name for alias in node.names]
                else:
                    continue
                for name in found:
                    if name.split(".")[0] in ORDER and folder_of(name) != here:
                        edges[here, folder_of(name)] += 1
    return edges, lines


def draw():
    """SVG text: a column for each package, an arrow's width for the number of imports."""
    edges, lines = imports()
    tallest = max(map(len, ORDER.values()))
    bottom = tallest * (HEIGHT + GAP) + 40
    positions, drawn = {}, []
    for column, (package, order) in enumerate(ORDER.items()):
        x = LEFT + column * (WIDTH + 110)
        drawn.append(f'<text x="{x}" y="{bottom + 24}" class="name">{package}</text>')
        for level, inside in enumerate(order):
            y = bottom - (level + 1) * (HEIGHT + GAP)
            positions[package, inside] = x, y
            label = html.escape(f"{inside}  {lines[package, inside]:,}")
            drawn.append(f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5"/>')
            drawn.append(f'<text x="{x + 8}" y="{y + 20}">{label}</text>')
    for (one, other), count in sorted(edges.items()):
        if one[0] != other[0] and other in positions and one in positions:
            (x1, y1), (x2, y2) = positions[one], positions[other]
            side = 0 if x2 < x1 else WIDTH
            drawn.insert(
                0,
                f'<path d="M{x1 + side} {y1 + 15} L{x2 + WIDTH - side} {y2 + 15}" '
                f'stroke-width="{min(0.4 + count / 12, 3):.1f}"><title>{".".join(one)} imports '
                f"{'.'.join(other)}: {count}</title></path>",
            )
    wide = LEFT * 2 + 4 * WIDTH + 3 * 110
    style = (
        "text{font:13px sans-serif}.name{font-weight:bold}rect{fill:#eef3fa;stroke:#7a93b8}"
        "path{stroke:#b9c4d6;fill:none}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {bottom + 40}">'
        f"<style>{style}</style>{''.join(drawn)}</svg>\n"
    )


if __name__ == "__main__":
    (ROOT / "docs" / "images" / "house.svg").write_text(draw())
