# SPDX-License-Identifier: Apache-2.0
"""Differentially private training, written once, run on PyTorch or JAX.

`import dualdp` is the core: accounting, plans, sampling. `import dualdp.torch` and
`import dualdp.jax` are the two backends; each needs its framework, the core needs neither.
"""

from . import accountants as accountants
from . import layouts as layouts
from . import mechanisms as mechanisms
from . import port as port
from . import schedules as schedules
from ._validate import AccountingError as AccountingError
from ._validate import UnsupportedLayerError as UnsupportedLayerError
from .accountants.calibrate import get_epsilon as get_epsilon
from .accountants.calibrate import get_noise_multiplier as get_noise_multiplier
from .accountants.calibrate import get_num_steps as get_num_steps
from .accountants.calibrate import get_sample_rate as get_sample_rate
from .exactness import ExactnessError as ExactnessError
from .ledger import Ledger as Ledger
from .plan import PrivacyPlan as PrivacyPlan

__version__ = "0.2.0"
