# SPDX-License-Identifier: Apache-2.0
"""Opacus' fine-tuning with LoRA and ghost clipping: adapters of `peft` in a small random BERT.

The criterion stays as it is, so three values come back.
"""

import sys
import warnings

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

# Opacus: from opacus import PrivacyEngine
from dualdp.torch import PrivacyEngine  # dualdp

warnings.simplefilter("ignore", FutureWarning)  # peft uses an old name of transformers
EPOCHS = 1 if "--toy" in sys.argv else 3
BATCH_SIZE, RATE, SIGMA, MAX_GRAD_NORM, DELTA = 64, 1e-2, 0.8, 1.0, 1e-4
VOCABULARY, LENGTH = 60, 12


def sentences(count):
    """Sentences of one of two topics, with a mask of what is padding."""
    labels = torch.randint(2, (count,))
    words = torch.randint(3, VOCABULARY, (count, LENGTH))
    topic = torch.where(labels == 1, 3, VOCABULARY // 2)[:, None]
    words[:, ::2] = topic + torch.randint(6, (count, LENGTH // 2))
    mask = torch.ones_like(words)
    mask[:, -1] = torch.randint(2, (count,))
    return TensorDataset(words, mask, labels)


def train(model, criterion, optimizer, train_loader):
    model.train()
    losses = []
    for input_ids, attention_mask, labels in train_loader:
        optimizer.zero_grad()
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
        loss = criterion(logits, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def test(model, test_loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for ids, mask, labels in test_loader:
            logits = model(input_ids=ids, attention_mask=mask).logits
            correct += int((logits.argmax(1) == labels).sum())
    return correct / len(test_loader.dataset)


def main(seed=0):
    torch.manual_seed(seed)
    train_loader = DataLoader(sentences(1500), batch_size=BATCH_SIZE)
    test_loader = DataLoader(sentences(500), batch_size=BATCH_SIZE)

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(vocab_size=VOCABULARY, intermediate_size=64, num_labels=2, **sizes)
    lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, target_modules=["query", "value"])
    model = get_peft_model(BertForSequenceClassification(config), lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    criterion = nn.CrossEntropyLoss()
    privacy_engine = PrivacyEngine()
    # Opacus: model, optimizer, criterion, train_loader = privacy_engine.make_private(
    model, optimizer, train_loader = privacy_engine.make_private(  # dualdp
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        # Opacus: criterion=criterion,
        noise_multiplier=SIGMA,
        max_grad_norm=MAX_GRAD_NORM,
        grad_sample_mode="ghost",
    )
    for epoch in range(EPOCHS):
        loss = train(model, criterion, optimizer, train_loader)
        epsilon = privacy_engine.get_epsilon(DELTA)
        print(f"epoch {epoch}: loss {loss:.3f}, epsilon {epsilon:.2f}")
    print(f"accuracy {test(model, test_loader):.3f}, epsilon {epsilon:.3f}")


if __name__ == "__main__":
    main()
