# SPDX-License-Identifier: Apache-2.0
"""Randomness of a run: the secret root key, the keys derived from it, and the streams they open."""

from .counter import bits as bits
from .counter import fold_in as fold_in
from .counter import normal as normal
from .keys import PURPOSES as PURPOSES
from .keys import LockedKey as LockedKey
from .keys import RootKey as RootKey
from .keys import root_key as root_key
from .keys import unlock as unlock
