# SPDX-License-Identifier: Apache-2.0
"""What is internal to jax, or differs between its releases, is touched in one module."""

import ast
from pathlib import Path

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


def test_internals_of_jax_are_touched_in_compat_alone():
    found = {path.name for path in PACKAGE.rglob("*.py") if internals(path.read_text())}
    assert found == {"compat.py"}
    assert internals("from jax._src.core import Primitive")
    assert not internals("from jax import lax, corelike")
