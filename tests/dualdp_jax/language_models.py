# SPDX-License-Identifier: Apache-2.0
"""GPT-2 in linen, for rows of tokens, and a small decoder in nnx."""

import jax
import jax.numpy as jnp
from flax import linen, nnx


def causal(positions):
    """(t,) position ids, or the length of one document -> (t, t) bool, what each token sees."""
    starts = jnp.pad(positions[1:] != positions[:-1] + 1, (1, 0))
    document = jnp.cumsum(starts)
    same = document[:, None] == document[None]
    return same & jnp.tril(jnp.ones(same.shape, bool))


class Attention(linen.Module):
    """Causal attention with one fused projection, as in `transformers`."""

    heads: int

    @linen.compact
    def __call__(self, x, sees):
        """(t, e), (t, t) -> (t, e)."""
        t, width = x.shape
        fused = linen.Dense(3 * width, name="c_attn", param_dtype=x.dtype)(x)
        q, k, v = (part.reshape(t, self.heads, -1) for part in jnp.split(fused, 3, axis=-1))
        scores = jnp.einsum("thd,shd->hts", q, k) / jnp.sqrt(q.shape[-1]).astype(x.dtype)
        mixed = jnp.einsum("hts,shd->thd", jax.nn.softmax(jnp.where(sees, scores, -jnp.inf)), v)
        return linen.Dense(width, name="c_proj", param_dtype=x.dtype)(mixed.reshape(t, width))


class MLP(linen.Module):
    """Four times as wide in between."""

    @linen.compact
    def __call__(self, x):
        """(t, e) -> (t, e)."""
        y = linen.Dense(4 * x.shape[-1], name="c_fc", param_dtype=x.dtype)(x)
        y = jax.nn.gelu(y, approximate=True)
        return linen.Dense(x.shape[-1], name="c_proj", param_dtype=x.dtype)(y)


class Block(linen.Module):
    """Attention and MLP, each on what is normalised."""

    heads: int

    @linen.compact
    def __call__(self, x, sees):
        """(t, e), (t, t) -> (t, e)."""
        norm = lambda name: linen.LayerNorm(epsilon=1e-5, name=name, param_dtype=x.dtype)  # noqa: E731
        x = x + Attention(self.heads, name="attn")(norm("ln_1")(x), sees)
        return x + MLP(name="mlp")(norm("ln_2")(x))


class Transformer(linen.Module):
    """Blocks between embeddings and the tied head: torch's `h.0` is `h_0` here."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    positions: int
    dtype: jnp.dtype

    @linen.compact
    def __call__(self, ids, positions):
        """(t,), (t,) -> (t, v) logits."""
        embed = lambda size, name: linen.Embed(  # noqa: E731
            size, self.width, name=name, param_dtype=self.dtype, dtype=self.dtype
        )
        tokens = embed(self.vocabulary, "wte")
        x = tokens(ids) + embed(self.positions, "wpe")(positions)
        sees = causal(positions)
        for k in range(self.layers):
            x = Block(self.heads, name=f"h_{k}")(x, sees)
        norm = linen.LayerNorm(epsilon=1e-5, name="ln_f", param_dtype=self.dtype)
        return tokens.attend(norm(x))


class GPT2(linen.Module):
    """Radford et al. 2019, for rows of tokens."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    positions: int
    dtype: jnp.dtype = jnp.float32

    @linen.compact
    def __call__(self, ids, position_ids=None):
        """(rows, t) ids and, where documents are packed, their positions -> (rows, t, v)."""
        if position_ids is None:
            position_ids = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        sizes = (self.vocabulary, self.width, self.layers, self.heads, self.positions, self.dtype)
        of_row = linen.vmap(
            Transformer, variable_axes={"params": None}, split_rngs={"params": False}
        )
        return of_row(*sizes, name="transformer")(ids, position_ids)


class Decoder(nnx.Module):
    """Embedding, dropout and a head, of nnx."""

    def __init__(self, vocabulary, width, rngs, rate=0.0):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs, param_dtype=jnp.float64)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, ids):
        """(rows, t) -> (rows, t, v)."""
        return self.head(self.dropout(jnp.cumsum(jnp.tanh(self.embed(ids)), 1)))
