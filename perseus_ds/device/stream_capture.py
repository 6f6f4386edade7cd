"""Lets a thread use CUDA while another thread captures a CUDA graph.

While a thread captures in CUDA's global mode, which is torch's default, calls such as the query of an event fail on
every other thread, and make the capture fail as well, unless that thread has chosen the relaxed mode. torch has no
function for that; the CUDA runtime that torch has loaded does.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

_RELAXED = 2  # cudaStreamCaptureModeRelaxed


def relax_stream_capture(runtime: Any = None) -> bool:
    """Choose the relaxed mode for the calling thread.

    Args:
        runtime: The CUDA runtime's library; by default the one that torch has loaded.

    Returns:
        Whether the runtime did so. If not, captures in other threads may fail while this thread uses CUDA.
    """
    runtime = runtime or _loaded_runtime()
    exchange = getattr(runtime, "cudaThreadExchangeStreamCaptureMode", None)
    if exchange is None:
        return False
    mode = ctypes.c_int(_RELAXED)
    return bool(exchange(ctypes.byref(mode)) == 0)


def _loaded_runtime() -> ctypes.CDLL | None:
    version = torch.version.cuda
    if version is None:
        return None
    try:
        return ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}", mode=os.RTLD_NOLOAD)
    except OSError:
        return None
