# SPDX-License-Identifier: Apache-2.0
"""Claims of a step, and a step of ones own."""

import pytest

from dualdp.testing import Claims


def test_bad_claims_are_refused():
    with pytest.raises(ValueError, match="noise_multiplier=0.0 is out of range"):
        Claims(0.0, 1.0)
    with pytest.raises(ValueError, match="sampler='weighted' is unknown"):
        Claims(1.0, 1.0, "weighted")
