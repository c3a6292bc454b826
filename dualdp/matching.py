# SPDX-License-Identifier: Apache-2.0
"""Which parameter of a torch module is which leaf of a JAX model, by names and the layouts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from dualdp.layouts import RECURRENT, ROOTS, Line, Term, joined, lines_for, places_of, split
from dualdp.leaves import Axes, Leaf, Place

Mapped = Mapping[str, str | tuple[str, str]]
JaxLeaves = Sequence[tuple[tuple[str, ...], tuple[int, ...]]]


def match(
    torch_shapes: Mapping[str, tuple[int, ...]],
    torch_kinds: Mapping[str, str],
    jax_leaves: JaxLeaves,
    mapping: Mapped | None = None,
    tied: Mapping[str, Sequence[str]] | None = None,
    frozen: frozenset[str] = frozenset(),
) -> tuple[Leaf, ...]:
    """Pair every torch parameter with the JAX leaves of the same name; nothing is left over.

    Args:
        torch_shapes: name -> shape of parameters and of running statistics.
        torch_kinds: every name, tied ones too -> kind, the first word of a line of `LAYOUTS`, and
            sizes of letters, such as "attention h=4"; a kind without lines keeps name and layout.
        jax_leaves: (path, shape) in the order of `jax.tree.leaves`.
        mapping: for names that differ: torch name of a parameter or a module (layer l of an RNN is
            "rnn.l0", "rnn.l0_reverse") -> JAX path joined by "/", or (path, layout).
        tied: first name -> all names of a parameter that has several.
        frozen: names without gradient; the JAX leaf is then frozen too and has no noise.

    Returns:
        Leaves in torch's order.

    Raises:
        ValueError: a parameter without partner, or partners whose shapes do not agree.
    """
    names = _Names(torch_shapes, torch_kinds, dict(tied or {}), frozen)
    return _Matcher(names, jax_leaves, dict(mapping or {})).leaves()


def suggest(
    torch_shapes: Mapping[str, tuple[int, ...]],
    torch_kinds: Mapping[str, str],
    jax_leaves: JaxLeaves,
    tied: Mapping[str, Sequence[str]] | None = None,
    frozen: frozenset[str] = frozenset(),
) -> dict[str, str]:
    """A mapping by structure, to be read and corrected: modules that no name pairs, in order.

    Each torch module gets the first free JAX module, numbers in names counted as numbers, whose
    leaves are exactly its parameters. Two layers of the same sizes in another order are swapped.

    Args:
        torch_shapes: as in `match`.
        torch_kinds: as in `match`.
        jax_leaves: as in `match`.
        tied: as in `match`.
        frozen: as in `match`.

    Returns:
        Torch module -> JAX path, for `mapping=`; a module without a partner is not in it.
    """
    names = _Names(torch_shapes, torch_kinds, dict(tied or {}), frozen)
    return _Matcher(names, jax_leaves, {}).suggestion()


@dataclass(frozen=True)
class _Names:
    """Torch's side of `match`."""

    shapes: Mapping[str, tuple[int, ...]]
    kinds: Mapping[str, str]
    tied: Mapping[str, Sequence[str]]
    frozen: frozenset[str]

    def first(self, name: str) -> str:
        """The first name of a parameter that has several."""
        return next((first for first, names in self.tied.items() if name in names), name)


class _Matcher:
    """The search for partners: each line of the table claims the leaves that it finds."""

    def __init__(self, torch: _Names, jax_leaves: JaxLeaves, mapping: dict[str, Any]) -> None:
        self.torch = torch
        self.shapes = {"/".join(path): shape for path, shape in jax_leaves}
        self.index = {path: number for number, path in enumerate(self.shapes)}
        self.mapping = {
            name: value if isinstance(value, tuple) else (value, None)
            for name, value in mapping.items()
        }
        self.modules = self._modules()
        self.places: dict[str, list[Place]] = {name: [] for name in torch.shapes}
        self._check_mapping()

    def _modules(self) -> dict[tuple[str, str], dict[str, str]]:
        """(module, its kind with sizes) -> local name -> first name of the parameter."""
        found: dict[tuple[str, str], dict[str, str]] = {}
        for name, kind in self.torch.kinds.items():
            module, local = split(name, kind)
            found.setdefault((module, kind), {})[local] = self.torch.first(name)
        return found

    def _check_mapping(self) -> None:
        """Refuse a table with names that nobody has."""
        prefixes = {
            ".".join(module.split(".")[:k])
            for module, _ in self.modules
            for k in range(1, module.count(".") + 2)
        }
        unknown = sorted(set(self.mapping) - set(self.torch.kinds) - prefixes)
        paths = [path.removeprefix(root) for path in self.index for root in ROOTS]
        unknown += sorted(
            path for path, _ in self.mapping.values()
            if not any(f"{known}/".startswith(f"{path}/") for known in (*self.index, *paths))
        )  # fmt: skip
        if unknown:
            raise ValueError(
                f"mapping names {unknown}, which neither model has. Expected torch names "
                f"{sorted(self.torch.shapes)} and JAX paths {sorted(self.index)}."
            )

    def leaves(self) -> tuple[Leaf, ...]:
        """Every parameter with its places.

        Raises:
            ValueError: see `match`.
        """
        for (module, kind), locals_ in self.modules.items():
            for line in lines_for(kind, locals_):
                for path in self._paths(module, line):
                    self._claim(path, line, kind, locals_)
        for name, place in self._mapped():
            self.places[name].append(place)
        self._refuse_left_over()
        self._number()
        streams = len(self.index)
        return tuple(
            Leaf(name, shape, tuple(sorted(self.places[name], key=_row)), streams + number)
            for number, (name, shape) in enumerate(self.torch.shapes.items())
        )

    def suggestion(self) -> dict[str, str]:
        """Module -> path, for the modules that have no partner by name."""
        free, lost = set(self.shapes), []
        for (module, kind), locals_ in self.modules.items():
            named = {
                path for line in lines_for(kind, locals_) for path in self._paths(module, line)
            }
            free -= named
            if module and not named:
                lost.append((module, kind, locals_))
        found: dict[str, str] = {}
        for module, kind, locals_ in lost:
            for prefix in sorted(_prefixes(free), key=_natural):
                below = {path for path in free if path.startswith(f"{prefix}/")}
                if below == self._fitting(prefix, module, kind, locals_):
                    found[module] = prefix
                    free -= below
                    break
        return found

    def _fitting(self, prefix: str, module: str, kind: str, locals_: Mapping[str, str]) -> set[str]:
        """The leaves below a path, if they could be all of a module's parameters; else nothing."""
        needed = {name for name in locals_.values() if split(name, kind)[0] == module}
        fit = set()
        for line in lines_for(kind, locals_):
            path, names = f"{prefix}/{line[2]}", [locals_[term.local] for term in line[1]]
            axes = [self._axes(*pair, line[3], kind) for pair in zip(names, line[1], strict=True)]
            if path in self.shapes and all(a and a.jax_shape == self.shapes[path] for a in axes):
                fit.add(path)
                needed -= set(names)
        return set() if needed else fit

    # ------------------------------------------------------------------ names

    def _paths(self, module: str, line: Line) -> list[str]:
        """The JAX leaf that a line finds for a module: none or one."""
        words = module.split(".") if module else []
        names = [".".join([*words, term.local]) for term in line[1]]
        if any(joined(name) in self.mapping for name in names):
            return []  # the table of the user decides
        mapped = [k for k in range(len(words), 0, -1) if ".".join(words[:k]) in self.mapping]
        head, rest = [""], words
        if mapped:
            target, rest = self.mapping[".".join(words[: mapped[0]])][0], words[mapped[0] :]
            head = [f"/{target}"]
            if not rest and line[0] in RECURRENT:
                head.append(f"/{target}/cell")
        choices = [head, *(places_of(word, line[0]) for word in rest)]
        wanted = {"".join(parts).removeprefix("/") for parts in product(*choices)}
        wanted = {f"{path}/{line[2]}".removeprefix("/") for path in wanted}
        paths = [root + path for path in sorted(wanted) for root in ROOTS]
        found = [path for path in paths if path in self.index]
        if len(found) > 1:
            raise ValueError(
                f"{names[0]} could be any of the JAX leaves {found}. Expected one; pass "
                f"mapping={{{names[0]!r}: 'jax/path'}}, or one for its module."
            )
        return found

    def _mapped(self) -> Iterator[tuple[str, Place]]:
        """Parameters that the user's table names themselves."""
        for name, (target, layout) in self.mapping.items():
            if name not in self.torch.kinds:
                continue
            path = next((root + target for root in ROOTS if root + target in self.index), target)
            kind, first = self.torch.kinds[name], self.torch.first(name)
            local = split(name, kind)[1]
            known = [
                line[3] for line in lines_for(kind, {local: name})
                if line[2].split("/")[-1] == path.split("/")[-1] or line[0] == "raw"
            ]  # fmt: skip
            if layout is None and (len(known) != 1 or path not in self.index):
                raise ValueError(
                    f"mapping has {name!r}: {target!r}, for which there is no layout (a {kind} "
                    f"parameter {self.torch.shapes[first]}, and {self.shapes.get(path)}). Expected "
                    f"the layout too, {name!r}: ({target!r}, 'o i -> i o'), or its module's name."
                )
            whole = Term("", None, None)
            yield first, self._place(path, first, whole, layout or known[0], kind)

    # ------------------------------------------------------------------ claims

    def _claim(self, path: str, line: Line, kind: str, locals_: Mapping[str, str]) -> None:
        """A line found a leaf for its parameters."""
        for number, term in enumerate(line[1]):
            name = locals_[term.local]
            place = self._place(path, name, term, line[3], kind)
            self.places[name].append(replace(place, is_added=number > 0))

    def _place(self, path: str, name: str, term: Term, layout: str, kind: str) -> Place:
        """The place of (a part of) a parameter, once its shape agrees."""
        shape = self.torch.shapes[name]
        axes = self._axes(name, term, layout, kind)
        expected = None if axes is None else axes.jax_shape
        if axes is None or expected != self.shapes[path]:
            part = f" (part {term.part[0]} of {term.part[1]})" if term.part else ""
            raise ValueError(
                f"{name} {shape}{part} in torch would be {expected or layout} in JAX, but {path} "
                f"is {self.shapes[path]}. Expected the same sizes on both sides."
            )
        rows = _rows(shape, term.part) if shape else None
        zero = _rows(shape, term.zero) if term.zero else None
        return Place(path, self.index[path], -1, rows, axes, zero=zero)

    def _axes(self, name: str, term: Term, layout: str, kind: str) -> Axes | None:
        """The layout of (a part of) a parameter, or None where it does not fit."""
        shape = self.torch.shapes[name]
        first, last = _rows(shape, term.part) if shape else (0, 0)
        sizes = {k: int(v) for k, v in re.findall(r"(\w)=(\d+)", kind)}
        return Axes.of(layout, (last - first, *shape[1:]) if shape else (), sizes)

    def _refuse_left_over(self) -> None:
        """Everything has one partner, or a sentence that names both sides."""
        claims = [(place.path, name) for name, places in self.places.items() for place in places
                  if not place.is_added]  # fmt: skip
        paths = [path for path, _ in claims]
        lonely = [
            f"{name} {shape}" for name, shape in self.torch.shapes.items()
            if _covered(self.places[name]) < (shape[0] if shape else 1)
        ]  # fmt: skip
        spare = [f"{path} {shape}" for path, shape in self.shapes.items() if path not in paths]
        if lonely or spare:
            raise ValueError(
                f"No partner for the torch parameters {lonely} and the JAX leaves {spare}. "
                "Expected the same names on both sides; pass mapping={torch name: 'jax/path'}."
            )
        if len(set(paths)) < len(paths):
            twice = sorted({claim for claim in claims if paths.count(claim[0]) > 1})
            raise ValueError(
                f"Two torch parameters share a JAX leaf: {twice}. Expected one partner each; pass "
                "mapping={torch name: 'jax/path'}."
            )
        doubled = [name for name, shape in self.torch.shapes.items()
                   if _covered(self.places[name]) > (shape[0] if shape else 1)]  # fmt: skip
        if doubled:
            where = {name: [place.path for place in self.places[name]] for name in doubled}
            raise ValueError(
                f"Two JAX leaves share a torch parameter: {where}. Expected one partner each; a "
                "weight that is tied in torch must be tied in JAX, or untie it in torch."
            )

    def _number(self) -> None:
        """Number the leaves that are trained, in their order: JAX draws noise for these."""
        trained = sorted({
            place.index for name, places in self.places.items() for place in places
            if name not in self.torch.frozen and not place.is_added
        })  # fmt: skip
        for name, places in self.places.items():
            self.places[name] = [
                replace(p, noise_index=trained.index(p.index) if p.index in trained else -1)
                for p in places
            ]


def _rows(shape: tuple[int, ...], part: tuple[int, int] | None) -> tuple[int, int]:
    """First and last + 1 row of the k-th of n parts."""
    k, n = part or (0, 1)
    return shape[0] * k // n, shape[0] * (k + 1) // n


def _covered(places: Sequence[Place]) -> int:
    """How many rows have a place."""
    return sum(1 if place.rows is None else place.rows[1] - place.rows[0] for place in places)


def _row(place: Place) -> int:
    """First row."""
    return place.rows[0] if place.rows else 0


def _prefixes(paths: set[str]) -> set[str]:
    """Every path that has leaves below it."""
    return {
        "/".join(words[:k])
        for words in (path.split("/") for path in paths)
        for k in range(1, len(words))
    }


def _natural(path: str) -> list[tuple[int, str]]:
    """Order in which Dense_10 comes behind Dense_2."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", path)]
