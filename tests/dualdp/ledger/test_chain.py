# SPDX-License-Identifier: Apache-2.0
"""The file of a ledger: chained, locked, whole after a kill, and never silently wrong."""

import base64
import hashlib
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
from tests.mistakes import refused

HEADER = {chain.FORMAT: chain.VERSION}
RECORDS = [HEADER, *({"number": k, "text": "a \u00e9\n"} for k in range(4))]
MORE = {"number": 5}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "chain"


def filed(path=None):
    """A chain of the records, whose file is made with the first of them."""
    made = Chain()
    for record in RECORDS:
        made.append(record)
        if path is not None and record is HEADER:
            made.write_to(path)
    return made


def test_the_hash_is_that_of_its_definition():
    """SHA-256 of the hash before, a newline, and the object without its hash."""
    previous, text = "A" * 43, filed().text()
    for line in text.splitlines():
        body = line[: line.rindex(',"h":')] + "}"
        expected = hashlib.sha256(f"{previous}\n{body}".encode()).digest()
        previous = json.loads(line)["h"]
        assert previous == base64.urlsafe_b64encode(expected).decode().rstrip("=")
    assert parse(text).records == RECORDS


@pytest.mark.parametrize("version", [1, 3])
def test_other_versions_are_refused_by_name(path, version):
    path.write_text(chained("A" * 43, json.dumps({chain.FORMAT: version})) + "\n")
    words = f"chain is a ledger of format {version}, and this version of dualdp reads format 2"
    refused(lambda: Chain.open(path), ValueError, words)


CHANGES = {
    "unlink": lambda path, old: path.unlink(),
    "truncate": lambda path, old: path.write_bytes(b""),
    "lengthen": lambda path, old: path.write_bytes(path.read_bytes() + b"{}\n"),
    "put back": lambda path, old: os.replace(old, path),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_another_program_changes_ends_the_run(tmp_path, path, change):
    """Releases went into a file without a name, and the one that was put there told of fewer."""
    made = filed(path)
    old = shutil.copy(path, tmp_path / "old")
    made.append(MORE)
    CHANGES[change](path, old)
    left = path.read_text() if path.exists() else None
    for write in (lambda: made.append(MORE), made.sync):
        refused(write, ValueError, "changed by another program while a run writes it")
    assert (path.read_text() if path.exists() else None) == left
    assert parse(made.text()).records == [*RECORDS, MORE]


@pytest.mark.parametrize("torn", ['{"r":[', '{"number":7777777777777777777777777777777777', "{"])
def test_the_next_line_takes_the_place_of_a_torn_one(path, torn):
    filed(path).close()
    text = path.read_text()
    path.write_text(text + torn)
    opened, parsed = Chain.open(path)
    assert (parsed.records, parsed.torn, opened.text(), len(opened)) == (RECORDS, torn, text, 5)
    assert path.read_text() == text + torn
    for _ in range(2):
        opened.append(MORE)
    assert parse(path.read_text()) == parse(opened.text())
    assert list(opened.records()) == [*RECORDS, MORE, MORE]
    assert is_torn_release(torn) == ("7" not in torn)


def test_one_file_has_one_writer(path):
    filed(path).close()
    first, _ = Chain.open(path)
    for _ in range(2):
        refused(lambda: Chain.open(path), ValueError, "chain is in use by another run")
        path.read_text()  # a POSIX lock would be lost when this is closed
    first.close()
    closed = "chain is closed, so a release would not be on record"
    refused(lambda: first.append(MORE), ValueError, closed)
    second, _ = Chain.open(path)
    del second  # an owner that is gone has no lock
    Chain.open(path)[0].close()
    refused(lambda: Chain().write_to(path), FileExistsError, "chain exists. Expected a new path")


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX
def test_a_fork_holds_no_lock(path):
    """A loader's worker outlived its killed parent, and the run could not go on."""
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
        Chain.open(path)[0].append(MORE)  # the child is alive
    finally:
        here.close()
        os.waitpid(child, 0)
    assert parse(path.read_text()).records == [*RECORDS, MORE, MORE]


def test_a_full_disk_changes_nothing(path, monkeypatch):
    made, real = filed(path), os.pwrite
    before = (path.read_bytes(), made.text(), made.last_hash)

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


def test_a_killed_process_leaves_its_records(path):
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
def test_an_interrupt_after_the_write_is_undone(path, monkeypatch, is_twice):
    """A second one, while the first is undone, leaves the rest to the next record."""
    made, real = filed(path), os.pwrite

    def interrupted(file, data, offset):
        if offset is not None:
            real(file, data, offset)
        raise KeyboardInterrupt

    monkeypatch.setattr(chain.os, "pwrite", interrupted)
    if is_twice:
        monkeypatch.setattr(chain.os, "ftruncate", lambda *_: interrupted(0, b"", None))
    with pytest.raises(KeyboardInterrupt):
        made.append({"number": 5, "text": "longer than the next"})
    monkeypatch.undo()
    made.append(MORE)
    assert parse(path.read_text()) == parse(made.text())
    assert parse(made.text()).records == [*RECORDS, MORE]


def test_a_long_line_is_read_again(path):
    """known_failures 80: a line was longer than the reader took."""
    made, long = filed(path), {"text": "x" * (1 << 22)}
    made.append(long)
    made.close()
    assert Chain.open(path)[1].records[-1] == long
