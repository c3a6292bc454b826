# SPDX-License-Identifier: Apache-2.0
"""Public names of privacy units: the rows of each user, what is drawn or kept, and the choice."""

from dualdp.plan.units.compare import UnitComparison as UnitComparison
from dualdp.plan.units.compare import UnitOption as UnitOption
from dualdp.plan.units.compare import compare_units as compare_units
from dualdp.plan.units.rows import DrawnRows as DrawnRows
from dualdp.plan.units.rows import UserRows as UserRows
from dualdp.plan.units.rows import draw_rows as draw_rows
from dualdp.plan.units.rows import user_rows as user_rows
from dualdp.plan.units.select import keep_owned_rows as keep_owned_rows
from dualdp.plan.units.select import keep_rows as keep_rows
from dualdp.plan.units.select import require_at_most as require_at_most
