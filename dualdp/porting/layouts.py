# SPDX-License-Identifier: Apache-2.0
"""Table of parameter names and layouts in both backends.

Layouts are written as in mathematics: torch's axes on the left, JAX's on the right. `o` out, `i`
in, `h` heads, `d` size of one head, `v` vocabulary, `c` channels, `...` the remaining axes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_QKV = ("query", "key", "value")
RECURRENT = ("lstm", "gru", "rnn")

# kind of torch module | its parameters: [1/4] is the second quarter of axis 0, + a sum, [2/3 = 0] a
# part without counterpart in JAX | path below the Flax module | layout. What is not listed, as most
# biases, has the same name and layout in both.
LAYOUTS: tuple[tuple[str, str, str, str], ...] = (
    ("linear", "weight", "kernel", "o i -> i o"),
    ("conv1d of transformers", "weight", "kernel", "i o -> i o"),
    ("conv", "weight", "kernel", "o i ... -> ... i o"),
    ("transposed conv", "weight", "kernel", "i o ... -> ... o i"),  # transpose_kernel=True
    ("embedding", "weight", "embedding", "v d -> v d"),
    ("norm", "weight", "scale", "... -> ..."),
    ("norm", "running_mean", "mean", "c -> c"),
    ("norm", "running_var", "var", "c -> c"),
    *(("attention", f"in_proj_weight[{n}/3]", f"{w}/kernel", "(h d) i -> i h d") for n, w in
      enumerate(_QKV)),
    *(("attention", f"in_proj_bias[{n}/3]", f"{w}/bias", "(h d) -> h d") for n, w in
      enumerate(_QKV)),
    *(("attention", f"{w[0]}_proj_weight", f"{w}/kernel", "(h d) i -> i h d") for w in _QKV),
    ("attention", "out_proj.weight", "out/kernel", "o (h d) -> h d o"),
    ("attention", "out_proj.bias", "out/bias", "o -> o"),
    *(("lstm", f"weight_ih[{n}/4]", f"i{g}/kernel", "o i -> i o") for n, g in enumerate("ifgo")),
    ("lstm", "weight_ih[1/4]", "if_/kernel", "o i -> i o"),  # nnx, where `if` is no attribute
    *(("lstm", f"weight_hh[{n}/4]", f"h{g}/kernel", "o i -> i o") for n, g in enumerate("ifgo")),
    *(("lstm", f"bias_ih[{n}/4] + bias_hh[{n}/4]", f"h{g}/bias", "o -> o") for n, g in
      enumerate("ifgo")),
    ("lstm", "bias_ih + bias_hh", "dense_h/bias", "o -> o"),
    *(("gru", f"weight_ih[{n}/3]", f"i{g}/kernel", "o i -> i o") for n, g in enumerate("rzn")),
    *(("gru", f"weight_hh[{n}/3]", f"h{g}/kernel", "o i -> i o") for n, g in enumerate("rzn")),
    *(("gru", f"bias_ih[{n}/3] + bias_hh[{n}/3]", f"i{g}/bias", "o -> o") for n, g in
      enumerate("rz")),
    ("gru", "bias_ih[2/3]", "in/bias", "o -> o"),
    ("gru", "bias_hh[2/3]", "hn/bias", "o -> o"),
    ("gru", "bias_ih + bias_hh[2/3 = 0]", "dense_i/bias", "o -> o"),
    *((k, f"weight_{w}h", f"dense_{w}/kernel", "o i -> i o") for k in RECURRENT for w in "ih"),
    ("rnn", "weight_ih", "i/kernel", "o i -> i o"),
    ("rnn", "weight_hh", "h/kernel", "o i -> i o"),
    ("rnn", "bias_ih + bias_hh", "i/bias", "o -> o"),
    ("rnn", "bias_ih + bias_hh", "dense_i/bias", "o -> o"),
)  # fmt: skip

_LAYER = re.compile(r"(weight|bias)_(ih|hh|hr)_(l\d+(?:_reverse)?)")
ROOTS = ("", "params/", "batch_stats/")


@dataclass(frozen=True)
class Term:
    """One parameter of a line; (k, n) is the k-th of n equal blocks of its rows.

    `block` is the block that the line is about, None for all rows; `zero` one that must be zero.
    """

    local: str
    block: tuple[int, int] | None = None
    zero: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str) -> list[Term]:
        """Return the terms of an expression such as "bias_ih + bias_hh[2/3 = 0]"."""
        terms = []
        for word in text.split(" + "):
            found = re.fullmatch(r"([\w.]+)(?:\[(\d)/(\d)( = 0)?\])?", word)
            assert found is not None
            block = (int(found[2]), int(found[3])) if found[2] else None
            terms.append(cls(found[1], None if found[4] else block, block if found[4] else None))
        return terms


Line = tuple[str, list[Term], str, str]
_LINES: tuple[Line, ...] = tuple(
    (kind, Term.parse(torch), jax, layout) for kind, torch, jax, layout in LAYOUTS
)


def base(kind: str) -> str:
    """Return a kind without its sizes: "attention h=4" -> "attention"."""
    return kind.split(" h=")[0]


def split(name: str, kind: str) -> tuple[str, str]:
    """Return module and local name: "a.lstm.weight_ih_l1" -> ("a.lstm.l1", "weight_ih")."""
    *module, last = name.split(".")
    layer = _LAYER.fullmatch(last) if kind in RECURRENT else None
    if layer:
        return ".".join([*module, layer[3]]), f"{layer[1]}_{layer[2]}"
    if base(kind) == "attention" and module and module[-1] == "out_proj":
        return ".".join(module[:-1]), f"out_proj.{last}"
    return ".".join(module), last


def lines_for(kind: str, locals_: Mapping[str, str]) -> list[Line]:
    """Return the lines whose parameters a module has; unlisted parameters keep their name."""
    lines = [line for line in _LINES if line[0] == base(kind)]
    known = {term.local for line in lines for term in line[1]}
    fit = [line for line in lines if all(term.local in locals_ for term in line[1])]
    raw = [local for local in locals_ if local not in known]
    return [*fit, *(("raw", [Term(local)], local, "... -> ...") for local in raw)]


def canonical(path: str, kind: str) -> str:
    """Return the form that a JAX path has in common with torch's name, written with slashes.

    Entry n of a list is "/n", "_n", "/layers/n" or "/layers_n" in JAX. The layer l1 of an RNN is
    "/l1" or "_l1", the layer l0 may be left out, and the cells of one with two directions are
    "/forward_rnn/cell" and "/backward_rnn/cell".
    """
    path = re.sub(r"^/(params|batch_stats)(?=/)", "", f"/{path}")
    if kind in RECURRENT:
        path = path.replace("/backward_rnn/", "_reverse/")
        path = re.sub(r"(/forward_rnn)?/cell(?=/)", "", path)
        path = re.sub(r"[/_]l0(?=/|_reverse/)", "", path)
        path = re.sub(r"[/_](l\d+)(?=/|_reverse/)", r"/\1", path)
    return re.sub(r"(/layers)*[/_](\d+)(?=(_\d+)*(_reverse)?/)", r"/\2", path)
