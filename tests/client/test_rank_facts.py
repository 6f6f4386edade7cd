"""The facts of a rank that the server of a job receives."""

import msgspec
from pipelines import one_f_one_b

from perseus_ds.artifacts.layout import Part, decode_parts, encode_parts
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.client.meeting import complete
from perseus_ds.config import parse_block
from perseus_ds.protocol.job_messages import GpuFacts, JobDescription, RankFacts, decode_description, encode
from perseus_ds.simulation.gpu import SimulatedGpu


def test_all_that_an_engine_declares_reaches_the_server_beside_what_perseus_adds():
    parts = {0: [Part(kind="dense", names=["layer"], parameters=10)], 1: None}
    declared = RankFacts(
        pipeline=(1, 0),
        copies=(0, 2),
        fingerprint="a model",
        micro_batch_size=4,
        steps_per_print=10,
        steps=70,
        engine="torch",
        parts=encode_parts(parts),
        tied=True,
        key=7,
    )
    schedule, gpu = one_f_one_b(ranks=1, micro_batches=2), SimulatedGpu.named("a100-sxm")
    description = JobDescription.of(b"{}", [complete(declared, parse_block({}), schedule, gpu)])
    (received,) = decode_description(encode(description)).ranks
    assert ScheduleStreams.model_validate_json(description.schedules[0]).to_schedule().ranks == schedule.ranks
    assert (received.gpu, received.clocks_mhz) == (gpu.facts, gpu.supported_clocks_mhz())
    added = {"gpu": GpuFacts(), "clocks_mhz": (), "versions": {}, "node": ""}
    assert msgspec.structs.replace(received, **added) == declared
    assert decode_parts(received.parts) == {0: parts[0]}, "parts of the second stage are unknown"
