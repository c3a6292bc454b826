# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks` is `dualdp bench` in a checkout: see the package `dualdp_tools.bench`."""

from dualdp_tools.bench.command_line import main

if __name__ == "__main__":
    main()
