# SPDX-License-Identifier: Apache-2.0
"""Cost model that chooses the cheapest exact method for a per-sample gradient norm.

Multiplications per example of a product with t positions, d_in inputs and d_out outputs. Every
training step computes the plain weight gradient, 2 t d_in d_out; privacy adds one of

* Gram form: t^2 (d_in + d_out) twice, and the weighted product instead of the plain one;
* keep: the plain product per example, written once and read twice, 3 d_in d_out numbers;
* discard: the product is done twice.

`move` is the number of multiplications that cost as much as moving one number, which depends on the
machine and on the matrix library.

Source: Li et al. 2022, eq. 3 (Gram form); Bu et al. 2023, table 2 (the choice per layer, by memory;
here by time).
"""

from __future__ import annotations

#: Multiplications that cost as much as moving one number of a kept gradient (one CPU thread).
MOVE = 24.0


def gram_cost(*, t: float, d_in: float, d_out: float, move: float = MOVE) -> float:
    """Return the additional cost of the Gram form, multiplications per example."""
    return 2.0 * t * t * (d_in + d_out) + 2.0 * move * t * t


def keep_cost(*, t: float, d_in: float, d_out: float, move: float = MOVE) -> float:
    """Return the additional cost of keeping per-sample gradients, multiplications per example."""
    return 3.0 * move * d_in * d_out


def discard_cost(*, t: float, d_in: float, d_out: float, move: float = MOVE) -> float:
    """Return the additional cost of a gradient formed only for its norm."""
    return 2.0 * t * d_in * d_out + 2.0 * move * d_in * d_out


def prefers_gram(*, t: float, d_in: float, d_out: float, move: float = MOVE) -> bool:
    """Return True if the Gram form of a norm is cheaper than forming the gradient.

    >>> prefers_gram(t=4, d_in=512, d_out=512), prefers_gram(t=400, d_in=8, d_out=8)
    (True, False)
    """
    sizes = {"t": t, "d_in": d_in, "d_out": d_out, "move": move}
    return gram_cost(**sizes) < discard_cost(**sizes)


def keeps_gradient(*, n: int, t: float, d_in: float, d_out: float, move: float = MOVE) -> bool:
    """Return True if keeping per-sample gradients is cheaper than the other methods.

    >>> keeps_gradient(n=8, t=1, d_in=512, d_out=512), keeps_gradient(n=8, t=400, d_in=8, d_out=8)
    (False, True)
    """
    sizes = {"t": t, "d_in": d_in, "d_out": d_out, "move": move}
    return t > 1 and keep_cost(**sizes) < min(gram_cost(**sizes), discard_cost(**sizes))


#: Multiplications that cost as much as forming one weight of one example's convolution gradient
#: (one CPU thread, 3 x 3 kernels of 64 to 256 channels), the same if all these gradients overflow
#: the caches, and as adding one number of a strided window.
FORM, FORM_FAR = 40.0, 150.0
WINDOW = 25.0
CACHED = 6_000_000  # numbers


def convolution_prefers_gram(
    *, t: int, pixels: int, kernel: int, channels: int, d_out: int, weights: int, n: int = 1
) -> bool:
    """Return True if products of patches are cheaper than a convolution's per-sample gradient.

    Args:
        t: number of output positions.
        pixels: number of positions of the padded input.
        kernel: number of positions of the kernel.
        channels: number of input channels.
        d_out: number of output channels.
        weights: number of elements of the weight.
        n: number of examples whose gradients are formed at once.

    >>> small = {"pixels": 100, "kernel": 9, "channels": 128, "d_out": 128, "weights": 147_456}
    >>> convolution_prefers_gram(t=64, **small)
    True
    >>> convolution_prefers_gram(t=1024, **{**small, "pixels": 1156})
    False
    """
    patches = 2.0 * pixels**2 * channels + WINDOW * kernel * t * t + 2.0 * t * t * d_out
    return patches < (FORM if n * weights <= CACHED else FORM_FAR) * weights


#: Multiplications that cost as much as writing one number of a kept convolution gradient and
#: reading it twice (XLA, one CPU thread, 3 x 3 kernels of 32 to 256 channels).
KEEP_CONVOLUTION = 375.0


def keeps_convolution(*, t: int) -> bool:
    """Return True if per-sample convolution gradients should be kept for the weighted sum.

    Args:
        t: number of output positions; each gradient element takes 2 t multiplications.

    >>> keeps_convolution(t=1024), keeps_convolution(t=64)
    (True, False)
    """
    return 2.0 * t > KEEP_CONVOLUTION


def convolution_form(*, channels: int, d_out: int, block: int = 1) -> str:
    """Return the fastest form of a convolution's per-sample gradients, a key of `conv_forms.FORMS`.

    Folding the examples into groups is fastest if the library has kernels for such groups: oneDNN
    has them for blocks of channels, and takes 1.2 to 2.3 times unfolding's time for others
    (measured: 8 to 64 channels, kernels of 3 and 5, 100 to 3,600 positions). With few channels a
    convolution with one more axis is fastest.

    Args:
        channels: number of input channels per group.
        d_out: number of output channels per group.
        block: number of channels that the device's library processes at once.

    >>> convolution_form(channels=3, d_out=32), convolution_form(channels=64, d_out=64, block=8)
    ('crb', 'folded')
    >>> convolution_form(channels=25, d_out=64, block=8), convolution_form(channels=25, d_out=64)
    ('unfold', 'folded')
    """
    if channels <= 4:
        return "crb"
    return "unfold" if channels % block or d_out % block else "folded"
