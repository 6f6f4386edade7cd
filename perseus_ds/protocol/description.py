"""The description of a job by its ranks before training, and the answer of its server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a job.

    Attributes:
        pipeline: Global ranks of its pipeline, first stage first.
        copies: Global ranks that train the same stages on other data, itself included. None if every pipeline has data
            of its own.
        schedule: Its operations in its first iteration, as a schedule of one rank in JSON. Empty in the description of
            a job.
        fingerprint: Changes with any property that affects the times of its instructions.
        models: Classes of the models in its process, the one that trains first.
        versions: Versions of packages.
        micro_batch_size: Number of samples of a micro-batch, if it is known.
        engine: Engine that defines the notation of layouts. None if layers cannot be moved between stages.
        parts: Parts of the model, by stage of this rank, in JSON. Empty if unknown.
        tied: Whether the embedding and the head share a weight.
        node: Host name of its node and id of the node's current boot.
        gpu: Product name of its GPU.
        driver: Version of the driver.
        settings: Settings of the GPU, in JSON. Empty if unknown.
        clocks_mhz: Clocks that can be locked.
        no_permission: Reason why clocks cannot be set. Empty if they can.
        simulated: Whether the GPU is simulated.
        calibrates: Whether its passes must be calibrated to take as long as on the simulated GPU.
        steps: Number of finished training steps. None if the engine does not count them.
        has_monitor: Whether it receives the figures of every iteration.
        steps_per_print: Interval of printed iterations. None for never.
    """

    pipeline: tuple[int, ...]
    copies: tuple[int, ...] | None
    schedule: bytes
    fingerprint: str = ""
    models: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    micro_batch_size: int | None = None
    engine: str | None = None
    parts: dict[int, bytes] = {}
    tied: bool = False
    node: str = ""
    gpu: str = ""
    driver: str | None = None
    settings: bytes = b""
    clocks_mhz: tuple[int, ...] = ()
    no_permission: str = ""
    simulated: bool = False
    calibrates: bool = False
    steps: int | None = None
    has_monitor: bool = False
    steps_per_print: int | None = None


class JobDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a job.

    Attributes:
        config: The ``perseus`` block of rank 0, as JSON.
        folder: The current folder of rank 0, to which paths are relative.
        ranks: Facts of each rank, by global rank.
        schedules: The different schedules of ranks.
        schedule_of: Index of each rank's schedule.
    """

    config: bytes
    folder: str = "."
    ranks: tuple[RankFacts, ...]
    schedules: tuple[bytes, ...]
    schedule_of: tuple[int, ...]

    @classmethod
    def of(cls, config: bytes, ranks: Iterable[RankFacts], folder: str = ".") -> JobDescription:
        """Describe a job. Equal schedules of its ranks are stored once."""
        index: dict[bytes, int] = {}
        facts, schedule_of = [], []
        for own in ranks:
            schedule_of.append(index.setdefault(own.schedule, len(index)))
            facts.append(msgspec.structs.replace(own, schedule=b""))
        return cls(
            config=config, folder=folder, ranks=tuple(facts), schedules=tuple(index), schedule_of=tuple(schedule_of)
        )


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the server to all ranks before training.

    Attributes:
        measures_power: Whether the ranks are to measure their energy counters and blocking power.
        measures_counter: Whether the ranks are to measure the refresh periods of their energy counters.
    """

    measures_power: bool = False
    measures_counter: bool = False


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a rank in the job.

    Attributes:
        pipeline: Number of its data-parallel pipeline.
        pipeline_rank: Its position in the pipeline, from 0.
    """

    pipeline: int
    pipeline_rank: int


def places_of(ranks: Sequence[RankFacts]) -> tuple[tuple[Place, ...], int]:
    """Return the place of each rank, and the largest number of ranks at one place.

    Ranks share a place with tensor parallelism, for example.
    """
    at = [facts.pipeline.index(rank) for rank, facts in enumerate(ranks)]
    if any(facts.copies is None for facts in ranks):
        pipelines = sorted({facts.pipeline[0] for facts in ranks})
        numbers = [pipelines.index(facts.pipeline[0]) for facts in ranks]
    else:
        numbers = [sorted(facts.copies or ()).index(rank) for rank, facts in enumerate(ranks)]
    found = tuple(Place(pipeline=number, pipeline_rank=place) for number, place in zip(numbers, at, strict=True))
    return found, max(Counter(found).values())


encode = msgspec.msgpack.Encoder().encode
# Each raises a ``msgspec.DecodeError`` if the content is invalid.
decode_description = msgspec.msgpack.Decoder(JobDescription).decode
decode_facts = msgspec.msgpack.Decoder(RankFacts).decode
decode_welcome = msgspec.msgpack.Decoder(Welcome).decode
