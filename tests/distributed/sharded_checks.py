# SPDX-License-Identifier: Apache-2.0
"""What is asserted inside of sharded runs, by every process."""

import contextlib
import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dualdp_torch as dpt
from dualdp import UnsupportedLayerError
from dualdp_torch.parallel import fsdp
from dualdp_torch.per_sample.gradients import Captured
from dualdp_torch.per_sample.random_state import Start

from . import sharded_models as models


def began(kind="mlp", mode="auto", dtype=torch.float32, options=None, model=None, **changes):
    """A sharded run that has begun: engine, model, optimizer, iterator."""
    built, data = models.build(kind, dtype)
    model = model or models.shard(built, **(options or {}))
    engine, model, optimizer, loader = models.begin(model, data, models.plan(**changes), mode)
    return engine, model, optimizer, iter(loader)


def whole(tensors):
    """Name -> the tensor of all processes; pieces are joined along their rows."""
    found = {}
    for name, piece in tensors.items():
        pieces = [None] * dist.get_world_size()
        dist.all_gather_object(pieces, piece)
        found[name] = torch.cat(pieces)
    return found


# ---------------------------------------------------------------------- noise and gradients


def gradient_is_the_noisy_mean_of_one_device():
    """Bit for bit: the joined gradient is what one device makes of the joined sums."""
    for noise in ("fast", "portable"):
        engine, model, optimizer, batches = began(noise=noise)
        models.step(model, optimizer, next(batches))
        sums = whole(engine.stages().unprotected_sum)
        expected = dpt.noisy_mean(sums, engine.plan, 0)
        for name, p in model.named_parameters():
            assert isinstance(p.grad, DTensor)
            assert p.grad.placements == p.placements
            assert torch.equal(p.grad.full_tensor(), expected[name]), name
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        engine.detach()


def the_ledger_says_what_is_not_checked():
    """The record of all processes holds it once."""
    engine, model, optimizer, batches = began()
    for _ in range(2):
        models.step(model, optimizer, next(batches))
    assert engine.ledger.to_json().count("check_impossible") == 1
    assert "fully_shard" in engine.ledger.to_json()
    engine.detach()


def a_buffer_that_is_written_later_is_refused():
    """It would carry examples, raw, into the state_dict; whichever way the sums are formed."""
    for clipping in ("flat", "per_layer"):
        writes, (built, _) = [], models.build("mlp", torch.float32)
        built.register_buffer("seen", torch.zeros(()))

        def write(module, args, writes=writes):
            if writes:
                module.seen.add_(args[0].mean())

        built.register_forward_pre_hook(write)
        engine, model, optimizer, batches = began(model=models.shard(built), clipping=clipping)
        models.step(model, optimizer, next(batches))
        writes.append(True)
        with pytest.raises(UnsupportedLayerError, match="buffers .'seen'. of a model under fully_"):
            models.step(model, optimizer, next(batches))
        engine.detach()


def gradients_are_there_after_the_last_physical_batch_only():
    engine, model, optimizer, batches = began(physical_batch_size=2)
    seen = []
    for batch in batches:
        models.step(model, optimizer, batch)
        assert {p.grad is None for p in model.parameters()} == {not engine.is_between_steps}
        seen.append(engine.is_between_steps)
        if engine.ledger.position == 3:
            break
    assert not all(seen)
    engine.detach()


def planted_faults_are_seen(patch):
    """Noise at another place, and a sum of one process only, change what a step gives."""
    found = []
    for fault in (None, "place", "sum"):
        with patch.context() as planted:
            if fault == "sum":
                planted.setattr(fsdp, "_reduce_scatter", _own_part)
            engine, model, optimizer, batches = began(dtype=torch.float64)
            if fault == "place":
                shards = engine._step.recorder.shards
                moved = {n: piece._replace(start=0) for n, piece in shards.pieces.items()}
                planted.setattr(shards, "pieces", moved)
            models.step(model, optimizer, next(batches))
            found.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
            engine.detach()
    right, *wrong = found
    for grads in wrong:
        assert max(float((grads[name] - right[name]).abs().max()) for name in right) > 1e-3


def _own_part(piece, total, group):
    """Not a sum over processes."""
    piece.copy_(total.chunk(dist.get_world_size())[dist.get_rank()])


def low_precision_stays_inside_the_model():
    """bfloat16 in forward; norms, sums and noise in float32, those of a bfloat16 model."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for mode in ("auto", "two_pass"):
        engine, model, optimizer, batches = began(mode=mode, options={"mp_policy": policy})
        batch = next(batches)
        models.step(model, optimizer, batch)
        stages = engine.stages()
        assert stages.unprotected_norms.dtype == torch.float32
        assert {s.dtype for s in stages.unprotected_sum.values()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        expected = dpt.noisy_mean(whole(stages.unprotected_sum), engine.plan, 0)
        for name, p in model.named_parameters():
            assert torch.equal(p.grad.full_tensor(), expected[name])
        low = models.build("mlp")[0].to(torch.bfloat16)
        theirs = dpt.clipped_grad_sum(
            lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"),
            low,
            batch[0].to(torch.bfloat16),
            batch[1],
            max_grad_norm=0.5,
        )
        torch.testing.assert_close(
            stages.unprotected_norms, theirs.norms.float(), rtol=0.02, atol=1e-3
        )
        total = {n: p.float() for n, p in theirs.grads.items()}
        for name, grad in total.items():
            dist.all_reduce(grad)
            ours = whole(stages.unprotected_sum)[name]
            torch.testing.assert_close(ours, grad, rtol=0.05, atol=0.02)
        engine.detach()


# ---------------------------------------------------------------------- memory


class Alive(TorchDispatchMode):
    """Which whole gradients of weights are alive at once, whatever makes them."""

    def __init__(self, shapes, ignored):
        super().__init__()
        self._shapes, self._ignored = set(shapes), ignored
        self._seen = []
        self.most, self.shapes = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if type(tensor) is torch.Tensor and tuple(tensor.shape) in self._shapes:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._ignored():
                    self._seen.append(weakref.ref(tensor))
        self._seen = [ref for ref in self._seen if ref() is not None]
        alive = {tuple(ref().shape) for ref in self._seen}
        self.shapes |= alive
        self.most = max(self.most, len(alive))
        return out


def _alive(clipping, mode="auto"):
    """The most whole gradients of weights that are alive at once in backward and step."""
    engine, model, optimizer, batches = began(mode=mode, clipping=clipping)
    for _ in range(2):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        plain = engine._step.recorder.shards.plain.values()
        shapes = [tuple(p.shape) for p in plain if p.dim() == 2]
        mode = Alive(shapes, lambda: {p.untyped_storage().data_ptr() for p in plain})  # noqa: B023
        with mode:
            loss.backward()
            in_backward = set(mode.shapes)
            optimizer.step()
        assert mode.shapes == set(shapes)  # it sees them
        assert in_backward != set(shapes)  # gradients are formed in the step
    engine.detach()
    return mode.most


def one_whole_gradient_is_alive_at_a_time(patch):
    assert _alive("flat") == 1
    assert _alive("per_layer") == 1
    sums = Captured.sums
    with patch.context() as planted:
        planted.setattr(
            Captured,
            "sums",
            lambda self, factors, rows, reduce: {
                name: reduce(name, total) for name, total in sums(self, factors, rows).items()
            },
        )
        assert _alive("flat") == 3


# ---------------------------------------------------------------------- guards


def refused(kind, match):
    return pytest.raises(kind, match=match)


def guards_of_the_recorder_are_on():
    engine, model, optimizer, batches = began()
    x, y = next(batches)
    out = model(x)
    with refused(RuntimeError, "called twice for one batch"):
        model(x)
    loss = F.cross_entropy(out, y)
    loss.backward(retain_graph=True)
    with refused(RuntimeError, "backward ran twice"):
        loss.backward()
    engine.detach()

    engine, model, optimizer, batches = began()
    x, y = next(batches)
    loss = F.cross_entropy(model(x), y) + model[0].weight.full_tensor().square().sum()
    with refused((RuntimeError, ValueError), "outside the recorded forward|joins|no mean"):
        loss.backward()
    engine.detach()

    engine, model, optimizer, batches = began()
    with refused(RuntimeError, "without a batch of the loader"):
        F.cross_entropy(model(torch.ones(4, 6)), torch.zeros(4, dtype=torch.long)).backward()
    engine.detach()

    engine, model, optimizer, batches = began()
    x, y = next(batches)
    model[0].bias.requires_grad_(False)
    with refused(RuntimeError, "were frozen, unfrozen or replaced"):
        model(x)
    engine.detach()

    engine, model, optimizer, batches = began()
    x, y = next(batches)
    with refused(ValueError, "loss_reduction='mean', but the loss is a sum"):
        F.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
    engine.detach()


class Escaping(nn.Module):
    """A parameter used by a function without a rule, behind data."""

    def __init__(self):
        super().__init__()
        self.first, self.power = nn.Linear(6, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return torch.pow(self.first(x).sigmoid(), self.power)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Experts(nn.Module):
    """Two layers of which each process uses another one."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x):
        return self.experts[dist.get_rank() % 2](x)


class Heads(nn.Module):
    """Two heads, of which each process' loss uses another one."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x):
        return [head(x) for head in self.heads]


def other_ways_through_the_model_are_refused():
    for mode, clipping in (("auto", "per_layer"), ("two_pass", "flat")):
        model = fully_shard(Experts())
        engine, model, optimizer, batches = began(mode=mode, model=model, clipping=clipping)
        x, y = next(batches)
        with refused(
            ValueError, r"the model used.* is 'experts.0.bias' on rank 0 and .* on rank 1"
        ):
            model(x)
        engine.detach()


def layers_that_one_process_uses_are_added_up():
    """Its examples contribute what they do on one device, the others' nothing."""
    torch.manual_seed(7)
    plain, own = Heads(), dist.get_rank() % 2

    def losses(model, x, y):
        return F.cross_entropy(model(x)[own], y, reduction="none")

    for clipping in ("flat", "per_layer"):
        model = fully_shard(copy.deepcopy(plain))
        engine, model, optimizer, batches = began(model=model, clipping=clipping, sampler="shuffle")
        x, y = next(batches)  # without padding
        expected = dpt.clipped_grad_sum(
            losses, plain, x, y, max_grad_norm=engine.plan.max_grad_norm, clipping=clipping
        ).grads
        losses(model, x, y).mean().backward()
        optimizer.step()
        sums = whole(engine.stages().unprotected_sum)
        for name, total in expected.items():
            dist.all_reduce(total)
            assert total.norm() > 0.01
            torch.testing.assert_close(sums[name], total)
        engine.detach()


def what_cannot_be_done_is_refused():
    data = models.build("mlp")[1]
    for mode in ("vmap", "functorch", "hooks", "materialize"):
        model = models.shard(models.mlp())
        before = len(model._forward_pre_hooks), len(model._forward_hooks)
        with refused(ValueError, "holds per-sample gradients of every layer at once"):
            models.begin(model, data, models.plan(), mode)
        assert before == (len(model._forward_pre_hooks), len(model._forward_hooks))
    size = dist.get_world_size()
    half = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))
    for options, ignored, match in (
        ({"mesh": half}, [], "'0.weight' has the placements"),
        ({"mesh": half["b"]}, [], "over all processes"),
        ({"shard_placement_fn": lambda p: Shard(p.dim() - 1)}, [], r"Shard\(0\)"),
        ({}, ["0.weight"], r"\['0.weight'\] are not sharded"),
    ):
        model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4))
        fully_shard(model, ignored_params={model.get_parameter(n) for n in ignored}, **options)
        with refused(TypeError, match):
            models.begin(model, data, models.plan())
    with refused(TypeError, "make_private takes sharded ones"):
        dpt.per_sample_norms(lambda m, x: m(x).sum(1), models.shard(models.mlp()), data[:3][0])
    for model, match in (
        (Escaping(), "fully_shard"),
        (Checkpointed(), "checkpoints activations"),
    ):
        fully_shard(model)
        engine, model, optimizer, loader = models.begin(model, data, models.plan())
        with refused(UnsupportedLayerError, match):
            model(next(iter(loader))[0])
        assert len(engine.ledger) == 0
        engine.detach()


class Adapted(nn.Module):
    """A base that may be frozen, and a small part beside it that is trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.adapter = nn.Linear(6, 4)

    def forward(self, x):
        return self.base(x) + self.adapter(x)


def cut(mesh, **frozen):
    """A model whose base is tensor parallel on a mesh of one dimension."""
    model = Adapted()
    model.base.requires_grad_(not frozen.get("frozen", False))
    plan = {"base.0": ColwiseParallel(), "base.2": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def tensor_parallel_models_are_refused():
    """By calls that take one process, of a frozen base too, and below fully_shard."""
    data, size = models.build("mlp")[1], dist.get_world_size()
    mesh, x, y = init_device_mesh("cpu", (size,)), *data[:6]
    losses = lambda model, x, y: F.cross_entropy(model(x), y, reduction="none")  # noqa: E731
    name = r"'base.0.weight'.*are DTensors.*tensor parallelism \(parallelize_module\) is not cov"
    for frozen in (False, True):
        model = cut(mesh, frozen=frozen)
        hooks = [len(module._forward_hooks) for module in model.modules()]
        with refused(TypeError, name):
            dpt.explain(losses, model, x, y)
        with refused(TypeError, name):
            dpt.validate(model)
        with refused(TypeError, name), dpt.record_per_sample(model, loss_reduction="mean"):
            pass
        assert hooks == [len(module._forward_hooks) for module in model.modules()]
    both = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    for frozen in (False, True):
        model = cut(both["tensor"], frozen=frozen)
        fully_shard(model.base, mesh=both["data"])
        match = r"'base.0.weight' has the placements .*\(parallelize_module\)"
        with refused(TypeError, match):
            models.begin(model, data, models.plan())
        with refused(TypeError, match):
            dpt.clipped_grad_sum(losses, model, x, y, max_grad_norm=1.0)


def adam_bc_of_shards_is_that_of_one_device():
    """The same steps, of moments that lie in pieces."""
    ends = []
    for shard in (lambda model: model, models.shard):
        model, data = models.build("mlp", torch.float64)
        shard(model)
        optimizer = dpt.AdamBC(model.parameters(), lr=0.05)
        engine, model, optimizer, loader = models.begin(
            model, data, models.plan(), optimizer=optimizer
        )
        for _, batch in zip(range(4), loader, strict=False):
            models.step(model, optimizer, batch)
        engine.detach()
        ends.append(models.parameters(model))
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-10, atol=1e-12)


def a_weight_tied_across_groups_is_named():
    model, data = models.build("tied")
    fully_shard(model.tokens)
    fully_shard(model)
    with refused((ValueError, RuntimeError), "(tokens|head).weight"):
        engine, model, optimizer, loader = models.begin(model, data, models.plan())
        models.step(model, optimizer, next(iter(loader)))


class Last(nn.Module):
    """Picks each example's last word by its length, which is data."""

    def __init__(self, shifts):
        super().__init__()
        self.body, self.head, self.shifts = nn.Linear(6, 5), nn.Linear(5, 3), shifts

    def forward(self, x):
        n = len(x)
        rows = torch.arange(n)
        if self.shifts and n > 1 and float(x[0, 0]) > 100:
            rows = rows.roll(1)
        return self.head(self.body(x)[rows].tanh())


def rows_that_data_move_are_looked_at_together():
    """One process has one example, or a batch in which nothing can move; all look at theirs."""
    data = models.build("mlp")[1]
    for shifts in (False, True):
        torch.manual_seed(1)
        model = Last(shifts)
        fully_shard(model)
        engine, model, optimizer, loader = models.begin(
            model, data, models.plan(expected_batch_size=4)
        )
        batches = iter(loader)
        if shifts:
            rows, labels = next(batches)
            rows[0, 0] = 1000.0
            most = torch.tensor(len(rows))
            dist.all_reduce(most, dist.ReduceOp.MAX)
            if most > 1:
                with refused(UnsupportedLayerError, "is another one alone than in the batch"):
                    model(rows)
        else:
            for _ in range(4):
                models.step(model, optimizer, next(batches))
        engine.detach()


def evaluation_between_steps_changes_nothing():
    ended = []
    for looks in (False, True):
        engine, model, optimizer, batches = began(
            kind="gpt", options={"reshard_after_forward": False}
        )
        for _, batch in zip(range(3), batches, strict=False):
            models.step(model, optimizer, batch)
            if looks:
                model.eval()
                with torch.no_grad():
                    model(batch[0])
                model.train()
        engine.detach()
        ended.append(models.parameters(model))
    assert all(torch.equal(ended[0][name], ended[1][name]) for name in ended[0])


def frozen_parameters_stay():
    model = models.build("mlp")[0]
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    models.shard(model)
    engine, model, optimizer, batches = began(model=model)
    for _ in range(2):
        models.step(model, optimizer, next(batches))
    assert torch.equal(model[0].weight.full_tensor(), before)
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None
    engine.detach()


def dropout_of_both_passes_is_the_same(patch):
    """Book-keeping, which has one pass, gives the same sums; other draws are refused."""

    def sums(mode):
        model = models.build("mlp", torch.float64)[0]
        model[1] = nn.Sequential(nn.Tanh(), nn.Dropout(0.5))
        models.shard(model)
        engine, model, optimizer, batches = began(mode=mode, dtype=torch.float64, model=model)
        torch.manual_seed(dist.get_rank())
        models.step(model, optimizer, next(batches))
        found = engine.stages().unprotected_sum
        engine.detach()
        return torch.cat([piece.flatten() for piece in found.values()])

    once = sums("book_keeping")
    torch.testing.assert_close(sums("two_pass"), once, rtol=1e-10, atol=1e-12)
    patch.setattr(Start, "replayed", lambda start, model: contextlib.nullcontext())
    with refused(UnsupportedLayerError, "gives other outputs than the first"):
        sums("two_pass")


def whole_models_are_gathered_or_refused():
    model = models.shard(models.build("gpt")[0])
    for name, array in dpt.weights.to_numpy(model).items():
        assert (array == models.build("gpt")[0].get_parameter(name).detach().numpy()).all()
    engine, model, optimizer, batches = began()
    with refused(TypeError, "save_checkpoint came with a model under fully_shard"):
        dpt.save_checkpoint("nowhere", model=model, optimizer=optimizer, engine=engine)
    with refused(TypeError, "load_checkpoint came with .*Expected load_sharded_checkpoint"):
        dpt.load_checkpoint("nowhere", model=model, optimizer=optimizer)
    engine.detach()


def secure_noise_trains():
    engine, model, optimizer, batches = began(noise="secure", seed=None)
    before = models.parameters(model)
    models.step(model, optimizer, next(batches))
    after = models.parameters(model)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    engine.detach()
