# SPDX-License-Identifier: Apache-2.0
"""`validate` names what can't be trained privately, `fix` replaces it and keeps the weights."""

import copy

import pytest
import torch
from torch import nn

import dualdp_torch as dpt
from dualdp import UnsupportedLayerError
from tests.dualdp_torch.checks import data, ids, randomise
from tests.dualdp_torch.per_sample.loops import classified


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
    layers = nn.Flatten(), nn.Linear(channels * 16, 24), nn.BatchNorm1d(24)
    return randomise(nn.Sequential(Block(channels), *layers))


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
    assert dpt.per_sample_norms(classified, fixed, x, y).isfinite().all()


GROUPS = {nn.BatchNorm2d: {64: 32, 48: 24, 7: 1, 34: 17}, nn.BatchNorm1d: {5: 1, 16: 2, 512: 32}}


@pytest.mark.parametrize("norm", GROUPS)
def test_groups_divide_the_channels(norm):
    """Of vectors, which would be normalised away, there are few."""
    for channels, groups in GROUPS[norm].items():
        fixed = dpt.fix(norm(channels))
        assert fixed.num_groups == groups
        assert dpt.fix(norm(channels), num_groups=1).num_groups == 1
        if norm is nn.BatchNorm1d:
            assert (fixed(data(3, channels)).abs() - 1).abs().mean() > 0.1


def test_everything_else_of_a_norm_is_kept():
    fixed = dpt.fix(nn.BatchNorm3d(4, affine=False).double().eval())
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
    fixed, x = dpt.fix(model), ids(5, 6, 3)
    assert len(dpt.validate(model)) == 2
    assert dpt.validate(fixed) == []
    torch.testing.assert_close(fixed(x)[:1], fixed(x[:1]))
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
    own = randomise(NormAct(4))
    fixed = dpt.fix(nn.Sequential(nn.Conv2d(1, 4, 1), own))[1]
    assert [type(part) for part in fixed] == [nn.GroupNorm, nn.Identity, nn.ReLU]
    assert torch.equal(fixed[0].weight, own.weight)
    assert type(dpt.fix(type("Plain", (nn.BatchNorm1d,), {})(16))) is nn.GroupNorm


@pytest.mark.parametrize(
    ("model", "options", "error", "match"),
    [
        (nn.Sequential(Own(2)), {}, UnsupportedLayerError, r"Own \(layer '0'\).*do it by hand"),
        (nn.BatchNorm1d(1), {}, UnsupportedLayerError, "would be a constant. Expected nn.Identity"),
        ("model", {}, TypeError, "model is a str"),
        (nn.BatchNorm2d(3), {"num_groups": 0}, ValueError, "num_groups=0"),
    ],
)
def test_what_cannot_be_fixed_is_refused_by_name(model, options, error, match):
    with pytest.raises(error, match=match):
        dpt.fix(model, **options)


def test_opacus_names():
    model, validator = network(), dpt.ModuleValidator
    errors = validator.validate(model)
    assert [type(error) for error in errors] == [UnsupportedLayerError] * 2
    assert "layer '0.norm'" in str(errors[0])
    with pytest.raises(UnsupportedLayerError, match=r"layer '0.norm'.*Replace it by GroupNorm"):
        validator.validate(model, strict=True)
    assert not validator.is_valid(model)
    assert validator.is_valid(validator.fix(model))
    assert validator.is_valid(validator.fix_and_validate(model, num_groups=2))


# ---------------------------------------------------------------------- the dry run


class Parts(nn.Module):
    """Mixing, a changing buffer and an unused parameter, each on request."""

    def __init__(self, fault=None):
        super().__init__()
        self.body, self.head, self.drop = nn.Linear(4, 3), nn.Linear(3, 3), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(3))
        self.fault = fault

    def forward(self, x):
        x = self.drop(self.body(x))
        if self.fault == "mixing":
            x = x - x.mean(0)
        if self.fault == "buffer":
            self.seen += x.detach().mean(0)
        return x if self.fault == "unused" else self.head(x)


def test_the_dry_run_finds_what_modules_do_not_show():
    """And leaves everything as it was."""
    for fault, words in {
        "mixing": "depend on other examples",
        "buffer": "The buffer 'seen' changes in forward",
        "unused": "Parameter 'head.weight': no example of the batch reaches it",
        None: "",
    }.items():
        model, state = randomise(Parts(fault)), torch.get_rng_state()
        found = dpt.validate(model, loss_fn=classified, batch=(data(6, 4), ids(3, 6)))
        assert torch.equal(state, torch.get_rng_state())
        assert not model.seen.any()
        assert model.body.weight.grad is None
        assert len(found) == {"unused": 2, None: 0}.get(fault, 1)
        assert all(finding.fix for finding in found)
        assert words in "".join(map(str, found))


def test_a_dry_run_without_two_examples_is_refused():
    """But for the modules, which are looked at first."""
    findings = dpt.validate(network(), loss_fn=classified, batch=())
    assert [finding.path for finding in findings] == ["0.norm", "3"]
    bad = torch.full((3, 4), float("nan"))
    for x, match in (
        (data(1, 4), "The batch holds 1 examples"),
        (bad, "Fewer than two losses of the batch are finite"),
    ):
        with pytest.raises(ValueError, match=match):
            dpt.validate(Parts(), loss_fn=classified, batch=(x, ids(3, len(x))))
