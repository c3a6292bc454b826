# SPDX-License-Identifier: Apache-2.0
"""`validate` names what can't be trained privately, `fix` replaces it and keeps the weights."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp import UnsupportedLayerError
from tests.dualdp_torch.checks import data, ids, randomise


class Block(nn.Module):
    """A convolution and its norm, held by two names."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels, eps=0.01)
        self.same = self.norm

    def forward(self, x):
        return self.same(self.norm(self.conv(x)))


def network(channels=12):
    """Norms at several depths."""
    return randomise(
        nn.Sequential(
            Block(channels), nn.Flatten(), nn.Linear(channels * 16, 24), nn.BatchNorm1d(24)
        )
    )


def losses(model, x, y):
    """(n,)."""
    return F.cross_entropy(model(x), y, reduction="none")


def test_batch_norm_becomes_group_norm_with_its_weights():
    model = network()
    model[3].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    fixed = dpt.fix(model)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert isinstance(model[0].norm, nn.BatchNorm2d)
    norm = fixed[0].norm
    assert type(norm) is nn.GroupNorm
    assert norm is fixed[0].same
    assert (norm.num_groups, norm.num_channels, norm.eps) == (6, 12, 0.01)
    assert torch.equal(norm.weight, model[0].norm.weight)
    assert norm.weight is not model[0].norm.weight
    assert fixed[3].num_groups == 3
    assert not fixed[3].weight.requires_grad
    assert fixed[3].bias.requires_grad
    assert dpt.validate(fixed) == []
    x, y = data(5, 3, 4, 4), ids(24, 5)
    assert dpt.per_sample_norms(losses, fixed, x, y).isfinite().all()


@pytest.mark.parametrize(
    ("channels", "groups"), [(64, 32), (48, 24), (7, 1), (16, 8), (33, 11), (34, 17)]
)
def test_groups_divide_the_channels(channels, groups):
    assert dpt.fix(nn.BatchNorm2d(channels)).num_groups == groups
    assert dpt.fix(nn.BatchNorm2d(channels), num_groups=1).num_groups == 1


@pytest.mark.parametrize(("channels", "groups"), [(5, 1), (16, 2), (512, 32)])
def test_vectors_are_not_normalised_away(channels, groups):
    fixed = dpt.fix(nn.BatchNorm1d(channels))
    assert fixed.num_groups == groups
    assert (fixed(data(3, channels)).abs() - 1).abs().mean() > 0.1


def test_everything_else_of_a_norm_is_kept():
    model = nn.BatchNorm3d(4, affine=False).double().eval()
    fixed = dpt.fix(model)
    assert fixed.weight is None
    assert not fixed.training
    with_scale = dpt.fix(nn.BatchNorm2d(4).double())
    assert with_scale.weight.dtype == torch.float64
    assert with_scale.training


def test_instance_norms_and_embeddings_are_fixed():
    model = nn.Sequential(
        nn.Embedding(5, 4, max_norm=1.0, scale_grad_by_freq=True),
        nn.InstanceNorm1d(3, track_running_stats=True, affine=True),
    )
    fixed = dpt.fix(model)
    assert dpt.validate(fixed) == []
    assert len(dpt.validate(model)) == 2
    x = ids(5, 6, 3)
    out = fixed(x)
    torch.testing.assert_close(out[:1], fixed(x[:1]))
    assert set(fixed.state_dict()) == {"0.weight", "1.weight", "1.bias"}


class Own(nn.BatchNorm2d):
    """A subclass may do anything."""

    def forward(self, x):
        return 2 * super().forward(x)


class NormAct(nn.BatchNorm2d):
    """Norm and activation in one, as in many image models."""

    def __init__(self, channels):
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


def test_a_subclass_that_goes_on_with_its_children_becomes_both():
    own = NormAct(4)
    with torch.no_grad():
        own.weight.copy_(torch.arange(4.0))
    fixed = dpt.fix(nn.Sequential(nn.Conv2d(1, 4, 1), own))[1]
    assert [type(part) for part in fixed] == [nn.GroupNorm, nn.Identity, nn.ReLU]
    assert torch.equal(fixed[0].weight, own.weight)

    class Plain(nn.BatchNorm1d):
        """Nothing of its own."""

    assert type(dpt.fix(Plain(16))) is nn.GroupNorm


def test_what_cannot_be_fixed_is_refused_by_name():
    with pytest.raises(UnsupportedLayerError, match=r"Own \(layer '1'\).*do it by hand"):
        dpt.fix(nn.Sequential(nn.Conv2d(1, 2, 1), Own(2)))
    with pytest.raises(UnsupportedLayerError, match="would be a constant. Expected nn.Identity"):
        dpt.fix(nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)))
    with pytest.raises(TypeError, match="model is a str"):
        dpt.fix("model")
    with pytest.raises(ValueError, match="num_groups=0"):
        dpt.fix(nn.BatchNorm2d(3), num_groups=0)


def test_opacus_names():
    model = network()
    errors = dpt.ModuleValidator.validate(model)
    assert [type(error) for error in errors] == [UnsupportedLayerError] * 2
    assert "layer '0.norm'" in str(errors[0])
    with pytest.raises(UnsupportedLayerError, match=r"layer '0.norm'.*Replace it by GroupNorm"):
        dpt.ModuleValidator.validate(model, strict=True)
    assert not dpt.ModuleValidator.is_valid(model)
    assert dpt.ModuleValidator.is_valid(dpt.ModuleValidator.fix(model))
    assert dpt.ModuleValidator.is_valid(dpt.ModuleValidator.fix_and_validate(model, num_groups=2))


# ---------------------------------------------------------------------- the dry run


class Parts(nn.Module):
    """Mixing, a changing buffer and an unused parameter, each on request."""

    def __init__(self, fault=None):
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))
        self.fault = fault

    def forward(self, x):
        x = self.body(x)
        if self.fault == "mixing":
            x = x - x.mean(0)
        if self.fault == "buffer":
            self.seen += x.detach().mean(0)
        return x if self.fault == "unused" else self.head(x)


def checked(fault):
    """Findings about a model with this fault."""
    return dpt.validate(randomise(Parts(fault)), loss_fn=losses, batch=(data(6, 4), ids(3, 6)))


def test_the_dry_run_finds_what_modules_do_not_show():
    assert checked(None) == []
    (mixing,) = checked("mixing")
    assert "depend on other examples" in str(mixing)
    (buffer,) = checked("buffer")
    assert "The buffer 'seen' changes in forward" in str(buffer)
    assert buffer.fix
    unused = checked("unused")
    assert [finding.path for finding in unused] == ["head.weight", "head.bias"]
    assert str(unused[0]).startswith("Parameter 'head.weight': no example of the batch reaches it")
    assert [f.path for f in dpt.validate(network(), loss_fn=losses, batch=())] == ["0.norm", "3"]


def test_the_dry_run_leaves_everything_as_it_was():
    model = randomise(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)))
    state = torch.get_rng_state()
    assert dpt.validate(model, loss_fn=losses, batch=(data(6, 4), ids(3, 6))) == []
    assert torch.equal(state, torch.get_rng_state())
    assert model[0].weight.grad is None


def test_a_dry_run_without_two_examples_is_refused():
    with pytest.raises(ValueError, match="The batch holds 1 examples"):
        dpt.validate(Parts(), loss_fn=losses, batch=(data(1, 4), ids(3, 1)))
    bad = torch.full((3, 4), float("nan"))
    with pytest.raises(ValueError, match="Fewer than two losses of the batch are finite"):
        dpt.validate(Parts(), loss_fn=losses, batch=(bad, ids(3, 3)))
