# SPDX-License-Identifier: Apache-2.0
"""Run every examples/opacus_*.py with Opacus and with dualdp; write the table of from_opacus.md.

    OMP_NUM_THREADS=1 .venv-bench/bin/python -m benchmarks.opacus_examples

An example is two programs in one file: a comment `# Opacus: code` is a line of Opacus' program,
and a line that ends in `# dualdp` is not.
"""

import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "from_opacus.md"
THEIRS = re.compile(r"^( *)# Opacus: (.*\n)", re.MULTILINE)
OURS = re.compile(r"^.*  # dualdp\n", re.MULTILINE)
RESULT = re.compile(r"accuracy ([\d.]+), epsilon ([\d.]+)\n$")
TABLE = re.compile(r"(?<=<!-- examples -->\n).*(?=<!-- /examples -->)", re.DOTALL)


def examples():
    """Return (name, text) of every example."""
    found = sorted((ROOT / "examples").glob("opacus_*.py"))
    return [(path.stem, path.read_text()) for path in found]


def for_opacus(text):
    """Return the program for Opacus."""
    return THEIRS.sub(r"\1\2", OURS.sub("", text))


def changed(text):
    """Return (lines of ours, lines of theirs) that are not the same."""
    return len(OURS.findall(text)), len(THEIRS.findall(text))


def run(text, seed, *options):
    """Return (accuracy, epsilon) that a program prints last, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "example.py").write_text(text)
        done = subprocess.run(
            [sys.executable, "-c", f"import example; example.main({seed})", *options],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
            capture_output=True,
            text=True,
        )
    found = RESULT.search(done.stdout)
    if done.returncode or not found:
        raise RuntimeError(done.stdout + done.stderr)
    return tuple(map(float, found.groups()))


def row(name, text):
    """Return one line of the table, and print it."""
    cells = [f"[{name}](../examples/{name}.py)", "{}/{}".format(*changed(text))]
    for program in (for_opacus(text), text):
        accuracy, epsilon = run(program, seed=0)
        cells.append(f"{100 * accuracy:.1f}%, {epsilon:.2f}")
    line = f"| {' | '.join(cells)} |\n"
    print(line, end="", flush=True)
    return line


def main():
    """Write the table."""
    titles = ("example", "lines, new/old", f"Opacus {version('opacus')}", "dualdp")
    head = f"| {' | '.join(titles)} |\n|---|---|---|---|\n"
    table = head + "".join(row(name, text) for name, text in examples())
    PAGE.write_text(TABLE.sub(lambda _: table, PAGE.read_text()))


if __name__ == "__main__":
    main()
