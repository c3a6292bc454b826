# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel models: norms and clipped sums of pieces are those of one device."""

import pytest

from tests.distributed.spawn import passed, together

pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


def check(folder, size, names):
    assert together(passed, size, folder, "tensor_checks", *names, timeout=170) == size * [
        tuple(names)
    ]


@pytest.mark.slow
def test_norms_and_sums_of_pieces_are_those_of_one_device(tmp_path):
    check(tmp_path, 2, ["an_mlp_agrees_with_one_device"])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_tensor_parallel_call_agrees_with_one_device(tmp_path, size):
    check(tmp_path, size, ["every_call_agrees_with_one_device"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "a_loop_of_twenty_steps_ends_where_one_device_ends",
        "ordinary_calls_agree_with_one_device",
        "planted_faults_are_seen",
        "what_cannot_be_done_is_refused",
        "frozen_pieces_and_several_views_agree",
        "dropout_needs_one_seed",
        "sequence_parallel_agrees_with_one_device",
    ],
)
def test_tensor_parallel_calls(tmp_path, name):
    check(tmp_path, 2, [name])
