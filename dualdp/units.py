# SPDX-License-Identifier: Apache-2.0
"""Public names of privacy units: the rows of each user, and what is drawn of them."""

from dualdp.plan.batches import drawn_rows as draw_rows
from dualdp.plan.units import DrawnRows as DrawnRows
from dualdp.plan.units import UserRows as UserRows
from dualdp.plan.units import user_rows as user_rows

__all__ = ["DrawnRows", "UserRows", "draw_rows", "user_rows"]
