# SPDX-License-Identifier: Apache-2.0
"""The import rule (design.md, section 2), proved in fresh interpreters."""

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FRAMEWORKS = {"torch", "jax", "jaxlib", "flax", "optax"}
# Modules of the core's folder that are there to look outward.
FACES = {"dualdp/torch.py", "dualdp/jax.py"}
#: Folders and files of each package, from the ground up: each may import those before it.
ORDER = runpy.run_path(str(ROOT / "docs" / "house.py"))["ORDER"]
#: Packages, from the ground up; a backend does not import the other.
FLOORS = {
    "dualdp": set(),
    "dualdp_torch": {"dualdp"},
    "dualdp_jax": {"dualdp"},
    "dualdp_tools": {"dualdp", "dualdp_torch", "dualdp_jax"},
}
BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.split(".")[0])
sys.meta_path.insert(0, Blocked())
"""


def python(code, *arguments, timeout=300):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def imports_of(path):
    """Names that a file imports, also for annotations; of an imported name with its module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "Expected the whole name of the module."
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


#: Imported by what needs them, for they take long.
LATE = {"typer", "rich", "matplotlib", "scipy.signal"}


def test_the_core_imports_no_framework():
    code = (
        "import sys, dualdp\n"
        "dualdp.get_epsilon(noise_multiplier=1.1, sample_rate=0.01, num_steps=100, delta=1e-5,"
        " accountant='rdp')\n"
        f"print(sorted(set(sys.modules) & {FRAMEWORKS | LATE}))"
    )
    done = python(code)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("face", "missing"), [("torch", "torch"), ("jax", "jax"), ("jax", "optax")]
)
def test_a_missing_framework_says_what_to_install(face, missing):
    done = python(BLOCK.format(blocked={missing}) + f"import dualdp.{face}")
    assert done.returncode == 1
    assert f"Run: pip install 'dualdp[{face}]'" in done.stderr


HOSTS = {
    "lightning": "Lightning, which is not installed. Run: pip install lightning",
    "trainer": "transformers, which is not installed. Run: pip install transformers accelerate",
}
TORCH = "PyTorch, which is not installed. Run: pip install 'dualdp[torch]'"


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["torch", "lightning pytorch_lightning transformers"])
def test_a_missing_host_says_what_to_install(missing):
    names = [f"dualdp_torch.{host}" for host in HOSTS]
    code = BLOCK.format(blocked=set(missing.split())) + (
        "import importlib\n"
        f"for name in {names}:\n"
        "    try: importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error: print(error)\n"
    )
    said = python(code).stdout.splitlines()
    if missing == "torch":
        assert said == [f"dualdp.torch needs {TORCH}"] * 2
    else:
        assert said == [f"dualdp_torch.{host} needs {hint}" for host, hint in HOSTS.items()]


@pytest.mark.slow
def test_a_type_checker_sees_the_types_of_an_installed_package(tmp_path):
    """Also of an editable one, which `make` installs."""
    (tmp_path / "program.py").write_text(
        "import dualdp.torch as dpt\nreveal_type(dpt.PrivacyEngine().get_epsilon())\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'Revealed type is "float"' in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_core_tests_pass_without_any_framework():
    """Every third of the fast ones; those of porting compare both frameworks."""
    code = BLOCK.format(blocked=FRAMEWORKS) + (
        "import pytest\n"
        "class Third:\n"
        "    @pytest.hookimpl(trylast=True)\n"
        "    def pytest_collection_modifyitems(self, items):\n"
        "        items[:] = items[::3]\n"
        "raise SystemExit(pytest.main(['tests/dualdp', '-q', '-x', '-m', 'not slow',"
        " '--ignore=tests/dualdp/porting', '--ignore=tests/dualdp/test_port.py',"
        " '--ignore=tests/dualdp/test_torch.py', '--ignore=tests/dualdp/test_jax.py',"
        " '-p', 'no:cacheprovider'], plugins=[Third()]))"
    )
    done = python(code, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def ours_in(path):
    """Modules of ours that a file imports; a package where a name is its."""
    for name in imports_of(path):
        place = ROOT / name.replace(".", "/")
        is_module = place.is_dir() or place.with_suffix(".py").exists()
        module = name if is_module else name.rpartition(".")[0]
        if module.split(".")[0] in FLOORS:
            yield tuple(module.split("."))


def is_below(name, package, place):
    """Whether a file of a package, in this folder, may import a module of ours."""
    if name[0] not in {package, *FLOORS[package]}:
        return False
    if place == "__init__":
        return True
    inside = ".".join(name[1:2])
    if name[0] == package:
        return inside in ORDER[package][: ORDER[package].index(place) + 1]
    return package == "dualdp_tools" or inside not in ("", "torch", "jax", "port")


def test_imports_run_down():
    """Between packages, and between the folders inside each; for annotations, too."""
    wrong = []
    for package in FLOORS:
        for path in sorted((ROOT / package).rglob("*.py")):
            place = path.relative_to(ROOT / package).with_suffix("").parts[0]
            ours = set(ours_in(path))
            if path.relative_to(ROOT).as_posix() in FACES:
                assert {name[0] for name in ours} == {f"dualdp_{place}"}
            else:
                wrong += [(path, name) for name in ours if not is_below(name, package, place)]
    assert not wrong


@pytest.mark.parametrize(
    ("package", "others"),
    [("dualdp", FRAMEWORKS), ("dualdp_torch", {"jax"}), ("dualdp_jax", {"torch"})],
)
def test_a_package_names_no_framework_but_its_own(package, others):
    for path in ROOT.glob(f"{package}/**/*.py"):
        if path.relative_to(ROOT).as_posix() not in FACES:
            assert not {name.split(".")[0] for name in imports_of(path)} & others, path


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
