# SPDX-License-Identifier: Apache-2.0
"""Both stacks have the same public functions: names, order, defaults and words, but for a table."""

import inspect

import pytest

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp_jax.per_sample.call import Options as JaxOptions
from dualdp_torch.per_sample.call import Options

CALL = " key trainable keep_batch_dim"
INSIDE = " positions program origin"  # of an engine or a `Chunk`
TRAIN = "loss_reduction grad_sample_mode module data_loader ledger checks views augment users"
#: Function -> arguments of PyTorch alone, of JAX alone: a module holds its parameters, nothing is
#: hidden in a function, arrays lie in places, a dry run looks. docs/architecture.md has more.
DIFFERENT = {
    "PrivacyEngine.make_loader": ("data_loader views augment", "data data_sharding"),
    "PrivacyEngine.make_private": (
        f"{TRAIN} calibrates optimizer",
        "loss_fn params data optimizer needs_key has_aux method data_sharding"
        " ledger checks views augment users" + CALL,
    ),
    "PrivacyEngine.make_private_with_epsilon": ("", "data"),
    "PrivacyEngine.resume": ("data_loader augment users", "arguments"),
    "clipped_grad_sum": ("model", "what" + CALL + INSIDE),
    "per_sample_grads": ("model", "what" + CALL + INSIDE),
    "per_sample_norms": ("model", "what" + CALL + INSIDE),
    "explain": ("model clipping check", "what options"),
    "validate": ("model loss_fn batch", "what loss_fn batch options"),
    "load_checkpoint": ("model optimizer", "like"),
    "load_sharded_checkpoint": ("model optimizer", "like"),
    "save_checkpoint": ("model optimizer", "state"),
    "save_sharded_checkpoint": ("model optimizer", "state"),
    "noisy_mean": ("layout", "key"),
}
#: Functions of one stack alone: Opacus' names, the recorder and the rehearsal of PyTorch's loops,
#: and what programs of the user's need on JAX.
ALONE = {
    *("fix", "PrivacyEngine.compile", "PrivacyEngine.pause", "PrivacyEngine.rehearse"),
    *("record_per_sample", "add_noise", "adam_bc", "check", "noise_keys"),
    "compile_clipped_grad_sum",
}
#: Defaults that differ: a `Chunk` knows its step.
DEFAULTS = {("noisy_mean", "step")}


def functions(face):
    """Public functions of a stack and public methods of its engine, by name."""
    found = {name: value for name, value in vars(face).items() if inspect.isfunction(value)}
    found |= {f"PrivacyEngine.{k}": v for k, v in vars(face.PrivacyEngine).items()
              if inspect.isfunction(v)}  # fmt: skip
    names = [name for name in found if not name.rpartition(".")[2].startswith("_")]
    return {name: found[name] for name in names if name != "PrivacyEngine.settings_to_save"}


TORCH, JAX = functions(dpt), functions(dpj)
CALLS = ("clipped_grad_sum", "per_sample_grads", "per_sample_norms")


def arguments(function, name, stack):
    """(positional in order, all with their defaults), without those that the table names."""
    left_out = DIFFERENT.get(name, ("", ""))[stack].split()
    every = [*inspect.signature(function).parameters.values()]
    if name in CALLS:  # the keywords that the calls share stand in one place
        shared = (Options, JaxOptions)[stack].__annotations__
        every += [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY) for key in shared]
        left_out += ["options"]
    kept = [p for p in every if p.name not in left_out]
    places = [p.name for p in kept if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    defaults = {p.name: p.default for p in kept if (name, p.name) not in DEFAULTS}
    return places, defaults


@pytest.mark.parametrize("name", sorted({*TORCH} & {*JAX}))
def test_arguments_are_those_of_the_twin(name):
    ours, theirs = arguments(TORCH[name], name, 0), arguments(JAX[name], name, 1)
    assert ours == theirs


def test_functions_of_one_stack_are_in_the_table():
    assert {*TORCH} ^ {*JAX} == ALONE
    assert {*DIFFERENT} <= {*TORCH} & {*JAX}
