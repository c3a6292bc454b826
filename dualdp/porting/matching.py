# SPDX-License-Identifier: Apache-2.0
"""Matching of torch parameters to JAX leaves, by names and layouts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product

from dualdp import _validate
from dualdp.porting import layouts
from dualdp.porting.layouts import RECURRENT, ROOTS, Line, Term
from dualdp.porting.parameter_map import Axes, LeafSlice, ParameterMap

Mapped = Mapping[str, str | tuple[str, str]]
JaxLeaves = Sequence[tuple[tuple[str, ...], tuple[int, ...]]]


@dataclass
class Matcher:
    """Search for partners: each line of `LAYOUTS` claims the leaves that it finds.

    Args:
        torch_shapes: mapping from the name of a parameter or running statistic to its shape.
        torch_kinds: mapping from every name, tied ones included, to its kind: the first column of
            `LAYOUTS`, with sizes of letters, such as "attention h=4". A kind that is not listed
            keeps name and layout.
        jax_leaves: (path, shape) in the order of `jax.tree.leaves`.
        mapping: mapping for names that differ, from a torch parameter or module (layer l of an RNN
            is "rnn.l0", "rnn.l0_reverse") to a JAX path joined by "/", or (path, layout).
        tied: mapping from the first name to all names of a parameter with several names.
        frozen: names without gradient; the JAX leaf is then frozen too and has no noise.
    """

    torch_shapes: Mapping[str, tuple[int, ...]]
    torch_kinds: Mapping[str, str]
    jax_leaves: JaxLeaves
    mapping: Mapped | None = None
    tied: Mapping[str, Sequence[str]] | None = None
    frozen: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not isinstance(self.mapping, Mapping | None):
            raise TypeError(
                f"mapping is {_validate.kind(self.mapping)}. Expected a mapping from torch names "
                "to JAX paths, {'fc': 'Dense_0'}."
            )
        tied = (self.tied or {}).items()
        self.first_name = {name: first for first, names in tied for name in names}
        self.shapes = {"/".join(path): shape for path, shape in self.jax_leaves}
        self.index = {path: number for number, path in enumerate(self.shapes)}
        self.targets = {
            name: value if isinstance(value, tuple) else (value, None)
            for name, value in (self.mapping or {}).items()
        }
        # (module, its kind with sizes) -> local name -> first name of the parameter
        self.modules: dict[tuple[str, str], dict[str, str]] = {}
        for name, kind in self.torch_kinds.items():
            module, local = layouts.split(name, kind)
            first = self.first_name.get(name, name)
            self.modules.setdefault((module, kind), {})[local] = first
        self.slices: dict[str, list[LeafSlice]] = {name: [] for name in self.torch_shapes}
        self._check_mapping()

    def _check_mapping(self) -> None:
        """Raise if the mapping has names that neither model has."""
        prefixes = {
            prefix for module, _ in self.modules for prefix in _prefixes(module.split("."), ".")
        }
        unknown = sorted(set(self.targets) - set(self.torch_kinds) - prefixes)
        paths = [path.removeprefix(root) for path in self.index for root in ROOTS]
        unknown += sorted(
            path for path, _ in self.targets.values()
            if not any(f"{known}/".startswith(f"{path}/") for known in (*self.index, *paths))
        )  # fmt: skip
        if unknown:
            raise ValueError(
                f"mapping names {unknown}, which neither model has. Expected torch names "
                f"{sorted(self.torch_shapes)} and JAX paths {sorted(self.index)}."
            )

    def parameter_maps(self) -> tuple[ParameterMap, ...]:
        """Return the map of every parameter, in torch's order; none may be left over."""
        for (module, kind), locals_ in self.modules.items():
            for line in layouts.lines_for(kind, locals_):
                for path in self._paths(module, line):
                    for number, term in enumerate(line[1]):
                        name = locals_[term.local]
                        found = self._slice(path, name, term, line[3], kind)
                        self.slices[name].append(replace(found, is_added=number > 0))
        for name, found in self._mapped():
            self.slices[name].append(found)
        self._refuse_left_over()
        # Trained leaves are numbered in their order, as JAX does for their noise.
        trained = sorted({
            found.index for name, slices in self.slices.items() for found in slices
            if name not in self.frozen and not found.is_added
        })  # fmt: skip
        noise_index = {index: number for number, index in enumerate(trained)}
        maps = []
        for number, (name, shape) in enumerate(self.torch_shapes.items()):
            numbered = (
                replace(found, noise_index=noise_index.get(found.index, -1))
                for found in sorted(self.slices[name], key=lambda s: s.rows[0] if s.rows else 0)
            )
            maps.append(ParameterMap(name, shape, tuple(numbered), len(self.index) + number))
        return tuple(maps)

    def _paths(self, module: str, line: Line) -> list[str]:
        """JAX leaves that a line finds for a module: none or one."""
        components = module.split(".") if module else []
        names = [".".join([*components, term.local]) for term in line[1]]
        if any(layouts.joined(name) in self.targets for name in names):
            return []  # set by the user's mapping
        head, rest = [""], components
        for k, prefix in enumerate(_prefixes(components, "."), 1):  # the longest one with a mapping
            if prefix in self.targets:
                target, rest = self.targets[prefix][0], components[k:]
                head = [f"/{target}"]
                if not rest and line[0] in RECURRENT:
                    head.append(f"/{target}/cell")
        forms = [head, *(layouts.path_forms(component, line[0]) for component in rest)]
        wanted = {"".join(form).removeprefix("/") for form in product(*forms)}
        wanted = {f"{path}/{line[2]}".removeprefix("/") for path in wanted}
        paths = [root + path for path in sorted(wanted) for root in ROOTS]
        found = [path for path in paths if path in self.index]
        if len(found) > 1:
            raise ValueError(
                f"{names[0]} could be any of the JAX leaves {found}. Expected one; pass "
                f"mapping={{{names[0]!r}: 'jax/path'}}, or one for its module."
            )
        return found

    def _mapped(self) -> Iterator[tuple[str, LeafSlice]]:
        """(name, slice) of the parameters that the user's mapping names."""
        for name, (target, layout) in self.targets.items():
            if name not in self.torch_kinds:
                continue
            path = next((root + target for root in ROOTS if root + target in self.index), target)
            kind, first = self.torch_kinds[name], self.first_name.get(name, name)
            local = layouts.split(name, kind)[1]
            known = [
                line[3] for line in layouts.lines_for(kind, {local: name})
                if line[2].split("/")[-1] == path.split("/")[-1] or line[0] == "raw"
            ]  # fmt: skip
            if layout is None and (len(known) != 1 or path not in self.index):
                raise ValueError(
                    f"mapping has {name!r}: {target!r}, for which there is no layout (a {kind} "
                    f"parameter {self.torch_shapes[first]}, and {self.shapes.get(path)}). Expected "
                    f"the layout too, {name!r}: ({target!r}, 'o i -> i o'), or its module's name."
                )
            whole = Term("", None, None)
            yield first, self._slice(path, first, whole, layout or known[0], kind)

    def _slice(self, path: str, name: str, term: Term, layout: str, kind: str) -> LeafSlice:
        """Rows of a parameter that the leaf at `path` holds, after a check of its shape."""
        shape = self.torch_shapes[name]
        rows = _rows(shape, term.block) if shape else None
        sizes = {k: int(v) for k, v in re.findall(r"(\w)=(\d+)", kind)}
        axes = Axes.of(layout, (rows[1] - rows[0], *shape[1:]) if rows else (), sizes)
        expected = None if axes is None else axes.jax_shape
        if axes is None or expected != self.shapes[path]:
            block = f" (part {term.block[0]} of {term.block[1]})" if term.block else ""
            raise ValueError(
                f"{name} {shape}{block} in torch would be {expected or layout} in JAX, but {path} "
                f"is {self.shapes[path]}. Expected the same sizes on both sides."
            )
        zero = _rows(shape, term.zero) if term.zero else None
        return LeafSlice(path, self.index[path], -1, rows, axes, zero=zero)

    def _refuse_left_over(self) -> None:
        """Raise unless every parameter and every leaf has exactly one partner."""
        owners: dict[str, list[str]] = {path: [] for path in self.shapes}
        left = {}  # rows of each parameter, less the rows that some leaf holds
        for name, shape in self.torch_shapes.items():
            left[name] = shape[0] if shape else 1
            for found in self.slices[name]:
                left[name] -= found.rows[1] - found.rows[0] if found.rows else 1
                owners[found.path] += [] if found.is_added else [name]
        lonely = [f"{name} {shape}" for name, shape in self.torch_shapes.items() if left[name] > 0]
        spare = [f"{path} {shape}" for path, shape in self.shapes.items() if not owners[path]]
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


def _prefixes(words: list[str], joint: str) -> list[str]:
    """Prefixes of a path: "a", "a.b" and "a.b.c" of ["a", "b", "c"]."""
    return list(accumulate(words, lambda above, word: f"{above}{joint}{word}"))
