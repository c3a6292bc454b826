# SPDX-License-Identifier: Apache-2.0
"""A call in a fork of this process, beside one in this process."""

import os
import pickle


def in_both(child, parent):
    """(what `child` returns in a fork of this process, what `parent` returns here)."""
    here, there = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.write(there, pickle.dumps(child()))
        finally:
            os._exit(0)
    mine = parent()
    os.waitpid(process, 0)
    theirs = pickle.loads(os.read(here, 1 << 16))
    for end in (here, there):
        os.close(end)
    return theirs, mine
