# SPDX-License-Identifier: Apache-2.0
"""Adapters of `peft`, and BitFit: per-sample gradients are those of plain autograd, or refused."""

import pytest
import torch

import dualdp.torch as dpt
from dualdp.finetuning import sft_rows

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.dualdp_torch.finetuning.models import (  # noqa: E402
    LENGTH,
    assert_equal,
    gradients_of,
    model_of,
    responses,
    tensors,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # code from outside warns about itself


def batch_of(family):
    """Rows of a decoder; for T5 the prompt is the source, and the response the target."""
    data = responses(3)
    if family != "t5":
        return tensors(sft_rows(*zip(*data, strict=True), length=LENGTH, pad_token_id=0))
    pad = torch.nn.utils.rnn.pad_sequence
    source = pad([torch.tensor(p) for p, _ in data], True)
    labels = pad([torch.tensor(y) for _, y in data], True, -100)
    inputs = torch.cat([torch.zeros(3, 1).long(), labels[:, :-1].clamp(min=0)], 1)
    batch = {"input_ids": source, "attention_mask": (source != 0).long(), "labels": labels}
    return {**batch, "decoder_input_ids": inputs}


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        ("gpt2", "lora"),
        ("llama", "dora"),
        ("qwen", "ia3"),
        ("gemma", "bitfit"),
        ("t5", "lora"),
        ("gpt2", "prefix"),
        ("llama", "prompt"),
    ],
)
def test_gradients_of_adapters_are_plain_autograd(family, adapter):
    model, batch = model_of(family, adapter=adapter), batch_of(family)
    rows = [{name: value[k : k + 1] for name, value in batch.items()} for k in range(3)]
    expected = gradients_of(model, [dpt.sft_loss(model, row)[0] for row in rows])
    assert any(bool(grad.any()) for grad in expected.values())
    assert_equal(dpt.per_sample_grads(dpt.sft_loss, model, batch), expected)
