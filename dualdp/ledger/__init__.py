# SPDX-License-Identifier: Apache-2.0
"""`Ledger`, the record of releases."""

from dualdp.ledger.ledger import Ledger as Ledger
