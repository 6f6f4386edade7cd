"""Makes the operations of a rank without a GPU take the time that a simulated GPU needs.

Nothing is measured here: operations are timed and marked as on a real GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Operation
from perseus_ds.simulation.device_models import MEMORY_BOUND
from perseus_ds.simulation.gpu import SimulatedGpu
from perseus_ds.timebase import REAL_TIME, Timebase

_aten = torch.ops.aten
# PyTorch counts only attention kernels for GPUs. The CPU kernel takes the same arguments and does the same work.
_FLOPS_OF = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


class FlopCounter(TorchDispatchMode):
    """Counts the floating-point operations of kernels without changing the choice of kernels.

    PyTorch's ``FlopCounterMode`` decomposes composite operators, which could change results. Code under
    ``torch.compile`` compiles as it does without a counter. Of its kernels, only separate matrix products are counted.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = _FLOPS_OF.get(getattr(func, "_overloadpacket", None))
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out


class _Pass:
    """A pass that runs.

    Attributes:
        counter: Counts its operations when it first runs. None later.
        before_waits: Operations before each wait for other ranks, as counted when it first ran.
        done: Operations that the GPU has done.
    """

    def __init__(self, counter: FlopCounter | None, before_waits: list[int]) -> None:
        self.counter = counter
        self.before_waits = before_waits
        self.done = 0
        self._waits = 0

    def flops_before_wait(self) -> int:
        """Return the operations before the wait that begins."""
        if self.counter is not None:
            self.before_waits.append(self.counter.flops)
        number, self._waits = self._waits, self._waits + 1
        return self.before_waits[number] if number < len(self.before_waits) else self.done


class SimulatedWork:
    """Operations that are computed for real and end when a simulated GPU has done the same work.

    The work of a pass relative to the others follows from the floating-point operations of its kernels when it first
    ran on inputs of the same shapes. Before :meth:`calibrate`, operations take their real time. Transfers and the tail
    take ``transfer_s`` and ``tail_s`` in addition to their real time.

    Attributes:
        seconds_per_flop: Time of a floating-point operation at the top clock [s]. None before :meth:`calibrate`.
        flops: Floating-point operations of each kind of pass so far.
    """

    def __init__(
        self, gpu: SimulatedGpu, *, transfer_s: float = 0.0, tail_s: float = 0.0, timebase: Timebase = REAL_TIME
    ) -> None:
        self._gpu = gpu
        self._transfer_s = transfer_s
        self._tail_s = tail_s
        self._tail_done = False
        self._time = timebase
        self.seconds_per_flop: float | None = None
        self._shapes: dict[tuple[int, int], Hashable] = {}
        self.flops: dict[Hashable, int] = {}
        self._before_waits: dict[Hashable, list[int]] = {}

    @property
    def is_calibrated(self) -> bool:
        """True if passes take as long as on the simulated GPU."""
        return self.seconds_per_flop is not None

    def calibrate(self, seconds_per_flop: float, flops: Mapping[Hashable, int] = MappingProxyType({})) -> None:
        """Set the time of a floating-point operation at the top clock [s].

        ``flops`` are those of passes for which another rank, which runs in step with this one, has more.
        """
        self.seconds_per_flop = seconds_per_flop
        self.flops.update({key: count for key, count in flops.items() if key in self.flops})

    @contextmanager
    def within(
        self, measured: AbstractContextManager[None], operation: Operation, inputs: Hashable = None
    ) -> Iterator[None]:
        """Context manager for one operation, whose work is done within the context that measures it.

        Args:
            measured: Context that times and marks the operation.
            operation: The operation.
            inputs: Shapes of a forward's inputs, if known. They also apply to the other passes of its micro-batch.
        """
        with measured:
            if isinstance(operation, Compute) and operation.instruction.kind is not Kind.TAIL:
                with self._pass(self._key(operation.instruction, inputs)):
                    yield
                return
            yield
            if self.is_calibrated:
                self._stretch_rest(operation)

    @contextmanager
    def _pass(self, key: Hashable) -> Iterator[None]:
        self._tail_done = False
        self._gpu.begin_work()
        running = _Pass(None if key in self.flops else FlopCounter(), self._before_waits.get(key, []))
        with running.counter or nullcontext(), self._waiting_in(running):
            yield
        if running.counter is not None:
            self.flops[key], self._before_waits[key] = running.counter.flops, running.before_waits
        self._finish(running, self.flops[key])

    def _finish(self, running: _Pass, flops: int) -> None:
        """Wait until the GPU has done the first operations of a pass, up to a number of them."""
        self._gpu.finish_work(max(0, flops - running.done) * (self.seconds_per_flop or 0.0))
        running.done = max(running.done, flops)

    @contextmanager
    def _waiting_in(self, running: _Pass) -> Iterator[None]:
        """Context of a pass in which the GPU does no work while the pass waits for other ranks.

        It waits once it has done the work before, as a GPU that executes a collective after other kernels. Collectives
        of ``torch.distributed._functional_collectives`` wait in C++ and count as work.
        """
        collectives: Any = dist.Work
        wait, thread = collectives.wait, threading.get_ident()

        def wait_without_work(collective: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return wait(collective, *args, **kwargs)
            self._finish(running, running.flops_before_wait())
            try:
                return wait(collective, *args, **kwargs)
            finally:
                self._gpu.begin_work()

        collectives.wait = wait_without_work
        try:
            yield
        finally:
            collectives.wait = wait

    def _key(self, instruction: Instruction, inputs: Hashable) -> Hashable:
        work = instruction.stage, instruction.micro_batch
        if instruction.kind is Kind.FORWARD:
            self._shapes[work] = inputs
        return instruction.stage, instruction.kind, self._shapes.get(work)

    def _stretch_rest(self, operation: Operation) -> None:
        if isinstance(operation, Exchange):
            self._time.sleep(self._transfer_s + self._gpu.transfer_delay_s)
        elif isinstance(operation, Compute) and self._tail_s and not self._tail_done:
            # The tail consists of several commands. All of its simulated work is done after the first one.
            self._tail_done = True
            self._gpu.begin_work(MEMORY_BOUND)
            self._gpu.finish_work(self._tail_s)
