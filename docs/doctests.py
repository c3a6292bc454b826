# SPDX-License-Identifier: Apache-2.0
"""Show the doctests of docstrings as code: in Markdown, lines with `>>>` would be quotations."""

import re

import griffe

DOCTEST = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Put a fence around every doctest."""

    def on_object(self, *, obj, **_):
        """Change the docstring of an object that was read."""
        if obj.docstring:
            fenced = r"\1```pycon\n\g<0>\n\1```"
            obj.docstring.value = DOCTEST.sub(fenced, obj.docstring.value)
