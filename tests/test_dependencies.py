"""The imports of perseus-ds are declared in pyproject.toml and pinned in requirements.lock."""

import ast
import subprocess
import sys
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OPTIONAL = PYPROJECT["project"]["optional-dependencies"]
NEEDED = PYPROJECT["project"]["dependencies"]
DECLARED = [*NEEDED, *chain.from_iterable(OPTIONAL.values()), *PYPROJECT["dependency-groups"]["dev"]]
DISTRIBUTIONS = packages_distributions()


def pins_of(lock):
    lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def names(requirements):
    return {canonicalize_name(Requirement(line).name) for line in requirements}


def imported(folder):
    """Return the distributions imported by the Python files of a folder."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            found |= {module.split(".")[0] for module in modules}
    outside = found - sys.stdlib_module_names - {"perseus_ds", "examples"}
    return {canonicalize_name(DISTRIBUTIONS.get(module, [module])[0]) for module in outside}


def test_the_package_imports_what_it_declares_and_nothing_else():
    assert imported("perseus_ds") == names(NEEDED) | names(OPTIONAL["zeus"]) | names(OPTIONAL["huggingface"])


def test_the_examples_import_what_their_extra_declares():
    assert imported("examples") - names(NEEDED) == names(OPTIONAL["examples"])


def test_every_dependency_is_pinned_within_its_range():
    pins = {canonicalize_name(pin.name): pin for pin in pins_of("requirements.lock")}
    for requirement in map(Requirement, DECLARED):
        (version,) = pins[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(version.version), requirement


def test_supported_pythons_are_named_alike_and_tested():
    project = PYPROJECT["project"]
    prefix = "Programming Language :: Python :: 3."
    minors = sorted(int(line.removeprefix(prefix)) for line in project["classifiers"] if line.startswith(prefix))
    assert project["requires-python"] == f">=3.{minors[0]}"
    assert f"PYTHONS := 3.{minors[0]} 3.{minors[-1]}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in ("README.md", "docs/quick-start.md"):
        assert f"Python 3.{minors[0]} to 3.{minors[-1]}" in (ROOT / page).read_text(encoding="utf-8")


def test_other_pythons_have_the_same_pins_where_there_are_such_versions_for_them():
    pins = pins_of("requirements-pythons.lock")
    newest = {str(pin).partition(";")[0] for pin in pins if pin.marker is None or "3.11" in str(pin.marker)}
    newest -= {str(pin).partition(";")[0] for pin in pins if "<" in str(pin.marker)}
    assert newest <= set(map(str, pins_of("requirements.lock")))


def test_reference_pages_are_made_with_what_the_lock_of_the_docs_has():
    script = "import sys, reference\nfor page in reference.PAGES.values():\n    page()\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT / "docs",
        env={"PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )
    modules = {name.split(b".")[0].decode() for name in done.stdout.split()} - sys.stdlib_module_names
    found = {canonicalize_name(DISTRIBUTIONS[module][0]) for module in modules if module in DISTRIBUTIONS}
    assert found - {"perseus-ds", "setuptools"} <= {
        canonicalize_name(p.name) for p in pins_of("requirements-docs.lock")
    }
