# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning a GPT-2 of `transformers` (small and random): LoRA adapters and its last layer norm.

What is frozen costs nothing and releases nothing.
"""

import sys

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import dualdp.torch as dpt

STEPS = 3 if "--toy" in sys.argv else 60
TARGET_EPSILON, TARGET_DELTA = 8.0, 1e-4
BATCH_SIZE, MAX_GRAD_NORM, LEARNING_RATE, RANK = 64, 1.0, 2e-2, 4
TEXT = "to be or not to be that is the question " * 40
LENGTH = 24


class LoRA(nn.Module):
    """A frozen linear map with a trained correction of low rank."""

    def __init__(self, frozen, inputs, outputs):
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(inputs, RANK, bias=False)
        self.up = nn.Linear(RANK, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        """(..., i) -> (..., o)."""
        return self.frozen(x) + self.up(self.down(x))


def loss_of(model, ids):
    """Mean over the lines of each line's own loss per character."""
    logits = model(ids).logits[:, :-1]
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return losses.mean(1).mean()


def main():
    letters = sorted(set(TEXT))
    ids = torch.tensor([letters.index(c) for c in TEXT])
    lines = ids.unfold(0, LENGTH, 3)

    torch.manual_seed(0)
    sizes = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(letters), **sizes))
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LoRA(block.attn.c_attn, 32, 3 * 32)
    model.transformer.ln_f.requires_grad_(True)
    trained = [p for p in model.parameters() if p.requires_grad]
    print(sum(p.numel() for p in trained), "of", model.num_parameters(), "parameters are trained")

    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.AdamW(trained, lr=LEARNING_RATE),
        data_loader=torch.utils.data.DataLoader(lines, batch_size=BATCH_SIZE),
        max_grad_norm=MAX_GRAD_NORM,
        target_epsilon=TARGET_EPSILON,
        target_delta=TARGET_DELTA,
        num_steps=STEPS,
    )
    model.train()
    before = loss_of(model.eval(), lines[:100]).item()
    model.train()
    for batch in loader.remaining():
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    with torch.no_grad():
        after = loss_of(model.eval(), lines[:100]).item()
    epsilon = engine.get_epsilon(delta=TARGET_DELTA)
    print(f"loss {before:.2f} -> {after:.2f} at epsilon {epsilon:.2f}, delta {TARGET_DELTA}")


if __name__ == "__main__":
    main()
