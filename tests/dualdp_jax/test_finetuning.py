# SPDX-License-Identifier: Apache-2.0
"""Losses of language models of Flax: gradients of single examples are those of plain autodiff."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualdp.jax as dpj
from dualdp.finetuning import packed_rows, preference_rows, sft_rows
from tests.closeness import assert_grads_close

nnx = pytest.importorskip("flax.nnx")
from tests.dualdp_jax.language_models import GPT2, Decoder  # noqa: E402

VOCABULARY, SIZES = 13, {"length": 8, "pad_token_id": 0}
DATA = [([1, 2], [3, 4, 5]), ([6], [7]), ([8, 9, 10], [11, 12])]
PAIRS = [(prompt, y, [5, 1, y[0]][: 1 + k]) for k, (prompt, y) in enumerate(DATA)]
SFT = sft_rows(*zip(*DATA, strict=True), **SIZES)


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def pairs(**more):
    return {**preference_rows(*zip(*PAIRS, strict=True), **SIZES), **more}


def linen_model():
    net = GPT2(VOCABULARY, 8, 1, 2, 32, jnp.float64)
    params = net.init(jax.random.key(0), jnp.zeros((1, 8), int))
    return jax.tree.map(
        lambda leaf: leaf + 0.1 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), params
    ), net.apply


def nnx_model():
    return Decoder(VOCABULARY, 8, nnx.Rngs(0)), lambda model, *inputs: model(*inputs)


FRAMEWORKS = {"linen": linen_model, "nnx": nnx_model}


def log_probs_of(model, ids, labels):
    """log pi(response) of one row."""
    inside = jax.nn.log_softmax(model(ids[None])[0])
    return inside[jnp.arange(7), labels[1:]][labels[1:] != -100].sum()


def leaves_of(grads):
    paths = jax.tree_util.tree_leaves_with_path(grads)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in paths}


def plain_grads(loss, what, rows):
    """Name -> (n, *shape): plain autodiff of `loss(what, row)` for each example."""
    grad = nnx.jit(nnx.grad(loss)) if isinstance(what, nnx.Module) else jax.jit(jax.grad(loss))
    count = len(rows["input_ids"])
    each = [leaves_of(grad(what, {k: c[i] for k, c in rows.items()})) for i in range(count)]
    return {name: np.stack([grads[name] for grads in each]) for name in each[0]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "name"), [("linen", "sft"), ("linen", "dpo"), ("nnx", "orpo")]
)
def test_losses_of_flax_are_plain_autodiff(framework, name):
    """Of padded rows and pairs; what the losses are is compared with PyTorch's."""
    what, run = FRAMEWORKS[framework]()
    rows = SFT if name == "sft" else pairs(reference_log_probs=np.linspace(-9, -1, 6).reshape(3, 2))
    ours = getattr(dpj, f"{name}_loss")
    loss_fn = lambda w, example: ours(partial(run, w), example)  # noqa: E731
    expected = plain_grads(loss_fn, what, rows)
    assert_grads_close(leaves_of(grads_of(loss_fn, what, rows)), expected, "float64")


def grads_of(loss_fn, what, rows):
    """In one program, unless the model is an object."""
    if isinstance(what, nnx.Module):
        return dpj.per_sample_grads(loss_fn, what, rows)
    return jax.jit(lambda w, r: dpj.per_sample_grads(loss_fn, w, r))(what, rows)


@pytest.fixture(scope="module")
def model():
    """GPT-2 in linen, jitted."""
    with jax.enable_x64(True):
        what, run = linen_model()
        return jax.jit(partial(run, what))


@pytest.mark.slow
def test_axes_in_front_are_kept(model):
    """Such as that of `keep_batch_dim`."""
    losses = dpj.simpo_loss(model, pairs())
    assert losses.shape == (3,)
    one = {name: column[1] for name, column in pairs().items()}
    np.testing.assert_allclose(dpj.simpo_loss(model, one), losses[1], rtol=1e-12)


@pytest.mark.slow
def test_a_packed_row_is_the_mean_of_its_documents(model):
    documents = [*DATA[:2], ([], [2, 4, 6])]  # nothing predicts the first token of the last one
    each = dpj.sft_loss(model, sft_rows(*zip(*documents, strict=True), **SIZES))
    rows = packed_rows([documents[:2], documents[1:]], length=14, pad_token_id=0)
    expected = np.asarray(each[:2] + each[1:]) / 2
    np.testing.assert_allclose(dpj.sft_loss(model, rows), expected, rtol=1e-12)


@pytest.mark.slow
def test_labels_that_are_no_token(model):
    """A response without tokens has the loss 0, one that has -1 or a number too large has nan."""
    labels = SFT["labels"]
    assert not dpj.sft_loss(model, {**SFT, "labels": np.full_like(labels, -100)}).any()
    for label in (-1, VOCABULARY):  # not that of another token, such as the last one
        losses = dpj.sft_loss(model, {**SFT, "labels": np.where(labels == 7, label, labels)})
        assert np.isnan(losses).tolist() == [False, True, False]


@pytest.mark.slow
def test_reference_log_probs_are_those_of_the_rows(model):
    rows = pairs()
    found = dpj.reference_log_probs(model, rows, physical_batch_size=2)
    each = zip(rows["input_ids"].reshape(-1, 8), rows["labels"].reshape(-1, 8), strict=True)
    expected = np.reshape([log_probs_of(model, *row) for row in each], (3, 2))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


TRAINING = partial(Decoder, VOCABULARY, 8, nnx.Rngs(0), 0.5)
UNANSWERED = {**SFT, "labels": np.where(np.arange(3)[:, None] == 2, -100, SFT["labels"])}
#: Name -> call with a model that is refused, and words of the message.
MISTAKES = {
    "train": (lambda m: dpj.reference_log_probs(TRAINING(), SFT), "as with dropout"),
    "no response": (
        lambda m: dpj.reference_log_probs(m, UNANSWERED, physical_batch_size=2),
        "One of the rows from 2 on has a response of length 0",
    ),
    "split": (lambda m: dpj.simpo_loss(m, {k: v[0] for k, v in SFT.items()}), "no pair"),
    "no reference": (lambda m: dpj.dpo_loss(m, pairs()), "no 'reference_log_probs'"),
    "reference": (
        lambda m: dpj.dpo_loss(m, pairs(reference_log_probs=np.zeros(6))),
        r"Expected \(3, 2\)",
    ),
    "no labels": (lambda m: dpj.sft_loss(m, {"input_ids": SFT["input_ids"]}), "no array 'labels'"),
    "short": (
        lambda m: dpj.sft_loss(m, {**SFT, "labels": SFT["labels"][:, 1:]}),
        "a label for each token id",
    ),
    "no mapping": (lambda m: dpj.sft_loss(m, SFT["labels"]), "Expected a mapping"),
    "one sequence": (lambda m: dpj.sft_loss(lambda ids: m(ids)[0], SFT), "jax.vmap"),
    "beta": (lambda m: dpj.dpo_loss(m, pairs(), beta=-1.0), "beta=-1.0 is out of range"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused_in_a_sentence(name):
    call, words = MISTAKES[name]
    with pytest.raises((TypeError, ValueError), match=words):
        call(jax.jit(Decoder(VOCABULARY, 8, nnx.Rngs(0)).__call__))


def test_labels_of_bytes_are_those_of_wide_integers():
    """-100 is no byte: compared in 8 bits it would be the token 156."""
    ids = np.array([[3, 156, 156, 7], [9, 2, 156, 1]])
    model = lambda ids: jnp.cos(ids[..., None] * jnp.arange(256.0))  # noqa: E731
    expected = dpj.sft_loss(model, {"input_ids": ids, "labels": ids})
    found = dpj.sft_loss(model, {"input_ids": ids, "labels": ids.astype(np.uint8)})
    assert jnp.array_equal(found, expected)
