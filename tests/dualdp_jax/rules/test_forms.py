# SPDX-License-Identifier: Apache-2.0
"""Every form of every rule against plain autodiff, and faults planted in each form.

The switch `forced` makes small models take forms that the cost model leaves to large ones.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualdp_jax as dpj
from dualdp_jax.per_sample import gradients, tied
from dualdp_jax.rules import conv, dot_general, gather
from dualdp_jax.rules.base import forced

N = 8
RNG = np.random.default_rng(2)
LAST = ("NHWC", "HWIO", "NHWC")


def draw(*shape):
    return jnp.asarray(RNG.normal(size=shape) / 2, jnp.float32)


def words(high, *shape):
    return jnp.asarray(RNG.integers(0, high, (N, *shape)))


def dense(p, x):
    return jnp.sum(jnp.sin(x @ p["w"]) ** 2)


def blocks(p, x):
    """Independent products: a batch axis of the weight."""
    return jnp.sum(jnp.sin(jnp.einsum("tbi,bio->tbo", x, p["w"])) ** 2)


def recurrent(p, x):
    step = lambda h, row: (jnp.tanh(row + h @ p["w"]), None)  # noqa: E731
    return jnp.sum(jax.lax.scan(step, x[0], x)[0] ** 2)


def stacked(p, x):
    """A weight of its own at each step."""
    step = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
    return jnp.sum(jax.lax.scan(step, x, p["w"])[0] ** 2)


def image(p, x, groups=1, stride=1):
    out = jax.lax.conv_general_dilated(
        x[None], p["w"], (stride, stride), "SAME", dimension_numbers=LAST,
        feature_group_count=groups,
    )  # fmt: skip
    return jnp.sum(jnp.sin(out) ** 2)


def image_in_a_scan(p, x):
    step = lambda h, _: (jnp.tanh(h + image_of(p, h)), None)  # noqa: E731
    return jnp.sum(jax.lax.scan(step, x, None, 2)[0] ** 2)


def image_of(p, x):
    return jax.lax.conv_general_dilated(x[None], p["w"], (1, 1), "SAME", dimension_numbers=LAST)[0]


def lookup(p, i):
    return jnp.sum(jnp.sin(p["w"][i]) ** 2)


def lookup_sum(p, i):
    return jnp.sum(jnp.sin(p["w"][i].sum(0)) ** 2)


def lookup_in_a_scan(p, i):
    step = lambda h, k: (jnp.tanh(h + p["w"][k].sum(0)), None)  # noqa: E731
    return jnp.sum(jax.lax.scan(step, jnp.zeros(6), i)[0] ** 2)


def tied_head(p, i):
    h = jnp.tanh(p["w"][i])
    return jnp.sum(jax.nn.log_softmax(h @ p["w"].T)[:, 0] ** 2)


def used_twice(p, x):
    return jnp.sum(jnp.sin(jnp.tanh(x @ p["w"]) @ p["w"]) ** 2)


ONE, DOT = ("lengths", "gram", "gradients"), ("gram", "gradients")
CONV, TIED = ("gram", "patches", "offsets"), ("pairs", "formed")
ROWS, COUNTS = ("table", "sort"), ("table",)  # of lookups; a sum of all rows needs counts alone
#: name: (loss, shape of the weight, batch, forms)
CASES = {
    "one position": (dense, (7, 5), draw(N, 7), ONE),
    "blocks of one position": (blocks, (3, 6, 4), draw(N, 1, 3, 6), ONE),
    "positions": (dense, (7, 5), draw(N, 4, 7), DOT),
    "blocks": (blocks, (3, 6, 4), draw(N, 4, 3, 6), DOT),
    "recurrence": (recurrent, (6, 6), draw(N, 5, 6), DOT),
    "stacked layers": (stacked, (3, 6, 6), draw(N, 4, 6), DOT),
    "image": (image, (3, 3, 2, 4), draw(N, 5, 5, 2), CONV),
    "groups": (functools.partial(image, groups=2), (3, 3, 2, 4), draw(N, 4, 4, 4), CONV),
    "stride": (functools.partial(image, stride=2), (3, 2, 3, 4), draw(N, 6, 5, 3), CONV),
    "channels": (functools.partial(image, groups=3), (3, 3, 1, 3), draw(N, 4, 5, 3), CONV),
    "image in a scan": (image_in_a_scan, (3, 3, 2, 2), draw(N, 4, 4, 2), CONV),
    "lookup": (lookup, (5, 6), words(5, 7), ROWS),
    "sum of rows": (lookup_sum, (5, 6), words(5, 7), COUNTS),
    "sum of few": (lookup_sum, (9, 3), words(3, 6), COUNTS),
    "lookup in a scan": (lookup_in_a_scan, (5, 6), words(5, 4, 2), ROWS),
    "beyond the table": (lookup, (5, 6), words(7, 7), ROWS),
    "tied head": (tied_head, (7, 6), words(7, 5), TIED),
    "used twice": (used_twice, (6, 6), draw(N, 4, 6), TIED),
    "used twice, one row": (used_twice, (6, 6), draw(N, 1, 6), TIED),
}
CLIPPING = ("flat", "per_layer", "automatic")
#: Every form of every case, and the last one of each with gradients that are kept.
GRID = [(name, form, False) for name, case in CASES.items() for form in case[3]]
GRID += [(name, case[3][-1], True) for name, case in CASES.items()]


@functools.cache
def truth(name):
    """Weight, and per-example gradients in float64 by `jax.grad` of one example after the other."""
    loss, shape, x, _ = CASES[name]
    w = np.random.default_rng(1).normal(size=shape) / 2
    with jax.enable_x64(True):
        wide = jnp.asarray(x, jnp.float64) if x.dtype == jnp.float32 else x
        grad = jax.jit(jax.grad(loss))
        each = [grad({"w": jnp.asarray(w)}, row)["w"] for row in wide]
        return np.asarray(w, np.float32), np.stack([np.asarray(g) for g in each])


def errors_of(name, form, is_kept):
    """What is wrong, for each kind of clipping; one program has the sums of all."""
    loss, _, x, _ = CASES[name]
    w, grads = truth(name)
    lengths = np.sqrt(np.square(grads).reshape(N, -1).sum(1))
    bound = float(np.median(lengths)) / 2
    given = {"max_grad_norm": bound, "method": "materialize" if is_kept else "book_keeping"}
    with forced(form, "kept" if is_kept else "dropped"):
        sums = jax.jit(
            lambda w, x: [
                dpj.clipped_grad_sum(loss, {"w": w}, x, clipping=clipping, check="off", **given)
                for clipping in CLIPPING
            ]
        )(w, x)
    for clipping, found in zip(CLIPPING, sums, strict=True):
        shrunk = bound / (1 + 1e-4)
        factors = np.minimum(1, shrunk / np.maximum(lengths, 1e-30))
        factors = shrunk / (lengths + 0.01) if clipping == "automatic" else factors
        gap = np.linalg.norm(found.grads["w"] - np.tensordot(factors, grads, 1))
        if not np.allclose(found.norms, lengths, rtol=2e-4) or gap > 1e-3 * bound:
            yield name, form, clipping, gap / bound


FAST = ("lengths", "formed")  # which few cases have
FORMS = {case[1]: () if case[1] in FAST else pytest.mark.slow for case in GRID}


@pytest.mark.parametrize("form", [pytest.param(form, marks=FORMS[form]) for form in FORMS])
def test_every_form_is_that_of_plain_autodiff(form):
    wrong = [error for case in GRID if case[1] == form for error in errors_of(*case)]
    assert not wrong


# ---------------------------------------------------------------------- faults


def smaller(found):
    """Squared norms of an estimate, or norms, too small: contributions of 1.12 C."""
    if hasattr(found, "_replace"):
        return found._replace(sq_norms=0.8 * found.sq_norms)
    return 0.8 * found


def shifted(iterator):
    """The gradients of the kernel's first offset are lost."""
    first, *rest = iterator
    return [0 * first, *rest]


#: name: (owner, function, change of its result, cases and forms that must see it)
FAULTS = {
    "gram of a product": (dot_general, "gram_norms", smaller, (ONE, DOT), "gram"),
    "lengths of a product": (dot_general, "of_lengths", smaller, (ONE,), "lengths"),
    "formed gradients": (dot_general, "outer", lambda g: 0.9 * g, (ONE, DOT), "gradients"),
    "sum of a product": (dot_general, "weighted_outer", lambda g: 1.01 * g, (ONE, DOT), "gram"),
    "gram of a convolution": (conv, "gram_norms", smaller, (CONV,), "gram"),
    "formed norms": (conv, "formed_norms", smaller, (CONV,), ""),
    "patches of a convolution": (conv, "patches_of", lambda x: 0.9 * x, (CONV,), "patches"),
    "offsets of a convolution": (conv, "offset_grads", shifted, (CONV,), "offsets"),
    "sum of a convolution": (conv, "scaled", lambda x: 1.01 * x, (CONV,), ""),
    "table of a lookup": (gather, "sq_norms_by_table", smaller, (ROWS,), "table"),
    "sort of a lookup": (gather, "sq_norms_by_sort", smaller, (ROWS,), "sort"),
    "counts of a lookup": (gather, "of_lengths", smaller, (COUNTS,), ""),
    "sum of a lookup": (gather, "scaled", lambda x: 1.01 * x, (ROWS,), ""),
    "pairs of a tied matrix": (tied, "pairs", lambda x: 0.8 * x, (TIED,), "pairs"),
    "sum of a kept gradient": (gradients, "weighted_sum", lambda x: 1.01 * x, (TIED,), "formed"),
}
AT_LEAST = 5


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_form_fails_five_cases(fault, monkeypatch):
    owner, name, change, kinds, form = FAULTS[fault]
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **k: change(right(*a, **k)))
    failed = 0
    for case in GRID:
        if CASES[case[0]][3] in kinds and case[1].startswith(form) and failed < AT_LEAST:
            failed += len(list(errors_of(*case)))
    assert failed >= AT_LEAST
