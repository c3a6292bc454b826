# SPDX-License-Identifier: Apache-2.0
"""Norms and sums are formed without TF32 and autocast, and the user's settings come back."""

import pytest
import torch

from dualdp_torch.rules import precision


def settings():
    return [getattr(owner, name) for owner, name, _ in precision._SETTINGS]


@pytest.fixture(params=["highest", "high", "medium"])
def chosen(request, monkeypatch):
    """The user's precision, on a build that seems to have CUDA."""
    monkeypatch.setattr(precision, "_HAS_CUDA", True)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


@precision.in_full_precision
def seen(fails=False):
    if fails:
        raise ValueError("inside")
    return settings(), precision.matmul_in_tf32(), torch.is_autocast_enabled("cpu")


def test_tf32_is_off_inside_and_as_it_was_after(chosen):
    before = settings()
    assert precision.matmul_in_tf32() == (chosen != "highest")
    with torch.autocast("cpu", torch.bfloat16):
        inside, products, autocast = seen()
        assert torch.is_autocast_enabled("cpu")
    assert set(inside) <= set(precision._OFF)
    assert not products
    assert not autocast
    assert settings() == before
    assert torch.get_float32_matmul_precision() == chosen


def test_a_failure_restores_the_settings(chosen):
    before = settings()
    with pytest.raises(ValueError, match="inside"):
        seen(fails=True)
    assert settings() == before


def test_settings_of_either_kind_can_be_read():
    """A program that sets the newer of torch's settings makes the older ones unreadable."""
    owner, name, off = precision._SETTINGS[0]
    before = getattr(owner, name)
    try:
        setattr(owner, name, off)
        assert not precision.matmul_in_tf32()
    finally:
        setattr(owner, name, before)
