"""Descriptions of jobs on simulated GPUs, and requests to start the processes of their servers."""

from dataclasses import replace

import zmq
from pipelines import one_f_one_b

from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.config import parse_block
from perseus_ds.protocol.job_messages import GpuFacts, JobDescription, RankFacts, encode
from perseus_ds.server.process import ServerRequest

TWO_STAGES = one_f_one_b(ranks=2, micro_batches=2)
KEY = 7
"""Key of the order with which these jobs start."""
GPU = {"gpu": GpuFacts(name="simulated", simulated=True), "clocks_mhz": tuple(range(900, 1411, 15))}


def described(schedule=TWO_STAGES, *, pipelines=1, of_ranks=(), **block):
    """Return the description of a job with pipelines that execute a schedule.

    Args:
        of_ranks: Facts of each rank that replace others.
        block: Keys of the ``perseus`` block.
    """
    streams = [ScheduleStreams.of(replace(schedule, ranks=(own,))).model_dump_json().encode() for own in schedule.ranks]
    stages = len(streams)
    ranks = stages * pipelines
    facts = tuple(
        RankFacts(
            pipeline=tuple(range(rank - rank % stages, rank - rank % stages + stages)),
            copies=tuple(range(rank % stages, ranks, stages)),
            key=KEY,
            schedule=streams[rank % stages],
            **GPU | (of_ranks[rank] if of_ranks else {}),
        )
        for rank in range(ranks)
    )
    config = parse_block({"device": "simulated", "cache": False, **block})
    return JobDescription.of(config.model_dump_json().encode(), facts)


def description(folder, **block):
    """Return the description of a job of two ranks with this output folder, as encoded by rank 0."""
    return encode(described(output_dir=str(folder), **block))


def request(folder, *, public_key=b"", **block):
    """Return a request for a server on this machine."""
    server_key, server_secret = zmq.curve_keypair()
    public_key = public_key or zmq.curve_keypair()[0]
    return ServerRequest(description(folder, **block), "127.0.0.1", 0, 0, server_key, server_secret, public_key)
