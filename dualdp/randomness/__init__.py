# SPDX-License-Identifier: Apache-2.0
"""Randomness of a run: its bits, fresh or of a seed, and the streams made of them."""

from dualdp.randomness.bits import PURPOSES as PURPOSES
from dualdp.randomness.bits import SegmentBits as SegmentBits
from dualdp.randomness.bits import fresh_bits as fresh_bits
from dualdp.randomness.bits import key_of as key_of
from dualdp.randomness.bits import noise_bits as noise_bits
from dualdp.randomness.bits import seeded_bits as seeded_bits
from dualdp.randomness.threefry import fold_in as fold_in
from dualdp.randomness.threefry import normal as normal
