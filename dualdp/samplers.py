# SPDX-License-Identifier: Apache-2.0
"""Public names of the samplers: functions that draw one step's batch."""

from dualdp.plan.samplers import SAMPLERS as SAMPLERS
from dualdp.plan.samplers import WHOLE_PASS as WHOLE_PASS
from dualdp.plan.samplers import Draw as Draw
from dualdp.plan.samplers import balls_in_bins as balls_in_bins
from dualdp.plan.samplers import cyclic_poisson as cyclic_poisson
from dualdp.plan.samplers import fixed_order as fixed_order
from dualdp.plan.samplers import fixed_size as fixed_size
from dualdp.plan.samplers import poisson as poisson
from dualdp.plan.samplers import shuffle as shuffle
from dualdp.plan.samplers import truncated_poisson as truncated_poisson
