# SPDX-License-Identifier: Apache-2.0
"""FSDP2 models: the same runs on 1, 2 and 4 processes as on one device."""

import pytest
import torch
from torch.nn import functional as F

import dualdp_torch as dpt
from tests.distributed import sharded_models as models
from tests.distributed import sharded_runs, spawn
from tests.distributed.spawn import together

pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
FAST = ["mlp two passes", "gpt by layer", "band", "relu"]


def relative(ours, theirs):
    """Largest difference of any parameter, relative to its largest number."""
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs
    )


def check_runs(folder, size, names):
    ranks = together(sharded_runs.runs, size, folder, *names, timeout=280)
    for name in names:
        ended = ranks[0][name]
        if name == "relu":
            check_steps(ended)
            continue
        theirs, expected = sharded_runs.run(name, sharded=False)
        dtype = sharded_runs.RUNS[name][1]
        assert [rank[name][1] for rank in ranks] == size * [expected]
        assert relative(ended[0], theirs) < (1e-10 if dtype == torch.float64 else 1e-5), name


def check_steps(steps):
    """Each step from the parameters that it began with: kinks turn rounding into other paths."""
    run, (model, data) = models.plan(), models.build("relu")
    for t, (before, after) in enumerate(steps):
        model.load_state_dict(before)
        sums = dpt.clipped_grad_sum(
            lambda model, x, y: F.cross_entropy(model(x), y, reduction="none"),
            model,
            *data[torch.from_numpy(run.batch_indices(t))],
            max_grad_norm=0.5,
        )
        mean = dpt.noisy_mean(sums.grads, run, t)
        assert relative(after, {name: p - 0.2 * mean[name] for name, p in before.items()}) < 1e-5


@pytest.mark.slow
def test_sharded_runs_end_where_one_device_ends(tmp_path):
    check_runs(tmp_path, 2, FAST)


#: Number of processes -> what they run: everything else by two, some by one and by four.
SOME = {
    1: ["mlp", "cnn portable", "gpt by layer"],
    2: [name for name in sharded_runs.RUNS if name not in FAST],
    4: ["mlp small batches", "mlp empty shares", "cnn", "gpt single", "gpt by layer"],
}


@pytest.mark.slow
@pytest.mark.parametrize("size", SOME)
def test_every_sharded_run_ends_where_one_device_ends(tmp_path, size):
    check_runs(tmp_path, size, SOME[size])


@pytest.mark.slow
def test_one_whole_gradient_is_alive_at_a_time(tmp_path):
    """And the gradient is the noisy mean of one device; faults that are planted are seen."""
    assert together(spawn.passed, 2, tmp_path, "sharded_checks", *FIRST) == 2 * [tuple(FIRST)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_sharded_models_keep_the_guards_and_name_what_is_refused(tmp_path, size):
    """All on two processes, every second on four."""
    names = tuple(OTHERS[:: size // 2])
    passed = together(spawn.passed, size, tmp_path, "sharded_checks", *names, timeout=170)
    assert passed == size * [names]


FIRST = [
    "the_ledger_says_what_is_not_checked",
    "a_buffer_that_is_written_later_is_refused",
    "gradient_is_the_noisy_mean_of_one_device",
    "planted_faults_are_seen",
    "tensor_parallel_models_are_refused",
    "one_whole_gradient_is_alive_at_a_time",
]
OTHERS = [
    "adam_bc_of_shards_is_that_of_one_device",
    "gradients_are_there_after_the_last_physical_batch_only",
    "low_precision_stays_inside_the_model",
    "guards_of_the_recorder_are_on",
    "what_cannot_be_done_is_refused",
    "other_ways_through_the_model_are_refused",
    "layers_that_one_process_uses_are_added_up",
    "a_weight_tied_across_groups_is_named",
    "rows_that_data_move_are_looked_at_together",
    "evaluation_between_steps_changes_nothing",
    "frozen_parameters_stay",
    "dropout_of_both_passes_is_the_same",
    "whole_models_are_gathered_or_refused",
    "secure_noise_trains",
]
