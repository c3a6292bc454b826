# SPDX-License-Identifier: Apache-2.0
"""Protocol, peers' requirements and committed results; the code is in `dualdp_tools.bench`."""
