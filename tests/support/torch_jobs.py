"""Features of newer versions of torch: jobs for ``schedule_job``, and schedule options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version
from torch.distributed.pipelining import schedules

TORCH = Version(torch.__version__)
_SINCE: dict[str, dict[str, dict[str, Any]]] = {
    "2.13": {
        "FSDP, 1F1B": {"schedule": "1F1B", "fsdp": True},
        "FSDP, interleaved": {"schedule": "Interleaved1F1B", "fsdp": True},
    },
    "2.14.1": {
        "split by the caller, 1F1B": {"schedule": "1F1B", "split": True},
        "split by the caller, interleaved": {"schedule": "Interleaved1F1B", "split": True},
    },
    "2.15": {
        "one send outstanding": {"schedule": "Interleaved1F1B", "runtime": {"max_outstanding_sends": 1}},
        "FSDP, gathered ahead": {
            "schedule": "InterleavedZeroBubble",
            "fsdp": True,
            "runtime": {"unshard_lookahead": "auto", "max_active_stages": 2},
        },
        "FSDP, reduction awaited later": {
            "schedule": "Interleaved1F1B",
            "fsdp": True,
            "runtime": {"defer_reduce_grad_wait": True},
        },
        "FSDP, gradients of two calls": {"schedule": "Interleaved1F1B", "fsdp": True, "calls_per_step": 2},
    },
}
JOBS = {name: job for since, jobs in _SINCE.items() if Version(since) <= TORCH for name, job in jobs.items()}
"""Jobs supported by the installed torch, by name."""


def with_options(name: str, **options: Any) -> Callable[..., Any]:
    """Return a function that makes a torch schedule by name, with options of torch's runtime."""

    def make(stages: Any, micro_batches: int, loss_fn: Any) -> Any:
        made = getattr(schedules, f"Schedule{name}")(stages, micro_batches, loss_fn=loss_fn)
        if options:
            order, made = (
                made.pipeline_order,
                schedules._PipelineScheduleRuntime(stages, micro_batches, loss_fn=loss_fn, **options),
            )
            made._prepare_schedule_with_comms(order)
        return made

    return make
