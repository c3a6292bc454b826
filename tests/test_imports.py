# SPDX-License-Identifier: Apache-2.0
"""The import rule (design.md, section 2), proved in fresh interpreters."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FRAMEWORKS = {"torch", "jax", "jaxlib", "flax", "optax"}
# Modules of the core's folder that are there to look outward.
FACES = {"dualdp/torch.py", "dualdp/jax.py"}
SIDES = {"dualdp/demo/torch_side.py", "dualdp/demo/jax_side.py"}
BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.split(".")[0])
sys.meta_path.insert(0, Blocked())
"""


def python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def imports_of(path):
    """(top-level, all) names of modules that a file imports."""
    tree = ast.parse(path.read_text())
    top, every = set(), set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        every.update(names)
        if node in tree.body:
            top.update(names)
    return top, every


def test_the_core_imports_no_framework():
    code = (
        "import sys, dualdp\n"
        "dualdp.get_epsilon(noise_multiplier=1.1, sample_rate=0.01, num_steps=100, delta=1e-5,"
        " accountant='rdp')\n"
        f"print(sorted(set(sys.modules) & {FRAMEWORKS | {'typer', 'rich', 'matplotlib'}}))"
    )
    done = python(code)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(("face", "other"), [("torch", "jax"), ("jax", "torch")])
def test_a_face_imports_only_its_own_framework(face, other):
    done = python(f"import sys, dualdp.{face}\nprint({other!r} in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(
    ("face", "missing"), [("torch", "torch"), ("jax", "jax"), ("jax", "optax")]
)
def test_a_missing_framework_says_what_to_install(face, missing):
    done = python(BLOCK.format(blocked={missing}) + f"import dualdp.{face}")
    assert done.returncode == 1
    assert f"Run: pip install 'dualdp[{face}]'" in done.stderr


@pytest.mark.slow
def test_core_tests_pass_without_any_framework():
    code = BLOCK.format(blocked=FRAMEWORKS) + (
        "import pytest\n"
        "raise SystemExit(pytest.main(['tests/core', '-q', '-x', '-m', 'not slow',"
        " '-p', 'no:cacheprovider']))"
    )
    done = python(code)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("path", sorted(ROOT.glob("dualdp/**/*.py")), ids=str)
def test_core_files_look_outward_only_where_they_may(path):
    name = path.relative_to(ROOT).as_posix()
    top, every = imports_of(path)
    outward = lambda names: {  # noqa: E731
        n for n in names if n.split(".")[0] in FRAMEWORKS | {"dualdp_torch", "dualdp_jax"}
    }
    if name in FACES | SIDES:
        return
    assert not outward(every), "the core imports no framework, not even lazily"
    assert not {n for n in top if n in {"dualdp.torch", "dualdp.jax"}}
    if not name.startswith(("dualdp/cli/", "dualdp/bench/", "dualdp/demo/")):
        allowed = {"dualdp/port.py"}
        assert name in allowed or not {"dualdp.torch", "dualdp.jax"} & every


@pytest.mark.parametrize(("package", "other"), [("dualdp_torch", "jax"), ("dualdp_jax", "torch")])
def test_backends_never_import_each_other(package, other):
    for path in ROOT.glob(f"{package}/**/*.py"):
        _, every = imports_of(path)
        roots = {name.split(".")[0] for name in every}
        assert not roots & {other, f"dualdp_{other}"}, path


def test_import_leaves_the_users_settings_alone():
    """No logging configured, no random state touched (known_failures.md, 47)."""
    code = (
        "import logging, random, numpy as np\n"
        "random.seed(1); np.random.seed(1)\n"
        "before = random.getstate(), np.random.get_state()[1].tolist()\n"
        "import dualdp\n"
        "after = random.getstate(), np.random.get_state()[1].tolist()\n"
        "print(before == after, logging.root.handlers)"
    )
    assert python(code).stdout.strip() == "True []"
