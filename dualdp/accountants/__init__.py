# SPDX-License-Identifier: Apache-2.0
"""Accountants by name: `create("pld")`, and `register` for a class of your own."""

from dualdp.accountants.base import Accountant as Accountant
from dualdp.accountants.base import create as create
from dualdp.accountants.base import names as names
from dualdp.accountants.base import register as register
from dualdp.accountants.base import require_bound as require_bound
from dualdp.accountants.pld import PLDAccountant as PLDAccountant
from dualdp.accountants.rdp import RDPAccountant as RDPAccountant
from dualdp.accountants.solve import gdp_epsilon as gdp_epsilon

register("pld", PLDAccountant)
register("prv", PLDAccountant)
register("rdp", RDPAccountant)
