"""Runs an unchanged training script with Perseus attached to DeepSpeed or Megatron-Core.

``deepspeed --module perseus_ds.launch train.py …`` and ``torchrun -m perseus_ds.launch train.py …`` run ``train.py``.
``… perseus_ds.launch -m package.module …`` runs a module. Perseus attaches to a DeepSpeed engine if its config has a
``perseus`` block or the environment variable ``PERSEUS`` is set, and to Megatron-Core if the variable is set. Otherwise
the script runs as it does without this launcher, and one line states why Perseus is not attached. Processes that the
script starts by ``multiprocessing`` or ``torch.multiprocessing`` are treated alike.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import perseus_ds

logger = logging.getLogger("perseus_ds")
_DEEPSPEED = "deepspeed.runtime.pipe.engine"
_MEGATRON = "megatron.core.pipeline_parallel.schedules"
_PROCESSES = "multiprocessing.spawn"
_USAGE = "usage: python -m perseus_ds.launch [-m] SCRIPT [ARGUMENT ...]"


def main() -> None:
    """Run the script or module named on the command line, as ``python`` would."""
    before, name, arguments, is_module = parse(sys.argv[1:])
    engines = attach_when_engines_are_imported()
    module, code = _load_module(name) if is_module else _load_script(name)
    sys.argv[:] = [str(module.__file__), *before, *arguments]
    sys.modules["__main__"] = module
    try:
        exec(code, module.__dict__)
    except SystemExit as ended:
        if not ended.code:
            engines.report_unused()
        raise
    engines.report_unused()


def parse(arguments: Sequence[str]) -> tuple[list[str], str, list[str], bool]:
    """Split ``[--local_rank=N] [-m] SCRIPT [ARGUMENT ...]``, whose first argument comes from DeepSpeed's launcher.

    Returns:
        The arguments to insert before those of the script, the script or module, its arguments, and whether it is a
        module.
    """
    rest = list(arguments)
    before = []
    while rest and rest[0].startswith("--local"):
        before.append(rest.pop(0))
    is_module = bool(rest) and rest[0] == "-m"
    if is_module:
        rest.pop(0)
    if not rest or rest[0].startswith("-"):
        sys.exit(_USAGE)
    return before, rest[0], rest[1:], is_module


def attach_when_engines_are_imported() -> EngineFinder:
    """Attach Perseus to each engine once it is imported, without importing any engine here."""
    engines = EngineFinder()
    sys.meta_path.insert(0, engines)
    return engines


class EngineFinder(MetaPathFinder):
    """Attaches Perseus to engines of this process, and of processes that it starts, after their modules are imported.

    Attributes:
        is_used: Whether the process has used such an engine, or has started processes, which may use one.
    """

    def __init__(self) -> None:
        self.is_used = False
        self._attach: dict[str, Callable[[Any], None]] = {
            _DEEPSPEED: self._attach_to_deepspeed,
            _MEGATRON: self._attach_to_megatron,
            _PROCESSES: self._attach_in_processes,
        }
        for name in self._attach.keys() & sys.modules.keys():
            self._attach.pop(name)(sys.modules[name])

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._attach:
            return None
        attach = self._attach.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                attach(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def report_unused(self) -> None:
        """Report, on rank 0, that a script has ended in whose process Perseus was never attached."""
        attached_itself = "perseus_ds.client.runtime" in sys.modules
        if not self.is_used and not attached_itself and _is_rank_0():
            logger.warning(
                "perseus: nothing was attached in this process, which used neither a pipeline engine of DeepSpeed nor "
                "Megatron-Core. Schedules of torch.distributed.pipelining need a call of perseus_ds.attach."
            )

    def _attach_to_deepspeed(self, engine_module: Any) -> None:
        """Wrap the constructor of DeepSpeed's pipeline engines to attach Perseus."""
        pipeline_engine = engine_module.PipelineEngine
        construct = pipeline_engine.__init__

        @functools.wraps(construct)
        def construct_and_attach(engine: Any, *args: Any, **kwargs: Any) -> None:
            self.is_used = True
            attach = perseus_ds.function_of("deepspeed", "attach_if_configured")
            construct(engine, *args, **kwargs)
            attach(engine, is_launched=True)

        pipeline_engine.__init__ = construct_and_attach

    def _attach_to_megatron(self, schedules: Any) -> None:
        """Attach to Megatron-Core when it is first used, if ``PERSEUS`` is set.

        Copies of Megatron-Core without a version, as in Megatron-DeepSpeed, are skipped, because their jobs train with
        DeepSpeed.
        """
        get_function = schedules.get_forward_backward_func

        @functools.wraps(get_function)
        def attach_and_get_function(*args: Any, **kwargs: Any) -> Any:
            if schedules.get_forward_backward_func is attach_and_get_function:
                schedules.get_forward_backward_func = get_function
                core = sys.modules["megatron.core"]
                if hasattr(core, "__version__"):
                    self.is_used = True
                    _attach_to_core(core)
            return get_function(*args, **kwargs)

        schedules.get_forward_backward_func = attach_and_get_function

    def _attach_in_processes(self, spawn: Any) -> None:
        """Let processes that this one starts attach Perseus, unless they are forked and therefore do so already."""
        prepare = spawn.get_preparation_data

        @functools.wraps(prepare)
        def prepare_and_attach(name: str) -> dict[str, Any]:
            self.is_used = True
            return {**prepare(name), "perseus_ds": _AttachWhenUnpickled()}

        spawn.get_preparation_data = prepare_and_attach


def _attach_to_core(core: ModuleType) -> None:
    """Attach to Megatron-Core if ``PERSEUS`` is set, and otherwise report on rank 0 that it is not."""
    if os.environ.get("PERSEUS", "").strip():
        perseus_ds.attach(core)
    elif _is_rank_0():
        logger.warning("perseus: the job trains without Perseus: the variable PERSEUS is not set.")


def _is_rank_0() -> bool:
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and torch_distributed.is_initialized():
        return bool(torch_distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


class _AttachWhenUnpickled:
    """Calls :func:`attach_when_engines_are_imported` in the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        # The other process does not have this one's sys.path yet.
        folder = str(Path(__file__).parents[1])
        return exec, (
            f"import sys; sys.path.append({folder!r}); import perseus_ds.launch; sys.path.pop(); "
            "perseus_ds.launch.attach_when_engines_are_imported()",
        )


def _load_script(path: str) -> tuple[ModuleType, CodeType]:
    """Return a ``__main__`` module for a script and its code, and put its folder on ``sys.path``."""
    try:
        with io.open_code(str(Path(path).absolute())) as script:
            code = compile(script.read(), path, "exec", dont_inherit=True)
    except OSError as error:
        sys.exit(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}")
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(path).resolve().parent)
    module = _new_main(path)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    module.__dict__.update(__loader__=loader, __spec__=None, __package__=None, __cached__=None)
    return module, code


def _load_module(name: str) -> tuple[ModuleType, CodeType]:
    """Return a ``__main__`` module for a module or package, and its code."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        sys.exit(f"{sys.executable}: Error while finding module specification for {name!r} ({error})")
    code = spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, InspectLoader) else None
    if spec is None or code is None:
        sys.exit(f"{sys.executable}: No module named {name}")
    module = _new_main(str(spec.origin))
    module.__dict__.update(__loader__=spec.loader, __spec__=spec, __package__=spec.parent, __cached__=spec.cached)
    return module, code


def _new_main(file: str) -> ModuleType:
    module = ModuleType("__main__")
    module.__dict__.update(__file__=file, __builtins__=__builtins__, __annotations__={})
    return module


if __name__ == "__main__":
    main()
