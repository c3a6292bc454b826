# SPDX-License-Identifier: Apache-2.0
"""Table of accountants by name: `create("pld")`, and `register` for a class of your own."""

from __future__ import annotations

from typing import Any

from dualdp import _validate
from dualdp.accountants.base import Accountant as Accountant
from dualdp.accountants.closed_forms import gdp_epsilon as gdp_epsilon
from dualdp.accountants.pld import PLDAccountant as PLDAccountant
from dualdp.accountants.rdp import RDPAccountant as RDPAccountant

_TABLE: dict[str, type[Accountant]] = {
    "pld": PLDAccountant,
    "prv": PLDAccountant,
    "rdp": RDPAccountant,
}
_METHODS = "step compose get_epsilon get_delta epsilon_bounds state_dict load_state_dict".split()


def create(name: str = "pld", **options: Any) -> Accountant:
    """Return a new accountant with an empty history.

    Args:
        name: `pld` (certified and tight, the default), `rdp`, `prv` (a synonym of `pld`), or a
            registered name.
        **options: `neighboring_relation=`, `group_size=`, and further arguments of the class.

    Returns:
        An `Accountant`.

    Raises:
        ValueError: no accountant has this name.
    """
    return _TABLE[require_bound(name)](**options)


def require_bound(name: str) -> str:
    """Return the name of an accountant, all of which give upper bounds.

    Raises:
        ValueError: no accountant has this name.
    """
    if name == "gdp" and name not in _TABLE:
        raise ValueError(
            f"accountant='gdp' is unknown: the central limit theorem bounds nothing. Expected one "
            f"of {', '.join(names())}; accountants.gdp_epsilon gives the number of papers."
        )
    return _validate.choice("accountant", name, _TABLE)


def register(name: str, cls: type[Accountant], *, overwrite: bool = False) -> None:
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
