# SPDX-License-Identifier: Apache-2.0
"""Randomness of a run: the secret root key, the keys derived from it, and their streams."""

from dualdp.randomness.bits import SegmentBits as SegmentBits
from dualdp.randomness.bits import fresh_bits as fresh_bits
from dualdp.randomness.bits import key_of as key_of
from dualdp.randomness.bits import noise_bits as noise_bits
from dualdp.randomness.bits import seeded_bits as seeded_bits
from dualdp.randomness.bits import PURPOSES as PURPOSES
from dualdp.randomness.keys import LockedKey as LockedKey
from dualdp.randomness.keys import RootKey as RootKey
from dualdp.randomness.keys import root_key as root_key
from dualdp.randomness.keys import unlock as unlock
from dualdp.randomness.threefry import bits as bits
from dualdp.randomness.threefry import fold_in as fold_in
from dualdp.randomness.threefry import normal as normal
