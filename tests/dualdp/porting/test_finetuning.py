# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning losses of one GPT-2 are the same on both stacks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import port
from dualdp.finetuning import packed_rows, preference_rows, sft_rows

pytest.importorskip("transformers")
pytest.importorskip("flax")

from tests.dualdp_jax.language_models import GPT2  # noqa: E402
from tests.dualdp_torch.finetuning.models import LENGTH, VOCABULARY, model_of, responses  # noqa: E402

SIZES = {"length": LENGTH, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def twins():
    """One model of torch, and the linen twin with its weights."""
    model, net = model_of("gpt2"), GPT2(VOCABULARY, 16, 2, 4, 32, jnp.float64)
    shapes = jax.eval_shape(net.init, jax.random.key(0), jnp.zeros((1, 4), int))
    like = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    return model, port.to_jax(model, like=like), net


def rows_of(name, count=5):
    prompts, answers = zip(*responses(count), strict=True)
    if name == "sft":
        return sft_rows(prompts, answers, **SIZES)
    if name == "packed":
        documents = responses(2 * count)
        units = zip(documents[::2], documents[1::2], strict=True)
        return packed_rows(units, length=2 * LENGTH, pad_token_id=0)
    others = [answer[:3] for _, answer in responses(count, seed=2)]
    rows = preference_rows(prompts, [answer[:4] for answer in answers], others, **SIZES)
    if name in ("dpo", "ipo"):
        reference = model_of("gpt2", seed=1).eval()
        rows["reference_log_probs"] = dpt.reference_log_probs(reference, rows).numpy()
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed", "dpo", "sft", "ipo", "simpo", "orpo"])
def test_losses_of_both_stacks_are_equal(name):
    model, params, net = twins()
    rows, kind = rows_of(name), "sft" if name == "packed" else name
    torch_rows = {key: torch.as_tensor(column) for key, column in rows.items()}
    if kind != "sft":  # rows of pairs in turn
        torch_rows = {key: t.flatten(0, 1) for key, t in torch_rows.items()}
    expected = getattr(dpt, f"{kind}_loss")(model, torch_rows).detach()
    run = jax.jit(partial(net.apply, params))
    np.testing.assert_allclose(getattr(dpj, f"{kind}_loss")(run, rows), expected, rtol=1e-9)
