# SPDX-License-Identifier: Apache-2.0
"""What is internal to jax, or differs between its releases, is touched in one module."""

import ast
from pathlib import Path

import pytest

import dualdp_jax

PACKAGE = Path(dualdp_jax.__file__).parent
INTERNAL = ("jax._src", "jax.core", "jax.extend", "jax.interpreters", "jaxlib")


def internals(source):
    """Names of internal modules that a program reaches, by import or by attribute."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            found |= {inner for inner in INTERNAL if f"{name}.".startswith(f"{inner}.")}
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_internals_of_jax_are_touched_in_compat_alone(path):
    assert bool(internals(path.read_text())) == (path.name == "compat.py")


@pytest.mark.parametrize(
    "line",
    [
        "import jax.extend",
        "from jax import core",
        "from jax.interpreters import ad",
        "import jax\njax.core.Tracer",
        "import jaxlib.xla_client",
        "from jax._src.core import Primitive",
    ],
)
def test_the_scan_sees_every_way_to_an_internal(line):
    assert internals(line)


def test_the_scan_lets_the_public_names_through():
    assert not internals("import jax\nfrom jax import lax\njax.lax.scan\nfrom jax import corelike")
