# SPDX-License-Identifier: Apache-2.0
"""Adapters of `peft`, and BitFit: per-sample gradients are those of plain autograd, or refused."""

import pytest
import torch

import dualdp.torch as dpt
from dualdp.finetuning import sft_rows

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.dualdp_torch.finetuning.models import (  # noqa: E402
    ADAPTERS,
    FAMILIES,
    LENGTH,
    assert_equal,
    gradients_of,
    model_of,
    responses,
    tensors,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # code from outside warns about itself
#: One fast case of each family.
FAST = {("gpt2", "lora"), ("llama", "dora"), ("qwen", "ia3"), ("gemma", "bitfit"), ("t5", "lora")}


def batch_of(family):
    """Rows of a decoder; for T5 the prompt is the source, and the response the target."""
    data = responses(3)
    if family != "t5":
        return tensors(sft_rows(*zip(*data, strict=True), length=LENGTH, pad_token_id=0))
    source = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p, _ in data], batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(y) for _, y in data], batch_first=True, padding_value=-100
    )
    start = torch.zeros(3, 1).long()
    return {
        "input_ids": source,
        "attention_mask": (source != 0).long(),
        "labels": labels,
        "decoder_input_ids": torch.cat([start, labels[:, :-1].clamp(min=0)], 1),
    }


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        pytest.param(family, adapter, marks=[] if (family, adapter) in FAST else pytest.mark.slow)
        for family in FAMILIES
        for adapter in ADAPTERS
    ],
)
def test_gradients_of_adapters_are_plain_autograd(family, adapter):
    model, batch = model_of(family, adapter=adapter), batch_of(family)
    rows = [{name: value[k : k + 1] for name, value in batch.items()} for k in range(3)]
    expected = gradients_of(model, [dpt.sft_loss(model, row)[0] for row in rows])
    assert any(bool(grad.any()) for grad in expected.values())
    assert_equal(dpt.per_sample_grads(dpt.sft_loss, model, batch), expected)
