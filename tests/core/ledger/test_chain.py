# SPDX-License-Identifier: Apache-2.0
"""The file of a ledger: chained, locked, whole after a kill, and never silently wrong."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from dualdp.ledger import hash_chain
from dualdp.ledger.hash_chain import Chain, parse

RECORDS = [{"number": k, "text": "a \u00e9\n"} for k in range(5)]


def written(path, records=RECORDS):
    made = Chain()
    made.write_to(path)
    for record in records:
        made.append(record)
    made.close()
    return path.read_text()


def test_what_is_written_is_read(tmp_path):
    text = written(tmp_path / "chain")
    assert parse(text) == RECORDS
    assert Chain.open(tmp_path / "chain").records == RECORDS


@pytest.mark.parametrize("line", range(5))
def test_edits_are_named(tmp_path, line):
    lines = written(tmp_path / "chain").splitlines(keepends=True)
    changed = list(lines)
    changed[line] = changed[line].replace(f'"number": {line}', '"number": 9')
    with pytest.raises(ValueError, match=f"line {line + 1}: its hash does not follow"):
        parse("".join(changed))
    if line < 4:
        with pytest.raises(ValueError, match=f"line {line + 1}: its hash does not follow"):
            parse("".join(lines[:line] + lines[line + 1 :]))
        moved = [*lines[:line], lines[line + 1], lines[line], *lines[line + 2 :]]
        with pytest.raises(ValueError, match=f"line {line + 1}: its hash does not follow"):
            parse("".join(moved))


def unlink(path, old):
    path.unlink()


def truncate(path, old):
    path.write_bytes(b"")


def lengthen(path, old):
    with open(path, "a") as file:
        file.write("{}\n")


def replace(path, old):
    os.replace(old, path)


@pytest.mark.parametrize("change", [unlink, truncate, lengthen, replace])
def test_a_file_that_another_program_changes_ends_the_run(tmp_path, change):
    """Releases went into a file without a name, and the one that was put there told of fewer."""
    path, made = tmp_path / "chain", Chain()
    made.write_to(path)
    made.append(RECORDS[0])
    shutil.copy(path, tmp_path / "old")
    made.append(RECORDS[1])
    change(path, tmp_path / "old")
    left = path.read_text() if path.exists() else None
    for write in (lambda: made.append(RECORDS[2]), made.sync):
        with pytest.raises(ValueError, match="by another program while a run writes it, so a rele"):
            write()
    assert made.records == RECORDS[:2]
    assert (path.read_text() if path.exists() else None) == left
    assert parse(made.text()) == RECORDS[:2]


def test_a_run_may_change_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Chain()
    made.write_to("chain")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    made.append(RECORDS[0])
    assert made.path == str(tmp_path / "chain")
    assert parse((tmp_path / "chain").read_text()) == RECORDS[:1]


@pytest.mark.parametrize(
    "broken", ["no json\n", "[]\n", "{}\n", '{"hash": 1, "x": NaN}\n', "[" * 99999 + "\n"]
)
def test_foreign_lines_are_named(tmp_path, broken):
    text = written(tmp_path / "chain")
    with pytest.raises(ValueError, match="The text is broken at line 6: no record of a ledger"):
        parse(text + broken)


def test_a_torn_last_line_is_cut_off(tmp_path):
    path = tmp_path / "chain"
    text = written(path)
    for torn in ('{"number"', text.splitlines()[0][:-2]):
        path.write_text(text + torn)
        assert parse(text + torn) == RECORDS
        opened = Chain.open(path)
        opened.append({"number": 5})
        opened.close()
        assert parse(path.read_text()) == [*RECORDS, {"number": 5}]


def test_one_file_has_one_writer(tmp_path):
    path = tmp_path / "chain"
    written(path)
    first = Chain.open(path)
    with pytest.raises(ValueError, match="chain is in use by another run"):
        Chain.open(path)
    first.close()
    Chain.open(path).close()
    with pytest.raises(FileExistsError, match="chain exists. Expected a new path"):
        Chain().write_to(path)


def test_a_full_disk_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "chain"
    made = Chain(RECORDS)
    made.write_to(path)
    before = (path.read_bytes(), list(made.records), made.text())
    real = os.write

    def full(file, data):
        if len(data) > 10:
            return real(file, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hash_chain.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        made.append({"number": 123456})
    monkeypatch.undo()
    assert (path.read_bytes(), made.records, made.text()) == before
    made.append({"number": 5})
    assert parse(path.read_text()) == [*RECORDS, {"number": 5}]


def test_a_killed_process_leaves_its_records(tmp_path):
    path = tmp_path / "chain"
    program = f"""
import os, signal
from dualdp.ledger.hash_chain import Chain
chain = Chain(); chain.write_to({os.fspath(path)!r})
for k in range(100): chain.append({{"number": k}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    assert parse(path.read_text()) == [{"number": k} for k in range(100)]


def test_an_interrupt_after_the_write_leaves_file_and_memory_together(tmp_path, monkeypatch):
    path = tmp_path / "chain"
    made = Chain(RECORDS)
    made.write_to(path)
    real = os.write

    def interrupted(file, data):
        real(file, data)
        raise KeyboardInterrupt

    monkeypatch.setattr(hash_chain.os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.append({"number": 5})
    monkeypatch.undo()
    made.append({"number": 6})
    assert parse(path.read_text()) == made.records == [*RECORDS, {"number": 6}]


def test_a_second_interrupt_while_the_first_is_undone(tmp_path, monkeypatch):
    """Nothing was cut off then; the next record does it."""
    path = tmp_path / "chain"
    made = Chain(RECORDS)
    made.write_to(path)
    real = os.write

    def interrupted(file, data):
        real(file, data)
        raise KeyboardInterrupt

    def again(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(hash_chain.os, "write", interrupted)
    monkeypatch.setattr(hash_chain.os, "ftruncate", again)
    with pytest.raises(KeyboardInterrupt):
        made.append({"number": 5})
    monkeypatch.undo()
    made.append({"number": 6})
    assert parse(path.read_text()) == made.records == [*RECORDS, {"number": 6}]


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX
def test_a_fork_that_ends_leaves_the_file_alone(tmp_path):
    """It knows the lines that there were when it was made, and no later ones."""
    path = tmp_path / "chain"
    made = Chain(RECORDS)
    made.write_to(path)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.read(read, 1)
        made.sync()
        made.close()
        os._exit(0)
    made.append({"number": 5})
    os.write(write, b"1")
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    assert parse(path.read_text()) == [*RECORDS, {"number": 5}]


def test_a_line_too_long_to_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(hash_chain, "LONGEST", 200)
    path = tmp_path / "chain"
    made = Chain(RECORDS)
    made.write_to(path)
    with pytest.raises(ValueError, match="takes 319 characters, more than the 200 that are read"):
        made.append({"text": "x" * 231})
    made.append({"text": "x" * 20})
    made.close()
    assert len(Chain.open(path)) == 6


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no/ledger can't be made: its folder does not"):
        Chain().write_to(tmp_path / "no" / "ledger")


def test_a_reformatted_chain_is_kept(tmp_path):
    path = tmp_path / "chain"
    path.write_text(written(path).replace('": ', '":   '))
    opened = Chain.open(path)
    opened.append({"number": 5})
    opened.close()
    assert parse(path.read_text()) == [*RECORDS, {"number": 5}]
