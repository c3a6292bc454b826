# SPDX-License-Identifier: Apache-2.0
"""The cost model: sizes in, the cheaper of exact ways out."""

import doctest

import pytest

from dualdp import costs


def test_examples_in_the_docstrings():
    assert doctest.testmod(costs).failed == 0


@pytest.mark.parametrize("width", [64, 256, 768])
def test_few_positions_take_the_gram_form(width):
    for choose in (costs.prefers_gram, lambda **sizes: not costs.keeps_gradient(n=8, **sizes)):
        choices = [choose(t=t, d_in=width, d_out=width) for t in range(1, 2000, 7)]
        assert choices[0]
        assert not choices[-1]
        assert sorted(choices, reverse=True) == choices


@pytest.mark.parametrize(("pixels", "t"), [(9, 1), (16, 4), (36, 16), (100, 64)])
def test_deep_convolutions_on_small_maps_use_products_of_patches(pixels, t):
    sizes = {"kernel": 9, "channels": 256, "d_out": 256, "weights": 9 * 256 * 256}
    assert costs.convolution_prefers_gram(t=t, pixels=pixels, **sizes)
    assert not costs.convolution_prefers_gram(t=64 * 64, pixels=66 * 66, **sizes)
