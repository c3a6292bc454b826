# SPDX-License-Identifier: Apache-2.0
"""Differentially private training on PyTorch and JAX.

`dualdp` is the core: accounting, plans and sampling, without either framework. `dualdp.torch` and
`dualdp.jax` are the two backends, which need their framework.
"""

from dualdp import accountants as accountants
from dualdp import correlated as correlated
from dualdp import finetuning as finetuning
from dualdp import mechanisms as mechanisms
from dualdp import port as port
from dualdp import schedules as schedules
from dualdp import units as units
from dualdp._validate import AccountingError as AccountingError
from dualdp._validate import UnsupportedLayerError as UnsupportedLayerError
from dualdp._version import __version__ as __version__
from dualdp.accountants.solve import get_epsilon as get_epsilon
from dualdp.accountants.solve import get_noise_multiplier as get_noise_multiplier
from dualdp.accountants.solve import get_num_steps as get_num_steps
from dualdp.accountants.solve import get_sample_rate as get_sample_rate
from dualdp.exactness import ExactnessError as ExactnessError
from dualdp.ledger.ledger import Ledger as Ledger
from dualdp.plan.plan import PrivacyPlan as PrivacyPlan
