# SPDX-License-Identifier: Apache-2.0
"""GPT-2 of `transformers` (small and random): carried to a Flax module and back."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen
from transformers import GPT2Config, GPT2LMHeadModel

from dualdp import port

SIZES = {"vocab_size": 96, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}


class Attention(linen.Module):
    """Causal attention with one fused projection, as in `transformers`."""

    heads: int

    @linen.compact
    def __call__(self, x):
        """(t, e) -> (t, e)."""
        t, width = x.shape
        fused = linen.Dense(3 * width, name="c_attn")(x)
        q, k, v = (part.reshape(t, self.heads, -1) for part in jnp.split(fused, 3, axis=-1))
        scores = jnp.einsum("thd,shd->hts", q, k) / jnp.sqrt(q.shape[-1]).astype(x.dtype)
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
        mixed = jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), v)
        return linen.Dense(width, name="c_proj")(mixed.reshape(t, width))


class MLP(linen.Module):
    """Four times as wide in between."""

    @linen.compact
    def __call__(self, x):
        """(t, e) -> (t, e)."""
        y = linen.Dense(4 * x.shape[-1], name="c_fc")(x)
        y = jax.nn.gelu(y, approximate=True)  # "gelu_new"
        return linen.Dense(x.shape[-1], name="c_proj")(y)


class Block(linen.Module):
    """Attention and MLP, each on what is normalised."""

    heads: int

    @linen.compact
    def __call__(self, x):
        """(t, e) -> (t, e)."""
        x = x + Attention(self.heads, name="attn")(linen.LayerNorm(epsilon=1e-5, name="ln_1")(x))
        return x + MLP(name="mlp")(linen.LayerNorm(epsilon=1e-5, name="ln_2")(x))


class Transformer(linen.Module):
    """Blocks between embeddings and the tied head: torch's `h.0` is `h_0` here."""

    config: GPT2Config

    @linen.compact
    def __call__(self, ids):
        """(t,) token ids -> (t, v) logits."""
        c = self.config
        tokens = linen.Embed(c.vocab_size, c.n_embd, name="wte")
        x = tokens(ids) + linen.Embed(c.n_positions, c.n_embd, name="wpe")(jnp.arange(len(ids)))
        for k in range(c.n_layer):
            x = Block(c.n_head, name=f"h_{k}")(x)
        return tokens.attend(linen.LayerNorm(epsilon=1e-5, name="ln_f")(x))


class GPT2(linen.Module):
    """Radford et al. 2019, for one sequence."""

    config: GPT2Config

    @linen.compact
    def __call__(self, ids):
        """(t,) token ids -> (t, v) logits."""
        return Transformer(self.config, name="transformer")(ids)


def main():
    torch.manual_seed(0)
    config = GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0, attn_implementation="eager")
    model, net = GPT2LMHeadModel(config).eval(), GPT2(config)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, 16))
    like = jax.eval_shape(net.init, jax.random.key(0), ids[0])
    like = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)

    params = port.to_jax(model, like=like)
    ours = jax.vmap(net.apply, (None, 0))(params, ids)
    theirs = model(torch.as_tensor(ids)).logits.detach().numpy()
    back = port.to_torch(params, like=model)
    same = all(torch.equal(back[name], value) for name, value in model.state_dict().items())
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} parameters, largest difference of the logits {abs(ours - theirs).max():.0e}")
    print(f"bitwise the same after the way back: {same}")


if __name__ == "__main__":
    main()
