# SPDX-License-Identifier: Apache-2.0
"""Planning past one machine: bytes sent, memory and time of a step, from sizes alone.

The bytes are checked against counted ones (`tests/test_bytes.py`). Memory and time are formulas;
`docs/scale.md` has them in one notation and says what was measured.
"""

from .footprint import memory as memory
from .jobs import SHARDINGS as SHARDINGS
from .jobs import Forecast as Forecast
from .jobs import Job as Job
from .jobs import forecast as forecast
from .presets import HARDWARE as HARDWARE
from .presets import MODELS as MODELS
from .presets import Assumptions as Assumptions
from .presets import Hardware as Hardware
from .presets import Transformer as Transformer
from .timing import Duration as Duration
from .timing import duration as duration
from .traffic import METHODS as METHODS
from .traffic import WIRES as WIRES
from .traffic import Message as Message
from .traffic import bytes_sent as bytes_sent
from .traffic import messages as messages
