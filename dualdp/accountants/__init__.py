# SPDX-License-Identifier: Apache-2.0
"""Table of accountants by name: `create("pld")`, and `register` for a class of your own."""

from __future__ import annotations

from typing import Any

from dualdp import _validate
from dualdp.accountants.base import Accountant as Accountant
from dualdp.accountants.gdp import GDPAccountant as GDPAccountant
from dualdp.accountants.pld import PLDAccountant as PLDAccountant
from dualdp.accountants.rdp import RDPAccountant as RDPAccountant

_TABLE: dict[str, Any] = {
    "pld": PLDAccountant,
    "prv": PLDAccountant,
    "rdp": RDPAccountant,
    "gdp": GDPAccountant,
}
_METHODS = "step compose get_epsilon get_delta epsilon_bounds state_dict load_state_dict".split()


def create(name: str = "pld", **options: Any) -> Any:
    """Return a new accountant with an empty history.

    Args:
        name: `pld` (certified and tight, the default), `rdp`, `gdp` (an approximation), `prv`
            (a synonym of `pld`), or a registered name.
        **options: `neighboring_relation=`, `group_size=`, and further arguments of the class.

    Returns:
        An `Accountant`.
    """
    return _TABLE[_validate.choice("accountant", name, _TABLE)](**options)


def require_bound(name: str) -> str:
    """Return `name` if it is an accountant that gives upper bounds; raise on an approximation."""
    kind = _TABLE[_validate.choice("accountant", name, _TABLE)]
    if isinstance(kind, type) and issubclass(kind, GDPAccountant):
        raise _validate.AccountingError(
            f"accountant={name!r} is an approximation that can lie far below the true epsilon, so "
            "no run is accounted by it. Expected 'pld' or 'rdp'; dualdp.get_epsilon(..., "
            "accountant='gdp', approximate=True) shows the approximation."
        )
    return name


def register(name: str, cls: Any, *, overwrite: bool = False) -> None:
    """Add an accountant of your own to the table of `create`.

    Args:
        name: str, the name to be passed to `create`.
        cls: class, called as `cls(neighboring_relation=..., group_size=...)`; must have `step`,
            `compose`, `get_epsilon`, `get_delta`, `epsilon_bounds`, `state_dict` and
            `load_state_dict`. The base class `Accountant` implements most of them.
        overwrite: bool, True to replace an existing name.

    Raises:
        TypeError: the class lacks a method.
        ValueError: the name is taken.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name={name!r} is not a name. Expected a string.")
    missing = [method for method in _METHODS if not callable(getattr(cls, method, None))]
    if missing:
        raise TypeError(f"cls={cls!r} lacks {', '.join(missing)}. Expected an accountant class.")
    if name in _TABLE and not overwrite:
        raise ValueError(f"name={name!r} is taken. Pass overwrite=True to replace it.")
    _TABLE[name] = cls


def names() -> tuple[str, ...]:
    """Names that `create` accepts, sorted."""
    return tuple(sorted(_TABLE))
