"""Perseus for the schedules of ``torch.distributed.pipelining``; the only room that knows them."""
