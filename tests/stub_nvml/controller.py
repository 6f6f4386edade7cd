"""Creates, changes and watches the GPUs of the stub NVML library (stub_nvml.c)."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from perseus_ds.protocol.places import RUNTIME_VARIABLE

SOURCE = Path(__file__).with_name("stub_nvml.c")
STATE_VARIABLE = "PERSEUS_STUB_NVML"
MAX_GPUS = 8
MAX_CLOCKS = 128
HISTORY = 4096
MAX_FIELDS = 16
A100_CLOCKS_MHZ = tuple(range(1410, 209, -15))

FUNCTIONS = (
    "init", "shutdown", "driver_version", "count", "by_index", "uuid", "name", "pci_info",
    "memory_clocks", "graphics_clocks", "set_locked", "reset_locked", "clock_info", "energy", "power", "reasons",
    "mig_mode", "application_clock", "default_application_clock", "power_limit", "default_power_limit",
    "power_profiles", "enforced_power_limit", "fields", "c2c_mode", "power_state", "temperature",
)  # fmt: skip
ERRORS = {
    "none": 0, "not_supported": 3, "no_permission": 4, "driver_not_loaded": 9, "timeout": 10, "function_not_found": 13,
    "gpu_is_lost": 15, "unknown": 999,
}  # fmt: skip


class _Change(ctypes.Structure):
    _fields_ = (("at_s", ctypes.c_double), ("clock_mhz", ctypes.c_uint32))


class _Field(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("scope", ctypes.c_uint32), ("value", ctypes.c_uint64))


class StubGpu(ctypes.Structure):
    """One GPU in the shared file, with attributes that other processes see immediately."""

    _fields_ = (
        ("uuid", ctypes.c_char * 80), ("name", ctypes.c_char * 96), ("bus_id", ctypes.c_char * 32),
        ("clock_count", ctypes.c_uint32), ("clocks_mhz", ctypes.c_uint32 * MAX_CLOCKS),
        ("memory_clock_count", ctypes.c_uint32), ("memory_clocks_mhz", ctypes.c_uint32 * 4),
        ("locked_clock_mhz", ctypes.c_uint32), ("previous_clock_mhz", ctypes.c_uint32),
        ("limit_clock_mhz", ctypes.c_uint32), ("has_energy_counter", ctypes.c_uint32),
        ("mig_enabled", ctypes.c_uint32), ("application_clock_mhz", ctypes.c_uint32),
        ("default_application_clock_mhz", ctypes.c_uint32), ("power_profiles", ctypes.c_uint32 * 8),
        ("field_count", ctypes.c_uint32), ("counter_leaves_module_out", ctypes.c_uint32),
        ("locked_memory_clock_mhz", ctypes.c_uint32), ("power_state", ctypes.c_uint32),
        ("temperature_c", ctypes.c_uint32),
        ("has_processor", ctypes.c_uint32), ("hides_gpu_power", ctypes.c_uint32),
        ("_values", _Field * MAX_FIELDS),
        ("throttle_reasons", ctypes.c_uint64),
        ("locked_at_s", ctypes.c_double), ("settle_s", ctypes.c_double), ("lock_latency_s", ctypes.c_double),
        ("counter_period_s", ctypes.c_double), ("power_w", ctypes.c_double), ("power_limit_w", ctypes.c_double),
        ("default_power_limit_w", ctypes.c_double), ("power_by_clock", ctypes.c_double),
        ("enforced_power_limit_w", ctypes.c_double), ("average_power_w", ctypes.c_double),
        ("module_w", ctypes.c_double), ("counted_j", ctypes.c_double), ("counted_until_s", ctypes.c_double),
        ("_calls", ctypes.c_uint32 * len(FUNCTIONS)), ("_errors", ctypes.c_int32 * len(FUNCTIONS)),
        ("_hang", ctypes.c_uint32 * len(FUNCTIONS)), ("change_count", ctypes.c_uint32),
        ("_changes", _Change * HISTORY),
    )  # fmt: skip

    def calls(self, function: str) -> int:
        return int(self._calls[FUNCTIONS.index(function)])

    def fail(self, function: str, error: str) -> None:
        """Make a function return an error from now on, or work again if it is ``none``."""
        self._errors[FUNCTIONS.index(function)] = ERRORS[error]

    def hang(self, function: str, hangs: bool = True) -> None:
        """Make a function block until a call with ``hangs=False``."""
        self._hang[FUNCTIONS.index(function)] = hangs

    def set_field(self, number: int, value: int) -> None:
        """Set the value of an NVML field by number."""
        self._values[self.field_count] = _Field(number, 0, value)
        self.field_count += 1

    def _last_changes(self) -> list[_Change]:
        return [self._changes[n % HISTORY] for n in range(max(0, self.change_count - HISTORY), self.change_count)]

    def changes_mhz(self) -> list[int]:
        """Return the clocks set so far in order, at most the last 4096, where 0 is a reset."""
        return [int(change.clock_mhz) for change in self._last_changes()]

    def changes_since_mhz(self, count: int) -> list[int]:
        """Return the clocks set after the first ``count`` changes, as far as they are among the last 4096."""
        added = self.change_count - count
        return self.changes_mhz()[-added:] if added > 0 else []

    def change_times_s(self) -> list[float]:
        """Return the times (``time.monotonic``) of :meth:`changes_mhz` [s]."""
        return [float(change.at_s) for change in self._last_changes()]


class _State(ctypes.Structure):
    _fields_ = (
        ("gpu_count", ctypes.c_uint32), ("driver_version", ctypes.c_char * 76), ("virtual_s", ctypes.c_double),
        ("_calls", ctypes.c_uint32 * len(FUNCTIONS)), ("_errors", ctypes.c_int32 * len(FUNCTIONS)),
        ("gpus", StubGpu * MAX_GPUS),
    )  # fmt: skip


def gpus_here() -> Sequence[StubGpu]:
    """Return the live GPUs that this process finds through the variables of :attr:`StubNvml.environment`."""
    with open(os.environ[STATE_VARIABLE], "r+b") as file:
        return _State.from_buffer(mmap.mmap(file.fileno(), 0)).gpus


def build(folder: Path) -> Path:
    """Compile the library into a folder and return its path.

    Raises:
        FileNotFoundError: There is no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc, gcc or clang) to build the stub NVML library with")
    library = folder / "libnvidia-ml.so.1"
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{library.name}"]
    subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE)], check=True)
    return library


class StubNvml:
    """GPUs visible through the real pynvml to every process started with :attr:`environment`.

    Attributes:
        gpus: The live GPUs: setting ``stub.gpus[0].power_w`` changes the value that the next call reads.
        environment: Variables that make a process load the stub library with these GPUs.
        memory: Folder of agents and records of locked clocks, which replaces the node's folder in memory.
    """

    def __init__(self, library: Path, state_file: Path, gpu_count: int) -> None:
        if ctypes.CDLL(str(library)).stubStateSize() != ctypes.sizeof(_State):
            raise AssertionError("controller.py and stub_nvml.c disagree about the layout of the shared state")
        state_file.write_bytes(bytes(ctypes.sizeof(_State)))
        with state_file.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._state = _State.from_buffer(self._map)
        self._state.driver_version = b"550.54.15-stub"
        self._state.gpu_count = gpu_count
        self.gpus = [self._state.gpus[index] for index in range(gpu_count)]
        for index, gpu in enumerate(self.gpus):
            _fill(gpu, index)
        search = os.pathsep.join(filter(None, [str(library.parent), os.environ.get("LD_LIBRARY_PATH")]))
        # Each test is its own node, with its own agents and records of locked clocks.
        self.memory = state_file.parent / "memory"
        self.memory.mkdir(exist_ok=True)
        self.environment = {
            STATE_VARIABLE: str(state_file),
            "LD_LIBRARY_PATH": search,
            RUNTIME_VARIABLE: str(self.memory),
        }

    @property
    def virtual_s(self) -> float:
        """Current time of the GPUs [s], which calls that take time advance.

        If it is 0, the GPUs use ``time.monotonic``.
        """
        return float(self._state.virtual_s)

    @virtual_s.setter
    def virtual_s(self, seconds: float) -> None:
        self._state.virtual_s = seconds

    def calls(self, function: str) -> int:
        """Return how often a function without a GPU argument was called (``init``, ``count``, …)."""
        return int(self._state._calls[FUNCTIONS.index(function)])

    def fail(self, function: str, error: str) -> None:
        """Make a function without a GPU argument return an error from now on."""
        self._state._errors[FUNCTIONS.index(function)] = ERRORS[error]

    def locked_clocks_mhz(self) -> list[int]:
        """Return the locked clock of each GPU, 0 if it is not locked."""
        return [int(gpu.locked_clock_mhz) for gpu in self.gpus]

    def agents(self) -> list[psutil.Process]:
        """Return the agents of this node, several while one starts or replaces another."""
        return self._processes("perseus_ds.agent.process")

    def servers(self) -> list[psutil.Process]:
        """Return the servers started by agents of this node."""
        return self._processes("perseus_ds.server.process")

    def _processes(self, module: str) -> list[psutil.Process]:
        state_file = self.environment[STATE_VARIABLE]
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_one = module in " ".join(process.cmdline())
                if is_one and process.environ().get(STATE_VARIABLE) == state_file:
                    found.append(process)
        return found

    def has_agent(self, ranks: int, besides: Iterable[psutil.Process] = ()) -> bool:
        """Return whether one agent, not in ``besides``, holds the memory of this many ranks."""
        for agent in {*self.agents()} - {*besides}:
            with contextlib.suppress(OSError):
                files = [os.readlink(descriptor) for descriptor in Path(f"/proc/{agent.pid}/fd").iterdir()]
                if sum(file.startswith("/memfd:perseus-ds") for file in files) >= ranks:
                    return True
        return False

    def run(self, *arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments on the stub's GPUs and return the completed process."""
        return subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, **self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=60,  # only ends a test that hangs
            check=False,
        )


def _fill(gpu: StubGpu, index: int) -> None:
    gpu.uuid = f"GPU-{index}b6c4a7e-5d21-4f3e-9a10-00000000000{index}".encode()
    gpu.name = b"NVIDIA A100-SXM4-80GB (stub)"
    gpu.bus_id = f"00000000:{index + 16:02X}:00.0".encode()
    gpu.clock_count = len(A100_CLOCKS_MHZ)
    gpu.clocks_mhz[: len(A100_CLOCKS_MHZ)] = sorted(A100_CLOCKS_MHZ, reverse=True)
    gpu.memory_clock_count = 2
    gpu.memory_clocks_mhz[:2] = [1593, 405]
    gpu.has_energy_counter = 1
    gpu.counter_period_s = 0.1
    gpu.power_w = 250.0
    gpu.application_clock_mhz = gpu.default_application_clock_mhz = max(A100_CLOCKS_MHZ)
    gpu.power_limit_w = gpu.default_power_limit_w = 400.0
