# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning in the loops that people have: the engine's, one's own, and that of `Trainer`."""

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

import dualdp
import dualdp.torch as dpt
from dualdp.finetuning import preference_rows, sft_rows

transformers = pytest.importorskip("transformers")

from tests.dualdp_torch.finetuning.models import LENGTH, model_of, responses, tensors  # noqa: E402
from tests.tiers import first  # noqa: E402

N, STEPS = 24, 4
SIZES = {"length": LENGTH, "pad_token_id": 0}


def items(rows):
    """One mapping for each example, as data sets have them."""
    return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]


def sft_data():
    return items(tensors(sft_rows(*zip(*responses(N), strict=True), **SIZES)))


def pair_data(reference):
    prompts, chosen = zip(*responses(N), strict=True)
    rejected = [y for _, y in responses(N, seed=2)]
    cut = [(p, y[:3], z[:3]) for p, y, z in zip(prompts, chosen, rejected, strict=True)]
    rows = tensors(preference_rows(*zip(*cut, strict=True), **SIZES))
    rows["reference_log_probs"] = dpt.reference_log_probs(reference.eval(), rows)
    reference.train()
    return items(rows)


def plan(**changes):
    sizes = {"num_examples": N, "expected_batch_size": 8, "num_steps": STEPS, "delta": 1e-3}
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "seed": 4, "noise": "portable"}
    return dualdp.PrivacyPlan(**{**sizes, **given, **changes})


def by_engine(model, data, loss, **changes):
    """The engine around the user's loop."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=8),
        plan=plan(**changes), checks=1.0,
    )  # fmt: skip
    for batch in loader.remaining():
        optimizer.zero_grad()
        loss(model, batch).mean().backward()
        optimizer.step()
    engine.detach()
    return engine, model.state_dict()


def by_calls(model, data, loss, rows_per_unit=1, **changes):
    """A loop of one's own with the functional call."""
    flat = lambda t: t.flatten(0, 1) if rows_per_unit > 1 else t  # noqa: E731
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    engine = dpt.PrivacyEngine()
    loader = engine.make_loader(data_loader=DataLoader(data, batch_size=8), plan=plan(**changes))
    for batch in loader.remaining():
        (step,) = engine.record()
        total = {name: torch.zeros_like(p) for name, p in trained.items()}
        for chunk in batch.chunks:
            (items,) = chunk.args
            part = dpt.clipped_grad_sum(
                loss, model, {name: flat(t) for name, t in items.items()}, mask=chunk.mask,
                max_grad_norm=1.0, rows_per_unit=rows_per_unit,
            )  # fmt: skip
            total = {name: total[name] + grad for name, grad in part.grads.items()}
        for name, grad in dpt.noisy_mean(total, engine.plan, step).items():
            trained[name].grad = grad
        optimizer.step()
    return model.state_dict()


def assert_same(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)


def options_of(path, **changes):
    return transformers.TrainingArguments(
        output_dir=str(path), per_device_train_batch_size=8, max_steps=STEPS, optim="sgd",
        learning_rate=0.1, lr_scheduler_type="constant", save_strategy="no", report_to="none",
        use_cpu=True, disable_tqdm=True, **changes,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("physical", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_sft_of_trainer_ends_where_the_loops_end(physical, tmp_path):
    pytest.importorskip("accelerate")
    from dualdp_torch.trainer import PrivacyCallback

    data, changes = sft_data(), {"physical_batch_size": physical}
    trainer = transformers.Trainer(
        model=model_of("gpt2"), args=options_of(tmp_path), train_dataset=data
    )
    PrivacyCallback(plan=plan(**changes)).attach(trainer)
    trainer.train()
    _, expected = by_engine(model_of("gpt2"), data, dpt.sft_loss, **changes)
    assert_same(trainer.model.state_dict(), expected)
    assert_same(by_calls(model_of("gpt2"), data, dpt.sft_loss, **changes), expected)


@pytest.mark.slow
def test_pairs_are_drawn_as_one_and_no_chunk_splits_them():
    data = pair_data(model_of("gpt2"))
    found = [
        by_calls(model_of("gpt2"), data, dpt.dpo_loss, rows_per_unit=2, physical_batch_size=size)
        for size in (None, 3)
    ]
    assert_same(*found)


@pytest.mark.parametrize("name", first(1, ["dpo", "ipo", "simpo", "orpo"]))
def test_the_loop_of_the_engine_takes_pairs(name):
    loss, data = getattr(dpt, f"{name}_loss"), pair_data(model_of("gpt2"))
    engine, found = by_engine(model_of("gpt2"), data, loss, rows_per_unit=2)
    assert engine.ledger.last_check == STEPS - 1
    assert engine.get_epsilon() == plan().epsilon()
    assert_same(found, by_calls(model_of("gpt2"), data, loss, rows_per_unit=2))


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "ia3", "bitfit"])
def test_adapters_learn_from_pairs_in_the_loop(adapter):
    data, model = pair_data(model_of("gpt2")), partial(model_of, "gpt2", adapter=adapter)
    _, found = by_engine(model(), data, dpt.dpo_loss, rows_per_unit=2, physical_batch_size=5)
    assert_same(found, by_calls(model(), data, dpt.dpo_loss, rows_per_unit=2))


def test_pairs_that_are_not_declared_are_refused():
    data = pair_data(model_of("gpt2"))
    with pytest.raises(ValueError, match="rows_per_unit=2 of the call, or of make_private, whose"):
        by_engine(model_of("gpt2"), data, dpt.dpo_loss)
    rows = lambda model, pairs: dpt.dpo_loss(model, {k: v.flatten(0, 1) for k, v in pairs.items()})  # noqa: E731
    with pytest.raises(RuntimeError, match="The model saw .* rows_per_unit=2 in make_private"):
        by_engine(model_of("gpt2"), data, rows)


@pytest.mark.parametrize("physical", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_dpo_of_trainer_ends_where_the_loop_ends(physical, tmp_path):
    pytest.importorskip("accelerate")
    from dualdp_torch.trainer import PrivacyCallback

    class PairTrainer(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if inputs["input_ids"].dim() == 3:
                inputs = {name: values.flatten(0, 1) for name, values in inputs.items()}
            loss = dpt.dpo_loss(model, inputs).mean()
            return (loss, {}) if return_outputs else loss

    data, changes = pair_data(model_of("gpt2")), {"physical_batch_size": physical}
    options = options_of(tmp_path, remove_unused_columns=False)
    trainer = PairTrainer(model=model_of("gpt2"), args=options, train_dataset=data)
    PrivacyCallback(plan=plan(rows_per_unit=2, **changes), checks=1.0).attach(trainer)
    assert trainer.train().metrics["epsilon"] == plan().epsilon()
    _, expected = by_engine(model_of("gpt2"), data, dpt.dpo_loss, rows_per_unit=2, **changes)
    assert_same(trainer.model.state_dict(), expected)
    pairs = {name: torch.stack([item[name] for item in data]).flatten(0, 1) for name in data[0]}
    loss = dpt.dpo_loss(trainer.model.eval(), pairs).mean().item()
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(loss, rel=1e-6)
