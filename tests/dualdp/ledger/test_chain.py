# SPDX-License-Identifier: Apache-2.0
"""The file of a ledger: chained, locked, whole after a kill, and never silently wrong."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from dualdp.ledger import chain
from dualdp.ledger.chain import Chain, chained, is_torn_release, parse

HEADER = {chain.FORMAT: chain.VERSION}
RECORDS = [HEADER, *({"number": k, "text": "a \u00e9\n"} for k in range(4))]
MORE = {"number": 5}


def filed(path=None):
    """A chain of the records, whose file is made with the first of them."""
    made = Chain()
    for record in RECORDS:
        made.append(record)
        if path is not None and record is HEADER:
            made.write_to(path)
    return made


def written(path):
    """The text of a file with these records, closed."""
    filed(path).close()
    return path.read_text()


def test_what_is_written_is_read(tmp_path):
    text = written(tmp_path / "chain")
    assert parse(text).records == RECORDS
    opened, parsed = Chain.open(tmp_path / "chain")
    assert list(opened.records()) == parsed.records == RECORDS
    assert (opened.text(), len(opened), parsed.torn) == (text, 5, "")


def test_the_hash_is_that_of_its_definition():
    """SHA-256 of the hash before, a newline, and the object without its hash."""
    import base64
    import hashlib

    previous = "A" * 43
    for line in filed().text().splitlines():
        body = line[: line.rindex(',"h":')] + "}"
        expected = hashlib.sha256(f"{previous}\n{body}".encode()).digest()
        previous = json.loads(line)["h"]
        assert previous == base64.urlsafe_b64encode(expected).decode().rstrip("=")


@pytest.mark.parametrize("version", [1, 3])
def test_other_versions_are_refused_by_name(tmp_path, version):
    text = chained("A" * 43, json.dumps({chain.FORMAT: version})) + "\n"
    (tmp_path / "old").write_text(text)
    match = f"old is a ledger of format {version}, and this version of dualdp reads format 2"
    with pytest.raises(ValueError, match=match):
        Chain.open(tmp_path / "old")


def unlink(path, old):
    path.unlink()


def truncate(path, old):
    path.write_bytes(b"")


def lengthen(path, old):
    with open(path, "a") as file:
        file.write("{}\n")


def put_back(path, old):
    os.replace(old, path)


@pytest.mark.parametrize("change", [unlink, truncate, lengthen, put_back])
def test_a_file_that_another_program_changes_ends_the_run(tmp_path, change):
    """Releases went into a file without a name, and the one that was put there told of fewer."""
    path = tmp_path / "chain"
    made = filed(path)
    shutil.copy(path, tmp_path / "old")
    made.append(MORE)
    change(path, tmp_path / "old")
    left = path.read_text() if path.exists() else None
    for write in (lambda: made.append(MORE), made.sync):
        with pytest.raises(ValueError, match="changed by another program while a run writes it"):
            write()
    assert (path.read_text() if path.exists() else None) == left
    assert parse(made.text()).records == [*RECORDS, MORE]


@pytest.mark.parametrize("torn", ['{"r":[', '{"number":77777777777777777777777777777777777', "{"])
def test_the_next_line_takes_the_place_of_a_torn_one(tmp_path, torn):
    path = tmp_path / "chain"
    text = written(path)
    path.write_text(text + torn)
    opened, parsed = Chain.open(path)
    assert (parsed.records, parsed.torn) == (RECORDS, torn)
    assert path.read_text() == text + torn
    for k in (5, 6):
        opened.append({"n": k})
    assert parse(path.read_text()) == parse(opened.text())
    assert parse(opened.text()).records == [*RECORDS, {"n": 5}, {"n": 6}]
    assert is_torn_release(torn) == (torn != '{"number":77777777777777777777777777777777777')


def test_one_file_has_one_writer(tmp_path):
    path = tmp_path / "chain"
    written(path)
    first, _ = Chain.open(path)
    with pytest.raises(ValueError, match="chain is in use by another run"):
        Chain.open(path)
    with open(path) as reader:  # a POSIX lock would be lost when it is closed
        reader.read()
    with pytest.raises(ValueError, match="chain is in use by another run"):
        Chain.open(path)
    first.close()
    with pytest.raises(ValueError, match="chain is closed, so a release would not be on record"):
        first.append(MORE)
    second, _ = Chain.open(path)
    del second  # an owner that is gone has no lock
    Chain.open(path)[0].close()
    with pytest.raises(FileExistsError, match="chain exists. Expected a new path"):
        Chain().write_to(path)


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX
def test_a_fork_holds_no_lock(tmp_path):
    """A loader's worker outlived its killed parent, and the run could not go on."""
    path = tmp_path / "chain"
    made = filed(path)
    here, there = socket.socketpair()
    child = os.fork()
    if not child:
        here.close()
        there.send(b"1")
        there.recv(1)  # ends with this process too
        os._exit(0)
    there.close()
    here.recv(1)
    try:
        made.append(MORE)
        made.close()
        again, _ = Chain.open(path)  # the child is alive
        again.append(MORE)
    finally:
        here.close()
        os.waitpid(child, 0)
    assert parse(path.read_text()).records == [*RECORDS, MORE, MORE]


def test_a_full_disk_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "chain"
    made = filed(path)
    before = (path.read_bytes(), made.text(), made.last_hash)
    real = os.pwrite

    def full(file, data, offset):
        if len(data) > 10:
            return real(file, data[:10], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(chain.os, "pwrite", full)
    for _ in range(2):  # the disk is still full when the step is tried again
        with pytest.raises(OSError, match="No space left"):
            made.append({"number": 123456})
        assert (path.read_bytes(), made.text(), made.last_hash) == before
    monkeypatch.undo()
    made.append(MORE)
    assert parse(path.read_text()).records == [*RECORDS, MORE]


def test_a_killed_process_leaves_its_records(tmp_path):
    path = tmp_path / "chain"
    program = f"""
import os, signal
from dualdp.ledger.chain import Chain
chain = Chain(); chain.append({HEADER!r}); chain.write_to({os.fspath(path)!r})
for k in range(100): chain.append({{"number": k}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    assert parse(path.read_text()).records == [HEADER, *({"number": k} for k in range(100))]


@pytest.mark.parametrize("is_twice", [False, True])
def test_an_interrupt_after_the_write_is_undone(tmp_path, monkeypatch, is_twice):
    """A second one, while the first is undone, leaves the rest to the next record."""
    path = tmp_path / "chain"
    made = filed(path)
    real = os.pwrite

    def interrupted(file, data, offset):
        real(file, data, offset)
        raise KeyboardInterrupt

    def again(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(chain.os, "pwrite", interrupted)
    if is_twice:
        monkeypatch.setattr(chain.os, "ftruncate", again)
    with pytest.raises(KeyboardInterrupt):
        made.append({"number": 5, "text": "longer than the next"})
    monkeypatch.undo()
    made.append(MORE)
    assert parse(path.read_text()) == parse(made.text())
    assert parse(made.text()).records == [*RECORDS, MORE]


def test_a_long_line_is_read_again(tmp_path):
    """known_failures 80: a line was longer than the reader took."""
    made, long = filed(tmp_path / "chain"), {"text": "x" * (1 << 22)}
    made.append(long)
    made.close()
    opened, parsed = Chain.open(tmp_path / "chain")
    assert parsed.records[-1] == long
    opened.close()
