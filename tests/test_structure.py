"""The structure of the package: permitted imports."""

import ast
import graphlib
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "perseus_ds"
# From top to bottom; a folder may import only from those below it.
FOLDERS = [
    "__main__",
    "cli",
    "launch",
    "__init__",
    "engines",
    "huggingface",
    "layouts",
    "client",
    "report",
    "server",
    "config",
    "agent",
    "policy",
    "profiler",
    "optimizer",
    "simulation",
    "gpu",
    "protocol",
    "progress",
    "savings",
    "planning",
    "artifacts",
    "pipeline",
    "units",
    "timebase",
    "errors",
]
# What uses Perseus and can be ignored, changed or removed without reading it. Everything else is the core.
REST = {"__main__", "cli", "launch", "__init__", "huggingface", "layouts", "report", "simulation"}
# Adapters of engines that know Hugging Face's models.
OF_MODELS = {
    f"perseus_ds/engines/{name}"
    for name in ("torch_pipelining/engine", "torch_pipelining/huggingface", "deepspeed/huggingface")
}
# They open simulated GPUs, or read their settings, beside real ones.
OPEN_GPUS = {f"perseus_ds/{name}" for name in ("config", "client/devices", "agent/process")}
MODULES = {path.relative_to(PACKAGE.parent).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")}


def folder_of(module):
    parts = module.removesuffix("/__init__").split("/")[1:]
    folder = parts[0] if parts else "__init__"
    assert folder in FOLDERS, f"{module} is in a folder that is not listed"
    return folder


def imports_of(path):
    """Yield the imported names of a file, and the modules in which they are."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            for name in node.names:
                yield f"{node.module}.{name.name}", str(node.module)
        elif isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, name.name


def modules_imported(path):
    for names in imports_of(path):
        if names[1].split(".")[0] == "perseus_ds":
            candidates = [f"{name.replace('.', '/')}{end}" for name in names for end in ("", "/__init__")]
            yield next(candidate for candidate in candidates if candidate in MODULES)


IMPORTS = {module: sorted(set(modules_imported(path))) for module, path in MODULES.items()}


def test_imports_point_down():
    for module, imported in IMPORTS.items():
        ours = FOLDERS.index(folder_of(module))
        up = [other for other in imported if FOLDERS.index(folder_of(other)) < ours]
        assert not up, f"{module} imports {up} from above"


def test_the_core_imports_nothing_of_the_rest():
    for module, imported in IMPORTS.items():
        if folder_of(module) not in REST:
            of_rest = {folder_of(other) for other in imported} & REST
            allowed = {"huggingface"} if module in OF_MODELS else {"simulation"} if module in OPEN_GPUS else set()
            assert of_rest <= allowed, f"{module} is part of the core and imports {of_rest}"


def test_class_names_are_unique():
    """A name that occurs twice sends a reader to the wrong file."""
    names = Counter()
    for path in MODULES.values():
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        names.update(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_modules_import_each_other_in_a_circle():
    list(graphlib.TopologicalSorter(IMPORTS).static_order())


def test_no_engine_imports_another():
    for module, imported in IMPORTS.items():
        engine = module.split("/")[2] if folder_of(module) == "engines" and module.count("/") == 3 else None
        others = [other for other in imported if engine and other.count("/") == 3 and folder_of(other) == "engines"]
        assert all(other.split("/")[2] == engine for other in others), f"{module} imports {others}"


def test_test_modules_import_no_test_modules():
    for path in Path(__file__).parent.rglob("*.py"):
        modules = {parent.split(".")[-1] for _, parent in imports_of(path)}
        assert not [name for name in modules if name.startswith("test_")], path


def test_tests_mirror_the_package():
    tests = Path(__file__).parent
    works = {"clients", "examples", "fuzz", "gpu_checks", "integration", "nodes", "trials"}
    others = {*works, "data", "stub_cuda", "stub_nvml", "support", "__pycache__"}
    # A folder may contain nothing but old bytecode.
    folders = {path.name for path in tests.iterdir() if any(path.rglob("*.py"))} - others
    assert folders <= set(FOLDERS)


def test_files_of_tests_have_different_names():
    """They are collected together, and their folders are no packages."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, files in names.items() if files > 1] == []
