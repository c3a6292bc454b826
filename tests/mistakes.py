# SPDX-License-Identifier: Apache-2.0
"""Judge of the tables of mistakes: each is answered by a sentence of this library's own.

A table maps a mistake to `(call, type of the error, words of its message)`. What Python itself says
of a call, such as a missing keyword, is no row, nor is what a user's own function raises.
"""

import linecache
import re
import traceback
from pathlib import Path

import pytest

import dualdp

#: Folder of the packages: the repository, or where a wheel is installed.
HOME = Path(dualdp.__file__).parent.parent
#: Words of Python and of the frameworks, which say nothing of the user's call.
RAW = ("[Errno", "NoneType", "object has no attribute", "not subscriptable", "Tracer", " a int")
LONGEST = 700  # characters


def is_a_sentence_of_ours(error):
    """True if a `raise` statement of this library made the error, rather than a call in it."""
    frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
    file = Path(frame.f_code.co_filename)
    source = linecache.getline(str(file), line).strip()
    is_ours = file.is_relative_to(HOME) and file.relative_to(HOME).parts[0].startswith("dualdp")
    return is_ours and source.startswith("raise")


def refused(call, error, words):
    """Assert that a call is refused by this error, in these words (a pattern), in one breath."""
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert type(caught.value) is error, text
    assert is_a_sentence_of_ours(caught.value), f"{traceback.format_exception(caught.value)[-3:]}"
    assert re.search(words, text), text
    assert not any(word in text for word in RAW), text
    assert len(text) <= LONGEST, text


def untidy(folder):
    """Return a folder with what paths are mistaken for: a folder, a text file, one of bytes."""
    (folder / "folder").mkdir()
    (folder / "file").write_text("nothing of ours\n")
    (folder / "bytes").write_bytes(b"\xff\xfe\x00")
    return folder
