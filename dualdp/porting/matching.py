# SPDX-License-Identifier: Apache-2.0
"""Matching of torch parameters to JAX leaves, by names and layouts."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from dualdp import _validate
from dualdp.porting import layouts
from dualdp.porting.layouts import ROOTS, Term
from dualdp.porting.parameter_map import Axes, LeafSlice, ParameterMap

Mapped = Mapping[str, str | tuple[str, str]]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class Matcher:
    """Search for partners: each line of `LAYOUTS` claims the leaves that it finds.

    Args:
        torch_shapes: mapping from the name of a parameter or running statistic to its shape.
        torch_kinds: mapping from every name, tied ones included, to its kind: the first column of
            `LAYOUTS`, with sizes of letters, such as "attention h=4". A kind that is not listed
            keeps name and layout.
        jax_shapes: mapping from path, joined by "/", to shape, in the order of `jax.tree.leaves`.
        mapping: mapping for names that differ, from a torch parameter or module (layer l of an RNN
            is "rnn.l0", "rnn.l0_reverse") to a JAX path joined by "/", or (path, layout).
        tied: mapping from the first name to all names of a parameter with several names.
        frozen: names without gradient; the JAX leaf is then frozen too and has no noise.
    """

    torch_shapes: Shapes
    torch_kinds: Mapping[str, str]
    jax_shapes: Shapes
    mapping: Mapped | None = None
    tied: Mapping[str, Sequence[str]] = field(default_factory=dict)
    frozen: Collection[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.mapping, Mapping | None):
            raise TypeError(
                f"mapping is {_validate.kind(self.mapping)}. Expected a mapping from torch names "
                "to JAX paths, {'fc': 'Dense_0'}."
            )
        self.first_name = {n: first for first, names in self.tied.items() for n in names}
        self.torch_shapes = {name: tuple(shape) for name, shape in self.torch_shapes.items()}
        self.jax_shapes = {path: tuple(shape) for path, shape in self.jax_shapes.items()}
        self.forms: dict[tuple[str, str], list[str]] = {}  # of a path, for a kind
        for path, kind in product(sorted(self.jax_shapes), {*self.torch_kinds.values()}):
            form = layouts.canonical(path, kind), kind
            self.forms.setdefault(form, []).append(path)
        self.targets = {
            name: value if isinstance(value, tuple) else (value, None)
            for name, value in (self.mapping or {}).items()
        }
        # (module, its kind with sizes) -> local name -> name of the parameter
        self.modules: dict[tuple[str, str], dict[str, str]] = {}
        for name, kind in self.torch_kinds.items():
            module, local = layouts.split(name, kind)
            self.modules.setdefault((module, kind), {})[local] = name
        self.slices: dict[str, list[LeafSlice]] = {name: [] for name in self.torch_shapes}
        self._check_mapping()

    def _check_mapping(self) -> None:
        """Raise if the mapping has names that neither model has."""
        unknown = sorted(
            name for name in self.targets.keys() - self.torch_kinds.keys()
            if not any(_is_in(module, name, ".") for module, _ in self.modules)
        )  # fmt: skip
        paths = {path.removeprefix(root) for path in self.jax_shapes for root in ROOTS}
        unknown += sorted(
            path for path, _ in self.targets.values()
            if not any(_is_in(known, path, "/") for known in paths)
        )  # fmt: skip
        if unknown:
            raise ValueError(
                f"mapping names {unknown}, which neither model has. Expected torch names "
                f"{sorted(self.torch_shapes)} and JAX paths {sorted(self.jax_shapes)}."
            )

    def parameter_maps(self) -> tuple[ParameterMap, ...]:
        """Return the map of every parameter, in torch's order; none may be left over."""
        for (module, kind), locals_ in self.modules.items():
            for _, terms, below, layout in layouts.lines_for(kind, locals_):
                names = [locals_[term.local] for term in terms]
                for path in self._paths(module, kind, below, names):
                    for number, (name, term) in enumerate(zip(names, terms, strict=True)):
                        self._claim(path, name, term, layout, is_added=number > 0)
        self._claim_mapped()
        self._refuse_left_over()
        trained = {
            found.path for name, slices in self.slices.items() for found in slices
            if name not in self.frozen and not found.is_added
        }  # fmt: skip
        # Trained leaves are numbered in their order, as JAX does for their noise.
        in_order = [path for path in self.jax_shapes if path in trained]
        noise_index = {path: number for number, path in enumerate(in_order)}
        maps = []
        for number, (name, shape) in enumerate(self.torch_shapes.items()):
            numbered = (
                replace(found, noise_index=noise_index.get(found.path, -1))
                for found in sorted(self.slices[name], key=lambda s: s.rows[0] if s.rows else 0)
            )
            maps.append(ParameterMap(name, shape, tuple(numbered), len(self.jax_shapes) + number))
        return tuple(maps)

    def _paths(self, module: str, kind: str, below: str, names: list[str]) -> list[str]:
        """JAX leaves at a path below that of a module, for these parameters: none or one."""
        if not self.targets.keys().isdisjoint(names):
            return []  # set by the user's mapping
        mapped = (prefix for prefix in self.targets if _is_in(module, prefix, "."))
        prefix = max(mapped, key=len, default="")
        rest = module.removeprefix(prefix).strip(".").replace(".", "/")
        target = self.targets[prefix][0] if prefix else ""
        path = "/".join(part for part in (target, rest, below) if part)
        found = [root + path for root in ROOTS if root + path in self.jax_shapes]
        found = found or self.forms.get((layouts.canonical(path, kind), kind), [])
        if len(found) > 1:
            raise ValueError(
                f"{names[0]} could be any of the JAX leaves {found}. Expected one; pass "
                f"mapping={{{names[0]!r}: 'jax/path'}}, or one for its module."
            )
        return found

    def _claim_mapped(self) -> None:
        """Claim the leaves of the parameters that the user's mapping names."""
        for name, (target, layout) in self.targets.items():
            if name not in self.torch_kinds:
                continue
            path = next(
                (root + target for root in ROOTS if root + target in self.jax_shapes), target
            )
            kind = self.torch_kinds[name]
            lines = layouts.lines_for(kind, {layouts.split(name, kind)[1]: name})
            known = [
                way for base, _, below, way in lines
                if base == "raw" or below.split("/")[-1] == path.split("/")[-1]
            ]  # fmt: skip
            if layout is None and (len(known) != 1 or path not in self.jax_shapes):
                shape = self.torch_shapes[self.first_name.get(name, name)]
                raise ValueError(
                    f"mapping has {name!r}: {target!r}, for which there is no layout (a {kind} "
                    f"parameter {shape}, and {self.jax_shapes.get(path)}). Expected "
                    f"the layout too, {name!r}: ({target!r}, 'o i -> i o'), or its module's name."
                )
            self._claim(path, name, Term(""), layout or known[0])

    def _claim(
        self, path: str, name: str, term: Term, layout: str, *, is_added: bool = False
    ) -> None:
        """Note that the leaf at `path` holds rows of a parameter, after a check of its shape."""
        first = self.first_name.get(name, name)
        shape = self.torch_shapes[first]
        rows = _rows(shape, term.block) if shape else None
        sizes = {k: int(v) for k, v in re.findall(r"(\w)=(\d+)", self.torch_kinds[name])}
        axes = Axes.of(layout, (rows[1] - rows[0], *shape[1:]) if rows else (), sizes)
        expected = None if axes is None else axes.jax_shape
        if axes is None or expected != self.jax_shapes[path]:
            block = f" (part {term.block[0]} of {term.block[1]})" if term.block else ""
            raise ValueError(
                f"{first} {shape}{block} in torch would be {expected or layout} in JAX, but {path} "
                f"is {self.jax_shapes[path]}. Expected the same sizes on both sides."
            )
        zero = _rows(shape, term.zero) if term.zero else None
        self.slices[first].append(LeafSlice(path, -1, rows, axes, is_added, zero))

    def _refuse_left_over(self) -> None:
        """Raise unless every parameter and every leaf has exactly one partner."""
        owners: dict[str, list[str]] = {path: [] for path in self.jax_shapes}
        left = {}  # rows of each parameter, less the rows that some leaf holds
        for name, shape in self.torch_shapes.items():
            left[name] = shape[0] if shape else 1
            for found in self.slices[name]:
                left[name] -= found.rows[1] - found.rows[0] if found.rows else 1
                owners[found.path] += [] if found.is_added else [name]
        lonely = [f"{name} {shape}" for name, shape in self.torch_shapes.items() if left[name] > 0]
        spare = [f"{path} {shape}" for path, shape in self.jax_shapes.items() if not owners[path]]
        twice = {path: names for path, names in owners.items() if len(names) > 1}
        doubled = {n: [s.path for s in self.slices[n]] for n in self.slices if left[n] < 0}
        for wrong, what in (
            (lonely + spare, f"No partner for torch parameters {lonely} and JAX leaves {spare}"),
            (twice, f"Two torch parameters share a JAX leaf: {twice}"),
            (doubled, f"Two JAX leaves share a torch parameter: {doubled}"),
        ):
            if wrong:
                raise ValueError(
                    f"{what}. Expected one partner each, and a weight tied on both sides or on "
                    "neither; pass mapping={torch name: 'jax/path'}."
                )


def _rows(shape: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, int]:
    """First and last + 1 row of the k-th of n equal blocks."""
    k, n = block or (0, 1)
    return shape[0] * k // n, shape[0] * (k + 1) // n


def _is_in(name: str, prefix: str, joint: str) -> bool:
    """True if a name is the prefix, or goes on with a joint after it."""
    return f"{name}{joint}".startswith(f"{prefix}{joint}")
