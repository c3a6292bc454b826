# SPDX-License-Identifier: Apache-2.0
"""The tables and files of a comparison."""

import json

import pytest

from dualdp_tools.compare import report


@pytest.mark.slow
def test_both_files_and_three_tables_are_written(compare, tmp_path):
    code, words = compare("--seed", "1")
    assert code == 0, words
    titles = ("1. Per-sample gradients", "2. One plan, two runs", "3. Time per step")
    assert all(title in words for title in titles)
    data = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert data["agree"] is True
    assert [point["step"] for point in data["training"]] == [1, 2, 3]
    names = {f"{layer}.{kind}" for layer in ("hidden", "head") for kind in ("weight", "bias")}
    assert {row["torch_name"] for row in data["gradients"]} == names
    assert all(row["excess"] <= 1 for row in data["gradients"])
    assert data["training"][-1]["epsilon"]["torch"] == data["training"][-1]["epsilon"]["jax"] <= 8
    assert {timing["stack"] for timing in data["seconds_per_step"]} == {"torch", "jax"}
    assert (tmp_path / "out" / "compare.png").read_bytes()[:4] == b"\x89PNG"
    assert len(list((tmp_path / "out").iterdir())) == 2


@pytest.mark.slow
def test_nothing_half_written_when_the_picture_fails(compare, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "picture", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    code, words = compare()
    assert (code, words[-17:]) == (2, "dualdp: disk full")
    assert list((tmp_path / "out").iterdir()) == []
