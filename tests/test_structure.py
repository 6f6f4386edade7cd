"""The structure of the package: permitted imports."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "perseus_ds"
# From top to bottom; a folder may import only from those below it.
FOLDERS = [
    "__main__",
    "cli",
    "launch",
    "__init__",
    "engines",
    "huggingface",
    "client",
    "report",
    "server",
    "config",
    "agent",
    "policy",
    "profiler",
    "optimizer",
    "gpu",
    "protocol",
    "measures",
    "planning",
    "artifacts",
    "pipeline",
    "units",
    "timebase",
    "errors",
]
MODULES = {path.relative_to(PACKAGE.parent).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")}


def folder_of(module):
    parts = module.removesuffix("/__init__").split("/")[1:]
    folder = parts[0] if parts else "__init__"
    assert folder in FOLDERS, f"{module} is in a folder that is not listed"
    return folder


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "perseus_ds":
            for name in node.names:
                yield f"{node.module}.{name.name}".replace(".", "/"), node.module.replace(".", "/")
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "perseus_ds":
                    yield name.name.replace(".", "/"), name.name.replace(".", "/")


def modules_imported(path):
    for name, parent in imports_of(path):
        for candidate in (name, f"{name}/__init__", parent, f"{parent}/__init__"):
            if candidate in MODULES:
                yield candidate
                break
        else:
            raise AssertionError(f"{path} imports {name}, which is no module of the package")


IMPORTS = {module: sorted(set(modules_imported(path))) for module, path in MODULES.items()}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    ours = FOLDERS.index(folder_of(module))
    up = [other for other in IMPORTS[module] if FOLDERS.index(folder_of(other)) < ours]
    assert not up, f"{module} imports {up} from above"


def test_no_modules_import_each_other_in_a_circle():
    done: set[str] = set()

    def visit(module, above):
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module not in done:
            for other in IMPORTS[module]:
                visit(other, [*above, module])
            done.add(module)

    for module in MODULES:
        visit(module, [])


def test_no_engine_imports_another():
    for module, imported in IMPORTS.items():
        engine = module.split("/")[2] if folder_of(module) == "engines" and module.count("/") == 3 else None
        others = [other for other in imported if engine and other.count("/") == 3 and folder_of(other) == "engines"]
        assert all(other.split("/")[2] == engine for other in others), f"{module} imports {others}"


def test_test_modules_import_no_test_modules():
    tests = Path(__file__).parent
    for path in tests.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.split(".")[-1].startswith("test_")], path


def test_tests_mirror_the_package():
    tests = Path(__file__).parent
    works = {"clients", "examples", "fuzz", "gpu_checks", "integration", "nodes", "trials"}
    others = {*works, "data", "stub_cuda", "stub_nvml", "support", "__pycache__"}
    # A folder whose tests were moved may still contain bytecode.
    folders = {path.name for path in tests.iterdir() if any(path.rglob("*.py"))} - others
    assert folders <= set(FOLDERS)
