# SPDX-License-Identifier: Apache-2.0
"""`dualdp port`: a checkpoint of one stack becomes a file of the other."""

import numpy as np
import torch
from typer.testing import CliRunner

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import checkpoint
from dualdp_tools.cli import app
from tests.dualdp.porting.test_convert_checkpoint import jax_state, saved_by_torch, torch_parts

FACTORIES = "from tests.dualdp.porting.test_convert_checkpoint import jax_state, torch_parts\n"


def test_the_command_writes_the_other_stacks_file(tmp_path, monkeypatch):
    def call(*arguments):
        done = CliRunner().invoke(app, ["port", *map(str, arguments)])
        assert done.exit_code == 0, done.output + str(done.exception)

    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    path, model, _ = saved_by_torch(tmp_path)
    (tmp_path / "folder").mkdir()
    out = tmp_path / "folder" / "jax.ckpt"
    call(path, "--to", "jax", "--like", "factories:jax_state", "--out", out)
    assert checkpoint.read(out)[1]["stack"] == "jax"
    state, engine = dpj.load_checkpoint(out, like=jax_state())
    bias = state.params["params"]["body"]["bias"]
    np.testing.assert_array_equal(bias, model.body.bias.detach().numpy())
    engine.ledger.close()
    call(out, "--to", "torch", "--like", "factories:torch_parts")
    other, optimizer = torch_parts()
    dpt.load_checkpoint(f"{out}.torch", model=other, optimizer=optimizer)
    assert torch.equal(other.body.bias, model.body.bias)
