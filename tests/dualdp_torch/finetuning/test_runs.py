# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning in the loops that people have: the engine's, and that of `Trainer`."""

import pytest
import torch
from torch.utils.data import DataLoader

import dualdp
import dualdp.torch as dpt
from dualdp.finetuning import preference_rows, sft_rows

transformers = pytest.importorskip("transformers")

from tests.dualdp_torch.finetuning.models import LENGTH, model_of, responses, tensors  # noqa: E402
from tests.dualdp_torch.loop import train_units  # noqa: E402

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


def by_hand(model, data, loss, **changes):
    """DP-SGD by plain autograd of each unit."""

    dims = 1 if "rows_per_unit" in changes else 0  # a unit of one row has no axis for it

    def loss_of(step, unit):
        rows = {name: value.view(-1, *value.shape[dims:]) for name, value in data[unit].items()}
        return loss(model, rows).sum()

    train_units(model, plan(**changes), loss_of, lr=0.1)
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
def test_sft_of_trainer_ends_where_the_loops_end(tmp_path):
    pytest.importorskip("accelerate")
    from dualdp_torch.trainer import PrivacyCallback

    data, changes = sft_data(), {"physical_batch_size": 3}
    model, args = model_of("gpt2"), options_of(tmp_path)
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
    PrivacyCallback(plan=plan(**changes)).attach(trainer)
    trainer.train()
    _, expected = by_engine(model_of("gpt2"), data, dpt.sft_loss, **changes)
    assert_same(model.state_dict(), expected)
    assert_same(by_hand(model_of("gpt2"), data, dpt.sft_loss), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "adapter"), [("dpo", None), ("orpo", "lora")])
def test_the_loop_of_the_engine_takes_pairs(name, adapter):
    """Pairs are drawn as one, and no chunk splits them."""
    loss, data = getattr(dpt, f"{name}_loss"), pair_data(model_of("gpt2"))
    engine, found = by_engine(
        model_of("gpt2", adapter=adapter), data, loss, rows_per_unit=2, physical_batch_size=3
    )
    assert engine.ledger.last_check == STEPS - 1
    assert engine.get_epsilon() == plan().epsilon()
    assert_same(found, by_hand(model_of("gpt2", adapter=adapter), data, loss, rows_per_unit=2))


def test_pairs_that_are_not_declared_are_refused():
    data = pair_data(model_of("gpt2"))
    with pytest.raises(ValueError, match="rows_per_unit=2 of the call, or of make_private, whose"):
        by_engine(model_of("gpt2"), data, dpt.dpo_loss)
    rows = lambda model, pairs: dpt.dpo_loss(model, {k: v.flatten(0, 1) for k, v in pairs.items()})  # noqa: E731
    with pytest.raises(RuntimeError, match="The model saw .* rows_per_unit=2 in make_private"):
        by_engine(model_of("gpt2"), data, rows)


@pytest.mark.slow
def test_dpo_of_trainer_ends_where_the_loop_ends(tmp_path):
    pytest.importorskip("accelerate")
    from dualdp_torch.trainer import PrivacyCallback

    class PairTrainer(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if inputs["input_ids"].dim() == 3:
                inputs = {name: values.flatten(0, 1) for name, values in inputs.items()}
            loss = dpt.dpo_loss(model, inputs).mean()
            return (loss, {}) if return_outputs else loss

    data, args = pair_data(model_of("gpt2")), options_of(tmp_path, remove_unused_columns=False)
    trainer = PairTrainer(model=model_of("gpt2"), args=args, train_dataset=data)
    PrivacyCallback(plan=plan(rows_per_unit=2), checks=1.0).attach(trainer)
    assert trainer.train().metrics["epsilon"] == plan().epsilon()
    _, expected = by_engine(model_of("gpt2"), data, dpt.dpo_loss, rows_per_unit=2)
    assert_same(trainer.model.state_dict(), expected)
    pairs = {name: torch.stack([item[name] for item in data]).flatten(0, 1) for name in data[0]}
    loss = dpt.dpo_loss(trainer.model.eval(), pairs).mean().item()
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(loss, rel=1e-6)
