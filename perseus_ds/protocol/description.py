"""A job as its ranks describe it before training, and what its server answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a job.

    Attributes:
        pipeline: Global ranks of its pipeline, first stage first.
        copies: Global ranks that train the same stages on other data, itself included; None if every pipeline has data
            of its own.
        schedule: What it executes in its first iteration, as a schedule of one rank in JSON.
        fingerprint: Changes with whatever the times of its instructions depend on.
        models: Classes of the models in its process, first the one that trains.
        versions: Of packages.
        micro_batch_size: Samples of a micro-batch, if it is known.
        engine: Whose spelling of layouts is used; None if layers cannot be moved between stages.
        parts: Of the model, by stage of this rank, in JSON; none if they are unknown.
        tied: Whether the embedding and the head share a weight.
        node: Name of its node, and of the kernel's present run.
        gpu: Product name of its GPU.
        driver: Version of the driver.
        settings: What was set of the GPU, in JSON; empty if unknown.
        clocks_mhz: That can be locked.
        no_permission: Why clocks cannot be set; empty if they can.
        simulated: Whether the GPU is simulated.
        calibrates: Whether its passes take as long as on the GPU only once they are calibrated.
        steps: Training steps that the engine has done; None if it does not count them.
        has_monitor: Whether it wants the figures of every iteration.
        steps_per_print: How often to print an iteration; None for never.
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
    """All of a job.

    Attributes:
        config: The ``perseus`` block of rank 0, as JSON.
        folder: The current folder of rank 0, to which paths are relative.
        ranks: By global rank.
    """

    config: bytes
    folder: str = "."
    ranks: tuple[RankFacts, ...]


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the server answers all ranks before training.

    Attributes:
        measures_power: Whether they are to measure their energy counters and what their GPUs draw while they wait.
        measures_counter: Whether they are to measure how often their energy counters are refreshed.
    """

    measures_power: bool = False
    measures_counter: bool = False


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank is in the job.

    Attributes:
        pipeline: Number of its data-parallel pipeline.
        pipeline_rank: Its position in that, 0 first.
    """

    pipeline: int
    pipeline_rank: int


def places_of(ranks: Sequence[RankFacts]) -> tuple[tuple[Place, ...], int]:
    """Return the place of each rank, and how many ranks of a pipeline share a stage, by tensor parallelism and such."""
    at = [facts.pipeline.index(rank) for rank, facts in enumerate(ranks)]
    if any(facts.copies is None for facts in ranks):
        pipelines = sorted({facts.pipeline[0] for facts in ranks})
        numbers = [pipelines.index(facts.pipeline[0]) for facts in ranks]
    else:
        numbers = [sorted(facts.copies or ()).index(rank) for rank, facts in enumerate(ranks)]
    found = tuple(Place(pipeline=number, pipeline_rank=place) for number, place in zip(numbers, at, strict=True))
    return found, max(Counter(found).values())


encode = msgspec.msgpack.Encoder().encode
_description = msgspec.msgpack.Decoder(JobDescription)
_facts = msgspec.msgpack.Decoder(RankFacts)
_welcome = msgspec.msgpack.Decoder(Welcome)


def decode_description(content: bytes) -> JobDescription:
    """Return a description that :data:`encode` wrote; a ``msgspec.DecodeError`` if it is none."""
    found: JobDescription = _description.decode(content)
    return found


def decode_facts(content: bytes) -> RankFacts:
    """Return the facts of a rank that :data:`encode` wrote; a ``msgspec.DecodeError`` if they are none."""
    found: RankFacts = _facts.decode(content)
    return found


def decode_welcome(content: bytes) -> Welcome:
    """Return an answer that :data:`encode` wrote; a ``msgspec.DecodeError`` if it is none."""
    found: Welcome = _welcome.decode(content)
    return found
