# SPDX-License-Identifier: Apache-2.0
"""Models from outside, as they are: GPT-2 and BERT of `transformers`, a ResNet with GroupNorm."""

import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp.plan.clipping import MARGIN
from dualdp_torch.per_sample import call
from tests.dualdp_torch.checks import ids

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # every model is made from its configuration
transformers = pytest.importorskip("transformers")
N = 4


def gpt2():
    """A language model: Conv1D layers, learned positions, a head tied to the embedding."""
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=32, n_positions=24, vocab_size=97,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    tokens = ids(97, N, 12)

    def loss_fn(model, tokens):
        logits = model(input_ids=tokens).logits[:, :-1]
        each = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return each.view(len(tokens), -1).mean(1)

    return transformers.GPT2LMHeadModel(config), loss_fn, (tokens,)


def bert():
    """A classifier of padded sequences: pooler, token types, attention mask."""
    config = transformers.BertConfig(
        num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=48,
        max_position_embeddings=24, vocab_size=89, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    lengths = torch.tensor([11, 3, 7, 9])
    mask = (torch.arange(11) < lengths[:, None]).long()
    batch = {"input_ids": ids(89, N, 11), "attention_mask": mask, "token_type_ids": 1 - mask}

    def loss_fn(model, batch, labels):
        return F.cross_entropy(model(**batch).logits, labels, reduction="none")

    return transformers.BertForSequenceClassification(config), loss_fn, (batch, ids(3, N, seed=2))


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut, named as torchvision names them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.GroupNorm(4, outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.GroupNorm(4, outputs)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(project, nn.GroupNorm(4, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    """torchvision's ResNet-18 at a quarter of its width, with GroupNorm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1, self.relu = nn.GroupNorm(4, width), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inputs = width
        for stage in range(1, 5):
            outputs, stride = width * 2 ** (stage - 1), 1 if stage == 1 else 2
            blocks = BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1)
            setattr(self, f"layer{stage}", nn.Sequential(*blocks))
            inputs = outputs
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(inputs, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet():
    """Images of 32 x 32."""

    def loss_fn(model, x, y):
        return F.cross_entropy(model(x), y, reduction="none")

    return ResNet(), loss_fn, (torch.randn(N, 3, 32, 32), ids(5, N))


@pytest.mark.parametrize("build", [gpt2, bert, resnet])
def test_a_model_from_outside(build, monkeypatch):
    torch.manual_seed(0)
    model, loss_fn, batch = build()
    model.train()
    names, before = list(model.state_dict()), {k: v.clone() for k, v in model.state_dict().items()}
    exact = dpt.per_sample_norms(loss_fn, model.double(), *_double(batch), method="loop")
    parts = dpt.per_sample_norms(loss_fn, model, *_double(batch), method="loop", per_parameter=True)
    bound = float(exact.median())
    reduced = bound / (1 + MARGIN["float32"])  # the sums that it is compared with are float32
    clipped = dpt.clipped_grad_sum(
        loss_fn, model, *_double(batch), max_grad_norm=reduced, method="loop"
    )
    model.float()
    monkeypatch.setattr(call, "by_vmap", None)  # captured uses must do
    found = dpt.clipped_grad_sum(loss_fn, model, *batch, max_grad_norm=bound)
    torch.testing.assert_close(found.norms.double(), exact, rtol=2e-5, atol=0)
    ours = dpt.per_sample_norms(loss_fn, model, *batch, per_parameter=True)
    assert ours.keys() == parts.keys()
    for name, norms in parts.items():
        torch.testing.assert_close(ours[name].double(), norms, rtol=1e-3, atol=1e-5 * bound)
        apart = (found.grads[name].double() - clipped.grads[name]).norm()
        assert apart < 2e-5 * bound * N, name
    after = model.state_dict()
    assert list(after) == names
    assert all(torch.equal(after[name], value) for name, value in before.items())


def _double(batch):
    """The batch in float64."""
    return tuple(
        part.double() if torch.is_tensor(part) and part.is_floating_point() else part
        for part in batch
    )
