# SPDX-License-Identifier: Apache-2.0
"""What is asserted inside of private loops of tensor parallel models, by every process."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import dualdp_torch as dpt
from dualdp import ExactnessError, UnsupportedLayerError
from dualdp_torch.integrations.host_loop import HostedRun
from dualdp_torch.noise.noise import Cut
from dualdp_torch.parallel.tensor_parallel import TensorParallel
from dualdp_torch.rules import RULES
from dualdp_torch.training import step as private_step
from dualdp_torch.training.step_checks import StepChecks

from . import sharded_models as models
from . import tensor_runs as runs
from .tensor_checks import Dropped, cut, losses, whole


def refused(kind, match):
    return pytest.raises(kind, match=match)


def ends_elsewhere(name, patch, owner, attribute, value, **options):
    """Without spot checks, a fault leads away from the run of one device."""
    expected = runs.run(name, is_cut=False)[0]
    with patch.context() as planted:
        planted.setattr(owner, attribute, value)
        found = runs.run(name, is_cut=True, checks=0.0, **options)[0]
    apart = max(float((found[n] - p).abs().max() / p.abs().max()) for n, p in expected.items())
    assert apart > 1e-6, (attribute, apart)


def stopped(name, patch, owner, attribute, value, kind, match):
    """A fault that is found before anything is released."""
    with patch.context() as planted:
        planted.setattr(owner, attribute, value)
        engine, model, optimizer, loader = runs.begin(name, is_cut=True)
        with refused(kind, match):
            runs.step(name, model, optimizer, next(iter(loader)))
        assert len(engine.ledger) == 0
        engine.detach()


def twice(self, of):
    """Squared norms to which a parameter that is whole adds on every process."""
    table = torch.stack([*of.values()])
    dist.all_reduce(table, group=self.group.process_group)
    return dict(zip(of, table.unbind(0), strict=True))


def planted_faults_die(patch):
    """Norms of one piece, whole parameters counted twice, one noise for all pieces."""
    failed = ExactnessError, "spot check failed"
    for value in (lambda self, of: {**of}, twice):
        stopped("portable", patch, TensorParallel, "added", value, *failed)
    ends_elsewhere("short", patch, TensorParallel, "added", twice)
    first = lambda self, whole, length: whole.narrow(self.axis, 0, length)  # noqa: E731
    ends_elsewhere("short", patch, Cut, "of", first)


def whole_parameters_that_drift_apart_are_found(patch):
    """Noise of a whole parameter that is another one on each process."""
    real = private_step.noised_mean

    def own(*args, **kwargs):
        found = real(*args, **kwargs)
        return found | {"body.2.bias": found["body.2.bias"] + 1e-9 * dist.get_rank()}

    patch.setattr(private_step, "noised_mean", own)
    engine, model, optimizer, loader = runs.begin("short", is_cut=True)
    batches = iter(loader)
    runs.step("short", model, optimizer, next(batches))
    with refused(ValueError, r"parameters before step 1\['body.2.bias'\] is one on rank 0"):
        runs.step("short", model, optimizer, next(batches))
    assert len(engine.ledger) == 1
    engine.detach()


def the_digest_has_every_number_once():
    """Sums of whole parameters are not counted for each process."""
    engine, model, *_ = runs.begin("short", is_cut=True)
    split = TensorParallel.of(model)
    sums = {name: getattr(p, "to_local", lambda p=p: p)() for name, p in model.named_parameters()}
    shapes = sorted(shape for layout, _ in split.hashes(b"secret" * 6, sums) for _, shape in layout)
    assert shapes == sorted([(4, 6), (4,), (5, 4)] * 2 + [(5,)])
    engine.detach()


def a_check_that_fails_on_one_process_stops_all(patch):
    """Of the loop's loss, of a rule, and of a plain gradient."""
    last = dist.get_rank() == dist.get_world_size() - 1

    def criterion(self, draw):
        if last:
            raise ExactnessError("a loss is wrong")

    stopped(*("short", patch, StepChecks, "criterion", criterion), ExactnessError, "loss is wrong")
    right = RULES[F.linear]

    def weight_sum(acts, grads_out, **options):
        return right.sums["weight"](acts, grads_out * (3 if last else 1), **options)

    wrong = replace(right, sums={**right.sums, "weight": weight_sum})
    with patch.context() as planted:
        planted.setitem(RULES, F.linear, wrong)
        engine, model, optimizer, loader = runs.begin("portable", is_cut=True)
        with refused(ExactnessError, "spot check failed"):
            runs.step("portable", model, optimizer, next(iter(loader)))
        assert engine.ledger.failed_check["step"] == 0
        engine.detach()


def stages_are_cut_like_the_parameters():
    """And the ledger says that checks passed; no per-sample gradients."""
    engine, model, optimizer, loader = runs.begin("portable", is_cut=True, checks=1.0)
    engine.keep_per_sample = True
    batch = next(iter(loader))
    expected = dpt.clipped_grad_sum(losses, runs.build("tables")[0], *batch, max_grad_norm=0.5)
    runs.step("portable", model, optimizer, batch)
    found = engine.stages()
    assert found.unprotected_grads is None
    torch.testing.assert_close(found.unprotected_norms, expected.norms)
    for name, p in model.named_parameters():
        assert type(p.grad) is type(p.data)
        assert str(getattr(p.grad, "placements", "")) == str(getattr(p, "placements", ""))
        ours, theirs = whole(found.unprotected_sum[name]), expected.grads[name]
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        assert torch.equal(whole(p.grad), whole(found.noisy_mean[name]))
    assert engine.ledger.last_check == 0
    with refused(ValueError, "not copied. Read the averages of the pieces"):
        engine.ema()
    engine.detach()


def what_cannot_be_done_is_refused(patch):
    rank = dist.get_rank()
    model, data = runs.build("mlp")
    plan = models.plan()
    for mode in ("vmap", "functorch", "two_pass", "ghost"):
        cut_model = cut(runs.build("mlp")[0], runs.MLP)
        with refused(ValueError, r"came with a tensor parallel model \(parallelize_module\)"):
            models.begin(cut_model, data, plan, mode)
        assert not cut_model._forward_hooks
    cut(model, runs.MLP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def begin(model=model, loader=None, optimizer=optimizer, **options):
        loader = DataLoader(data, batch_size=10) if loader is None else loader
        engine = dpt.PrivacyEngine()
        return engine, *engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, plan=models.plan(), **options
        )

    sampled = DataLoader(data, batch_size=5, sampler=DistributedSampler(data))
    with refused(ValueError, "takes the same examples on every process. Expected a plain DataLo"):
        begin(loader=sampled)
    with refused(TypeError, "inside DistributedDataParallel"), patch.context() as planted:
        planted.setattr(DistributedDataParallel, "__init__", torch.nn.Module.__init__)
        wrapper = DistributedDataParallel()
        wrapper.module, wrapper.mixed_precision, wrapper._comm_hooks = model, None, []
        wrapper._delay_all_reduce_params, wrapper.process_group = [], None
        begin(model=wrapper)
    with refused(ValueError, r"disagree: optimizer\['groups'\]\[0\]\['lr'\]"):
        begin(optimizer=torch.optim.SGD(model.parameters(), lr=0.1 + rank))
    language, words = runs.build("tables")
    cut(language, runs.TABLES)
    for option in ("foreach", "fused"):
        mixed = torch.optim.AdamW(language.parameters(), **{option: True})
        with refused(ValueError, f"optimizer has {option}=True for parameters of a tensor parall"):
            models.begin(language, words, plan, "auto", mixed)
    assert not model._forward_hooks
    assert "zero_grad" not in vars(model)
    engine, *_, loader = begin()
    for call, match in (
        (dpt.save_checkpoint, "^save_checkpoint came with a tensor parallel model"),
        (dpt.save_sharded_checkpoint, "^save_sharded_checkpoint came with a tensor parallel"),
    ):
        with refused(TypeError, match):
            call("nowhere", model=model, optimizer=optimizer, engine=engine)
    hosted = HostedRun()
    hosted.loader = loader
    with refused(TypeError, "is not covered by trainers of other packages"):
        hosted.start(model, optimizer, wrapper=model, folder="nowhere", num_steps=1)
    for call in (dpt.load_checkpoint, dpt.load_sharded_checkpoint):
        with refused(TypeError, "whose runs are not saved or resumed"):
            call("nowhere", model=model, optimizer=optimizer)
    engine.detach()


def loops_that_differ_are_refused():
    """Other rows, other labels, other dropout on one process; outputs in pieces."""
    rank = dist.get_rank()

    def stops(engine, optimizer, loss, kind, match):
        with refused(kind, match):
            loss().backward()
            optimizer.step()
        assert len(engine.ledger) == 0
        engine.detach()

    engine, model, optimizer, loader = runs.begin("short", is_cut=True)
    x, y = next(batches := iter(loader))
    match = "disagree: the batch.*same examples in the same order"
    stops(engine, optimizer, lambda: F.cross_entropy(model(x + rank), y), ValueError, match)
    engine, model, optimizer, loader = runs.begin("short", is_cut=True)
    x, y = next(batches := iter(loader))
    y = (y + rank) % 5
    match = "disagree: the loss of physical batch 0 of step 0 .*the same labels"
    stops(engine, optimizer, lambda: F.cross_entropy(model(x), y), ValueError, match)
    data = runs.build("checkpointed")[1]
    model = cut(Dropped().double(), {"body.0": ColwiseParallel(), "head": RowwiseParallel()})
    for seeds, kind in (((5, 5), None), ((5, 6), ValueError)):
        engine, model, optimizer, loader = models.begin(model, data, models.plan())
        x, y = next(batches := iter(loader))
        torch.manual_seed(seeds[rank])
        if kind is None:
            models.step(model, optimizer, (x, y))
            assert len(engine.ledger) == 1
            engine.detach()
        else:
            match = "state of torch's generators.*torch.manual_seed alike"
            stops(engine, optimizer, lambda: F.cross_entropy(model(x), y), kind, match)  # noqa: B023
    model, data = runs.build("mlp")
    cut(model, runs.MLP | {"body.2": RowwiseParallel(use_local_output=False)})
    engine, model, optimizer, loader = models.begin(model, data, models.plan())
    x, y = next(batches := iter(loader))
    match = "model returned a DTensor"
    stops(engine, optimizer, lambda: model(x).square().mean(), UnsupportedLayerError, match)


def parameters_used_on_pieces_are_refused():
    """A norm of the heads that are here: each process has a share of its gradient."""
    _, data = runs.build("tables")
    plan = {"q": ColwiseParallel(), "o": RowwiseParallel()}
    for mode, checks in (("auto", 1.0), ("auto", 0.0), ("loop", 1.0)):
        torch.manual_seed(2)
        model = cut(HeadNorm().double(), plan)
        engine, model, optimizer, loader = models.begin(
            model, data, models.plan(), mode, checks=checks
        )
        with refused(
            UnsupportedLayerError, r"\['norm.weight', 'norm.bias'\] whole, but their grad"
        ):
            runs.step("tables", model, optimizer, next(iter(loader)))
        assert len(engine.ledger) == 0
        engine.detach()


class HeadNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.q, self.norm, self.o = nn.Linear(8, 8), nn.LayerNorm(4), nn.Linear(8, 8)

    def forward(self, x):
        heads = self.norm(self.q(self.words(x)).unflatten(-1, (-1, 4)))
        return self.head(self.o(heads.tanh().flatten(2)))


def a_model_that_is_cut_later_is_refused():
    """Its trained parameters are as before, but each process had got examples of its own."""
    engine, model, optimizer, loader = runs.begin("adapted", is_cut=False, checks=0.0)
    cut(model.base, runs.MLP)
    with refused(RuntimeError, "cut by parallelize_module, or made whole, after set-up"):
        runs.step("adapted", model, optimizer, next(iter(loader)))
    assert len(engine.ledger) == 0
    engine.detach()
