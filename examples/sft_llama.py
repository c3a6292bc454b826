# SPDX-License-Identifier: Apache-2.0
"""Private supervised fine-tuning of a small random Llama, then private DPO; no text is needed.

A synthetic language: each token tells the next one, and an answer ends with a polite token or a
rude one. SFT learns the language at several epsilons; DPO then learns to be polite. A record is a
row in the first run and a pair in the second, and nobody's records are in both.
"""

import os
import sys

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import dualdp
import dualdp.torch as dpt
from dualdp.finetuning import preference_rows, sft_rows

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is made from its configuration
IS_TOY = "--toy" in sys.argv
STEPS, EPSILONS, COUNT = (2, (8.0,), 60) if IS_TOY else (80, (1.0, 4.0, 16.0), 2000)
DELTA, BATCH_SIZE, MAX_GRAD_NORM = 1e-4, 30 if IS_TOY else 200, 0.5
WORDS, POLITE, RUDE, LENGTH = 20, 21, 22, 12
SIZES = {"length": LENGTH, "pad_token_id": 0}


def sentences(count, seed):
    """Prompts of one or two tokens, and how they go on: 1 + (7 x mod 20) after x, mostly."""
    generator = torch.Generator().manual_seed(seed)
    prompts, answers = [], []
    for _ in range(count):
        words = [int(torch.randint(1, WORDS + 1, (), generator=generator))]
        size = int(torch.randint(5, 9, (), generator=generator))
        for slip in torch.rand(size, generator=generator):
            words.append(1 + (words[-1] * (7 if slip > 0.05 else 3)) % WORDS)
        cut = 1 + len(words) % 2
        prompts.append(words[:cut])
        answers.append(words[cut:])
    return prompts, answers


def sft_data(count, seed):
    """Rows of sentences with polite and rude ends."""
    prompts, answers = sentences(count, seed)
    ends = [answer + [(POLITE, RUDE)[k % 2]] for k, answer in enumerate(answers)]
    return sft_rows(prompts, ends, **SIZES)


def pair_data(count, seed):
    """Pairs of one sentence: the polite end is preferred."""
    prompts, answers = sentences(count, seed)
    ends = [[answer + [end] for answer in answers] for end in (POLITE, RUDE)]
    return preference_rows(prompts, *ends, **SIZES)


def train(model, loss, rows, epsilon, learning_rate):
    """Train privately, in a loop of our own; pairs (u, 2, t) are units of two rows."""
    items = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    is_pair = rows["input_ids"].ndim == 3
    plan = dualdp.PrivacyPlan.calibrate(
        num_examples=len(items), expected_batch_size=BATCH_SIZE, num_steps=STEPS, delta=DELTA,
        target_epsilon=epsilon, max_grad_norm=MAX_GRAD_NORM,
    )  # fmt: skip
    engine = dpt.PrivacyEngine()
    loader = engine.make_loader(data_loader=DataLoader(items, batch_size=BATCH_SIZE), plan=plan)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=learning_rate)
    model.train()
    for batch in loader.remaining():
        (step,) = engine.record()
        total = {name: torch.zeros_like(p) for name, p in trained.items()}
        for chunk in batch.chunks:
            (inputs,) = chunk.args
            if is_pair:
                inputs = {name: value.flatten(0, 1) for name, value in inputs.items()}
            part = dpt.clipped_grad_sum(
                loss, model, inputs, mask=chunk.mask, max_grad_norm=MAX_GRAD_NORM,
                rows_per_unit=2 if is_pair else 1,
            )  # fmt: skip
            total = {name: total[name] + grad for name, grad in part.grads.items()}
        for name, grad in dpt.noisy_mean(total, plan, step).items():
            trained[name].grad = grad
        optimizer.step()
    return engine.get_epsilon()


def perplexity(model, rows):
    """Exponential of the mean loss of a token, over responses."""
    batch = {name: torch.as_tensor(column) for name, column in rows.items()}
    with torch.no_grad():
        return float(dpt.sft_loss(model.eval(), batch).mean().exp())


def politeness(model, rows):
    """Share of the pairs whose polite response is the more likely one."""
    chosen, rejected = dpt.reference_log_probs(model.eval(), rows).unbind(1)
    return float((chosen > rejected).float().mean())


def main():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=RUDE + 1, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    start = LlamaForCausalLM(config).state_dict()
    model, held_out = LlamaForCausalLM(config), sft_data(200, seed=1)
    model.load_state_dict(start)
    print(f"epsilon 0: perplexity {perplexity(model, held_out):.2f}")
    for epsilon in EPSILONS:
        model.load_state_dict(start)
        spent = train(model, dpt.sft_loss, sft_data(COUNT, seed=0), epsilon, 1e-2)
        print(f"epsilon {spent:.2f}: perplexity {perplexity(model, held_out):.2f}")

    pairs, others = pair_data(COUNT, seed=2), pair_data(200, seed=3)
    polite = {name: column[:, 0] for name, column in others.items()}
    before = politeness(model, others), perplexity(model, polite)
    pairs["reference_log_probs"] = dpt.reference_log_probs(model.eval(), pairs).numpy()
    spent = train(model, dpt.dpo_loss, pairs, EPSILONS[-1], 1e-4)
    after = politeness(model, others), perplexity(model, polite)
    print(f"before DPO: polite in {before[0]:.0%} of the pairs, their perplexity {before[1]:.2f}")
    print(f"epsilon {spent:.2f}: polite in {after[0]:.0%}, perplexity {after[1]:.2f}")


if __name__ == "__main__":
    main()
