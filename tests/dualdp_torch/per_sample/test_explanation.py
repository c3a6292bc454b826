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


def squares(model, x):
    return model(x).flatten(1).square().sum(1)


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


def test_methods_and_reasons():
    model, x = nn.Linear(6, 6), data(4, 6)
    assert all(u["keeps"] for u in dpt.explain(squares, model, x, method="materialize")["uses"])
    assert dpt.explain(squares, model, x, method="vmap")["way"] == "vmap"
    loop = dpt.explain(squares, model, x, method="loop")
    assert loop["way"] == "loop"
    assert loop["check"]["status"] == "not checked"
    assert dpt.explain(squares, model, x, check="off")["check"] == {"status": "off"}
    turned = dpt.explain(lambda m, x: squares(m, x.flip(0)).flip(0), model, x)
    assert turned["way"] == "vmap"
    assert turned["reason"]
    assert dpt.explain(squares, model, x * torch.nan)["check"]["status"] == "not checked"


def test_a_failed_check_is_told(monkeypatch):
    from dataclasses import replace

    right = RULES[F.linear]
    grads = {**right.grads, "bias": lambda acts, grads_out, **_: 2 * grads_out}
    sums = {"weight": right.sums["weight"]}
    monkeypatch.setitem(RULES, F.linear, replace(right, grads=grads, sums=sums))
    found = dpt.explain(squares, nn.Linear(6, 2), data(8, 6), method="book_keeping")
    assert found["check"]["status"] == "failed"
    assert "'bias'" in found["check"]["reason"]


def test_bad_arguments():
    model, x = nn.Linear(6, 6), data(1, 6)
    with pytest.raises(ValueError, match="The batch holds 1 examples. Expected at least two"):
        dpt.explain(squares, model, x)
    with pytest.raises(ValueError, match="check='always' is unknown"):
        dpt.explain(squares, model, data(4, 6), check="always")
