# SPDX-License-Identifier: Apache-2.0
"""Which exact way to a per-sample norm is cheapest, from sizes alone.

Multiplications per example of a product with t positions, d_in inputs and d_out outputs. The plain
weight gradient, 2 t d_in d_out, is paid by every training step; what privacy adds is one of

* Gram form: t^2 (d_in + d_out) twice, and the weighted product instead of the plain one;
* keep: the plain product is done per example and its result read twice, 3 d_in d_out numbers;
* discard: the product is done twice.

`move` is how many multiplications cost as much as moving one number, which depends on the machine
and on the library that multiplies.

Source: Li et al. 2022, eq. 3 (Gram form); Bu et al. 2023, table 2 (the choice per layer, by memory;
here by time).
"""

from __future__ import annotations

#: Multiplications that cost as much as moving one number of a kept gradient (one CPU thread).
MOVE = 24.0


def gram_cost(*, t: int, d_in: int, d_out: int, move: float = MOVE) -> float:
    """What the Gram form adds to a plain step, multiplications per example."""
    return 2.0 * t * t * (d_in + d_out) + 2.0 * move * t * t


def keep_cost(*, t: int, d_in: int, d_out: int, move: float = MOVE) -> float:
    """What keeping the per-sample gradient adds, multiplications per example."""
    del t
    return 3.0 * move * d_in * d_out


def discard_cost(*, t: int, d_in: int, d_out: int, move: float = MOVE) -> float:
    """What forming the gradient for its norm alone adds, multiplications per example."""
    return 2.0 * t * d_in * d_out + 2.0 * move * d_in * d_out


def prefers_gram(*, t: int, d_in: int, d_out: int, move: float = MOVE) -> bool:
    """Whether the Gram form of a norm is cheaper than forming the gradient.

    >>> prefers_gram(t=4, d_in=512, d_out=512), prefers_gram(t=400, d_in=8, d_out=8)
    (True, False)
    """
    sizes = {"t": t, "d_in": d_in, "d_out": d_out}
    return gram_cost(**sizes, move=move) < discard_cost(**sizes, move=move)


def keeps_gradient(*, n: int, t: int, d_in: int, d_out: int, move: float = MOVE) -> bool:
    """Whether keeping n per-sample gradients is cheaper than every way that forgets them.

    >>> keeps_gradient(n=8, t=1, d_in=512, d_out=512), keeps_gradient(n=8, t=400, d_in=8, d_out=8)
    (False, True)
    """
    del n
    sizes = {"t": t, "d_in": d_in, "d_out": d_out}
    others = min(gram_cost(**sizes, move=move), discard_cost(**sizes, move=move))
    return keep_cost(**sizes, move=move) < others and t > 1


#: Multiplications that cost as much as forming one weight of one example's convolution (one CPU
#: thread, 3 x 3 kernels of 64 to 256 channels), the same where all of them together overflow the
#: caches, and as adding one number of a strided window.
FORM, FORM_FAR = 40.0, 150.0
WINDOW = 25.0
CACHED = 6_000_000  # numbers


def patch_gram_cost(
    *, t: int, pixels: int, kernel: int, channels: int, d_out: int, weights: int, n: int = 1
) -> float:
    """What the products of patches take, multiplications per example."""
    del weights, n
    return 2.0 * pixels**2 * channels + WINDOW * kernel * t * t + 2.0 * t * t * d_out


def form_cost(*, weights: int, n: int = 1, **_: int) -> float:
    """What forming and keeping one example's gradient of a convolution adds."""
    return (FORM if n * weights <= CACHED else FORM_FAR) * weights


def convolution_prefers_gram(
    *, t: int, pixels: int, kernel: int, channels: int, d_out: int, weights: int, n: int = 1
) -> bool:
    """Whether products of patches are cheaper than one example's gradient of a convolution.

    Args:
        t: positions of the output.
        pixels: positions of the padded input.
        kernel: positions of the kernel.
        channels: of the input.
        d_out: channels of the output.
        weights: numbers in the weight.
        n: examples whose gradients are formed at once.

    >>> small = {"pixels": 100, "kernel": 9, "channels": 128, "d_out": 128, "weights": 147_456}
    >>> convolution_prefers_gram(t=64, **small)
    True
    >>> convolution_prefers_gram(t=1024, **{**small, "pixels": 1156})
    False
    """
    sizes = {"pixels": pixels, "kernel": kernel, "channels": channels, "d_out": d_out}
    return patch_gram_cost(t=t, weights=weights, **sizes) < form_cost(weights=weights, n=n)


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


def convolution_form(*, channels: int, d_out: int, block: int = 1) -> str:
    """The fastest form of a convolution's per-sample gradients, as a key of `conv_forms.FORMS`.

    Folding the examples into groups wins where the library has kernels for such groups: oneDNN has
    them for blocks of channels, and takes 1.2 to 2.3 times unfolding's time for others (measured: 8
    to 64 channels, kernels of 3 and 5, 100 to 3,600 positions). Few channels are best left to a
    convolution of one axis more.

    Args:
        channels: of the input, per group.
        d_out: channels of the output, per group.
        block: channels that the device's library handles at once.

    >>> convolution_form(channels=3, d_out=32), convolution_form(channels=64, d_out=64, block=8)
    ('crb', 'folded')
    >>> convolution_form(channels=25, d_out=64, block=8), convolution_form(channels=25, d_out=64)
    ('unfold', 'folded')
    """
    if channels <= 4:
        return "crb"
    return "unfold" if channels % block or d_out % block else "folded"
