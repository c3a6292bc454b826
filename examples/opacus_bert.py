# SPDX-License-Identifier: Apache-2.0
"""Opacus' tutorial of a text classifier: the last layers of a BERT, small and random here."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

# Opacus: from opacus import PrivacyEngine
# Opacus: from opacus.utils.batch_memory_manager import BatchMemoryManager
from dualdp.torch import BatchMemoryManager, PrivacyEngine  # dualdp

EPOCHS = 1 if "--toy" in sys.argv else 4
BATCH_SIZE, MAX_PHYSICAL_BATCH_SIZE, RATE = 64, 32, 1e-2
EPSILON, DELTA, MAX_GRAD_NORM = 7.5, 1e-4, 0.1
VOCABULARY, LENGTH = 60, 12


def pairs(count):
    """Pairs of sentences of one of two topics, each with words of its own."""
    labels = torch.randint(2, (count,))
    topic = torch.where(labels == 1, 3, VOCABULARY // 2)[:, None]
    words = topic + torch.randint(6, (count, LENGTH))
    mask = torch.ones_like(words)
    mask[:, -1] = torch.randint(2, (count,))
    types = (torch.arange(LENGTH) >= LENGTH // 2).long().expand(count, LENGTH)
    return TensorDataset(words, mask, types, labels)


def evaluate(model, test_dataloader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for ids, mask, types, labels in test_dataloader:
            outputs = model(input_ids=ids, attention_mask=mask, token_type_ids=types)
            correct += int((outputs.logits.argmax(1) == labels).sum())
    model.train()
    return correct / len(test_dataloader.dataset)


def main(seed=0):
    torch.manual_seed(seed)
    train_dataloader = DataLoader(pairs(1500), batch_size=BATCH_SIZE)
    test_dataloader = DataLoader(pairs(500), batch_size=BATCH_SIZE, shuffle=False)

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(vocab_size=VOCABULARY, intermediate_size=64, num_labels=2, **sizes)
    model = BertForSequenceClassification(config)
    trainable_layers = [model.bert.encoder.layer[-1], model.bert.pooler, model.classifier]
    for p in model.parameters():
        p.requires_grad = False
    for layer in trainable_layers:
        for p in layer.parameters():
            p.requires_grad = True
    model = model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    privacy_engine = PrivacyEngine()
    model, optimizer, train_dataloader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_dataloader,
        target_delta=DELTA,
        target_epsilon=EPSILON,
        epochs=EPOCHS,
        max_grad_norm=MAX_GRAD_NORM,
    )
    for epoch in range(1, EPOCHS + 1):
        losses = []
        with BatchMemoryManager(
            data_loader=train_dataloader,
            max_physical_batch_size=MAX_PHYSICAL_BATCH_SIZE,
            optimizer=optimizer,
        ) as memory_safe_data_loader:
            for batch in memory_safe_data_loader:
                optimizer.zero_grad()
                names = ("input_ids", "attention_mask", "token_type_ids", "labels")
                inputs = dict(zip(names, batch, strict=True))
                outputs = model(**inputs)
                loss = outputs[0]
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
        epsilon = privacy_engine.get_epsilon(DELTA)
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, epsilon {epsilon:.2f}")
    print(f"accuracy {evaluate(model, test_dataloader):.3f}, epsilon {epsilon:.3f}")


if __name__ == "__main__":
    main()
