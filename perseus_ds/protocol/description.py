"""The description of a job by its ranks before training, and the answer of its server."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a job."""

    pipeline: tuple[int, ...]  # global ranks of its pipeline, first stage first
    # Global ranks that train the same stages on other data, itself included. None if every pipeline has its own data.
    copies: tuple[int, ...] | None
    schedule: bytes  # of this rank in its first iteration, in JSON; empty in the description of a job
    fingerprint: str = ""  # changes with any property that affects the times of its instructions
    models: tuple[str, ...] = ()  # classes of the models in its process, the one that trains first
    versions: dict[str, str] = {}  # of packages
    micro_batch_size: int | None = None
    engine: str | None = None  # defines the notation of layouts; None if layers cannot be moved between stages
    parts: dict[int, bytes] = {}  # of the model, by stage of this rank, in JSON; empty if unknown
    tied: bool = False  # the embedding and the head share a weight
    node: str = ""  # host name, and id of the node's current boot
    gpu: str = ""  # product name
    driver: str | None = None
    settings: bytes = b""  # of the GPU, in JSON; empty if unknown
    clocks_mhz: tuple[int, ...] = ()  # that can be locked
    no_permission: str = ""  # why clocks cannot be set; empty if they can
    simulated: bool = False
    calibrates: bool = False  # its passes must be calibrated to take as long as on the simulated GPU
    steps: int | None = None  # finished training steps; None if the engine does not count them
    has_monitor: bool = False  # it receives the figures of every iteration
    steps_per_print: int | None = None  # None to print none


class JobDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a job."""

    config: bytes  # the perseus block of rank 0, in JSON
    folder: str = "."  # the current folder of rank 0, to which paths are relative
    ranks: tuple[RankFacts, ...]
    schedules: tuple[bytes, ...]  # the different schedules of ranks
    schedule_of: tuple[int, ...]  # index of each rank's schedule

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
    """What all ranks have to measure before training."""

    measures_power: bool = False  # their energy counters and their blocking power
    measures_counter: bool = False  # only the refresh periods of their energy counters


encode = msgspec.msgpack.Encoder().encode
# Each raises a ``msgspec.DecodeError`` if the content is invalid.
decode_description = msgspec.msgpack.Decoder(JobDescription).decode
decode_facts = msgspec.msgpack.Decoder(RankFacts).decode
decode_welcome = msgspec.msgpack.Decoder(Welcome).decode
