# SPDX-License-Identifier: Apache-2.0
"""Make Markdown of docstrings: doctests are code, and guarantees a list."""

import re

import griffe

DOCTEST = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)
GUARANTEES = re.compile(r"^( *)Guarantees:\n(?:\1 +.*\n?)+", re.MULTILINE)


def markdown(text):
    """Docstring with a fence around every doctest, and a bullet before every guarantee.

    Without them Markdown takes `>>>` for a quotation, and all guarantees for one paragraph.
    """

    def bulleted(match):
        return re.sub(rf"^({match[1]}    )(?=\S)", r"\1- ", match[0], flags=re.MULTILINE)

    fenced = DOCTEST.sub(r"\1```pycon\n\g<0>\n\1```", text)
    return GUARANTEES.sub(bulleted, fenced)


class Docstrings(griffe.Extension):
    """Change the docstrings that are read."""

    def on_object(self, *, obj, **_):
        """Change the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
