# SPDX-License-Identifier: Apache-2.0
"""Runs programs, each as `__main__` of a process of its own, forked from one that has the imports.

Importing a framework takes longer than most programs of the pages. What is imported ahead is what
each of these programs imports itself: the face of the library for its framework.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
#: Framework -> what its programs import; every optimizer of PyTorch imports `torch._dynamo`.
AHEAD = {"torch": ("dualdp.torch", "torch._dynamo"), "jax": ("dualdp.jax", "optax")}
LIMIT = 300  # seconds of a program


class Done(NamedTuple):
    """How a program ended."""

    returncode: int
    stdout: str
    stderr: str


@contextmanager
def runner(*options, seconds=LIMIT):
    """Yield run(text, folder, *arguments, path=None) -> Done; see `_Server.run`.

    Args:
        *options: of the interpreter, such as "-W", "error".
        seconds: int, after which a program is killed.
    """
    servers = {}

    def run(text, folder, *arguments, path=None):
        frameworks = tuple(name for name in AHEAD if name in text)
        if frameworks not in servers:
            servers[frameworks] = _Server(frameworks, options, seconds)
        return servers[frameworks].run(text, folder, arguments, path)

    try:
        yield run
    finally:
        for server in servers.values():
            server.end()


class _Server:
    """A process that has imported frameworks and forks."""

    def __init__(self, frameworks, options, seconds):
        self._seconds = seconds
        self._process = subprocess.Popen(
            [sys.executable, *options, "-m", "tests.docs.programs", *frameworks],
            cwd=ROOT,
            # Of a JAX program most time goes into compiling, most of that into XLA's optimizations.
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, text, folder, arguments, path):
        """Run a program in a folder, where its output stays: the file `path`, or else the text."""
        asked = {"text": text, "folder": str(folder), "arguments": arguments}
        asked |= {"path": str(path) if path else None, "seconds": self._seconds}
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the imports of the programs failed"
        said = (Path(folder, name).read_text() for name in ("stdout.txt", "stderr.txt"))
        return Done(int(answer), *said)

    def end(self):
        """Let the process end; it has no program left."""
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _fork():
    """`os.fork`, without what frameworks say about threads: of one thread there is no other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def _serve():
    """What the next program is, in its process; the server itself never returns."""
    for line in sys.stdin:
        pid = _fork()
        if pid == 0:
            return json.loads(line)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)


def _become(text, folder, arguments, path, seconds):
    """Run a program as a fresh interpreter does."""
    signal.alarm(seconds)
    os.chdir(folder)
    for number, name in enumerate(("stdout.txt", "stderr.txt"), 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    sys.argv = [path or "-c", *arguments]
    sys.path[0] = str(Path(path).parent) if path else ""
    if path:
        runpy.run_path(path, run_name="__main__")
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(text, "<string>", "exec"), vars(main))  # noqa: S102


if __name__ == "__main__":
    importlib.import_module("dualdp")
    for framework in sys.argv[1:]:
        for module in AHEAD[framework]:
            importlib.import_module(module)
    _become(**_serve())
