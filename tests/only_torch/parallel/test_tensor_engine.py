# SPDX-License-Identifier: Apache-2.0
"""Private loops of tensor parallel models: they end where one device ends."""

import pytest

from dualdp.ledger.verify import verify
from tests.distributed import tensor_runs
from tests.distributed.spawn import passed, together

pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


def check_runs(folder, size, names):
    ranks = together(tensor_runs.runs, size, folder, *names, timeout=280)
    for name in names:
        parameters, epsilon, releases, _ = tensor_runs.run(name, is_cut=False)
        for rank in ranks:
            ended, spent, told, text = rank[name]
            assert ended.keys() == parameters.keys()
            apart = {n: (ended[n] - p).abs().max() / p.abs().max() for n, p in parameters.items()}
            assert max(apart.values()) < 1e-9, (name, apart)
            assert spent == epsilon
            assert told == releases, (told[:2], releases[:2])
            assert text == ranks[0][name][3]  # every process has the record that the first wrote
        assert verify(folder / f"{name}.ledger", allow_seed=True).passed
        assert '"digest":"' in ranks[0][name][3].replace(" ", "")


def test_a_private_loop_of_pieces_ends_where_one_device_ends(tmp_path):
    check_runs(tmp_path, 2, ["short"])


@pytest.mark.slow
def test_every_private_loop_of_pieces_ends_where_one_device_ends(tmp_path):
    """20 steps of a Megatron block with tables that are cut, and every option."""
    check_runs(tmp_path, 2, list(tensor_runs.RUNS))


@pytest.mark.slow
def test_four_processes_end_where_one_device_ends(tmp_path):
    check_runs(tmp_path, 4, ["small batches", "by layer"])


CHECKS = [
    "planted_faults_die",
    "whole_parameters_that_drift_apart_are_found",
    "the_digest_has_every_number_once",
    "a_check_that_fails_on_one_process_stops_all",
    "stages_are_cut_like_the_parameters",
    "what_cannot_be_done_is_refused",
    "loops_that_differ_are_refused",
    "parameters_used_on_pieces_are_refused",
    "a_model_that_is_cut_later_is_refused",
]


@pytest.mark.slow
def test_private_loops_of_pieces_keep_the_guards_and_name_what_is_refused(tmp_path):
    found = together(passed, 2, tmp_path, "tensor_engine", *CHECKS, timeout=170)
    assert found == 2 * [tuple(CHECKS)]
