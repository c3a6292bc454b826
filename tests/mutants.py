# SPDX-License-Identifier: Apache-2.0
"""Plant faults one at a time, run the tests of that folder, and print the faults that survive.

    python -m tests.mutants --count 120 --seed 0          # all folders, about two hours
    python -m tests.mutants --only accountants --count 10

Most faults are drawn by a seed from the syntax tree: an operator, a comparison, a constant, an
axis, a dropped statement, a negated condition. Those in `BY_HAND` are what a person would do.
A fault is planted in a copy of the checkout, so that nothing here changes.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("dualdp", "dualdp_torch", "dualdp_jax", "dualdp_tools", "benchmarks", "tests")
LIMIT = 600  # seconds of the tests of one fault; a fault that makes them hang is found
OPERATORS: dict[type, type] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.FloorDiv: ast.Div, ast.Pow: ast.Mult, ast.In: ast.NotIn, ast.NotIn: ast.In},
}

#: Sources -> the tests that must find a fault in them.
TARGETS: dict[str, tuple[str, ...]] = {
    "dualdp/accountants": ("tests/dualdp/accountants", "tests/fixtures"),
    "dualdp/plan": ("tests/dualdp/plan", "tests/fixtures"),
    "dualdp/randomness": ("tests/dualdp/randomness", "tests/fixtures"),
    "dualdp/ledger": ("tests/dualdp/ledger",),
    "dualdp/checkpoint.py": ("tests/dualdp/test_checkpoint.py",),
    "dualdp_torch/rules": ("tests/dualdp_torch/rules", "tests/grid"),
    "dualdp_torch/per_sample": ("tests/dualdp_torch/per_sample", "tests/grid"),
    "dualdp_torch/noise": ("tests/dualdp_torch/noise", "tests/backends/test_noise.py"),
    "dualdp_torch/training": ("tests/dualdp_torch/training", "tests/backends/test_engine.py"),
    "dualdp_torch/checkpoint": ("tests/dualdp_torch/checkpoint",),
    "dualdp_jax/rules": ("tests/dualdp_jax/rules", "tests/grid"),
    "dualdp_jax/per_sample": ("tests/dualdp_jax/per_sample", "tests/grid"),
    "dualdp_jax/noise": ("tests/dualdp_jax/noise", "tests/backends/test_noise.py"),
    "dualdp_jax/training": ("tests/dualdp_jax/training", "tests/backends/test_engine.py"),
    "dualdp_jax/checkpoint": ("tests/dualdp_jax/checkpoint",),
}

#: (file, text, what stands in its place): faults that a person would make.
BY_HAND: tuple[tuple[str, str, str], ...] = (
    ("dualdp_torch/rules/linear.py", "g.T @ a", "g.T @ a * 0.99"),
    ("dualdp_torch/rules/linear.py", "torch.bmm(g.mT, a)", "torch.bmm(g.mT, a.flip(0))"),
    (
        "dualdp_torch/rules/linear.py",
        "torch.bmm(x, x.mT, out=out.squeeze(1))",
        "torch.bmm(x, x.mT, out=out.squeeze(1)); out.mul_(0.8)",
    ),
    ("dualdp_jax/rules/arrays.py", '"nbti,nbto->nbio"', '"nbti,nbso->nbio"'),
    ("dualdp_jax/rules/arrays.py", '"n,n...->...", factors', '"n,n...->...", factors[::-1]'),
    (
        "dualdp_torch/noise/noise.py",
        "draw(key_of(bits), release.draw_stddev)",
        "draw(key_of(bits), 0.9 * release.draw_stddev)",
    ),
    (
        "dualdp_jax/noise/noise.py",
        "np.asarray(release.expected_batch_size, dtype), release.draw_stddev",
        "np.asarray(release.expected_batch_size, dtype), 0.9 * release.draw_stddev",
    ),
    (
        "dualdp/plan/clipping.py",
        "bound = max_grad_norm / (1 + margin_of(norms.dtype))",
        "bound = max_grad_norm * (1 + margin_of(norms.dtype))",
    ),
    (
        "dualdp/plan/accounting.py",  # a pass that is resumed in its middle is one more pass
        "rest = min(-start % (cost.separation * cost.kept_epochs), stop - start)",
        "rest = 0",
    ),
    ("dualdp/plan/samplers.py", "order[: plan.max_batch_size]", "order[: plan.max_batch_size + 1]"),
    ("dualdp/ledger/chain.py", 'f"{previous}\\n{body}"', 'f"{body}"'),
    (
        "dualdp/randomness/bits.py",
        'seeded_bits(seed, "noise", step)',
        'seeded_bits(seed, "noise", 0)',
    ),
)
#: Text of a fault -> why no test can find it.
SURVIVORS: dict[str, str] = {}


@dataclass(frozen=True)
class Fault:
    """One change of one file."""

    path: str
    line: int
    old: str
    new: str
    source: str  # of the whole file with the fault

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old}  ->  {self.new}"


class _Planter(ast.NodeTransformer):
    """Change the node with this number among all that can be changed."""

    def __init__(self, number: int) -> None:
        self.number, self.met = number, 0
        self.change: tuple[int, str, str] | None = None

    def _is_chosen(self) -> bool:
        self.met += 1
        return self.met - 1 == self.number

    def _note(self, node: ast.AST, new: ast.AST) -> ast.AST:
        self.change = node.lineno, ast.unparse(node), ast.unparse(new)  # type: ignore[attr-defined]
        return new

    def visit(self, node: ast.AST) -> ast.AST:
        """Visit children first, then perhaps change the node."""
        if isinstance(node, ast.arguments | ast.AnnAssign | ast.Raise | ast.Import | ast.JoinedStr):
            return node  # defaults, fields and texts are held by other tests
        self.generic_visit(node)
        for changed in _changes(node):
            if self._is_chosen():
                return self._note(node, changed)
        return node


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in place of a node."""
    match node:
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            yield ast.copy_location(ast.BinOp(left, OPERATORS[type(op)](), right), node)
        case ast.Compare(left, [op], right) if type(op) in OPERATORS:
            yield ast.copy_location(ast.Compare(left, [OPERATORS[type(op)]()], right), node)
        case ast.BoolOp(op, values):
            yield ast.copy_location(ast.BoolOp(OPERATORS[type(op)](), values), node)
        case ast.UnaryOp(ast.USub() | ast.Not(), operand):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.copy_location(ast.Constant(not value), node)
        case ast.Constant(int() | float() as value):
            yield ast.copy_location(ast.Constant(value + 1), node)
        case ast.If(test, body, orelse):
            negated = ast.copy_location(ast.UnaryOp(ast.Not(), test), test)
            yield ast.copy_location(ast.If(negated, body, orelse), node)
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield ast.copy_location(ast.Pass(), node)


def drawn(path: Path, rng: random.Random) -> Fault | None:
    """Return a fault of a file, drawn from its syntax tree; None if nothing can be changed."""
    text = path.read_text()
    counter = _Planter(-1)
    counter.visit(ast.parse(text))
    if not counter.met:
        return None
    planter = _Planter(rng.randrange(counter.met))
    tree = planter.visit(ast.parse(text))
    assert planter.change is not None
    name = str(path.relative_to(ROOT))
    return Fault(name, *planter.change, ast.unparse(ast.fix_missing_locations(tree)))


def faults(count: int, seed: int | str, only: str = "") -> list[Fault]:
    """Return `count` faults: those of `BY_HAND`, then others, spread over the targets."""
    rng, found = random.Random(seed), list[Fault]()
    for name, old, new in BY_HAND:
        if only in name:
            text = (ROOT / name).read_text()
            assert text.count(old) == 1, f"{name} has {text.count(old)} times {old!r}"
            line = text[: text.index(old)].count("\n") + 1
            found.append(Fault(name, line, old, new, text.replace(old, new)))
    found = rng.sample(found, min(len(found), count))
    places = [target for target in TARGETS if only in target]
    while len(found) < count:
        target = ROOT / places[len(found) % len(places)]
        files = [target] if target.is_file() else sorted(target.rglob("*.py"))
        sizes = [path.stat().st_size for path in files]
        fault = drawn(rng.choices(files, sizes)[0], rng)
        if fault is not None:
            found.append(fault)
    return found


def tests_of(path: str) -> tuple[str, ...]:
    """Return the tests of a source file."""
    target = max((name for name in TARGETS if path.startswith(name)), key=len)
    return tuple(name for name in TARGETS[target] if (ROOT / name).exists())


def survives(fault: Fault, folder: Path) -> bool:
    """Plant a fault in a copy of the checkout; return True if the tests of its folder pass."""
    place = folder / fault.path
    original = place.read_text()
    place.write_text(fault.source)
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-m", "not slow"]
    try:
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", *tests_of(fault.path)],
            cwd=folder,
            env=environment,
            capture_output=True,
            timeout=LIMIT,
            check=False,
        )
        return done.returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        place.write_text(original)


def copied(folder: Path) -> Path:
    """Copy what the tests need."""
    for name in (*PACKAGES, "docs", "examples"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def survivors(planted: list[Fault]) -> list[Fault]:
    """Return the faults that no test of their folder finds."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = copied(Path(name)), list[Fault]()
        for fault in planted:
            is_alive = survives(fault, folder)
            print(f"{'SURVIVES' if is_alive else 'found   '} {fault}", flush=True)
            if is_alive and str(fault) not in SURVIVORS:
                found.append(fault)
        return found


def main() -> None:
    """Plant faults and say which survive; exit with 1 if more than 3 % do."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--only", default="", help="Targets that hold this text.")
    options = parser.parse_args()
    planted = faults(options.count, options.seed, options.only)
    left = survivors(planted)
    print(f"{len(planted) - len(left)} of {len(planted)} faults were found")
    sys.exit(len(left) > 0.03 * len(planted))


if __name__ == "__main__":
    main()
