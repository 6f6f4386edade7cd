"""A job as known to its server, from the descriptions and reports of its ranks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.layout import Layout, decode_parts
from perseus_ds.artifacts.profile import GpuSettings, ProfileInfo, StageProfile
from perseus_ds.artifacts.run_events import Started
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.config import PerseusConfig
from perseus_ds.errors import GpuError, PlanError, ProfileError, ScheduleError
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.dependencies import check_dependencies
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.protocol.job_messages import JobDescription, LatencyTable, Measured, RankFacts

_COUNTER_PERIOD_S, _COUNTER_SETTLE_S = 1.0, 1.0
"""Defaults for an energy counter that was not measured."""
# A rank is slow if its clocks change later than the median by this factor and this time [s].
_MUCH_LATER, _LATE_S = 2.0, 0.015
_MOST_NAMED = 8
MOST_PROFILED = 8
"""Maximum number of pipelines that are profiled. More would add little information."""


@dataclass(frozen=True)
class Place:
    """Number of a rank's data-parallel pipeline, and its position in the pipeline from 0."""

    pipeline: int
    pipeline_rank: int


@dataclass
class RankState:
    """State of a rank, from its reports."""

    latencies: LatencyTable = field(default_factory=LatencyTable)
    measured: Measured | None = None
    late_s: float = 0.0  # delay with which its agent follows marks
    default_mhz: float = 0.0  # clock of its busy GPU while it is not locked; 0 if unknown
    memory_bytes: int = 0  # peak of tensors on its GPU; 0 if unknown
    flops: tuple[tuple[str, int], ...] = ()  # floating-point operations of its passes, on a simulated GPU
    is_here: bool = False  # it follows the server
    has_left: bool = False  # it has stopped following the server
    was_killed: bool = False  # its process ended without closing Perseus

    def delay_s(self, clocks_mhz: Sequence[int]) -> float:
        """Return the time from a mark until the GPU typically runs at one of these clocks at the earliest [s].

        A clock that a limit keeps the GPU from reaching seems to have a long latency, so the shortest ones count.
        """
        of_clocks, soonest_s = self.latencies.of_clocks, self.latencies.soonest_s
        from_below_s = of_clocks(clocks_mhz, partial(soonest_s, rises=True))
        from_above_s = of_clocks(clocks_mhz, partial(soonest_s, rises=False))
        return self.late_s + min(statistics.median(from_below_s), statistics.median(from_above_s))


@dataclass(frozen=True)
class Job:
    """A training job, or its iterations of one order."""

    config: PerseusConfig
    schedule: Schedule  # of one pipeline in one iteration
    info: ProfileInfo
    # By rank:
    facts: tuple[RankFacts, ...]
    places: tuple[Place, ...]
    states: tuple[RankState, ...]
    fixed_ranks: set[int] = field(default_factory=set)  # their GPUs keep their default clocks

    @classmethod
    def of(cls, description: JobDescription) -> Job:
        """Create the job from its description.

        Raises:
            PerseusError: The ranks do not fit together, their schedule cannot be planned, or the description is
                invalid.
        """
        config = PerseusConfig.model_validate_json(description.config)
        ranks = description.ranks
        places, tensor_parallel = _places_of(ranks)
        schedules = [ScheduleStreams.model_validate_json(each).to_schedule() for each in description.schedules]
        streams = [schedules[number] for number in description.schedule_of]
        facts, gpu = ranks[0], ranks[0].gpu
        first = facts.pipeline
        schedule = replace(streams[first[0]], ranks=tuple(streams[rank].ranks[0] for rank in first))
        if config.mode != "observe":
            check_dependencies(schedule)
        for rank, (own, place) in enumerate(zip(streams, places, strict=True)):
            if own.ranks[0] != schedule.ranks[place.pipeline_rank]:
                raise ScheduleError(
                    f"Rank {rank} runs other operations than rank {first[place.pipeline_rank]}, which has the same "
                    "place in its pipeline: all pipelines of a job have to run the same schedule."
                )
            if ranks[rank].key != facts.key:
                raise ScheduleError(
                    f"Rank {rank} begins with another order than rank 0: the value that identifies an order, and its "
                    "repr, must be equal on all ranks."
                )
        parts = [decode_parts(ranks[rank].parts) for rank in first]
        info = ProfileInfo(
            simulated=gpu.simulated,
            gpu=gpu.name,
            driver=gpu.driver,
            settings=None if gpu.settings is None else GpuSettings.model_validate(gpu.settings),
            schedule=schedule.name,
            layout=None if facts.engine is None else Layout.of_ranks(facts.engine, parts, tied=facts.tied),  # type: ignore[arg-type]
            stages=schedule.num_stages,
            pipeline_ranks=len(schedule.ranks),
            data_parallel=1 + max(place.pipeline for place in places),
            tensor_parallel=tensor_parallel,
            micro_batches=schedule.micro_batches,
            micro_batch_size=facts.micro_batch_size,
            model=facts.models[0] if facts.models else None,
            versions=facts.versions,
        )
        return cls(config, schedule, info, ranks, places, tuple(RankState() for _ in ranks))

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def profile_path(self) -> Path:
        """Path of the profile that this job writes."""
        return self.output_dir / "profile.csv"

    @property
    def world_size(self) -> int:
        return len(self.facts)

    @cached_property
    def counts_energy(self) -> tuple[bool, ...]:
        """Whether the energy of each rank is added to that of the job. GPUs that share a counter are counted once."""
        seen: set[tuple[str, str]] = set()
        counts = []
        for facts in self.facts:
            counter = facts.node, facts.gpu.counter
            counts.append(not facts.gpu.counter or counter not in seen)
            seen.add(counter)
        return tuple(counts)

    @property
    def gpus_per_rank(self) -> float:
        """Number of GPUs for each pipeline rank. GPUs that share a counter are one, as in their energies."""
        return sum(self.counts_energy) / len(self.schedule.ranks)

    @property
    def simulated(self) -> bool:
        return bool(self.info.simulated)

    @property
    def shown(self) -> tuple[int, ...]:
        """The ranks of rank 0's pipeline. Their operations represent all pipelines."""
        return self.facts[0].pipeline

    @property
    def profiled(self) -> list[int]:
        """The ranks that are profiled."""
        return [rank for rank, place in enumerate(self.places) if place.pipeline < MOST_PROFILED]

    def clocks_mhz(self) -> list[int]:
        """Return the clocks that may be profiled, which all GPUs support, in ascending order [MHz].

        Raises:
            ConfigError: There are fewer than two.
        """
        free = [facts for rank, facts in enumerate(self.facts) if rank not in self.fixed_ranks]
        common = set.intersection(*(set(facts.clocks_mhz) for facts in free))
        return self.config.profile.clocks_among(sorted(common), self.facts[0].gpu.name)

    def check_clocks(self, clocks_mhz: Sequence[int]) -> None:
        """Check that the GPUs of all ranks support clocks.

        Raises:
            PlanError: A GPU lacks one of them.
        """
        needed_mhz = set(clocks_mhz)
        for facts in (facts for rank, facts in enumerate(self.facts) if rank not in self.fixed_ranks):
            for clock_mhz in sorted(needed_mhz.difference(facts.clocks_mhz)):
                raise PlanError(
                    f"Plan does not fit this GPU: {facts.gpu.name} lacks {clock_mhz} MHz. Profile on GPUs of this kind."
                )

    def fix_slow_ranks(self, say: Callable[[str], None]) -> None:
        """Let ranks keep their default clocks from now on if their clocks change much later than those of others.

        One such GPU would otherwise determine how often the clocks of all others may change.
        """
        delays_s = self._delays_s()
        for rank in _slow_ranks(delays_s):
            self.fixed_ranks.add(rank)
            usual_s = statistics.median_low(delays_s.values())
            say(
                f"clock changes of rank {rank} take {delays_s[rank]:.2g} s, those of other ranks {usual_s:.2g} s: its "
                "GPU keeps its default clock"
            )

    def least_dwell_s(self) -> dict[int, float]:
        """Return the shortest time at each clock by the latencies of all ranks but slow ones [s]. Empty if unknown."""
        slow_ranks = _slow_ranks(self._delays_s())
        states = [self.states[rank] for rank in self._free_ranks() if rank not in slow_ranks]
        clocks_mhz = self.clocks_mhz()
        by_rank = [state.latencies.of_clocks(clocks_mhz, state.latencies.dwell_s) for state in states]
        dwell_s = dict(zip(clocks_mhz, map(max, *by_rank) if len(by_rank) > 1 else by_rank[0], strict=True))
        return dwell_s if any(dwell_s.values()) else {}

    def _free_ranks(self) -> list[int]:
        """Return the ranks whose clocks are set."""
        return [rank for rank in range(self.world_size) if rank not in self.fixed_ranks]

    def _delays_s(self) -> dict[int, float]:
        """Return the delays of clock changes by rank, without ranks whose latencies are not known yet [s]."""
        clocks_mhz = self.clocks_mhz()
        known = (rank for rank in self._free_ranks() if self.states[rank].latencies.is_known)
        return {rank: self.states[rank].delay_s(clocks_mhz) for rank in known}

    def in_folder(self, folder: str | Path) -> Job:
        """Return the job with another output folder."""
        return replace(self, config=self.config.model_copy(update={"output_dir": str(folder)}))

    def of_order(self, number: int, schedule: Schedule) -> Job:
        """Return the job of iterations of another order, with its own schedule and folder."""
        info = self.info.model_copy(update={"schedule": schedule.name, "micro_batches": schedule.micro_batches})
        job = self.in_folder(self.output_dir / "orders" / str(number))
        return replace(job, schedule=schedule, info=info)

    @cached_property
    def key(self) -> str:
        """The key by which a later start of the job recognises it."""
        return self._key({})

    def started(self, order: int) -> Started:
        """Return the event of the job's start, at which an order with this number was declared."""
        return Started(
            mode=self.config.mode,
            gpu=self.facts[0].gpu.name,
            frontier=self.config.frontier,
            job=self.key,
            goal=self.config.goal.given(),
            engines=list(self.facts[0].models) or None,
            order=order,
            micro_batches=self.schedule.micro_batches,
            ranks=self.world_size,
            pipelines=self.info.data_parallel,
            settings=self.info.settings,
        )

    @cached_property
    def owner(self) -> dict[str, str]:
        """The key by which an output folder belongs to this job, and a description.

        The key depends on model, schedule and GPU. It does not depend on figures that may change at a later start, such
        as versions and the numbers of pipelines and micro-batches.
        """
        schedule, info = self.schedule, self.info
        fingerprints = [self.facts[rank].fingerprint for rank in self.shown]
        content = [info.model, fingerprints, schedule.name, schedule.num_stages, info.gpu]
        model, name = info.model or "a model", schedule.name.rpartition(":")[2]
        return {
            "key": _hash(content),
            "description": f"{model}, {name} with {schedule.num_stages} stages, {info.gpu}",
        }

    def profile_key(self) -> str:
        """Return a key of its profile that depends on passes, GPU settings and measurement."""
        settings = [facts.gpu.settings for facts in self.facts]
        return self._key({"profile": self.config.profile.model_dump(), "settings": settings})

    def _key(self, settings: dict[str, object]) -> str:
        """Return a hash of job, simulated GPUs, every rank's share of the model, and settings.

        It does not depend on the number of micro-batches, which may differ between the first iterations of two starts.
        """
        simulated = self.config.simulated.model_dump() if self.simulated else {}
        info = self.info.model_copy(update={"settings": None, "micro_batches": None}).model_dump(mode="json")
        fingerprints = [facts.fingerprint for facts in self.facts]
        content = [info, fingerprints, {**settings, "simulated": simulated}]
        return _hash(content)

    # Measurements before training.

    def counter_period_s(self) -> float:
        """Return the refresh period of the slowest energy counter [s]."""
        return self._slowest(lambda measured: measured.period_s) or _COUNTER_PERIOD_S

    def counter_settle_s(self, unknown_s: float = _COUNTER_SETTLE_S) -> float:
        """Return the longest time for which a counter still reports the power before a step [s].

        ``unknown_s`` is returned if it was not measured.
        """
        is_known = any(math.isfinite(power_w) for power_w in self._blocking_powers_w())
        return self._slowest(lambda measured: measured.settle_s) if is_known else unknown_s

    def blocking_power_w(self) -> float:
        """Return the mean blocking power of all ranks, or that of the last profile if not measured [W].

        Raises:
            GpuError: No rank could measure it, and no profile has it.
        """
        known = [power_w for power_w in self._blocking_powers_w() if math.isfinite(power_w)]
        if known:
            return statistics.mean(known)
        with contextlib.suppress(ProfileError):
            if (power_w := StageProfile.load(self.profile_path).info.blocking_power_w) is not None:
                return power_w
        raise GpuError("the power of waiting GPUs could not be measured")

    def blocking_power_of_w(self, rank: int) -> float:
        """Return the blocking power of a rank, or the mean of all ranks if its own was not measured [W]."""
        measured = self.states[rank].measured
        own_w = math.nan if measured is None else measured.blocking_power_w
        return own_w if math.isfinite(own_w) else self.blocking_power_w()

    def _blocking_powers_w(self) -> list[float]:
        return [state.measured.blocking_power_w for state in self.states if state.measured is not None]

    def _slowest(self, of: Callable[[Measured], float]) -> float:
        return max((of(state.measured) for state in self.states if state.measured is not None), default=0.0)


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def _places_of(ranks: Sequence[RankFacts]) -> tuple[tuple[Place, ...], int]:
    """Return the place of each rank, and the largest number of ranks at one place.

    Ranks share a place with tensor parallelism, for example.
    """
    if any(facts.copies is None for facts in ranks):
        pipelines = sorted({facts.pipeline[0] for facts in ranks})
        numbers = [pipelines.index(facts.pipeline[0]) for facts in ranks]
    else:
        numbers = [sorted(facts.copies or ()).index(rank) for rank, facts in enumerate(ranks)]
    found = tuple(Place(number, ranks[rank].pipeline.index(rank)) for rank, number in enumerate(numbers))
    return found, max(Counter(found).values())


def _slow_ranks(delays_s: Mapping[int, float]) -> list[int]:
    """Return the ranks whose clocks change much later than those of others, by their delays [s]."""
    if not delays_s:
        return []
    usual_s = statistics.median_low(delays_s.values())
    return [rank for rank, delay_s in delays_s.items() if delay_s > max(_MUCH_LATER * usual_s, usual_s + _LATE_S)]


@dataclass(eq=False)
class Order:
    """An order with a known schedule.

    Attributes:
        number: Number by which ranks and records identify it, the same in every start of the job.
        job: The job with its schedule and its own output folder.
        frontier: Its plans; None before they are computed.
        is_given_up: Whether it cannot be planned.
    """

    number: int
    job: Job
    frontier: Frontier | None = None
    is_given_up: bool = False

    @cached_property
    def dag(self) -> Dag:
        return Dag.build(self.job.schedule)

    @cached_property
    def passes(self) -> int:
        """Number of passes of a pipeline in one iteration."""
        return sum(map(len, self.job.schedule.instructions))


def with_permission(job: Job) -> tuple[Job, str]:
    """Let ranks whose clocks cannot be set keep their default clocks in auto mode, and return a warning.

    A process may lack the permission, and a virtual GPU the clocks. If this is so on all ranks, the mode becomes
    observe mode.
    """
    config = job.config
    problems = {rank: facts.no_permission for rank, facts in enumerate(job.facts) if facts.no_permission}
    if config.mode != "auto" or not problems:
        return job, ""
    problem = next(iter(problems.values()))
    if len(problems) < job.world_size:
        ranks = ", ".join(map(str, sorted(problems)[:_MOST_NAMED]))
        more = f" and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        warning = f'{problem} Default clocks are kept on rank {ranks}{more}. With "required": true this is an error.'
        return replace(job, fixed_ranks=set(problems)), warning
    warning = (
        f"{problem} This job trains at default clocks, and its time and energy are recorded, as in mode "
        '"observe". With "required": true this is an error.'
    )
    return replace(job, config=config.model_copy(update={"mode": "observe"})), warning
