# SPDX-License-Identifier: Apache-2.0
"""Private supervised fine-tuning of a small decoder of Flax, then private DPO; no text is needed.

The synthetic language of sft_llama.py: each token tells the next one, and an answer ends with a
polite token or a rude one. SFT learns the language; DPO then learns to be polite. A record is a row
in the first run and a pair in the second, and nobody's records are in both.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import dualdp.jax as dpj
from dualdp.finetuning import preference_rows, sft_rows

IS_TOY = "--toy" in sys.argv
STEPS, EPSILON, COUNT = (2, 8.0, 60) if IS_TOY else (80, 8.0, 2000)
DELTA, MAX_GRAD_NORM, BATCH_SIZE, BLOCKS = 1e-4, 0.5, *((30, 1) if IS_TOY else (200, 2))
WORDS, POLITE, RUDE, LENGTH, WIDTH = 20, 21, 22, 12, 32
SIZES = {"length": LENGTH, "pad_token_id": 0}


class Block(nnx.Module):
    """Causal attention and an MLP, each on what is normalised."""

    def __init__(self, rngs):
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.wide, self.narrow = (
            nnx.Linear(*shape, rngs=rngs) for shape in ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))
        )

    def __call__(self, x, mask):
        """(rows, t, e), what each token sees -> (rows, t, e)."""
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.narrow(nnx.silu(self.wide(self.norms[1](x))))


class Decoder(nnx.Module):
    """Blocks between embeddings and a head."""

    def __init__(self, rngs):
        self.tokens = nnx.Embed(RUDE + 1, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.head = nnx.Linear(WIDTH, RUDE + 1, rngs=rngs)

    def __call__(self, ids):
        """(rows, t) token ids -> (rows, t, v) logits."""
        x = self.tokens(ids) + self.positions(jnp.arange(ids.shape[-1]))
        for block in self.blocks:
            x = block(x, nnx.make_causal_mask(ids))
        return self.head(x)


def sentences(count, seed):
    """Prompts of one or two tokens, and how they go on: 1 + (7 x mod 20) after x, mostly."""
    rng = np.random.default_rng(seed)
    prompts, answers = [], []
    for _ in range(count):
        words = [int(rng.integers(1, WORDS + 1))]
        for slip in rng.random(rng.integers(5, 9)):
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


def train(model, loss, rows, learning_rate):
    """Train privately on rows (n, t) or pairs (u, 2, t), each of them one example."""
    engine = dpj.PrivacyEngine()
    step, state, loader = engine.make_private_with_epsilon(
        loss_fn=loss, params=model, optimizer=optax.adamw(learning_rate), data=rows,
        expected_batch_size=BATCH_SIZE, max_grad_norm=MAX_GRAD_NORM, num_steps=STEPS,
        target_epsilon=EPSILON, target_delta=DELTA,
    )  # fmt: skip
    for batch in loader.remaining():
        state, _ = step(state, batch)
    return engine.model(state), engine.get_epsilon()


def perplexity(model, rows):
    """Exponential of the mean loss of an example, over responses."""
    losses = nnx.jit(lambda model, rows: jax.vmap(lambda row: dpj.sft_loss(model, row))(rows))
    return float(jnp.exp(losses(model, rows).mean()))


def politeness(model, pairs):
    """Share of the pairs whose polite response is the more likely one."""
    chosen, rejected = dpj.reference_log_probs(model, pairs, physical_batch_size=200).T
    return float((chosen > rejected).mean())


def main():
    model, held_out = Decoder(nnx.Rngs(0)), sft_data(200, seed=1)
    print(f"epsilon 0: perplexity {perplexity(model, held_out):.2f}")
    model, spent = train(model, dpj.sft_loss, sft_data(COUNT, seed=0), 1e-2)
    print(f"epsilon {spent:.2f}: perplexity {perplexity(model, held_out):.2f}")

    pairs, others = pair_data(COUNT, seed=2), pair_data(200, seed=3)
    polite = {name: column[:, 0] for name, column in others.items()}
    before = politeness(model, others), perplexity(model, polite)
    pairs["reference_log_probs"] = dpj.reference_log_probs(model, pairs, physical_batch_size=200)
    model, spent = train(model, dpj.dpo_loss, pairs, 1e-4)
    after = politeness(model, others), perplexity(model, polite)
    print(f"before DPO: polite in {before[0]:.0%} of the pairs, their perplexity {before[1]:.2f}")
    print(f"epsilon {spent:.2f}: polite in {after[0]:.0%}, perplexity {after[1]:.2f}")


if __name__ == "__main__":
    main()
