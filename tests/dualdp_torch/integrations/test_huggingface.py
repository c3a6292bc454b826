# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's `Trainer`, made private by one callback."""

from types import SimpleNamespace

import pytest
import torch

import dualdp

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.utils import DistributedType  # noqa: E402

import dualdp.torch as dpt  # noqa: E402
from dualdp_torch.integrations.host_loop import HostedLoader, HostedRun  # noqa: E402
from dualdp_torch.integrations.huggingface import FILE, PrivacyCallback, per_example_loss  # noqa: E402

ROWS, STEPS = 48, 6
WINDOW = {"correlation": dualdp.correlated.window([1.0, -0.5, 0.2]), "sampler": "fixed_order"}
TINY = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"intermediate_size": 8, "max_position_embeddings": 16}


class Stream(torch.utils.data.IterableDataset):
    """Data that can't be drawn by index."""

    def __iter__(self):
        return (Sentences()[i] for i in range(ROWS))


class Sentences(torch.utils.data.Dataset):
    """Token ids and a class; for language models the ids are the labels."""

    def __init__(self, causal=False):
        self.causal = causal

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        ids = torch.randint(30, (8,), generator=torch.Generator().manual_seed(i))
        labels = ids.clone() if self.causal else ids[0] % 2
        if self.causal:
            labels[: 1 + i % 4] = -100
        return {"input_ids": ids, "labels": labels}


def bert():
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**TINY))


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=30, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def plan(**changes):
    sizes = {"num_examples": ROWS, "expected_batch_size": 16, "num_steps": STEPS, "delta": 1e-4}
    return dualdp.PrivacyPlan(**{**sizes, "noise_multiplier": 1.0, "max_grad_norm": 1.0, **changes})


def trainer(folder, model, causal=False, **options):
    options = {
        "per_device_train_batch_size": 16,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    arguments = transformers.TrainingArguments(output_dir=str(folder), **options)
    data = Sentences(causal)
    return transformers.Trainer(model=model, args=arguments, train_dataset=data)


def by_hand(model, causal, **changes):
    """The same run with the engine alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(Sentences(causal), batch_size=16)
    engine = dpt.PrivacyEngine()
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, plan=plan(seed=3, **changes)
    )
    model.train()
    torch.manual_seed(42)
    for batch in loader.remaining():
        optimizer.zero_grad()
        labels = batch.pop("labels")
        logits = model(**batch).logits
        if causal:
            losses = torch.nn.functional.cross_entropy(
                logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none"
            )
            loss = (losses.sum(1) / (labels[:, 1:] != -100).sum(1)).mean()
        else:
            loss = torch.nn.functional.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
    engine.detach()
    return model.state_dict()


def same(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


SLOW = [(True, None), (False, 5)]
SGD = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "num_train_epochs": 1}


@pytest.mark.parametrize(
    ("causal", "physical"),
    [(True, 5), (False, None)] + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW],
)
def test_trainer_trains_as_the_engine_alone(causal, physical, tmp_path):
    make = gpt2 if causal else bert
    hosted = trainer(tmp_path, make(), causal, max_steps=STEPS, **SGD)
    before = dict(vars(hosted.args))
    callback = PrivacyCallback(plan=plan(seed=3, physical_batch_size=physical)).attach(hosted)
    torch.manual_seed(42)
    hosted.train()
    expected = by_hand(make(), causal, physical_batch_size=physical)
    assert same(hosted.model.state_dict(), expected)
    assert len(callback.engine.ledger) == hosted.state.global_step == STEPS
    logged = [entry["epsilon"] for entry in hosted.state.log_history]
    assert logged[:STEPS] == [plan().epsilon(step) for step in range(1, STEPS + 1)]
    assert vars(hosted.args) == before
    assert vars(hosted).keys() & {"log", "training_step", "get_train_dataloader"} == set()


def test_trainer_trains_with_correlated_noise(tmp_path):
    hosted = trainer(tmp_path, bert(), max_steps=STEPS, **SGD)
    callback = PrivacyCallback(plan=plan(seed=3, **WINDOW)).attach(hosted)
    torch.manual_seed(42)
    hosted.train()
    assert same(hosted.model.state_dict(), by_hand(bert(), False, **WINDOW))
    assert callback.engine.get_epsilon() == pytest.approx(plan(**WINDOW).epsilon())


def test_trainer_accumulates_and_calibrates(tmp_path):
    hosted = trainer(tmp_path, bert(), per_device_train_batch_size=4, gradient_accumulation_steps=4)
    callback = PrivacyCallback(max_grad_norm=1.0, target_epsilon=3.0, target_delta=1e-4)
    callback.attach(hosted).attach(hosted)
    result = hosted.train()
    made = callback.engine.plan
    assert (made.num_steps, made.expected_batch_size_at(0)) == (2 * 3, 16)
    assert made.physical_batch_size == 4
    assert hosted.state.global_step == hosted.state.max_steps == 6
    assert result.metrics["epsilon"] <= 3.0
    assert hosted.args.gradient_accumulation_steps == 4
    assert not any("grad_norm" in entry for entry in hosted.state.log_history)
    lines = dualdp.Ledger.read(callback.engine.ledger.to_json())
    notes = [line["note"] for line in lines if "unprotected" in line.get("note", ())]
    assert notes == [{"unprotected": ["loss", "train_loss"]}]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, None])
def test_trainer_resumes(seed, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": STEPS}
    if seed is None:  # two passes, and accumulation
        saving |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
        given = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "target_delta": 1e-4}
    else:
        given = {"plan": plan(seed=seed, physical_batch_size=5)}
    first = trainer(tmp_path, bert(), **saving)
    PrivacyCallback(**given).attach(first)
    first.train()
    second = trainer(tmp_path, bert(), **saving)
    callback = PrivacyCallback().attach(second)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert same(first.model.state_dict(), second.model.state_dict()) == (seed is not None)
    assert second.state.global_step == STEPS
    assert len(callback.engine.ledger) == STEPS + 2, "steps 4 and 5 were released twice"
    assert callback.engine.get_epsilon() > plan().epsilon()

    (tmp_path / f"checkpoint-{STEPS}" / FILE).unlink()
    third = trainer(tmp_path, bert(), **saving)
    PrivacyCallback().attach(third)
    with pytest.raises(ValueError, match=f"has no {FILE}: it was saved without this callback"):
        third.train(resume_from_checkpoint=True)
    (tmp_path / f"checkpoint-{STEPS}" / FILE).write_text("{}")
    with pytest.raises(ValueError, match="The checkpoint says nothing of a private run"):
        third.train(resume_from_checkpoint=True)


def test_a_spent_budget_ends_the_training(tmp_path):
    hosted = trainer(tmp_path, bert(), num_train_epochs=100)
    given = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "on_budget": "stop"}
    callback = PrivacyCallback(**given, target_epsilon=9.0, target_delta=1e-4).attach(hosted)
    hosted.train()
    ledger = callback.engine.ledger
    assert 3 < hosted.state.global_step == len(ledger) == ledger.end < 100
    assert ledger.get_epsilon() <= 9.0


def test_what_trainer_would_do_to_gradients_is_refused(tmp_path):
    def refused(text, **options):
        hosted = trainer(tmp_path, bert(), **options)
        PrivacyCallback(plan=plan()).attach(hosted)
        with pytest.raises(ValueError, match=text):
            hosted.train()

    refused("max_grad_norm=0.5 of TrainingArguments clips whole batches", max_grad_norm=0.5)
    refused("auto_find_batch_size changes", auto_find_batch_size=True)
    for strategy in ("group_by_length", "batch_rebalance"):
        refused(
            f"train_sampling_strategy='{strategy}' makes batches of examples that are alike",
            train_sampling_strategy=strategy,
        )
    refused(
        "Write activation_checkpointing_kwargs={'use_reentrant': False}",
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": True},
    )
    hosted = trainer(tmp_path, bert())
    PrivacyCallback(plan=plan()).attach(hosted)
    hosted.accelerator.state.distributed_type, kind = DistributedType.FSDP, DistributedType.NO
    try:
        with pytest.raises(ValueError, match="the trainer works in parallel by FSDP"):
            hosted.train()
    finally:
        hosted.accelerator.state.distributed_type = kind
    hosted = trainer(tmp_path, bert())
    hosted.args._n_gpu = 2
    PrivacyCallback(plan=plan()).attach(hosted)
    with pytest.raises(ValueError, match="2 GPUs in one process"):
        hosted.train()
    hosted = trainer(tmp_path, bert(), max_steps=STEPS)
    hosted.train_dataset = Stream()
    PrivacyCallback(plan=plan()).attach(hosted)
    with pytest.raises(TypeError, match="Expected a map-style"):
        hosted.train()
    hosted = trainer(tmp_path, bert())
    PrivacyCallback(plan=plan()).attach(hosted)
    hosted.args.fp16 = True
    with pytest.raises(ValueError, match="fp16 scales the loss"):
        hosted.train()
    hosted = trainer(tmp_path, bert())
    PrivacyCallback(plan=plan()).attach(hosted)
    hosted._get_train_sampler = lambda data=None: torch.utils.data.WeightedRandomSampler([1.0], 1)
    with pytest.raises(ValueError, match="draws by WeightedRandomSampler"):
        hosted.train()


def test_a_callback_that_is_not_attached_is_refused(tmp_path):
    hosted = trainer(tmp_path, bert())
    hosted.add_callback(PrivacyCallback(plan=plan()))
    with pytest.raises(RuntimeError, match="given to a Trainer but not attached"):
        hosted.train()
    hosted = trainer(tmp_path, bert())
    PrivacyCallback(plan=plan()).attach(hosted)
    with pytest.raises(RuntimeError, match="trainer.train was replaced after attach"):
        type(hosted).train(hosted)
    with pytest.raises(RuntimeError, match="Data were asked for before the private run began"):
        next(iter(HostedLoader(HostedRun(), torch.utils.data.DataLoader(Sentences()), 1)))


def test_losses_are_each_examples_own():
    logits = torch.randn(3, 4, 5)
    labels = torch.tensor([[1, 2, -100, -100], [0, 1, 2, 3], [-100, -100, -100, -100]])

    def model(kind, problem=None):
        return SimpleNamespace(loss_type=kind, config=SimpleNamespace(problem_type=problem))

    tokens = per_example_loss(model("ForTokenClassification"), {"logits": logits}, labels)
    rows = [torch.nn.functional.cross_entropy(logits[i], labels[i]) for i in range(2)]
    torch.testing.assert_close(tokens, torch.stack([*rows, torch.tensor(0.0)]))
    causal = per_example_loss(model("ForCausalLM"), (logits,), labels, smoothing=0.1)
    row = torch.nn.functional.cross_entropy(logits[1, :-1], labels[1, 1:], label_smoothing=0.1)
    torch.testing.assert_close(causal[1], row)

    classifier, scores = model("ForSequenceClassification"), torch.randn(3, 1)
    squares = per_example_loss(classifier, (scores,), torch.arange(3.0))
    torch.testing.assert_close(squares, (scores[:, 0] - torch.arange(3.0)) ** 2)
    several = per_example_loss(classifier, (logits[:, 0],), torch.ones(3, 5))
    one = torch.nn.functional.binary_cross_entropy_with_logits(logits[1, 0], torch.ones(5))
    torch.testing.assert_close(several[1], one)
    with pytest.raises(ValueError, match="The model's loss is 'ForObjectDetection'"):
        per_example_loss(model("ForObjectDetection"), (logits,), labels)


class OwnLoss(transformers.Trainer):
    """A loss of one's own, as the Trainer's documentation writes it."""

    options = {}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.get("logits")
        criterion = torch.nn.CrossEntropyLoss(**self.options)
        loss = criterion(logits.view(-1, self.model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


@pytest.mark.slow
@pytest.mark.parametrize(("reduction", "physical"), [("mean", None), ("sum", 5)])
def test_a_trainer_with_a_loss_of_its_own(reduction, physical, tmp_path):
    hosted = trainer(tmp_path, bert(), max_steps=STEPS, **SGD)
    hosted.__class__ = type("Own", (OwnLoss,), {"options": {"reduction": reduction}})
    given = {"plan": plan(seed=3, physical_batch_size=physical)}
    PrivacyCallback(**given, loss_reduction=reduction).attach(hosted)
    torch.manual_seed(42)
    hosted.train()
    expected = by_hand(bert(), False, physical_batch_size=physical)
    assert all(
        torch.allclose(p, expected[name], rtol=0, atol=1e-6)
        for name, p in hosted.model.state_dict().items()
    )


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"reduction": "sum"}, ValueError, "Declare loss_reduction='sum'"),
        ({"weight": torch.tensor([1.0, 2.0])}, ValueError, "Weighted means"),
    ],
)
def test_losses_of_ones_own_that_mix_examples_are_refused(options, error, match, tmp_path):
    hosted = trainer(tmp_path, bert(), **SGD)
    hosted.__class__ = type("Own", (OwnLoss,), {"options": options})
    callback = PrivacyCallback(plan=plan()).attach(hosted)
    with pytest.raises(error, match=match):
        hosted.train()
    assert len(callback.engine.ledger) == 0


def test_a_compiled_trainer_trains_as_the_engine_alone(tmp_path):
    """known_failures 87: private steps run eagerly, and the option is there again afterwards."""
    hosted = trainer(tmp_path, bert(), torch_compile=True, max_steps=STEPS, **SGD)
    backend = hosted.accelerator.state.dynamo_plugin.backend
    PrivacyCallback(plan=plan(seed=3)).attach(hosted)
    torch.manual_seed(42)
    hosted.train()
    assert same(hosted.model.state_dict(), by_hand(bert(), False))
    assert hosted.accelerator.state.dynamo_plugin.backend == backend == "INDUCTOR"


@pytest.mark.slow
@pytest.mark.parametrize("kwargs", [None, {"preserve_rng_state": True}])
def test_a_trainer_that_checkpoints_activations_trains_as_without(kwargs, tmp_path):
    """known_failures 87: recomputed without reentrance, with the same dropout."""
    model, told = bert(), []

    def enable(activation_checkpointing_kwargs, **others):
        told.append(dict(activation_checkpointing_kwargs))
        type(model).activation_checkpointing_enable(model, activation_checkpointing_kwargs)

    model.activation_checkpointing_enable = enable
    options = {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs}
    hosted = trainer(tmp_path, model, max_steps=STEPS, **options, **SGD)
    PrivacyCallback(plan=plan(seed=3)).attach(hosted)
    torch.manual_seed(42)
    hosted.train()
    assert told == [{"use_reentrant": False, **(kwargs or {})}]
    assert hosted.args.activation_checkpointing_kwargs == kwargs
    assert model.bert.encoder.layer[0].gradient_checkpointing
    expected = by_hand(bert(), False)
    assert all(
        torch.allclose(p, expected[name], rtol=0, atol=1e-6)
        for name, p in model.state_dict().items()
    )


class Flipped(torch.utils.data.DataLoader):
    """Changes batches on their way."""

    def __iter__(self):
        return ({**batch, "labels": 1 - batch["labels"]} for batch in super().__iter__())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda data: Flipped(data, batch_size=16), "Flipped with an __iter__ of its own"),
        (lambda data: torch.utils.data.DataLoader(data, batch_size=4), "has batches of 4"),
        (
            lambda data: torch.utils.data.DataLoader(
                data, 16, sampler=torch.utils.data.RandomSampler(data, num_samples=20)
            ),
            "draws by RandomSampler",
        ),
        (lambda data: torch.utils.data.DataLoader(data, batch_size=16, shuffle=True), None),
    ],
)
def test_a_loader_of_ones_own_is_used_whole_or_refused(tmp_path, make, text):
    made, callback = trainer(tmp_path, bert()), PrivacyCallback(plan=plan())
    data = make(made.train_dataset)

    class Own(type(made)):
        def get_train_dataloader(self):
            return data

    made.__class__ = Own
    callback.attach(made)
    if text is None:
        made.train()
        assert len(callback.engine.ledger) == STEPS
        return
    with pytest.raises(ValueError, match=text):
        made.train()
