# SPDX-License-Identifier: Apache-2.0
"""Cryptographic randomness: the AES-256-CTR keystream, normals from it, and the public grid.

Properties that `noise="secure"` has and the other modes lack:

- The stream is cryptographic, AES-256 in counter mode. The key of a release's noise is 256 fresh
  bits of the operating system, stored nowhere; that of a batch is derived from the 128 bits of its
  segment (`SegmentBits`).
- A released number lies on a grid that the plan fixes. Ordinary floating-point noise does not: a
  float32 normal of `jax.random` has 2^23 values, so that one released coordinate distinguishes two
  neighboring data sets with probability 0.9 [test_one_coordinate_betrays_ordinary_noise].
- The work is constant: nothing is rejected, and no branch of ours depends on a drawn number.

Limits: normals are float64, so the noise is Gaussian up to the rounding of float64 (the probability
of a grid cell has a relative error of about stddev / (2^52 pitch): 2^-29 for a million parameters
and a noise multiplier of 1). The float32 sums to which noise is added were rounded in an order that
may depend on the batch.

Source: Mironov 2012, "On significance of the least significant bits for differential privacy"; NIST
SP 800-38A (CTR); Box & Muller 1958.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualdp.randomness.parallel import fill_blocks

Float64 = NDArray[np.float64]

#: Rounding to the grid adds at most this share of C to the sensitivity of a sum.
GRID_MARGIN = 2.0**-12
#: Share of C by which a clipped contribution may exceed its bound (rounding of float32 factors).
CLIP_MARGIN = 1e-4

BLOCK = 1 << 15  # numbers; their keystream and the working set stay in the second-level cache
_AES_BLOCK = 16  # bytes
_KEY_BYTES = 32
_MOST_CELLS = 2.0**48  # largest stddev / pitch: ten standard deviations are exact in float64


def accounted_noise_multiplier(noise_multiplier: float) -> float:
    """Return the noise multiplier with which secure noise is accounted.

    Rounding to the grid increases the distance of two neighboring sums by at most pitch sqrt(d),
    which `pitch` keeps below GRID_MARGIN C for every model; a clipped contribution has norm at most
    C (1 + CLIP_MARGIN). Both increase the sensitivity, so the noise multiplier is divided by it.

    >>> round(accounted_noise_multiplier(1.0), 6)
    0.999656
    """
    return noise_multiplier / (1 + GRID_MARGIN + CLIP_MARGIN)


def pitch(max_grad_norm: float, num_parameters: int) -> float:
    """Return the spacing of the grid: a power of two, from public numbers only.

    It is the largest with pitch sqrt(num_parameters) <= GRID_MARGIN C. A finer grid would cost less
    sensitivity, but with fewer float64 numbers per cell the noise would be less exact.
    """
    _, exponent = math.frexp(GRID_MARGIN * max_grad_norm / math.sqrt(max(1, num_parameters)))
    if exponent < -100:
        raise ValueError(
            f"max_grad_norm={max_grad_norm} is too small for noise='secure' on {num_parameters} "
            "parameters. Expected a norm above 1e-20; scale the loss."
        )
    return math.ldexp(1.0, exponent - 1)


def keystream(key: bytes, first_block: int, num_bytes: int) -> bytes:
    """Return bytes of the AES-CTR keystream from the 16-byte block `first_block` on."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "noise='secure' needs the package cryptography, which is not installed. Run pip "
            "install 'dualdp[secure]'."
        ) from error
    counter = modes.CTR(first_block.to_bytes(_AES_BLOCK, "big"))
    encryptor = Cipher(algorithms.AES(key), counter).encryptor()
    return encryptor.update(bytes(num_bytes))


def words(bits: bytes, count: int, *, stream: int = 0) -> NDArray[np.uint64]:
    """Return (count,) uniform 64-bit integers: the keystream as little-endian words.

    Element i depends on (bits, stream, i) alone.

    Guarantees:
        AES-256-CTR from counter stream * 2^64, under the last 32 bytes of the bits.
            [test_the_stream_gives_the_known_answers]
    """
    return np.frombuffer(keystream(bits[-_KEY_BYTES:], stream << 64, 8 * count), dtype="<u8")


def box_muller(raw: NDArray[Any], out: Float64) -> None:
    """Normals from as many words: the first half for radii, the second for angles.

    With t = tan(angle / 2): cos = 2 / (1 + t^2) - 1 and sin = t * 2 / (1 + t^2), so one tan gives
    two normals.
    """
    half = raw.size // 2
    u = ((raw[:half] >> np.uint64(1)).view(np.int64) + 0.5) * 2.0**-63  # 63 bits, in (0, 1]
    diameter = np.sqrt(-8.0 * np.log(u))  # twice the radius
    t = np.tan(raw[half:].view(np.int64) * (0.5 * math.pi * 2.0**-63))
    part = diameter / (t * t + 1.0)
    np.subtract(part, 0.5 * diameter, out=out[:half])
    np.multiply(part, t, out=out[half:])


def grid_noise(
    bits: bytes,
    *,
    cells: float,
    size: int,
    start: int = 0,
    stop: int | None = None,
    threads: int | None = None,
) -> Float64:
    """Return the noise of a release in units of the grid: float64 integers below 2^52.

    The sum rounded to the grid plus this noise equals the rounding of the rounded sum plus a
    Gaussian of standard deviation `cells`: post-processing of the Gaussian mechanism.

    Args:
        bits: of the release.
        cells: standard deviation, in units of the grid.
        size: number of elements of the whole noise.
        start: first element to draw.
        stop: element after the last; None for all that follow.
        threads: most threads; None for one a processor.

    Guarantees:
        A part is bit for bit that of the whole.  [test_secure_parts_are_those_of_the_whole]
        Independent of the number of threads.  [test_normals_do_not_depend_on_threads]
        Normal before it is rounded, out to 9.4 standard deviations, beyond which 4e-21 of a
            Gaussian lies.  [test_secure_normals_are_normal, test_the_tail_reaches_as_far_as_said]

    Source: Box & Muller 1958, with tan of half the angle in place of cosine and sine.
    """
    if cells > _MOST_CELLS:
        raise ValueError(
            f"noise of {cells:.3g} grid cells is too wide for noise='secure' with {size} "
            "parameters. Expected at most 2**48; lower noise_multiplier."
        )
    stop = size if stop is None else stop
    out, key, first = np.empty(stop - start), bits[-_KEY_BYTES:], start // BLOCK

    def fill(number: int) -> None:
        low, drawn = (first + number) * BLOCK, np.empty(BLOCK)  # each block is drawn as a whole
        stretch = keystream(key, low * 8 // _AES_BLOCK, 8 * BLOCK)
        box_muller(np.frombuffer(stretch, dtype="<u8"), drawn)
        drawn *= cells
        np.rint(drawn, out=drawn)
        begin, end = max(start, low), min(stop, low + BLOCK)
        out[begin - start : end - start] = drawn[begin - low : end - low]

    fill_blocks(fill, -(-stop // BLOCK) - first if len(out) else 0, threads)
    return out


def noisy_sum(
    sums: NDArray[Any], noise: Float64, pitch: float, *, threads: int | None = None
) -> NDArray[Any]:
    """Return the sums, rounded to the grid, plus noise in units of the grid; both (size,).

    Guarantees:
        Every number is a multiple of the pitch.  [test_secure_sums_lie_on_the_grid]
    """
    out = np.empty_like(sums)

    def add(block: int) -> None:
        part = slice(block * BLOCK, (block + 1) * BLOCK)  # a block fits in the cache
        whole = np.rint(sums[part].astype(np.float64) / pitch)
        out[part] = (whole + noise[part]) * pitch

    fill_blocks(add, -(-sums.size // BLOCK), threads)
    return out
