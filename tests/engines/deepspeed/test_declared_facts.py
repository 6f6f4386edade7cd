"""What DeepSpeed's engine declares about its training. An engine stands in for DeepSpeed's."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from perseus_ds.engines.deepspeed.engine import DeepSpeedEngine
from perseus_ds.engines.engine import whole_number


def declared(**attributes):
    module = torch.nn.Module()
    vars(module).update(forward_funcs=[], parts=[0, 0], stage_id=0, activation_checkpoint_interval=0, tied_comms={})
    grid = SimpleNamespace(pp_group=[0], get_data_parallel_group=lambda: dist.group.WORLD)
    counts = {"micro_batch_size": 2, "steps_per_print": lambda: 10, "global_steps": 0, "stage_id": 0}
    return DeepSpeedEngine(SimpleNamespace(module=module, grid=grid, **counts | attributes))


@pytest.mark.parametrize(
    ("given", "expected"), [(10, 10), (1e9, 10**9), (math.inf, None), (math.nan, None), (10**30, None), (None, None)]
)
def test_an_interval_of_printed_steps_in_any_notation_is_valid(process_group, given, expected):
    assert declared(steps_per_print=lambda: given).facts().steps_per_print == whole_number(given) == expected


@pytest.mark.parametrize(
    ("monitor", "is_written"), [({"enabled": True}, True), ({"enabled": False}, False), ({}, True)]
)
def test_figures_are_written_to_a_monitor_unless_it_is_disabled(monitor, is_written):
    monitor = SimpleNamespace(**monitor)
    assert declared(monitor=monitor).monitor() is (monitor if is_written else None)
