# SPDX-License-Identifier: Apache-2.0
"""The planning calculator against bytes that the kernel saw, and XLA's own collectives."""

import functools
import json

import pytest

from dualdp_tools import scaling
from tests.distributed import counted
from tests.distributed.spawn import together

TOLERANCE = 0.05

#: Size of the group -> cases of `tests.distributed.counted`.
CASES = {
    2: [
        {},
        {"method": "materialize"},
        {"physical_batch_size": 4},
        {"sharding": "full"},
        {"sharding": "full", "root": True},
        {"sharding": "full", "compute_bytes": 2},
    ],
    4: [
        {"method": "two_pass"},
        {"sharding": "full", "method": "two_pass"},
        {"sharding": "full", "clipping": "per_layer", "physical_batch_size": 2},
        {"sharding": "full", "physical_batch_size": 1, "root": True},
    ],
}


def named(size, case):
    return "-".join([str(size), *(f"{value}" for value in case.values())])


ALL = [
    pytest.param(size, number, id=named(size, case))
    for size, cases in CASES.items()
    for number, case in enumerate(cases)
]


@functools.cache
def counts(size, folder):
    """What the ranks of a group counted, case by case."""
    ranks = together(counted.counts, size, folder, CASES[size], timeout=170)
    return list(zip(*ranks, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("counted")


def model_of(size, case, chunks):
    """The messages of a case."""
    said = counted.USUAL | case
    method = "per_layer" if said["clipping"] == "per_layer" else said["method"]
    layers = [sum(p.numel() for p in layer.parameters()) for layer in counted.built()[::2]]
    return scaling.messages(
        method,
        sum(layers),
        ranks=size,
        shards=size if said["sharding"] == "full" else 1,
        chunks=chunks,
        compute_bytes=said["compute_bytes"],
        root=sum(layers) - layers[2] if said["root"] else 0,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize(("size", "number"), ALL)
def test_bytes_sent_per_step_are_the_models(size, number, folder):
    case, ranks = CASES[size][number], counts(size, folder)[number]
    chunks = {rank["chunks"] for rank in ranks}
    assert len(chunks) == 1
    expected = scaling.bytes_sent(model_of(size, case, int(chunks.pop())), wire="torch_gloo")
    # The first step also examines the model; a mean over ranks, as the formulas are.
    for step in zip(*(rank["sent"][1:] for rank in ranks), strict=True):
        assert sum(step) / size == pytest.approx(expected, rel=TOLERANCE)


#: Processes, virtual devices of each, cases of `tests.only_jax.workers.counted`.
ON_A_MESH = {
    "two devices": (1, 2, [{}, {"shards": 2, "method": "two_pass"}]),
    "eight devices": (
        1,
        8,
        [{}, {"shards": 8}, {"shards": 4}, {"shards": 8, "physical_batch_size": 1}],
    ),
    "two processes": (
        2,
        1,
        [{}, {"shards": 2}, {"shards": 2, "physical_batch_size": 4, "method": "two_pass"}],
    ),
}


@functools.cache
def on_a_mesh(name):
    """What the processes of a mesh counted, case by case."""
    from tests.only_jax.workers.launch import reports

    processes, devices, cases = ON_A_MESH[name]
    text = json.dumps(cases)
    found = reports("counted", text, processes=processes, devices=devices, seconds=150)
    return list(zip(*found, strict=True))


def jax_messages(ranks, case, chunks):
    from tests.only_jax.workers.counted import USUAL, num_parameters

    said = USUAL | case
    method = "book_keeping" if said["method"] == "auto" else said["method"]
    return scaling.messages(
        method,
        num_parameters(),
        ranks=ranks,
        shards=said["shards"],
        chunks=chunks,
        stack="jax",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number"),
    [(name, i) for name, case in ON_A_MESH.items() for i in range(len(case[2])) if case[0] == 1],
)
def test_collectives_of_the_compiled_step_are_the_models(name, number):
    (_, ranks, cases), (found,) = ON_A_MESH[name], on_a_mesh(name)[number]
    shards, chunks = cases[number].get("shards", 1), int(found["chunks"])
    payloads = dict.fromkeys(["all_gather", "reduce_scatter", "all_reduce"], 0)
    for program, kind, size in found["collectives"]:
        # A reduce-scatter's result is one part of its payload; `_add_chunk` runs for every chunk.
        whole = size * shards if kind == "reduce_scatter" else size
        payloads[kind] += whole * (chunks if program == "jit__add_chunk" else 1)
    expected = dict.fromkeys(payloads, 0)
    for message in jax_messages(ranks, cases[number], chunks):
        if message.what != "agreement":  # those are between processes
            expected[message.collective] += message.size * message.times
    assert payloads == pytest.approx(expected, rel=TOLERANCE, abs=64)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_bytes_between_processes_of_a_mesh_are_the_models(number):
    ranks, _, cases = ON_A_MESH["two processes"]
    found = on_a_mesh("two processes")[number]
    chunks = int(found[0]["chunks"])
    expected = scaling.bytes_sent(jax_messages(ranks, cases[number], chunks))
    for step in zip(*(process["sent"] for process in found), strict=True):
        assert sum(step) / ranks == pytest.approx(expected, rel=TOLERANCE)
