# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning of one GPT-2 on both stacks: the same losses, and the same parameters at the end."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.utils.data import DataLoader

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import PrivacyPlan, port
from dualdp.finetuning import packed_rows, preference_rows, sft_rows

pytest.importorskip("transformers")
pytest.importorskip("flax")

from tests.dualdp_jax.language_models import GPT2  # noqa: E402
from tests.only_torch.finetuning.models import LENGTH, VOCABULARY, model_of, responses  # noqa: E402
from tests.tiers import first  # noqa: E402

N, STEPS = 24, 20
SIZES = {"length": LENGTH, "pad_token_id": 0}
NAMES = ("sft", "dpo", "ipo", "simpo", "orpo")


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


def rows_of(name, count=N):
    prompts, answers = zip(*responses(count), strict=True)
    if name == "sft":
        return sft_rows(prompts, answers, **SIZES)
    if name == "packed":
        documents = responses(2 * count)
        units = zip(documents[::2], documents[1::2], strict=True)
        return packed_rows(units, length=2 * LENGTH, pad_token_id=0)
    others = [answer[:3] for _, answer in responses(count, seed=2)]
    rows = preference_rows(prompts, [answer[:4] for answer in answers], others, **SIZES)
    reference = model_of("gpt2", seed=1).eval()
    if name in ("dpo", "ipo"):
        rows["reference_log_probs"] = dpt.reference_log_probs(reference, rows).numpy()
    return rows


def as_rows(name, batch):
    """Rows of pairs in turn."""
    is_flat = name in ("sft", "packed")
    return {key: t if is_flat else t.flatten(0, 1) for key, t in batch.items()}


@pytest.mark.parametrize("name", first(1, ("packed", "dpo", "sft", "ipo", "simpo", "orpo")))
def test_losses_of_both_stacks_are_equal(name):
    model, params, net = twins()
    rows, kind = rows_of(name, 5), "sft" if name == "packed" else name
    torch_rows = as_rows(name, {key: torch.as_tensor(column) for key, column in rows.items()})
    expected = getattr(dpt, f"{kind}_loss")(model, torch_rows).detach()
    run = jax.jit(partial(net.apply, params))
    np.testing.assert_allclose(getattr(dpj, f"{kind}_loss")(run, rows), expected, rtol=1e-9)


def plan(**changes):
    return PrivacyPlan(
        num_examples=N, expected_batch_size=8, num_steps=STEPS, noise_multiplier=0.5,
        max_grad_norm=1.0, delta=1e-3, noise="portable", seed=6, physical_batch_size=8, **changes,
    )  # fmt: skip


def items_of(rows):
    return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]


def by_torch(model, name, rows, layout):
    """A loop of one's own; pairs are units of two rows."""
    engine, trained = dpt.PrivacyEngine(), dict(model.named_parameters())
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    data_loader = DataLoader(items_of(rows), batch_size=8)
    loader = engine.make_loader(data_loader=data_loader, plan=plan())
    for batch in loader.remaining():
        (step,) = engine.record()
        total = {key: torch.zeros_like(p) for key, p in trained.items()}
        for chunk in batch.chunks:
            part = dpt.clipped_grad_sum(
                getattr(dpt, f"{name}_loss"), model, as_rows(name, chunk.args[0]),
                mask=chunk.mask, max_grad_norm=1.0, rows_per_unit=1 if name == "sft" else 2,
            )  # fmt: skip
            total = {key: total[key] + grad for key, grad in part.grads.items()}
        for key, grad in dpt.noisy_mean(total, engine.plan, step, layout=layout).items():
            trained[key].grad = grad
        optimizer.step()
    return engine.get_epsilon()


def by_loop(model, rows, run, layout):
    """DPO in the loop of the engine, which takes the plan of JAX as it is."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = dpt.PrivacyEngine()
    engine.noise_layout = layout
    *_, loader = engine.make_private(
        module=model, optimizer=optimizer, plan=run,
        data_loader=DataLoader(items_of(rows), batch_size=8),
    )  # fmt: skip
    for batch in loader.remaining():
        optimizer.zero_grad()
        dpt.dpo_loss(model, batch).mean().backward()
        optimizer.step()
    engine.detach()
    return engine.get_epsilon()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo", "dpo of one plan"])
def test_20_steps_of_both_stacks_end_alike(name):
    model, params, net = twins()
    name, is_one_plan = name.split()[0], name.endswith("plan")
    rows, run = rows_of(name), plan(rows_per_unit=2 if is_one_plan else None)
    loss = getattr(dpj, f"{name}_loss")
    engine = dpj.PrivacyEngine()
    step, state, loader = engine.make_private(
        loss_fn=lambda params, example: loss(partial(net.apply, params), example), params=params,
        optimizer=optax.sgd(0.1), data=rows, plan=run,
    )  # fmt: skip
    for batch in loader.remaining():
        state, _ = step(state, batch)
    layout = port.match(model, params)
    if is_one_plan:
        epsilon = by_loop(model, rows, run, layout)
    else:
        epsilon = by_torch(model, name, rows, layout)
    assert engine.get_epsilon() == epsilon
    back = port.to_torch(state.params, like=model)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(back[key], value, rtol=0, atol=1e-6, msg=key)
