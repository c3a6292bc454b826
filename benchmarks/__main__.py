# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`."""

from benchmarks.commands import main

if __name__ == "__main__":
    main()
