# SPDX-License-Identifier: Apache-2.0
"""The glossary's table of old module names, and the public import paths that stay."""

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "glossary.md").read_text().partition("## Names of version 0.1")[2]
PUBLIC, _, TABLE = PAGE.partition("whoever knew them")


def exists(module):
    path = ROOT.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def test_public_import_paths_stay():
    names = re.findall(r"`(dualdp[\w.]*)`", PUBLIC)
    assert len(names) > 20
    for name in names:
        module, _, attribute = name.rpartition(".")
        if not exists(name):
            assert hasattr(importlib.import_module(module), attribute), name
        else:
            importlib.import_module(name)


def test_every_new_name_exists():
    rows = re.findall(r"^\| (`dualdp.*?) \| (.*?) \|$", TABLE, re.MULTILINE)
    assert len(rows) > 50
    for old, new in rows:
        prefixes = re.findall(r"`(dualdp[\w.]*?)\.?\*?`", new)
        assert new == "-" or prefixes, (old, new)
        inner = re.findall(r"`(\w+)`", old) if new.endswith("the same names") else [""]
        for name in inner:
            assert new == "-" or exists(f"{prefixes[0]}.{name}".rstrip(".")), (old, new)
