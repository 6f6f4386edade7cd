"""Which Megatron-Core Perseus works with: versions, and everything of it that it relies upon."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from perseus_ds.errors import VersionError

OLDEST_MEGATRON = "0.14.0"
"""The first whose transfers are methods of ``P2PCommunicator`` and whose forwards know their virtual stage."""
NEWEST_MEGATRON = "0.19.2"
"""The newest that was tried."""

SCHEDULES: Mapping[str, str] = {
    "get_forward_backward_func": "gives the function that trains an iteration",
    "forward_backward_no_pipelining": "trains an iteration of a single stage",
    "forward_backward_pipelining_without_interleaving": "trains an iteration by 1F1B",
    "forward_backward_pipelining_with_interleaving": "trains an iteration with virtual stages",
    "forward_step": "runs a forward",
    "backward_step": "runs a backward",
    "get_schedule_table": "the order of an interleaved schedule",
    "P2PCommunicator": "transfers between stages",
}
"""Names in ``megatron.core.pipeline_parallel.schedules``, and what each is used for."""

PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "forward_step": ("input_tensor", "current_microbatch", "vp_stage"),
    "backward_step": ("output_tensor", "output_tensor_grad"),
    "combined_forward_backward_step": (
        *("f_model", "b_model", "f_model_chunk_id", "current_microbatch", "input_tensor"),
        *("b_output_tensor", "b_output_tensor_grad", "pre_backward"),
    ),
    "_communicate": ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "wait_on_reqs"),
}
"""Parameters that tell which instruction or transfer it is."""

PARALLEL_STATE: Mapping[str, str] = {
    "model_parallel_is_initialized": "whether there are groups",
    "get_pipeline_model_parallel_group": "ranks of a pipeline",
    "get_data_parallel_group": "ranks that train the same stages on other data",
    "get_expert_model_parallel_group": "ranks that share the experts of a stage",
}
"""Names in ``megatron.core.parallel_state``, and what each is used for."""


def check_megatron(core: Any, schedules: Any, parallel_state: Any) -> None:
    """Check that Megatron-Core's modules have what Perseus relies upon.

    Args:
        core: The module ``megatron.core``.
        schedules: The module ``megatron.core.pipeline_parallel.schedules``.
        parallel_state: The module ``megatron.core.parallel_state``.

    Raises:
        VersionError: The message names what is missing, what it is used for, and what to install.
    """
    version = str(core.__version__)
    if Version(version).release < Version(OLDEST_MEGATRON).release:
        raise VersionError(
            f"Megatron-Core {version} is too old for perseus-ds, expected megatron-core>={OLDEST_MEGATRON}. "
            f'Run: pip install "megatron-core>={OLDEST_MEGATRON}"'
        )
    missing = [f"schedules.{name} ({use})" for name, use in SCHEDULES.items() if not hasattr(schedules, name)]
    missing += [
        f"parallel_state.{name} ({use})" for name, use in PARALLEL_STATE.items() if not hasattr(parallel_state, name)
    ]
    owners = {
        "_communicate": getattr(schedules, "P2PCommunicator", None),
        "combined_forward_backward_step": getattr(core.pipeline_parallel, "combined_1f1b", None),
    }
    for name, parameters in PARAMETERS.items():
        function = getattr(owners.get(name, schedules), name, None)
        found = inspect.signature(function).parameters if function is not None else {}
        missing += [
            f"{name}(…, {parameter}) (which pass or transfer it is)"
            for parameter in parameters
            if parameter not in found
        ]
    if missing:
        raise VersionError(
            f"Megatron-Core {version} is not one that perseus-ds works with: there is no {', '.join(missing)}. "
            f'Run: pip install --upgrade perseus-ds, or pip install "megatron-core<={NEWEST_MEGATRON}"'
        )
