# SPDX-License-Identifier: Apache-2.0
"""What two processes assert inside of sharded runs."""

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
from dualdp_torch.per_sample.random_state import Start

from . import models

BOTH = ("flat", "per_layer")
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def refused(kind, match):
    return pytest.raises(kind, match=match)


@contextlib.contextmanager
def began(model=None, mode="auto", optimizer=None, **changes):
    """Engine, model, optimizer and batches of a sharded run."""
    model, data = model or models.shard(models.build()[0]), models.build()[1]
    data.tensors = data.tensors[0].to(next(model.parameters()).dtype), data.tensors[1]
    engine, model, optimizer, loader = models.begin(
        model, data, models.plan(**changes), mode, optimizer
    )
    try:
        yield engine, model, optimizer, iter(loader)
    finally:
        engine.detach()


def whole(tensors):
    """Name -> the tensor of all processes; pieces are joined along their rows."""
    found = {}
    for name, piece in tensors.items():
        pieces = [None] * dist.get_world_size()
        dist.all_gather_object(pieces, piece)
        found[name] = torch.cat(pieces)
    return found


def losses(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


# ---------------------------------------------------------------------- noise and gradients


@check
def gradient_is_the_noisy_mean_of_one_device(patch, folder):
    """Bit for bit: the joined gradient is what one device makes of the joined sums."""
    for noise in ("fast", "portable"):
        with began(noise=noise) as (engine, model, optimizer, batches):
            models.step(model, optimizer, next(batches))
            expected = dpt.noisy_mean(whole(engine.stages().unprotected_sum), engine.plan, 0)
            for name, p in model.named_parameters():
                assert isinstance(p.grad, DTensor)
                assert p.grad.placements == p.placements
                assert torch.equal(p.grad.full_tensor(), expected[name]), name
            optimizer.zero_grad()
            assert all(p.grad is None for p in model.parameters())


@check
def gradients_are_there_after_the_last_physical_batch_only(patch, folder):
    """And the ledger says once what is not checked."""
    with began(physical_batch_size=2) as (engine, model, optimizer, batches):
        seen = []
        while engine.ledger.position < 3:
            models.step(model, optimizer, next(batches))
            seen.append(engine.is_between_steps)
            assert {p.grad is None for p in model.parameters()} == {not seen[-1]}
        assert not all(seen)
        assert engine.ledger.to_json().count("check_impossible") == 1
        assert "fully_shard" in engine.ledger.to_json()


@check
def low_precision_stays_inside_the_model(patch, folder):
    """bfloat16 in forward; norms, sums and noise in float32, norms those of a bfloat16 model."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for mode in ("auto", "two_pass"):
        model = models.shard(models.build()[0], mp_policy=policy)
        with began(model, mode) as (engine, model, optimizer, batches):
            x, y = next(batches)
            models.step(model, optimizer, (x, y))
            stages = engine.stages()
            assert stages.unprotected_norms.dtype == torch.float32
            assert {s.dtype for s in stages.unprotected_sum.values()} == {torch.float32}
            assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
            low = models.build(dtype=torch.bfloat16)[0]
            found = dpt.clipped_grad_sum(losses, low, x.bfloat16(), y, max_grad_norm=0.5)
            close = {"rtol": 0.02, "atol": 1e-3}
            torch.testing.assert_close(stages.unprotected_norms, found.norms.float(), **close)
            sums = whole(stages.unprotected_sum)
            for name, grad in found.grads.items():
                dist.all_reduce(total := grad.float())
                torch.testing.assert_close(sums[name], total, rtol=0.05, atol=0.02)


class Heads(nn.Module):
    """Two heads, of which each process' loss uses another one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x):
        return [head(x) for head in self.heads]


@check
def layers_that_one_process_uses_are_added_up(patch, folder):
    """Its examples contribute what they do on one device, the others' nothing."""
    plain, own = Heads(), dist.get_rank()
    mine = lambda model, x, y: F.cross_entropy(model(x)[own], y, reduction="none")  # noqa: E731
    for clipping in BOTH:
        changes = {"clipping": clipping, "sampler": "shuffle"}  # without padding
        with began(fully_shard(copy.deepcopy(plain)), **changes) as run:
            engine, model, optimizer, batches = run
            batch, options = next(batches), {"max_grad_norm": 0.5, "clipping": clipping}
            expected = dpt.clipped_grad_sum(mine, plain, *batch, **options).grads
            mine(model, *batch).mean().backward()
            optimizer.step()
            sums = whole(engine.stages().unprotected_sum)
            for name, total in expected.items():
                dist.all_reduce(total)
                assert total.norm() > 0.01
                torch.testing.assert_close(sums[name], total)


@check
def adam_bc_of_shards_is_that_of_one_device(patch, folder):
    """The same steps, of moments that lie in pieces."""
    ends = []
    for shard in (lambda model: model, models.shard):
        model = shard(models.build(dtype=torch.float64)[0])
        optimizer = dpt.AdamBC(model.parameters(), lr=0.05)
        with began(model, optimizer=optimizer) as (_, model, optimizer, batches):
            for _ in range(4):
                models.step(model, optimizer, next(batches))
            ends.append(models.parameters(model))
    assert models.distance(*ends) < 1e-10


@check
def dropout_of_both_passes_is_the_same(patch, folder):
    """Book-keeping, which has one pass, gives the same sums; other draws are refused."""

    def sums(mode):
        model = models.build(dtype=torch.float64)[0]
        model[1] = nn.Sequential(nn.Tanh(), nn.Dropout(0.5))
        with began(models.shard(model), mode) as (engine, model, optimizer, batches):
            torch.manual_seed(dist.get_rank())
            models.step(model, optimizer, next(batches))
            return engine.stages().unprotected_sum

    first, second = sums("book_keeping"), sums("two_pass")
    for name, total in first.items():
        torch.testing.assert_close(second[name], total, rtol=1e-10, atol=1e-12)
    patch.setattr(Start, "replayed", lambda start, model: contextlib.nullcontext())
    with refused(UnsupportedLayerError, "gives other outputs than the first"):
        sums("two_pass")


@check
def evaluation_between_steps_changes_nothing(patch, folder):
    ended = []
    for looks in (False, True):
        model = models.shard(models.build()[0], reshard_after_forward=False)
        with began(model) as (_, model, optimizer, batches):
            for _ in range(3):
                models.step(model, optimizer, batch := next(batches))
                if looks:
                    model.eval()
                    with torch.no_grad():
                        model(batch[0])
                    model.train()
            ended.append(models.parameters(model))
    assert models.distance(*ended) == 0


@check
def frozen_parameters_stay_under_secure_noise(patch, folder):
    model = models.build()[0]
    model[0].requires_grad_(False)
    before = models.parameters(model)
    with began(models.shard(model), noise="secure", seed=None) as (_, model, optimizer, batches):
        models.step(model, optimizer, next(batches))
        assert model[0].weight.grad is None
        for name, value in models.parameters(model).items():
            assert torch.equal(value, before[name]) == name.startswith("0."), name


# ---------------------------------------------------------------------- memory


class Alive(TorchDispatchMode):
    """Which whole gradients of weights are alive at once, whatever makes them."""

    def __init__(self, parameters):
        super().__init__()
        self._parameters, self._seen = parameters, []
        self.whole = {tuple(p.shape) for p in parameters}
        self.most, self.shapes = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        ignored = {p.untyped_storage().data_ptr() for p in self._parameters}
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if type(tensor) is torch.Tensor and tuple(tensor.shape) in self.whole:
                if tensor.untyped_storage().data_ptr() not in ignored:
                    self._seen.append(weakref.ref(tensor))
        alive = {tuple(tensor.shape) for ref in self._seen if (tensor := ref()) is not None}
        self.most, self.shapes = max(self.most, len(alive)), self.shapes | alive
        return out


@check
def one_whole_gradient_is_alive_at_a_time(patch, folder):
    for clipping in BOTH:
        with began(clipping=clipping) as (engine, model, optimizer, batches):
            x, y = next(batches)
            loss = F.cross_entropy(model(x), y)
            plain = engine._step.recorder.shards.plain.values()
            with Alive([p for p in plain if p.dim() == 2]) as alive:
                loss.backward()
                assert alive.shapes != alive.whole  # gradients are formed in the step
                optimizer.step()
            assert (alive.most, alive.shapes) == (1, alive.whole)


# ---------------------------------------------------------------------- guards


@check
def a_buffer_that_is_written_later_is_refused(patch, folder):
    """It would carry examples, raw, into the state_dict; whichever way the sums are formed."""
    for clipping in BOTH:
        writes, model = [], models.build()[0]
        model.register_buffer("seen", torch.zeros(()))

        def write(module, args, writes=writes):
            if writes:
                module.seen.add_(args[0].mean())

        model.register_forward_pre_hook(write)
        with began(models.shard(model), clipping=clipping) as (_, model, optimizer, batches):
            models.step(model, optimizer, next(batches))
            writes.append(True)
            with refused(UnsupportedLayerError, "buffers .'seen'. of a model under fully_"):
                models.step(model, optimizer, next(batches))


def twice(model, optimizer, x, y):
    model(x)
    model(x)


def outside(model, optimizer, x, y):
    (F.cross_entropy(model(x), y) + model[0].weight.full_tensor().square().sum()).backward()


def frozen_now(model, optimizer, x, y):
    model[0].bias.requires_grad_(False)
    model(x)


def a_sum(model, optimizer, x, y):
    F.cross_entropy(model(x), y, reduction="sum").backward()
    optimizer.step()


GUARDS = {
    "called twice for one batch": twice,
    "outside the recorded forward|joins|no mean": outside,
    "were frozen, unfrozen or replaced": frozen_now,
    "loss_reduction='mean', but the loss is a sum": a_sum,
}


@check
def guards_of_the_recorder_are_on(patch, folder):
    for text, mistake in GUARDS.items():
        with began() as (_, model, optimizer, batches):
            batch = next(batches)
            with refused((RuntimeError, ValueError), text):
                mistake(model, optimizer, *batch)
    with began() as (_, model, *_), refused(RuntimeError, "without a batch of the loader"):
        F.cross_entropy(model(torch.ones(4, 6)), torch.zeros(4, dtype=torch.long)).backward()


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


class Experts(Heads):
    """Two layers of which each process uses another one."""

    def forward(self, x):
        return self.heads[dist.get_rank()](x)


class Last(nn.Module):
    """Picks each example's last word by its length, which is data."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        rows = torch.arange(len(x))
        if len(x) > 1 and float(x[0, 0]) > 100:
            rows = rows.roll(1)
        return self.head(self.body(x)[rows].tanh())


@check
def models_that_cannot_be_captured_are_refused(patch, folder):
    data = models.build()[1]
    text = r"the model used.* is 'heads.0.bias' on rank 0 and .* on rank 1"
    for model, options, kind, match in (
        (Escaping(), {}, UnsupportedLayerError, "fully_shard"),
        (Checkpointed(), {}, UnsupportedLayerError, "checkpoints activations"),
        (Experts(), {"clipping": "per_layer"}, ValueError, text),
        (Experts(), {"mode": "two_pass"}, ValueError, text),
    ):
        with began(fully_shard(model), **options) as (engine, model, _, batches):
            with refused(kind, match):
                model(next(batches)[0])
            assert len(engine.ledger) == 0
    model = models.build("tied")[0]
    fully_shard(model.tokens)  # its weight is tied across groups
    with refused((ValueError, RuntimeError), "(tokens|head).weight"):
        engine, model, optimizer, loader = models.begin(fully_shard(model), data)
        models.step(model, optimizer, next(iter(loader)))


@check
def rows_that_data_move_are_looked_at_together(patch, folder):
    """One process has one example, or a batch in which nothing can move; all look at theirs."""
    with began(fully_shard(Last()), expected_batch_size=4) as (_, model, optimizer, batches):
        for _ in range(4):
            models.step(model, optimizer, next(batches))
    with began(fully_shard(Last()), expected_batch_size=4) as (_, model, optimizer, batches):
        rows = next(batches)[0]
        rows[0, 0] = 1000.0
        dist.all_reduce(most := torch.tensor(len(rows)), dist.ReduceOp.MAX)
        assert most > 1
        with refused(UnsupportedLayerError, "is another one alone than in the batch"):
            model(rows)


@check
def what_cannot_be_done_is_refused(patch, folder):
    data = models.build()[1]
    for mode in ("vmap", "functorch", "hooks", "materialize"):
        model = models.shard(models.mlp())
        before = len(model._forward_pre_hooks), len(model._forward_hooks)
        with refused(ValueError, "holds per-sample gradients of every layer at once"):
            models.begin(model, data, mode=mode)
        assert before == (len(model._forward_pre_hooks), len(model._forward_hooks))
    half = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    for options, ignored, match in (
        ({"mesh": half}, [], "'0.weight' has the placements"),
        ({"mesh": half["b"]}, [], "over all processes"),
        ({"shard_placement_fn": lambda p: Shard(p.dim() - 1)}, [], r"Shard\(0\)"),
        ({}, ["0.weight"], r"\['0.weight'\] are not sharded"),
    ):
        model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4))
        fully_shard(model, ignored_params={model.get_parameter(n) for n in ignored}, **options)
        with refused(TypeError, match):
            models.begin(model, data)
    with refused(TypeError, "make_private takes sharded ones"):
        dpt.per_sample_norms(losses, models.shard(models.mlp()), *data[:3])


@check
def tensor_parallel_models_are_refused(patch, folder):
    """By calls that take one process, of a frozen base too, and below fully_shard."""
    data, x, y = models.build()[1], *models.build()[1][:6]
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))

    def cut(is_frozen):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 3))
        model[:3].requires_grad_(not is_frozen)
        ways = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(model, mesh["tensor"], ways)

    name = r"'0.weight'.*are DTensors.*tensor parallelism \(parallelize_module\) is not cov"
    for is_frozen in (False, True):
        model = cut(is_frozen)
        hooks = [len(module._forward_hooks) for module in model.modules()]
        with refused(TypeError, name):
            dpt.explain(losses, model, x, y)
        with refused(TypeError, name):
            dpt.validate(model)
        with refused(TypeError, name), dpt.record_per_sample(model, loss_reduction="mean"):
            pass
        assert hooks == [len(module._forward_hooks) for module in model.modules()]
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh["data"])
        match = r"'0.weight' has the placements .*\(parallelize_module\)"
        with refused(TypeError, match):
            models.begin(model, data)
        with refused(TypeError, match):
            dpt.clipped_grad_sum(losses, model, x, y, max_grad_norm=1.0)


@check
def whole_models_are_gathered_or_refused(patch, folder):
    model = models.shard(models.build("gpt")[0])
    for name, array in dpt.weights.to_numpy(model).items():
        assert (array == models.build("gpt")[0].get_parameter(name).detach().numpy()).all()
    with began() as (engine, model, optimizer, batches):
        parts = {"model": model, "optimizer": optimizer}
        with refused(TypeError, "save_checkpoint came with a model under fully_shard"):
            dpt.save_checkpoint("nowhere", engine=engine, **parts)
        with refused(TypeError, "load_checkpoint came with .*Expected load_sharded_checkpoint"):
            dpt.load_checkpoint("nowhere", **parts)
