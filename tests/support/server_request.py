"""Requests to start the process of a job's server."""

from dataclasses import replace

import zmq
from pipelines import one_f_one_b

from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.config import parse_block
from perseus_ds.protocol import description as described
from perseus_ds.protocol.description import JobDescription, RankFacts
from perseus_ds.server.process import ServerRequest

SCHEDULE = one_f_one_b(ranks=2, micro_batches=2)


def description(folder, **block):
    """Return the description of a job of two ranks, as encoded by rank 0."""
    config = parse_block({"device": "simulated", "output_dir": str(folder), "cache": False, **block})
    facts = tuple(
        RankFacts(
            pipeline=(0, 1),
            copies=(rank,),
            schedule=ScheduleStreams.of(replace(SCHEDULE, ranks=(own,))).model_dump_json().encode(),
            gpu="simulated",
            clocks_mhz=tuple(range(900, 1411, 15)),
            simulated=True,
        )
        for rank, own in enumerate(SCHEDULE.ranks)
    )
    return described.encode(JobDescription.of(config.model_dump_json().encode(), facts))


def request(folder, *, epoch=0, output_dir="", public_key=b"", **block):
    """Return a request for a server on this machine."""
    server_key, server_secret = zmq.curve_keypair()
    public_key = public_key or zmq.curve_keypair()[0]
    return ServerRequest(
        description(folder, **block), "127.0.0.1", 0, epoch, server_key, server_secret, public_key, output_dir
    )
