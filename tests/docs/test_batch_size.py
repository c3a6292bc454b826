# SPDX-License-Identifier: Apache-2.0
"""The table that docs/batch_size.md shows is the one that its program prints."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "batch_size.md").read_text()


def test_the_table_of_the_page_is_what_its_program_prints(capsys):
    program, table = (
        re.search(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL).group(1)
        for kind in ("python", "text")
    )
    exec(compile(program, "batch_size.md", "exec"), {})
    assert capsys.readouterr().out == table
