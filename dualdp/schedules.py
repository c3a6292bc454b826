# SPDX-License-Identifier: Apache-2.0
"""Public names of the schedules of noise, clipping norm and batch size."""

from dualdp.plan.schedules import AdaptiveNorm as AdaptiveNorm
from dualdp.plan.schedules import Constant as Constant
from dualdp.plan.schedules import Cosine as Cosine
from dualdp.plan.schedules import Exponential as Exponential
from dualdp.plan.schedules import Linear as Linear
from dualdp.plan.schedules import Schedule as Schedule
from dualdp.plan.schedules import Step as Step
from dualdp.plan.schedules import Table as Table
from dualdp.plan.schedules import Warmup as Warmup
