# SPDX-License-Identifier: Apache-2.0
"""One run for a secret key: in a process, in its forks, on a machine; and the secret in nothing."""

import copy
import dataclasses
import gc
import json
import os
import pickle
import shutil
import subprocess
import sys
import traceback

import numpy as np
import pytest

import dualdp
from dualdp import checkpoint
from dualdp.plan.batches import physical_batches
from dualdp.randomness import LockedKey, RootKey, run_registry, used_keys
from tests.core.ledger.test_ledger import forks, in_a_fork, release
from tests.core.plan.test_plan import make


def draw(plan, step=0, source="noisy_mean", caller="noisy_mean", **options):
    """Ask for the noise of a step, as `noisy_mean` does."""
    with run_registry.drawing(plan, source, caller, step, **options) as granted:
        return granted


# ---------------------------------------------------------------------- in one process


def test_the_second_user_is_told_of_the_first_and_of_the_way_out():
    """known_failures 79: an engine and add_noise of one plan drew the same noise."""
    plan = make()
    ledger = dualdp.Ledger(plan)
    plan.claim(ledger, recorder="PrivacyEngine.make_private")
    for source in ("add_noise(plan)", "noisy_mean"):
        with pytest.raises(
            dualdp.AccountingError,
            match=rf"{source[:9]}.* that the engine's own step of this plan draws already.*make_l",
        ):
            draw(plan, source=source)
        with pytest.raises(dualdp.AccountingError, match="draws already: the same numbers twice"):
            run_registry.reserve(plan, source, object())
    with pytest.raises(
        dualdp.AccountingError, match=r"this process \(PrivacyEngine.make_private\)"
    ):
        release(dualdp.Ledger(plan), 0)


def test_a_source_that_came_first_waits_for_its_record():
    """add_noise is often made before the loader; it has drawn nothing by then."""
    plan, caller = make(), object()
    run_registry.reserve(plan, "add_noise(plan)", caller)
    ledger = dualdp.Ledger(plan)
    plan.claim(ledger, recorder="PrivacyEngine.make_loader", source="")
    release(ledger, 0)
    assert draw(plan, source="add_noise(plan)", caller=caller) == 0
    with pytest.raises(dualdp.AccountingError, match="noisy_mean would draw noise that add_noise"):
        draw(plan)
    with pytest.raises(dualdp.AccountingError, match="came twice for one plan"):
        draw(plan, source="add_noise(plan)", caller=object())
    other = make()
    run_registry.reserve(other, "add_noise(plan)", caller)
    with pytest.raises(
        dualdp.AccountingError, match=r"was given to add_noise\(plan\), and Privacy"
    ):
        other.claim(dualdp.Ledger(other), recorder="PrivacyEngine.make_private")


def test_a_run_that_goes_on_may_give_its_noise_to_the_engine(tmp_path):
    plan = make()
    ledger = dualdp.Ledger(plan, path=tmp_path / "ledger")
    release(ledger, 0)
    state = ledger.state()
    ledger.close()
    again = dualdp.Ledger.resume(plan, state, tmp_path / "ledger")
    plan.claim(again, recorder="load_checkpoint", source="", resumed=True)
    release(again, 1)
    draw(plan, 1)
    with pytest.raises(dualdp.AccountingError, match="the engine's own step would draw noise that"):
        run_registry.draw_by_engine(again)


def test_two_ledgers_of_one_key_are_refused_in_a_process():
    plan = make()
    first, second = dualdp.Ledger(plan), dualdp.Ledger(plan)
    release(first, 0)
    with pytest.raises(dualdp.AccountingError, match=r"another run of this process \(Ledger\)"):
        second.record(0)
    assert len(second) == 0


def test_noise_that_was_refused_is_no_use_of_the_key():
    """Inside jit a step that is not on record gets nan; the loop is repaired and begins."""
    plan, caller = make(), object()
    run_registry.reserve(plan, "add_noise(plan)", caller)
    options = {"source": "add_noise(plan)", "caller": caller, "on_record_only": True}
    assert draw(plan, **options) is None
    ledger = dualdp.Ledger(plan)
    plan.claim(ledger, recorder="PrivacyEngine.make_loader", source="")
    assert draw(plan, **options) is None
    release(ledger, 0)
    assert draw(plan, **options) == 0
    assert ledger.get_epsilon() > 0


def test_runs_of_one_seeded_plan_go_side_by_side():
    """Each ledger is a run of its own, in which a step's noise is handed out once."""
    plan = make(seed=1)
    ledgers = [dualdp.Ledger(plan) for _ in range(2)]
    for step in range(3):
        for ledger in ledgers:
            release(ledger, step)
        assert [draw(plan, step) for _ in ledgers] == [0, 0]
        with pytest.raises(dualdp.AccountingError, match=f"noise of step={step} was handed out be"):
            draw(plan, step)


def test_plans_that_are_gone_leave_nothing():
    """Seeded runs are forgotten with their plans; those of secret keys are remembered."""
    gc.collect()
    before = len(run_registry._seeded)
    for _ in range(3):
        plan = make(seed=1)
        release(dualdp.Ledger(plan), 0)
    del plan
    gc.collect()
    assert len(run_registry._seeded) <= before + 1


# ---------------------------------------------------------------------- forks


@forks
def test_a_fork_can_not_use_the_noise_of_its_parent(tmp_path):
    """known_failures 81."""
    plan = make()
    ledger = dualdp.Ledger(plan)
    release(ledger, 0)
    for work in (
        lambda: release(ledger, 1),
        lambda: draw(plan),
        lambda: dualdp.Ledger(plan).record(0),
        lambda: ledger.seal(0, None),
    ):
        assert "AccountingError: This " in in_a_fork(work)
    assert draw(plan) == 0
    waiting = make()  # nobody has used it, but two forks could
    said = in_a_fork(lambda: waiting.claim())
    assert f"This plan's key came into process {os.getpid()}, of which this process is a" in said
    assert "is a fork of process" in in_a_fork(lambda: draw(waiting))
    waiting.save_key(tmp_path / "key")
    text = waiting.to_json()
    fresh = lambda: dualdp.PrivacyPlan.from_json(text, key=tmp_path / "key").claim()  # noqa: E731
    assert in_a_fork(fresh) == "None"  # it read the file itself, and left a mark
    assert "was used by a run that left" in in_a_fork(fresh)
    seeded = make(seed=1)
    assert in_a_fork(lambda: release(dualdp.Ledger(seeded), 0).step) == "0"


# ---------------------------------------------------------------------- on one machine


@pytest.fixture
def state(tmp_path, monkeypatch):
    """A machine of one's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "dualdp"


def begin(text, key, **options):
    """Begin a run in another process; what it says if it is refused."""
    program = f"""
import dualdp
plan = dualdp.PrivacyPlan.from_json({text!r}, key={os.fspath(key)!r})
try:
    plan.claim(**{options!r})
except dualdp.AccountingError as error:
    print(error)
"""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_a_copied_key_file_does_not_escape_the_mark(tmp_path, state):
    """known_failures 81: a copy had none beside it."""
    plan = make()
    early, late = tmp_path / "early", tmp_path / "late"
    plan.save_key(tmp_path / "key")
    shutil.copy(tmp_path / "key", early)
    assert begin(plan.to_json(), tmp_path / "key") == ""
    shutil.copy(tmp_path / "key", late)
    assert (state / plan.root.sha256).exists()
    for copied in (early, late):
        assert f"was used by a run that left {state / plan.root.sha256}" in begin(
            plan.to_json(), copied
        )
    # A copy made here of a file that has a mark gets one, too.
    shutil.rmtree(state)
    RootKey.load(tmp_path / "key").save(tmp_path / "made")
    assert used_keys.beside(tmp_path / "made").exists()


def test_two_processes_that_race_for_a_key_are_told_apart(tmp_path, state, monkeypatch):
    """Both have looked and found nothing; the file system decides."""
    plan = make()
    plan.save_key(tmp_path / "key")
    monkeypatch.setattr(used_keys, "marks", lambda sha256: [])
    assert begin(plan.to_json(), tmp_path / "key") == ""
    with pytest.raises(
        dualdp.AccountingError, match="Another process began a run with this key ju"
    ):
        plan.claim()
    used_keys.beside(tmp_path / "key").unlink()
    (state / plan.root.sha256).unlink()
    used_keys.beside(tmp_path / "key").touch()
    with pytest.raises(dualdp.AccountingError, match="it left .*key.used"):
        plan.claim()
    assert not (state / plan.root.sha256).exists()  # taken back: no run has begun


@pytest.mark.parametrize("where", ["beside", "machine"])
def test_a_mark_that_can_not_be_written_is_a_refusal(tmp_path, state, monkeypatch, where):
    """known_failures 81: it was skipped."""
    plan = make()
    plan.save_key(tmp_path / "key")
    real = os.open

    def unwritable(path, *options):
        if str(path).endswith(".used") if where == "beside" else str(state) in str(path):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return real(path, *options)

    monkeypatch.setattr(used_keys.os, "open", unwritable)
    with pytest.raises(
        dualdp.AccountingError, match=r"can't be written \(Permission denied\). Exp"
    ):
        plan.claim()
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(state.parent))
    assert not used_keys.marks(plan.root.sha256)
    plan.claim()
    monkeypatch.setattr(used_keys.os, "open", unwritable)
    with pytest.raises(dualdp.AccountingError, match="can't be written"):
        plan.save_key(tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_marks_go_where_they_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(used_keys.tempfile, "gettempdir", lambda: str(tmp_path))
    plan = make()
    plan.save_key(tmp_path / "key")
    plan.claim()
    (folder,) = [path for path in tmp_path.iterdir() if path.name.startswith("dualdp-")]
    assert (folder / plan.root.sha256).exists()


def test_a_key_that_is_saved_after_its_run_began_is_marked(tmp_path, state):
    plan = make()
    ledger = dualdp.Ledger(plan, path=tmp_path / "ledger")
    release(ledger, 0)
    assert not state.exists()  # a key without a file is nowhere else
    plan.save_key(tmp_path / "key")
    mark = json.loads(used_keys.beside(tmp_path / "key").read_text())
    assert mark == {
        "ledger": str(tmp_path / "ledger"),
        "opened": ledger.chain.last_hash,
        "key": plan.root.sha256,
    }
    assert f"records in {tmp_path / 'ledger'}" in begin(plan.to_json(), tmp_path / "key")


def test_the_mark_of_a_key_that_was_deleted_is_not_that_of_the_next(tmp_path, state):
    dualdp.Ledger(make()).plan.save_key(tmp_path / "key")
    (tmp_path / "key").unlink()
    plan = make()
    plan.save_key(tmp_path / "key")
    assert begin(plan.to_json(), tmp_path / "key") == ""
    assert "was used by a run" in begin(plan.to_json(), tmp_path / "key")


def resume(folder):
    """Go on with the run of a folder for a step."""
    path = folder / "run"
    again = checkpoint.unpack_run(checkpoint.read(path)[1], path)
    again.plan.claim(again, resumed=True)
    release(again, again.position, [np.ones(1)])
    again.close()


def test_a_copied_ledger_can_not_go_on_beside_the_other(tmp_path, state):
    """Key, ledger and checkpoint copied together: two runs would use the same noise."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    ledger = dualdp.Ledger(make())
    release(ledger, 0)
    checkpoint.write(first / "run", {}, checkpoint.pack_run(ledger, first / "run"))
    ledger.close()
    shutil.copytree(first, second)

    resume(second)
    with pytest.raises(dualdp.AccountingError, match="does not hold what the run of this key has"):
        resume(first)
    resume(second)
    shutil.rmtree(first)
    shutil.move(second, first)  # moved, it is the same ledger
    resume(first)


@pytest.mark.parametrize("ends", [False, True])
def test_a_copy_of_a_run_that_goes_on_can_not_go_on_too(tmp_path, state, ends):
    """The copy has all the lines that the marks know of, if the run was never resumed."""
    first, second, later = tmp_path / "first", tmp_path / "second", tmp_path / "later"
    first.mkdir()
    ledger = dualdp.Ledger(make(), path=first / "ledger")
    release(ledger, 0)
    checkpoint.write(first / "run", {}, checkpoint.pack_run(ledger, first / "run"))
    shutil.copytree(first, second)
    if ends:
        release(ledger, 1)
        checkpoint.write(first / "run", {}, checkpoint.pack_run(ledger, first / "run"))
        shutil.copytree(first, later)
        ledger.close()
    with pytest.raises(dualdp.AccountingError, match="does not hold what the run of this key has"):
        resume(second)
    if ends:
        resume(later)  # which has all that was recorded
        with pytest.raises(dualdp.AccountingError, match="does not hold what the run of this key"):
            resume(first)


def test_old_marks_are_respected(tmp_path, state):
    """Those of 0.1.0 are empty."""
    plan = make()
    plan.save_key(tmp_path / "key")
    used_keys.beside(tmp_path / "key").touch()
    assert "was used by a run that left" in begin(plan.to_json(), tmp_path / "key")
    assert begin(plan.to_json(), tmp_path / "key", resumed=True) == ""


# ---------------------------------------------------------------------- the secret


def holds(data, secret):
    """Whether bytes or text hold a secret in any usual form."""
    data = data.encode() if isinstance(data, str) else data
    forms = secret, secret.hex().encode(), repr(secret)[2:-1].encode()
    return any(form in data for form in forms)


def test_no_pickle_copy_or_exception_holds_the_secret(tmp_path):
    """known_failures 81: in pickle.dumps(plan) and of a batch, and in the __cause__ of an error."""
    plan = make()
    secret, path = plan.root.secret, tmp_path / "key"
    batch = {"plan": plan, "chunks": list(physical_batches(plan.batch_indices(0), 8))}
    for thing in (plan, plan.root, batch, dataclasses.asdict(plan)):
        assert not holds(pickle.dumps(thing), secret)
    for again in (pickle.loads(pickle.dumps(plan)), copy.copy(plan), copy.deepcopy(plan)):
        if again.root != plan.root:  # a shallow copy shares the object
            assert again.root == LockedKey(plan.root.sha256)
            assert json.loads(again.to_json()) == json.loads(plan.to_json())
            with pytest.raises(
                ValueError, match="is not loaded.*A copy or a pickle of a plan has no"
            ):
                again.batch_indices(0)
    plan.save_key(path)
    unpickled = pickle.loads(pickle.dumps(plan))
    opened = dualdp.PrivacyPlan.from_json(unpickled.to_json(), key=path)
    assert opened == plan
    seeded = make(seed=3)
    assert pickle.loads(pickle.dumps(seeded)) == seeded


BROKEN = {
    "cut": lambda text: text[:-3],
    "not hexadecimal": lambda text: text.replace('", "seed"', 'zz", "seed"'),
    "short": lambda text: text.replace('", "seed"', '00", "seed"'),
    "another seed": lambda text: text.replace('"seed": null', '"seed": 3'),
    "version": lambda text: text.replace('"dualdp_key": 1', '"dualdp_key": 2'),
    "no version": lambda text: text.replace('"dualdp_key"', '"key"'),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_key_file_tells_nothing_of_the_key(tmp_path, name):
    plan, path = make(), tmp_path / "key"
    plan.save_key(path)
    path.write_text(BROKEN[name](path.read_text()))
    text = plan.to_json()
    with pytest.raises(ValueError, match="is not a key file|is a key file of format 2") as caught:
        dualdp.PrivacyPlan.from_json(text, key=path)
    assert_silent(caught.value, plan.root.secret)


def test_a_key_file_that_exists_tells_nothing_of_the_key(tmp_path):
    plan = make()
    plan.save_key(tmp_path / "key")
    with pytest.raises(FileExistsError, match="a key file is never overwritten") as caught:
        plan.save_key(tmp_path / "key")
    assert_silent(caught.value, plan.root.secret)


def assert_silent(error, secret):
    """Neither the error, nor what caused it, nor the variables of their frames say the secret."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        assert not holds(repr(error), secret)
        assert not holds(repr(vars(error)), secret)
        assert not holds(repr(error.args), secret)
        told = traceback.TracebackException.from_exception(error, capture_locals=True)
        frames = [frame for frame in told.stack if "dualdp" in frame.filename]
        assert frames
        # `plan` and `self` are there, and their repr shows a hash.
        assert not any(holds(str(frame.locals), secret) for frame in frames)
        assert not holds(pickle.dumps(error), secret)
        error = error.__cause__ or error.__context__


def test_newer_formats_are_refused_by_name(tmp_path):
    plan, path = make(), tmp_path / "key"
    plan.save_key(path)
    path.write_text(path.read_text().replace('"dualdp_key": 1', '"dualdp_key": 9'))
    data = {**json.loads(plan.to_json()), "dualdp_plan": 9}
    ledger = dualdp.Ledger(plan).to_json().replace('"dualdp_ledger": 1', '"dualdp_ledger": 9')
    (record,) = [json.loads(line) for line in ledger.splitlines()]
    del record["hash"]
    chained = dualdp.ledger.ledger.Chain([record]).text()
    for read, kind in (
        (lambda: RootKey.load(path), "key file of format 9"),
        (lambda: dualdp.PrivacyPlan.from_json(json.dumps(data)), "plan of format 9"),
        (lambda: dualdp.Ledger.read(chained), "ledger of format 9"),
        (lambda: checkpoint.require_version({"dualdp_checkpoint": 9}, "x"), "checkpoint of format"),
    ):
        with pytest.raises(ValueError, match=f"is a {kind}.*use the version of dualdp that wrote"):
            read()


@pytest.mark.parametrize(
    ("branch", "error"), [("x", TypeError), (1.5, TypeError), ([], TypeError), (-1, ValueError)]
)
def test_a_branch_is_a_number(branch, error):
    plan = make(seed=3)
    with (
        pytest.raises(error, match=r"branch=.*Expected an integer"),
        run_registry.drawing(plan, "noisy_mean", "noisy_mean", 0, branch),
    ):
        pass
