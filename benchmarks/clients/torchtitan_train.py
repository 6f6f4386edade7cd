"""Trains torchtitan with Perseus by a derived trainer. The variable ``PERSEUS`` contains the block."""

from typing import Any

from torchtitan.train import Trainer, main

import perseus_ds


class PerseusTrainer(Trainer):  # type: ignore[misc]
    """Attaches Perseus after the schedule and model are created."""

    def __init__(self, job_config: Any) -> None:
        super().__init__(job_config)
        dims = self.parallel_dims
        data_parallel = dims.get_mesh("batch") if dims.dp_enabled else None
        perseus_ds.attach(self.pp_schedule, pipeline=dims.get_mesh("pp"), data_parallel=data_parallel)

    def close(self) -> None:
        perseus_ds.detach(self.pp_schedule)
        super().close()


main(PerseusTrainer)
