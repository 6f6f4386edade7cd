"""The rooms of the house: who may import whom, and how large they may be."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "perseus_ds"
# From top to bottom; a room imports only from those below it.
ROOMS = [
    "__main__",
    "cli",
    "launch",
    "__init__",
    "engine",
    "torch_pipelining",
    "runtime",
    "report",
    "policy",
    "profiler",
    "optimizer",
    "optimizer/exact",
    "device",
    "device/gpu",
    "artifacts",
    "pipeline",
    "distributed",
    "timebase",
    "errors",
]
MODULES = {path.relative_to(PACKAGE.parent).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")}


def room_of(module):
    parts = module.removesuffix("/__init__").split("/")[1:]
    if not parts:
        return "__init__"
    for length in (2, 1):
        if "/".join(parts[:length]) in ROOMS:
            return "/".join(parts[:length])
    raise AssertionError(f"{module} is in no room")


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
    ours = ROOMS.index(room_of(module))
    up = [other for other in IMPORTS[module] if ROOMS.index(room_of(other)) < ours]
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


def test_the_package_has_at_most_fifteen_entries():
    entries = {path.name for path in PACKAGE.iterdir()} - {"__init__.py", "__main__.py", "__pycache__", "py.typed"}
    assert len(entries) <= 15, sorted(entries)


@pytest.mark.parametrize("module", MODULES)
def test_files_have_at_most_300_lines(module):
    assert len(MODULES[module].read_text(encoding="utf-8").splitlines()) <= 300


def test_classes_have_at_most_a_dozen_public_methods():
    too_many = []
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
                names = {n.name for n in methods if "property" not in map(ast.unparse, n.decorator_list)}
                if len(names) > 12:
                    too_many.append(f"{module}: {node.name} has {len(names)}")
    assert not too_many


def test_test_modules_import_no_test_modules():
    tests = Path(__file__).parent
    for path in tests.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.split(".")[-1].startswith("test_")], path


def test_tests_mirror_the_rooms():
    tests = Path(__file__).parent
    works = {"clients", "examples", "fuzz", "gpu", "integration", "nodes", "trials"}
    others = {*works, "data", "stub_nvml", "support", "__pycache__"}
    # A folder that a move has left without tests may still hold bytecode.
    folders = {path.name for path in tests.iterdir() if any(path.rglob("*.py"))} - others
    assert folders <= {room.split("/")[0] for room in ROOMS}
    assert {path.name for path in (tests / "device").iterdir() if path.is_dir()} - {"__pycache__"} == {"gpu"}
