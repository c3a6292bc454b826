# SPDX-License-Identifier: Apache-2.0
"""Losses of language models: gradients of single examples are those of plain autograd."""

import math
from functools import partial

import pytest
import torch

import dualdp.torch as dpt
from dualdp.finetuning import packed_rows, preference_rows, sft_rows

transformers = pytest.importorskip("transformers")

from tests.dualdp_torch.finetuning.models import (  # noqa: E402
    LENGTH,
    assert_equal,
    gradients_of,
    log_probs_of,
    model_of,
    responses,
    tensors,
)

SIZES = {"length": LENGTH, "pad_token_id": 0}
DATA = responses(4)
PAIRS = [(prompt, y, z[:3]) for (prompt, y), (_, z) in zip(DATA, responses(4, seed=2), strict=True)]
MODELS = {
    "gpt2": {},
    "llama": {"adapter": "lora"},
    "qwen": {"is_checkpointed": True},
}


def sft_batch(data=DATA):
    return tensors(sft_rows(*zip(*data, strict=True), **SIZES))


def pair_batch(reference=None, pairs=PAIRS):
    """Rows of pairs, in turn."""
    batch = tensors(preference_rows(*zip(*pairs, strict=True), **SIZES))
    if reference is not None:
        batch["reference_log_probs"] = dpt.reference_log_probs(reference.eval(), batch)
        reference.train()
    return {name: value.flatten(0, 1) for name, value in batch.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", MODELS)
def test_sft_gradients_are_plain_autograd(family):
    """Of rows with padding, against unpadded rows."""
    if "adapter" in MODELS[family]:
        pytest.importorskip("peft")
    model = model_of(family, **MODELS[family])
    expected = gradients_of(model, [-log_probs_of(model, *pair).mean() for pair in DATA])
    for method in ("auto", "two_pass"):
        found = dpt.per_sample_grads(dpt.sft_loss, model, sft_batch(), method=method)
        assert_equal(found, expected)


def log_sigmoid(z):
    return -torch.log1p(torch.exp(-z))


def log_odds(mean):
    return torch.log(mean.exp() / (1 - mean.exp()))


def dpo(w, r, ref_w, ref_r):
    return -log_sigmoid(0.1 * ((w.sum() - ref_w.sum()) - (r.sum() - ref_r.sum())))


def ipo(w, r, ref_w, ref_r):
    return (w.sum() - ref_w.sum() - r.sum() + ref_r.sum() - 1 / 0.2) ** 2


def simpo(w, r, ref_w, ref_r):
    return -log_sigmoid(2.0 * w.mean() - 2.0 * r.mean() - 1.0)


def orpo(w, r, ref_w, ref_r):
    return -w.mean() - 0.1 * log_sigmoid(log_odds(w.mean()) - log_odds(r.mean()))


#: Name -> loss of one pair from its log-probabilities and those of the reference, as published.
TEXTBOOK = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo}


def loss_of(name):
    return getattr(dpt, f"{name}_loss")


def textbook_losses(name, model, reference):
    """Losses of PAIRS, one at a time, without padding."""
    losses = []
    for prompt, chosen, rejected in PAIRS:
        rows = [(prompt, chosen), (prompt, rejected)]
        with torch.no_grad():
            referred = [log_probs_of(reference, *row) for row in rows]
        losses.append(TEXTBOOK[name](*(log_probs_of(model, *row) for row in rows), *referred))
    return losses


@pytest.mark.parametrize("name", TEXTBOOK)
def test_preference_gradients_are_plain_autograd(name):
    model, reference = model_of("gpt2"), model_of("gpt2", seed=1)
    expected = gradients_of(model, textbook_losses(name, model, reference))
    batch = pair_batch(reference)
    assert_equal(dpt.per_sample_grads(loss_of(name), model, batch, rows_per_unit=2), expected)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_packed_row_is_the_unit_of_its_documents(family):
    """Its gradient is that of the mean of the documents' losses, and none of them sees another."""
    model, units = model_of(family), [DATA[:2], [*DATA[2:3], ([], [4, 9, 2])], DATA[1:4]]
    batch = tensors(packed_rows(units, length=3 * LENGTH, pad_token_id=0))
    means = [[-log_probs_of(model, *document).mean() for document in unit] for unit in units]
    expected = gradients_of(model, [torch.stack(each).mean() for each in means])
    assert_equal(dpt.per_sample_grads(dpt.sft_loss, model, batch), expected)
    as_units = sft_batch(DATA[:2])
    found = dpt.per_sample_grads(dpt.sft_loss, model, as_units, rows_per_unit=2)
    assert_equal(found, {name: grad[:1] for name, grad in expected.items()})


def replaced(batch, at, by):
    return {
        name: torch.cat([value[: 2 * at], by[name], value[2 * at + 2 :]])
        for name, value in batch.items()
    }


@pytest.mark.parametrize("size", [None, 3])
def test_a_pair_that_is_replaced_moves_the_sum_by_at_most_2c(size):
    """A pair whose rows were clipped apart could move it by 4C; removed, it moves it by C."""
    model, reference = model_of("gpt2"), model_of("gpt2", seed=1)
    batch = pair_batch(reference)
    other = pair_batch(reference, [([3], [4, 5], [6]), ([7, 8], [9], [2, 2, 2])])
    norms = dpt.per_sample_norms(dpt.dpo_loss, model, batch, rows_per_unit=2)
    options = {"max_grad_norm": 0.1 * float(norms.min()), "rows_per_unit": 2}
    call = partial(dpt.clipped_grad_sum, dpt.dpo_loss, model, **options)

    def moved(one, two):
        total = sum(float((one[n] - two[n]).square().sum()) for n in one)
        return math.sqrt(total) / options["max_grad_norm"]

    sums = call(batch, physical_batch_size=size).grads
    for at in range(2):
        by = {key: value[2 * at : 2 * at + 2] for key, value in other.items()}
        assert moved(sums, call(replaced(batch, at, by)).grads) <= 2 + 1e-9
        without = torch.arange(len(PAIRS)) != at
        assert 1 - 1e-3 <= moved(sums, call(batch, mask=without).grads) <= 1 + 1e-9


def test_padding_changes_nothing():
    """Nor does a mask of attention, nor padding on the left with the positions of the tokens."""
    model, batch = model_of("llama"), sft_batch()
    expected = dpt.sft_loss(model, batch)
    mask = torch.zeros_like(batch["labels"])
    left = {name: torch.zeros_like(mask) for name in ("input_ids", "position_ids")}
    left["attention_mask"], left["labels"] = mask.clone(), mask - 100
    for row, (prompt, response) in enumerate(DATA):
        size = len(prompt) + len(response)
        mask[row, :size] = 1
        left["attention_mask"][row, -size:] = 1
        left["position_ids"][row, -size:] = torch.arange(size)
        for name in ("input_ids", "labels"):
            left[name][row, -size:] = batch[name][row, :size]
    for other in ({**batch, "attention_mask": mask}, left):
        torch.testing.assert_close(dpt.sft_loss(model, other), expected, rtol=1e-10, atol=0)


def packed_batch():
    return tensors(packed_rows([DATA[:2]], length=20, pad_token_id=0))


def sft(model, batch=None, **changes):
    return dpt.sft_loss(model, {**(batch or sft_batch()), **changes})


def simpo(model, batch=None, size=None):
    return dpt.simpo_loss(model, {k: v[:size] for k, v in (batch or pair_batch()).items()})


def referred(model, **changes):
    return dpt.reference_log_probs(model.eval(), {**sft_batch(), **changes})


def token_mean(model, batch):
    """The loss of a model of transformers: a mean over all tokens of the batch."""
    return model(**batch, use_cache=False).loss


def weighted_by_all(model, batch):
    """(n,) losses that add up to the mean over all tokens of the batch."""
    each = dpt.sft_loss(model, batch) * (batch["labels"][:, 1:] != -100).sum(1)
    return each / (batch["labels"][:, 1:] != -100).sum()


def unanswered():
    batch = sft_batch()
    batch["labels"][2] = -100
    return batch


GRADS = dpt.per_sample_grads
#: Name -> call with a model that is refused, and words of the message.
MISTAKES = {
    "token mean": (lambda m: GRADS(token_mean, m, sft_batch()), "loss of shape"),
    "weighted": (lambda m: GRADS(weighted_by_all, m, sft_batch()), "depend"),
    "no response": (lambda m: sft(m, unanswered()), "Row 2 .* response of length 0"),
    "packed, mask": (
        lambda m: sft(m, packed_batch(), attention_mask=torch.ones(1, 20).long()),
        "attention_mask hides their boundaries",
    ),
    "packed, prompt": (
        lambda m: sft(model_of("gpt2", adapter="prompt"), packed_batch()),
        "virtual tokens of the adapter come before the first one only",
    ),
    "flattened": (
        lambda m: sft(m, packed_batch(), cu_seq_lens_q=torch.tensor([0, 4, 9])),
        "joined to one row",
    ),
    "packed pair": (
        lambda m: simpo(m, {k: v.repeat(2, 1) for k, v in packed_batch().items()}),
        "Expected one response in each row of a pair",
    ),
    "left": (
        lambda m: sft(m, attention_mask=torch.arange(4 * LENGTH).view(4, LENGTH).clamp(max=1)),
        "padded on the left",
    ),
    "train": (lambda m: dpt.reference_log_probs(m, sft_batch()), "in training mode"),
    "no module": (lambda m: dpt.reference_log_probs(len, sft_batch()), "Expected a module"),
    "split": (lambda m: simpo(m, size=3), "nothing splits a pair"),
    "rows alone": (
        lambda m: GRADS(dpt.simpo_loss, m, pair_batch()),
        "such as a pair, give rows_per_unit=2",
    ),
    "no reference": (lambda m: dpt.dpo_loss(m, pair_batch()), "no 'reference_log_probs'"),
    "reference of pairs": (
        lambda m: dpt.dpo_loss(m, {**pair_batch(), "reference_log_probs": torch.zeros(4)}),
        r"Expected \(8,\), a number for each row",
    ),
    "pairs": (
        lambda m: sft(m, {k: v.view(-1, 2, LENGTH) for k, v in pair_batch().items()}),
        "for a preference loss",
    ),
    "no labels": (lambda m: sft(m, labels=None), "no tensor 'labels'"),
    "short": (lambda m: sft(m, labels=torch.zeros(4, 3).long()), "a label for each token id"),
    "negative": (
        lambda m: sft(m, labels=sft_batch()["labels"].clamp(min=-1)),
        "Row 0 .* negative label other than -100",
    ),
    "text": (lambda m: referred(m, text=["a"] * 4), "'text', which is a list"),
    "encoding": (
        lambda m: GRADS(dpt.sft_loss, m, transformers.BatchEncoding(sft_batch())),
        "BatchEncoding, of which dict",
    ),
    "no mapping": (lambda m: dpt.sft_loss(m, sft_batch()["labels"]), "Expected a mapping"),
    "beta": (lambda m: dpt.dpo_loss(m, pair_batch(m), beta=0), "beta=0 is out of range"),
    "headless": (lambda m: sft(m.transformer), "as logits"),
    "encoder": (lambda m: sft(model_of("t5")), "prepare_decoder_input_ids_from_labels"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused_in_a_sentence(name):
    call, words = MISTAKES[name]
    with pytest.raises((TypeError, ValueError), match=words):
        call(model_of("gpt2"))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_response_without_tokens_weighs_nothing_under_vmap():
    model, batch = model_of("gpt2"), unanswered()
    one = lambda ids, labels: dpt.sft_loss(  # noqa: E731
        model, {"input_ids": ids[None], "labels": labels[None]}
    )
    losses = torch.func.vmap(one)(batch["input_ids"], batch["labels"])[:, 0]
    assert losses[2] == 0
    torch.testing.assert_close(losses[:2], dpt.sft_loss(model, sft_batch())[:2])


def test_reference_log_probs_are_those_of_the_rows():
    """In chunks, of NumPy arrays, and without a gradient."""
    model = model_of("gpt2").eval()
    rows = preference_rows(*zip(*PAIRS, strict=True), **SIZES)
    found = dpt.reference_log_probs(model, rows, physical_batch_size=3)
    expected = [[log_probs_of(model, p, y).sum().item() for y in pair] for p, *pair in PAIRS]
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-6, atol=1e-6)
    assert not found.requires_grad
    assert dpt.reference_log_probs(model, {k: v[:0] for k, v in rows.items()}).shape == (0, 2)


def test_labels_of_bytes_are_those_of_wide_integers():
    """-100 is no byte: compared in 8 bits it would be the token 156."""
    model = torch.nn.Sequential(torch.nn.Embedding(256, 4), torch.nn.Linear(4, 256))
    ids = torch.tensor([[3, 156, 156, 7], [9, 2, 156, 1]])
    expected = dpt.sft_loss(model, {"input_ids": ids, "labels": ids})
    found = dpt.sft_loss(model, {"input_ids": ids, "labels": ids.to(torch.uint8)})
    assert torch.equal(found, expected)
