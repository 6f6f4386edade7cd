"""Calls to pynvml whose errors say what to do; only this module and :mod:`perseus_ds.device.gpu.nvml` know pynvml."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pynvml

from perseus_ds.errors import GpuBusyError, GpuError, GpuPermissionError

_ANOTHER_DEVICE = 'or set "device": "simulated" in the perseus block.'
_REMEDIES = {
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "Changing clocks needs root or CAP_SYS_ADMIN: run as root, add `--cap-add SYS_ADMIN` to docker run, "
        'or run the zeusd daemon and set "device": "zeus".'
    ),
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "libnvidia-ml.so.1 was not found: install the NVIDIA driver, start the container with `--gpus all`, "
        + _ANOTHER_DEVICE
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "The NVIDIA kernel driver is not loaded: check `nvidia-smi` and `dmesg`, " + _ANOTHER_DEVICE
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "NVML and the loaded kernel driver are of different versions: reboot, or reload the driver after its update."
    ),
    pynvml.NVML_ERROR_GPU_IS_LOST: (
        "The GPU fell off the bus: look for `Xid` in dmesg, then reset the GPU or reboot the node."
    ),
    pynvml.NVML_ERROR_RESET_REQUIRED: "The GPU must be reset before it is usable: `nvidia-smi --gpu-reset` as root.",
    pynvml.NVML_ERROR_TIMEOUT: "The driver did not answer in time: check `nvidia-smi` and dmesg, then try again.",
    pynvml.NVML_ERROR_NOT_SUPPORTED: (
        "This GPU or its driver lacks the function (vGPUs and GPUs before Volta often do): use another GPU, "
        + _ANOTHER_DEVICE
    ),
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "The driver is too old to have the function: update the NVIDIA driver.",
    pynvml.NVML_ERROR_INVALID_ARGUMENT: (
        "There is no such GPU or value: `nvidia-smi -L` lists the GPUs, `nvidia-smi -q -d SUPPORTED_CLOCKS` clocks."
    ),
    pynvml.NVML_ERROR_OPERATING_SYSTEM: "The operating system blocked the request: check cgroups, seccomp and SELinux.",
}
_KINDS = {
    pynvml.NVML_ERROR_NO_PERMISSION: GpuPermissionError,
    pynvml.NVML_ERROR_TIMEOUT: GpuBusyError,
    pynvml.NVML_ERROR_IN_USE: GpuBusyError,
    pynvml.NVML_ERROR_MEMORY: GpuBusyError,
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: GpuBusyError,
}


def call(what: str, function: str, *arguments: Any) -> Any:
    """Call one of pynvml's functions.

    Args:
        what: The beginning of the message if the call fails, such as ``Opening GPU 0``.
        function: Name of pynvml's function.
        arguments: The function's arguments.

    Raises:
        GpuPermissionError: This process may not.
        GpuBusyError: NVML may do it later.
        GpuError: Anything else that NVML refused.
    """
    if not hasattr(pynvml, function):
        raise GpuError(
            f"{what} failed: the installed nvidia-ml-py has no {function}. "
            f'Run `pip install --upgrade "nvidia-ml-py>=12.535"`.'
        )
    try:
        return getattr(pynvml, function)(*arguments)
    except pynvml.NVMLError as error:
        kind = _KINDS.get(error.value, GpuError)
        remedy = _REMEDIES.get(error.value, "Check `nvidia-smi` and dmesg.")
        raise kind(f"{what} failed: {function} says {str(error)!r} (code {error.value}). {remedy}") from error


def start_nvml() -> None:
    """Start NVML, which counts its users: each must call ``nvmlShutdown`` later.

    Raises:
        GpuError: The binding, the library or the driver is missing.
    """
    if not hasattr(pynvml, "_nvmlGetFunctionPointer"):
        raise GpuError(
            f"The module pynvml at {getattr(pynvml, '__file__', '?')} is not NVIDIA's binding. "
            f"Run `pip uninstall pynvml` and then `pip install --force-reinstall nvidia-ml-py`."
        )
    call("Starting NVML", "nvmlInit")


@contextmanager
def nvml_session() -> Iterator[None]:
    """Start NVML, and stop it afterwards unless a GPU is open (it counts its users)."""
    start_nvml()
    try:
        yield
    finally:
        call("Closing NVML", "nvmlShutdown")
