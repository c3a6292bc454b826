# SPDX-License-Identifier: Apache-2.0
"""One file: broken, foreign or wrong ones are refused by what is wrong."""

import jax.numpy as jnp
import pytest

import dualdp_jax as dpj
from dualdp import AccountingError
from tests.dualdp_jax.checkpointed import arguments, load, params, saved, start


def test_broken_files_are_refused_by_what_is_wrong(tmp_path):
    path = saved(tmp_path)
    data = path.read_bytes()
    for damaged, said in (
        (data[:-7], "is truncated or no safetensors file"),
        (data[:-3] + b"abc", "was changed after it was written"),
        (b"PK\x03\x04" + data, "is truncated or no safetensors file"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=said):
            load(path)
    path.write_bytes(data)
    ledger = tmp_path / "run.ckpt.ledger"
    ledger.write_text(ledger.read_text().replace('{"r":[0,1.0', '{"r":[0,9.0'))
    with pytest.raises(ValueError, match="is broken at line"):
        load(path)


def test_wrong_arguments_are_refused(tmp_path):
    path = saved(tmp_path)
    engine, _, state, _ = start()
    with pytest.raises(TypeError, match="like is a dict. Expected dpj.TrainState.create"):
        dpj.load_checkpoint(path, like=params())
    with pytest.raises(TypeError, match="state is a dict. Expected the TrainState of a step"):
        dpj.save_checkpoint(path, state=params(), engine=engine)
    with pytest.raises(TypeError, match="The leaf 'params/odd' is an object"):
        dpj.save_checkpoint(path, state=state._replace(params={"odd": object()}), engine=engine)
    twice = {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}
    with pytest.raises(ValueError, match="Two leaves of the state have the name 'params/a.b'"):
        dpj.save_checkpoint(path, state=state._replace(params=twice), engine=engine)
    with pytest.raises(AccountingError, match="There is no loaded run to go on with"):
        engine.resume(**arguments())
