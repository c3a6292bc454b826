# SPDX-License-Identifier: Apache-2.0
"""Which exact way to a per-sample norm is cheapest, from sizes alone.

Multiplications per example of a product with t positions, d_in inputs and d_out outputs. The plain
weight gradient, 2 t d_in d_out, is paid by every training step; what privacy adds is one of

* Gram form: t^2 (d_in + d_out) twice, and the weighted product instead of the plain one;
* keep: the plain product is done per example and its result read twice, 3 d_in d_out numbers;
* discard: the product is done twice.

Source: Li et al. 2022, eq. 3 (Gram form); Bu et al. 2023, table 2 (the choice per layer, by memory;
here by time).
"""

from __future__ import annotations

#: Multiplications that cost as much as moving one number of a kept gradient (one CPU thread).
MOVE = 24.0


def gram_cost(*, t: int, d_in: int, d_out: int) -> float:
    """What the Gram form adds to a plain step, multiplications per example."""
    return 2.0 * t * t * (d_in + d_out) + 2.0 * MOVE * t * t


def keep_cost(*, t: int, d_in: int, d_out: int) -> float:
    """What keeping the per-sample gradient adds, multiplications per example."""
    del t
    return 3.0 * MOVE * d_in * d_out


def discard_cost(*, t: int, d_in: int, d_out: int) -> float:
    """What forming the gradient for its norm alone adds, multiplications per example."""
    return 2.0 * t * d_in * d_out + 2.0 * MOVE * d_in * d_out


def prefers_gram(*, t: int, d_in: int, d_out: int) -> bool:
    """Whether the Gram form of a norm is cheaper than forming the gradient.

    >>> prefers_gram(t=4, d_in=512, d_out=512), prefers_gram(t=400, d_in=8, d_out=8)
    (True, False)
    """
    return gram_cost(t=t, d_in=d_in, d_out=d_out) < discard_cost(t=t, d_in=d_in, d_out=d_out)


def keeps_gradient(*, n: int, t: int, d_in: int, d_out: int) -> bool:
    """Whether keeping n per-sample gradients is cheaper than every way that forgets them.

    >>> keeps_gradient(n=8, t=1, d_in=512, d_out=512), keeps_gradient(n=8, t=400, d_in=8, d_out=8)
    (False, True)
    """
    del n
    sizes = {"t": t, "d_in": d_in, "d_out": d_out}
    return keep_cost(**sizes) < min(gram_cost(**sizes), discard_cost(**sizes)) and t > 1


#: Multiplications that cost as much as forming one weight of one example's convolution (one CPU
#: thread, 3 x 3 kernels of 64 to 256 channels), and as adding one number of a strided window.
FORM = 40.0
WINDOW = 25.0


def convolution_prefers_gram(
    *, t: int, pixels: int, kernel: int, channels: int, d_out: int, weights: int
) -> bool:
    """Whether products of patches are cheaper than one example's gradient of a convolution.

    Args:
        t: positions of the output.
        pixels: positions of the padded input.
        kernel: positions of the kernel.
        channels: of the input.
        d_out: channels of the output.
        weights: numbers in the weight.

    >>> small = {"pixels": 100, "kernel": 9, "channels": 128, "d_out": 128, "weights": 147_456}
    >>> convolution_prefers_gram(t=64, **small)
    True
    >>> convolution_prefers_gram(t=1024, **{**small, "pixels": 1156})
    False
    """
    gram = 2.0 * pixels**2 * channels + WINDOW * kernel * t * t + 2.0 * t * t * d_out
    return gram < FORM * weights


#: Multiplications that cost as much as writing one number of a kept convolution gradient and
#: reading it twice (XLA, one CPU thread, 3 x 3 kernels of 32 to 256 channels).
KEEP_CONVOLUTION = 375.0


def keeps_convolution(*, t: int) -> bool:
    """Whether one example's convolution gradient is worth keeping for the weighted sum.

    Args:
        t: positions of the output: each of its numbers takes 2 t multiplications.

    >>> keeps_convolution(t=1024), keeps_convolution(t=64)
    (True, False)
    """
    return 2.0 * t > KEEP_CONVOLUTION


def convolution_prefers_crb(*, channels: int) -> bool:
    """Whether a convolution of one axis more is the fastest form: where it has few channels.

    Args:
        channels: of the input, per group.

    >>> convolution_prefers_crb(channels=3), convolution_prefers_crb(channels=64)
    (True, False)
    """
    return channels <= 4
