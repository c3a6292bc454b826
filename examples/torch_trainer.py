# SPDX-License-Identifier: Apache-2.0
"""Hugging Face `Trainer`: a small random BERT learns to look at the first word."""

import sys
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from dualdp_torch.trainer import PrivacyCallback

EPOCHS = 1 if "--toy" in sys.argv else 12
TARGET_EPSILON, TARGET_DELTA = 8.0, 1e-4
BATCH_SIZE, ACCUMULATE, MAX_GRAD_NORM, LEARNING_RATE = 64, 2, 1.0, 5e-3
WORDS, LENGTH = 12, 8
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def sentences(count, seed):
    """Sentences; the label says whether the number of their first word is odd."""
    ids = torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": int(row[0] % 2)} for row in ids]


def main():
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, intermediate_size=32, max_position_embeddings=16, **SIZES)
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            tempfile.mkdtemp(),
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH_SIZE,
            gradient_accumulation_steps=ACCUMULATE,  # a logical batch of 128
            learning_rate=LEARNING_RATE,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
            disable_tqdm=not sys.stdout.isatty(),
        ),
        train_dataset=sentences(2000, seed=0),
        eval_dataset=sentences(500, seed=1),
        compute_metrics=lambda found: {
            "accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())
        },
    )
    privacy = PrivacyCallback(
        max_grad_norm=MAX_GRAD_NORM, target_epsilon=TARGET_EPSILON, target_delta=TARGET_DELTA
    ).attach(trainer)
    trainer.train()
    accuracy, epsilon = trainer.evaluate()["eval_accuracy"], privacy.engine.get_epsilon()
    print(f"accuracy {accuracy:.1%} at epsilon {epsilon:.2f}, delta {TARGET_DELTA}")


if __name__ == "__main__":
    main()
