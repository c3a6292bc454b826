# SPDX-License-Identifier: Apache-2.0
"""Forecast of bytes sent, memory and time of a step on many accelerators, from sizes alone.

The bytes are tested against counted ones (`tests/tools/scaling/test_bytes.py`). Memory and time are
formulas; `docs/scale.md` gives them in one notation and lists what was measured.
"""

from dualdp_tools.scaling.footprint import memory as memory
from dualdp_tools.scaling.jobs import forecast as forecast
from dualdp_tools.scaling.presets import HARDWARE as HARDWARE
from dualdp_tools.scaling.presets import MODELS as MODELS
from dualdp_tools.scaling.presets import SHARDINGS as SHARDINGS
from dualdp_tools.scaling.presets import Assumptions as Assumptions
from dualdp_tools.scaling.presets import Job as Job
from dualdp_tools.scaling.presets import Transformer as Transformer
from dualdp_tools.scaling.traffic import METHODS as METHODS
from dualdp_tools.scaling.traffic import Message as Message
from dualdp_tools.scaling.traffic import bytes_sent as bytes_sent
from dualdp_tools.scaling.traffic import messages as messages
