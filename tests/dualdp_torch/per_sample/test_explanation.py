# SPDX-License-Identifier: Apache-2.0
"""`explain` says how a model is treated, before it is trained."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp_torch.rules import RULES
from tests.dualdp_torch.checks import data
from tests.dualdp_torch.per_sample.loops import linear, rule_with, scaled_rows, squares


def test_each_use_is_told():
    norm, head = nn.LayerNorm(4 * 62), nn.Linear(248, 99)
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.Flatten(), norm, head)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    found = dpt.explain(squares, model, data(8, 3, 64))
    forms = {use["parameters"][0]: (use["function"], use["form"]) for use in found["uses"]}
    assert forms["3.weight"] == ("linear", "products")
    assert forms["2.weight"] == ("layer_norm", "gradients")
    assert set(forms) == {name for name, _ in model.named_parameters()}
    assert "3.weight" not in found["instantiated"]
    assert (found["way"], found["reason"], found["check"]) == ("uses", None, {"status": "passed"})
    assert json.loads(json.dumps(found)) == found
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_methods_and_reasons(monkeypatch):
    model, x = linear(6), data(4, 6)
    assert all(u["keeps"] for u in dpt.explain(squares, model, x, method="materialize")["uses"])
    assert dpt.explain(squares, model, x, method="vmap")["way"] == "vmap"
    loop = dpt.explain(squares, model, x, method="loop")
    assert (loop["way"], loop["check"]["status"]) == ("loop", "not checked")
    assert dpt.explain(squares, model, x, check="off")["check"] == {"status": "off"}
    turned = dpt.explain(lambda m, x: squares(m, x.flip(0)).flip(0), model, x)
    assert turned["way"] == "vmap"
    assert turned["reason"]
    assert dpt.explain(squares, model, x * torch.nan)["check"]["status"] == "not checked"
    monkeypatch.setitem(RULES, F.linear, rule_with(scaled_rows(2), slot="bias"))
    found = dpt.explain(squares, linear(2), data(8, 6), method="book_keeping")
    assert found["check"]["status"] == "failed"
    assert "'bias'" in found["check"]["reason"]


def test_bad_arguments():
    with pytest.raises(ValueError, match="The batch holds 1 examples. Expected at least two"):
        dpt.explain(squares, linear(), data(1, 6))
    with pytest.raises(ValueError, match="check='always' is unknown"):
        dpt.explain(squares, linear(), data(4, 6), check="always")
