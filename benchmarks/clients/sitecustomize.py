"""Replacements of CUDA, so that code written for GPUs trains on CPUs, and a recorder of its results.

Python imports this module when it starts if this folder is on ``PYTHONPATH``. It has no effect unless the variable
``CLIENT`` is set to JSON with these keys:

- ``code``: the folder of the client's code. Only callers in this folder see GPUs.
- ``record``: a function, as ``package.module:Class.method``. After each of its calls, every rank adds a line to
  ``rank<N>.jsonl`` in the folder ``out``: its numeric arguments and results, a hash of the parameters and states of
  the optimizers that have stepped, and a hash of the states of random generators.
- ``empty``: modules that are imported but not needed. They are replaced by empty ones.
- ``replaced``: functions, by names as in ``record``, and their replacements, such as ``math:sqrt``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import pickle
import random
import sys
import weakref
from collections import defaultdict
from contextlib import nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

JOB: dict[str, Any] = json.loads(os.environ.get("CLIENT", "{}"))


def called_by_client() -> bool:
    """Return whether the calling function was called from the client's code."""
    return sys._getframe(2).f_code.co_filename.startswith(JOB["code"])


class Nothing:
    """A stream, an event or a context on which every method does nothing."""

    cuda_stream = device_index = 0
    device = "cpu"

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...


def stand_in_for_cuda(torch: Any) -> None:
    """Replace the functions of ``torch`` that code for GPUs uses, before the client is imported."""
    cuda = torch.cuda
    count = int(os.environ.get("LOCAL_SIZE", "1"))
    properties = SimpleNamespace(name="CPU", major=8, minor=0, total_memory=80 << 30, multi_processor_count=108)
    cuda.is_available = called_by_client
    cuda.device_count = lambda: count if called_by_client() else 0
    cuda.is_initialized = called_by_client
    cuda.is_bf16_supported = lambda *_: True
    cuda.current_device = lambda: torch.device("cpu")
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.get_device_properties = lambda *_: properties
    cuda.get_device_name = lambda *_: properties.name
    for name in ("Stream", "Event", "ExternalStream", "current_stream", "default_stream", "stream", "device"):
        setattr(cuda, name, Nothing)
    for name in ("set_device", "set_stream", "synchronize", "empty_cache", "ipc_collect", "init", "_lazy_init"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("reset_peak_memory_stats", "reset_max_memory_allocated", "set_per_process_memory_fraction"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.device_memory_used = lambda *_: 0
    cuda.mem_get_info = lambda *_: (80 << 30, 80 << 30)
    cuda.memory_stats = lambda *_, **__: defaultdict(int)
    # The generator of the CPU is also used as that of GPUs.
    cuda.default_generators = defaultdict(lambda: torch.default_generator)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = cuda.manual_seed_all = torch.default_generator.manual_seed
    cuda.initial_seed = torch.initial_seed
    cuda._lazy_call = lambda call, **_: call()
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(cuda.nvtx, name, lambda *_, **__: None)
    cuda.nvtx.range = nullcontext
    for kind in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool"):
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    on_the_cpu(torch).__enter__()
    talk_by_gloo(torch.distributed)


def on_the_cpu(torch: Any) -> Any:
    """Return a mode in which tensors are created on, and moved to, the CPU instead of CUDA."""
    is_cuda, type_of = torch.Tensor.is_cuda.__get__, torch.Tensor.type

    def is_device(value: Any) -> bool:
        return isinstance(value, str | torch.device) or type(value) is int

    def elsewhere(device: Any) -> Any:
        return torch.device("cpu") if "cuda" in str(device) or type(device) is int else device

    class OnTheCpu(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if function is is_cuda:
                return called_by_client()
            if function is type_of and len(args) == 1 and not kwargs:
                return function(*args).replace("torch.", "torch.cuda." if called_by_client() else "torch.")
            if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
                return args[0]
            if function is torch.Tensor.view and called_by_client():
                function = torch.Tensor.reshape if type(args[1]) is not torch.dtype else function
            if function is torch.Tensor.to:
                args = tuple(elsewhere(value) if is_device(value) else value for value in args)
            if kwargs.get("device") is not None:
                kwargs["device"] = elsewhere(kwargs["device"])
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return function(*args, **kwargs)

    return OnTheCpu()


def talk_by_gloo(distributed: Any) -> None:
    """Let all process groups use gloo.

    Sent data is copied, because it may be changed afterwards as on a CUDA stream.
    """
    if not distributed.is_available():
        return
    c10d = distributed.distributed_c10d
    for name in ("init_process_group", "new_group"):
        make = getattr(c10d, name)

        def by_gloo(*args: Any, make: Any = make, **kwargs: Any) -> Any:
            kwargs.update(backend="gloo", pg_options=None, device_id=None)
            return make(*(args if make.__name__ == "new_group" else ()), **kwargs)

        setattr(c10d, name, by_gloo)
        setattr(distributed, name, by_gloo)

    wait, send = c10d.barrier, c10d.isend

    def barrier(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
        return wait(*args, **kwargs)

    c10d.barrier = distributed.barrier = barrier
    c10d.isend = distributed.isend = lambda tensor, *args, **kwargs: send(tensor.clone(), *args, **kwargs)


class Recorder:
    """Records the results of a rank after each call of a function."""

    def __init__(self) -> None:
        self._optimizers: list[weakref.ref[Any]] = []

    def surround(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._record([args, kwargs, result])
            return result

        call.__wrapped__ = function  # type: ignore[attr-defined]
        return call

    def notice_optimizers(self, _: Any) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if all(known() is not optimizer for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def _record(self, values: Any) -> None:
        import numpy as np
        import torch

        digest = hashlib.sha256()
        for optimizer in filter(None, (known() for known in self._optimizers)):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    digest.update(repr(plain(parameter, hashed=True)).encode())
                    digest.update(repr(plain(optimizer.state.get(parameter), hashed=True)).encode())
        states = [torch.get_rng_state().numpy(), random.getstate(), np.random.get_state()]
        line = {
            "losses": plain(values),
            "optimizer": digest.hexdigest(),
            "random": hashlib.sha256(pickle.dumps(states)).hexdigest(),
        }
        with (Path(JOB["out"]) / f"rank{os.environ['RANK']}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def plain(value: Any, hashed: bool = False) -> Any:
    """Convert a value to JSON types without loss of bits. Tensors are hashed if requested."""
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = value.to_local() if hasattr(value, "to_local") else value
        if hashed or value.numel() > 64:
            content = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return f"{list(value.shape)} {hashlib.sha256(content).hexdigest()}"
        return [repr(number) for number in value.flatten().tolist()]
    if isinstance(value, dict):
        return {str(key): plain(item, hashed) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, hashed) for item in value]
    return repr(value) if isinstance(value, int | float | str | None) else type(value).__name__


class Empty(ModuleType):
    """A module in which any name is a class, also usable as a decorator, that does nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Nothing,), {})


class Finder(MetaPathFinder, Loader):
    """Creates empty modules, and changes other modules after their import."""

    def __init__(self) -> None:
        recorder = Recorder()
        self.changes: dict[str, list[Any]] = {
            "numpy": [lambda numpy: numpy.random.seed(1)],
            "torch": [lambda torch: torch.manual_seed(1), stand_in_for_cuda, recorder.notice_optimizers],
        }
        for name, other in JOB.get("replaced", {}).items():
            self._change(name, lambda _, other=other: find(other))
        if record := JOB.get("record"):
            self._change(record, recorder.surround)

    def _change(self, name: str, change: Any) -> None:
        module, _, path = name.partition(":")
        self.changes.setdefault(module, []).append(lambda found: replace(found, path, change))

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if any(name == empty or name.startswith(f"{empty}.") for empty in JOB.get("empty", ())):
            return ModuleSpec(name, self, is_package=True)
        changes = self.changes.pop(name, None)
        if changes is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for change in changes:
                change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class CrossEntropy:
    """Cross entropy per token, computed by torch instead of a kernel for GPUs."""

    @staticmethod
    def apply(logits: Any, labels: Any) -> Any:
        from torch.nn.functional import cross_entropy

        return cross_entropy(logits, labels, reduction="none")


def random_pictures(*_: Any, transform: Any, **__: Any) -> Any:
    """Return a data set that needs no download."""
    from torchvision.datasets import FakeData

    return FakeData(1000, (3, 32, 32), 10, transform)


def find(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def replace(module: Any, path: str, change: Any) -> None:
    """Replace a function of a module, or a method of a class in it, by ``change(original)``."""
    *parents, name = path.split(".")
    owner = module
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, change(getattr(owner, name, None)))


if JOB:
    random.seed(1)  # some code does not seed the generator, and jobs would draw different numbers
    sys.meta_path.insert(0, Finder())
