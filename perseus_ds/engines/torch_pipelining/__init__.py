"""Perseus for the schedules of ``torch.distributed.pipelining``. Only this folder uses that package."""
