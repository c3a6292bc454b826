# SPDX-License-Identifier: Apache-2.0
"""Differences in plain data of several processes, for error messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()


def differences(ours: Any, theirs: Any, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield (field, ours, theirs) for every leaf in which plain data differ.

    >>> list(differences({"a": [1, 2]}, {"a": [1, 3]}, "plan"))
    [("plan['a'][1]", '2', '3')]
    """
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            pair = ours.get(key, _ABSENT), theirs.get(key, _ABSENT)
            yield from differences(*pair, f"{name}[{key!r}]")
    elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            yield f"the length of {name}", str(len(ours)), str(len(theirs))
        for i, (one, two) in enumerate(zip(ours, theirs, strict=False)):
            yield from differences(one, two, f"{name}[{i}]")
    elif ours != theirs:
        yield name, repr(ours), repr(theirs)
