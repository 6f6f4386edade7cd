"""Perseus attaches to Megatron-Core, reads the order of an iteration, and detaches completely."""

import itertools
import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import megatron.core
import pytest
import run_log
import torch
import torch.distributed as dist
from engines_on_virtual_cuda import cuda_of_engines, launched
from megatron.core import full_cuda_graph, parallel_state
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.parallel_state import RankGenerator
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from packaging.version import Version
from virtual.job import predicted_over_used

import perseus_ds
from examples.megatron.cpu import CpuTorch
from perseus_ds.client.runtime import PerseusRuntime
from perseus_ds.engines.engine import Session, SessionState
from perseus_ds.engines.layers import parts_of_gpt
from perseus_ds.engines.megatron import engine as megatron_engine
from perseus_ds.engines.megatron.engine import (
    NEWEST_MEGATRON,
    OLDEST_MEGATRON,
    MegatronEngine,
    check_megatron,
)
from perseus_ds.engines.megatron.order import OrderRecorder
from perseus_ds.errors import ConfigError, GpuPermissionError, ScheduleError, VersionError
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.dependencies import check_dependencies
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Exchange, Launch, Schedule
from perseus_ds.protocol.layout import DEFAULT_CLOCKS, PAUSED
from perseus_ds.simulation.device_models import DEVICES

WIDTH, LENGTH, ROWS = 4, 2, 1
NAMES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
    "forward_step",
    "backward_step",
)
SLOWDOWN = DEVICES["a100-sxm"].slowdown(DEVICES["a100-sxm"].top_clock_mhz)


@pytest.fixture
def block(tmp_path):
    return {"mode": "observe", "device": "simulated", "output_dir": str(tmp_path / "perseus")}


@pytest.fixture(autouse=True)
def _megatron(process_group, monkeypatch):
    for module in (schedules, p2p_communication):
        monkeypatch.setattr(module, "torch", CpuTorch())
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    yield
    perseus_ds.detach(megatron.core)
    MODELS.clear()


def group(rank, ranks):
    """Return a process group in which this process acts as one rank after the other."""
    return SimpleNamespace(rank=lambda: rank, size=lambda: ranks)


class Communicator(schedules.P2PCommunicator):
    """The neighbours of a single rank: everything that it requests arrives."""

    def __init__(self, group, config):
        self.pp_group, self.config = group, config
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size


def communicate(self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape, wait_on_reqs=True):
    """Send nothing and receive zeros immediately."""
    asked = {
        "send_next": tensor_send_next is not None,
        "send_prev": tensor_send_prev is not None,
        "recv_prev": recv_prev,
        "recv_next": recv_next,
    }
    received = [torch.zeros(tensor_shape, requires_grad=True) if wanted else None for wanted in (recv_prev, recv_next)]
    over = SimpleNamespace(wait=lambda: None)
    return (*received, None if wait_on_reqs else {name: over for name, wanted in asked.items() if wanted})


@pytest.fixture
def alone(block, monkeypatch):
    """The ``perseus`` block of a job whose ranks run one after the other."""
    monkeypatch.setattr(schedules.P2PCommunicator, "_communicate", communicate)
    return block


class Part(torch.nn.Linear):
    """A virtual stage."""

    def __init__(self, config):
        super().__init__(WIDTH, WIDTH)
        self.config, self.inputs = config, None
        self.model_type = None

    def set_input_tensor(self, tensors):
        self.inputs = tensors[0]


def forward_step(data, part):
    inputs = torch.ones(LENGTH, ROWS, WIDTH) if part.inputs is None else part.inputs
    return part(inputs), lambda output: (output.mean(), {})


# The models of a test: parts by the name of the model, the rank and the number of its chunks.
MODELS = {}


def train(
    rank,
    ranks,
    micro_batches,
    chunks=1,
    overlap=True,
    *,
    communicator=Communicator,
    function=None,
    forward_only=False,
    model="actor",
    **more,
):
    """Run an iteration as a rank of a pipeline, and return the result of Megatron's schedule."""
    config = ModelParallelConfig(
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        microbatch_group_size_per_vp_stage=ranks,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=overlap and chunks > 1,
        batch_p2p_comm=not (overlap and chunks > 1),
    )
    config.hidden_size, config.fine_grained_activation_offloading = WIDTH, False
    for name, value in more.items():
        setattr(config, name, value)
    own, one = group(rank, ranks), group(0, 1)
    parts = MODELS.setdefault((model, rank, chunks), [Part(config) for _ in range(chunks)])
    for part in parts:
        part.config = config
    schedule = NAMES[2] if chunks > 1 else NAMES[1]
    return (function or getattr(schedules, schedule))(
        forward_step_func=forward_step,
        data_iterator=[None] * chunks if chunks > 1 else None,
        model=parts if chunks > 1 else parts[0],
        num_microbatches=micro_batches,
        seq_length=LENGTH,
        micro_batch_size=ROWS,
        forward_only=forward_only,
        p2p_communicator=communicator(own, config),
        pg_collection=ProcessGroupCollection(tp=one, cp=one, embd=None, pos_embd=None, pp=own, dp_cp=one),
    )


def order_of(alone, ranks, micro_batches, chunks=1, overlap=True):
    """Return the operations of each rank in its first iteration."""
    streams = []
    for rank in range(ranks):
        perseus_ds.attach(megatron.core, alone)
        train(rank, ranks, micro_batches, chunks, overlap)
        streams.extend(megatron.core.perseus.engine.read().ranks)
        perseus_ds.detach(megatron.core)
    return Schedule("megatron", micro_batches, tuple(streams))


SIZES = [(2, 1, 1, False), (3, 2, 1, False), (4, 8, 1, False), (2, 6, 3, False), (4, 8, 2, True)]


@pytest.mark.parametrize("sizes", SIZES)
def test_the_first_iteration_shows_an_order_that_does_not_deadlock(alone, sizes):
    ranks, micro_batches, chunks, _ = sizes
    schedule, stages = order_of(alone, *sizes), ranks * chunks
    counts = Counter(i for stream in schedule.instructions for i in stream)
    assert set(counts.values()) == {1}
    passes = Counter((i.stage, i.kind) for i in counts if i.kind is not Kind.TAIL)
    assert passes == {(s, kind): micro_batches for s in range(stages) for kind in (Kind.FORWARD, Kind.BACKWARD)}
    for rank, stream in enumerate(schedule.instructions):
        assert {i.stage % ranks for i in stream} == {rank}
        assert [i.kind for i in stream].index(Kind.TAIL) == len(stream) - 1
    operations = [op for stream in schedule.ranks for op in stream if isinstance(op, Exchange | Launch)]
    sides = Counter(transfer for operation in operations for transfer in operation.transfers)
    assert len(sides) == 2 * (stages - 1) * micro_batches
    assert set(sides.values()) == {2}
    check_dependencies(schedule)
    assert len(Dag.build(schedule).nodes) == len(counts) + len(sides)


def test_a_profile_predicts_what_plans_of_the_order_take(alone, tmp_path):
    order, stages_s = order_of(alone, 2, 4, 2), (0.02, 0.025, 0.02, 0.03)
    time, energy = predicted_over_used(tmp_path, order, stages_s, transfer_s=0.001)
    assert abs(time) < 0.005
    assert abs(energy) < 0.005


def attributes():
    communicate = vars(schedules.P2PCommunicator)["_communicate"]
    return [*(vars(schedules)[name] for name in NAMES), communicate, set(vars(megatron.core))]


def test_detach_leaves_every_attribute_as_it_was(block):
    before = attributes()
    assert perseus_ds.attach(megatron.core, block) is megatron.core
    assert megatron.core.perseus.phase == "start"
    assert attributes() != before
    perseus_ds.detach(megatron.core)
    assert attributes() == before
    perseus_ds.detach(megatron.core)


def test_a_function_that_trains_is_attached_to_by_itself(block):
    plain = schedules.forward_backward_pipelining_without_interleaving
    ours = perseus_ds.attach(plain, block)
    assert ours is schedules.forward_backward_pipelining_without_interleaving
    assert perseus_ds.attach(ours) is ours  # as if every step requested the function
    assert perseus_ds.detach(ours) is plain


def test_a_rank_that_has_said_that_it_trains_without_perseus_is_an_error_of_the_others(block, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    before = attributes()
    perseus_ds.attach(megatron.core, {**block, "enabled": False})
    perseus_ds.attach(megatron.core, {**block, "enabled": False})  # as if every step attached
    assert attributes() == before
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with pytest.raises(ConfigError, match=r"ranks differ: enabled is False on rank 0, not on all\. Give all ranks"):
        perseus_ds.attach(megatron.core, block)


def test_another_config_while_attached_and_other_objects_are_errors(block):
    perseus_ds.attach(megatron.core, block)
    with pytest.raises(ConfigError, match=r"attached to Megatron-Core already.*detach"):
        perseus_ds.attach(megatron.core, block)
    with pytest.raises(ConfigError, match=r"expected the module megatron\.core.* got get_forward_backward_func\."):
        perseus_ds.attach(schedules.get_forward_backward_func, block)


def test_groups_that_are_not_there_are_an_error_of_the_first_iteration(block, monkeypatch):
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: False)
    perseus_ds.attach(megatron.core, block)
    with pytest.raises(ConfigError, match=r"no groups of ranks\. Call parallel_state\.initialize_model_parallel\(\)"):
        train(0, 2, 4)


@pytest.mark.parametrize("mode", [{"mode": "profile"}, {"mode": "auto", "required": True}])
def test_a_gpu_whose_clocks_may_not_be_set_is_an_error_of_attach_where_the_job_needs_them(block, mode):
    before = attributes()
    with pytest.raises(GpuPermissionError, match="may not set clocks"):
        perseus_ds.attach(megatron.core, {**block, **mode, "simulated": {"may_lock": False}})
    assert attributes() == before


class MultiModulePipelineCommunicator:
    """Like Megatron's: not a ``P2PCommunicator``, but with its methods."""

    def __init__(self, *args):
        self._one = Communicator(*args)

    def __getattr__(self, name):
        return getattr(self._one, name)


def test_transfers_without_known_passes_are_an_error_and_in_auto_mode_one_warning(alone, caplog):
    reason = "MultiModulePipelineCommunicator"
    perseus_ds.attach(megatron.core, {**alone, "mode": "profile"})
    with pytest.raises(ScheduleError, match=reason):
        train(0, 2, 4, communicator=MultiModulePipelineCommunicator)
    perseus_ds.detach(megatron.core)
    perseus_ds.attach(megatron.core, {**alone, "mode": "auto"})
    for _ in range(2):
        train(0, 2, 4, communicator=MultiModulePipelineCommunicator)
    assert [reason in record.getMessage() for record in caplog.records] == [True]


class Optimizer(MegatronOptimizer):
    """An optimizer whose step takes 10 ms on the GPU."""

    def __init__(self, cuda):
        self.cuda = cuda

    def step(self):
        self.cuda.launch(0.01)


Optimizer.__abstractmethods__ = frozenset()


@pytest.fixture
def launches(alone, monkeypatch):
    """A stand-in for CUDA on which passes are launched and Megatron's wrapper captures graphs."""
    cuda = cuda_of_engines(monkeypatch)
    for name in ("Stream", "stream"):
        monkeypatch.setattr(cuda, name, getattr(CpuTorch.cuda, name), raising=False)
    monkeypatch.setattr(full_cuda_graph, "torch", SimpleNamespace(cuda=cuda, distributed=dist, Tensor=torch.Tensor))
    monkeypatch.setattr(full_cuda_graph, "get_all_rng_states", dict)
    monkeypatch.setattr(
        Part, "forward", lambda part, inputs: launched(torch.nn.Linear.forward(part, inputs), cuda, 0.1)
    )
    # The neighbours of this rank are not part of the job.
    monkeypatch.setattr(megatron_engine, "ranks_of", lambda group: (0,))
    monkeypatch.setattr(MegatronEngine, "_copies", lambda engine: (0,))
    yield cuda
    for name in ("curr_iteration", "cuda_graph", "result"):
        first = 0 if name == "curr_iteration" else None
        getattr(FullCudaGraphWrapper, name).update(training=first, validation=first)


GRAPH = {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}


def in_a_graph(wrapper, **keys):
    """Train or evaluate an iteration with Megatron's wrapper."""
    return train(0, 2, 3, function=wrapper, **GRAPH, **keys)


@pytest.mark.parametrize(("attaches_to", "warm_up"), [("module", 1), ("wrapper", 3)])
def test_iterations_that_megatron_replays_as_one_graph_are_marked_and_recorded(launches, alone, attaches_to, warm_up):
    optimizer = Optimizer(launches)
    if attaches_to == "module":
        perseus_ds.attach(megatron.core, alone)
    wrapper = FullCudaGraphWrapper(getattr(schedules, NAMES[1]), warm_up)
    if attaches_to == "wrapper":
        assert perseus_ds.attach(wrapper, alone) is wrapper
    for number in range(6):
        in_a_graph(wrapper)
        optimizer.step()
        launches.synchronize()
        memory = megatron.core.perseus.runtime.clocks.memory
        assert memory.begun == memory.ended == number, "the first iteration is used to read the order"
        marked = [memory.marked_s(slot) is not None for slot in range(2 * 6 + 1)]
        assert marked == [number >= warm_up] * 13, "forwards, backwards, and the begin of the tail"
        if number == 3:
            for _ in range(3):
                in_a_graph(wrapper, forward_only=True)
                assert memory.idle_since_s == PAUSED
    perseus_ds.detach(wrapper)
    assert wrapper.forward_backward_func is getattr(schedules, NAMES[1])
    assert not hasattr(wrapper.forward_backward_func, "__wrapped__")
    found = run_log.records(Path(alone["output_dir"]))
    assert [r["time_s"] for r in run_log.iterations(found)] == pytest.approx([0.91 * SLOWDOWN] * 5, rel=0.03)
    timeline = json.loads((Path(alone["output_dir"]) / "timeline.json").read_text())
    passes = Counter(operation["kind"] for operation in timeline["iterations"][0]["ranks"][0])
    assert passes == {"forward": 3, "backward": 3, "activation": 3, "grad": 3, "tail": 1}


def test_passes_outside_the_known_order_count_no_tokens_of_varying_lengths(launches, alone, monkeypatch):
    counted = []
    monkeypatch.setattr(PerseusRuntime, "add_tokens", lambda runtime, count: counted.append(count))
    perseus_ds.attach(megatron.core, alone)
    vary = {"variable_seq_lengths": True}
    for _ in range(2):  # the first iteration is used to read the order
        train(0, 2, 4, **vary)
    assert counted == [LENGTH * ROWS] * 4
    train(0, 2, 4, forward_only=True, **vary)
    train(0, 2, 4, model="critic", **vary)
    assert counted == [LENGTH * ROWS] * 4


@pytest.mark.parametrize(
    ("owner", "name", "from_step"),
    [
        (OrderRecorder, "step", 0),
        (OrderRecorder, "operations", 0),
        (MegatronEngine, "_find_steps", 2),
        (MegatronEngine, "_next", 2),
        (Session, "iteration", 2),
        (Session, "end_iteration", 2),
        (PerseusRuntime, "operation", 2),
    ],
)
def test_an_error_of_perseus_itself_does_not_end_training(launches, alone, monkeypatch, caplog, owner, name, from_step):
    def raises(*_, **__):
        raise LookupError(name)

    plain = train(0, 1, 4)
    before = attributes()
    perseus_ds.attach(megatron.core, {**alone, "mode": "auto"})
    session, optimizer = megatron.core.perseus, Optimizer(launches)
    for step in range(4):
        if step == from_step:
            monkeypatch.setattr(owner, name, raises)
        assert train(0, 1, 4) == plain
        optimizer.step()
    assert attributes() == before
    assert session.state is SessionState.CLOSED
    assert [record.exc_info[0] for record in caplog.records if record.levelname == "ERROR"] == [LookupError]


def test_an_optimizer_whose_step_is_replayed_ends_the_iteration(launches, alone):
    perseus_ds.attach(megatron.core, alone)
    optimizer, graph = Optimizer(launches), launches.CUDAGraph()
    for number in range(4):
        train(0, 2, 3)
        if number == 1:
            with launches.graph(graph):
                optimizer.step()
        graph.replay() if number else optimizer.step()
        if number:  # the first iteration is used to read the order
            assert megatron.core.perseus.runtime.clocks.memory.progress == 2 * number
    launches.synchronize()
    assert megatron.core.perseus.runtime.clocks.memory.ended == 3


def test_a_graph_that_is_captured_first_trains_at_default_clocks(launches, alone, caplog):
    perseus_ds.attach(megatron.core, alone)
    wrapper = FullCudaGraphWrapper(getattr(schedules, NAMES[1]), 0)
    for _ in range(2):
        in_a_graph(wrapper)
    assert [record.getMessage().count("cuda_graph_warmup_steps") for record in caplog.records] == [1]
    assert megatron.core.perseus.runtime is None


def test_passes_in_another_order_than_recorded_run_at_default_clocks(launches, alone, caplog):
    perseus_ds.attach(megatron.core, alone)
    for _ in range(2):
        train(0, 2, 4)
    engine = megatron.core.perseus.engine
    (order,) = engine._orders
    recorded = engine._orders[order]
    engine._orders[order] = Schedule(recorded.name, recorded.micro_batches, (recorded.ranks[0][::-1],))
    memory = megatron.core.perseus.runtime.clocks.memory
    before = memory.iteration
    train(0, 2, 4)
    assert memory.iteration > before
    assert memory.program(memory.iteration) == DEFAULT_CLOCKS
    assert "its clocks are the default ones" in caplog.text


def test_a_single_stage_has_nothing_to_plan_and_trains_without_groups(block, caplog, monkeypatch):
    perseus_ds.attach(megatron.core, block)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(TypeError, match="forward_step_func"):  # Megatron's own error for a call without arguments
        schedules.forward_backward_no_pipelining()
    assert "nothing to plan" in caplog.text


def test_the_installed_megatron_has_what_is_relied_upon():
    check_megatron(megatron.core, schedules, parallel_state)
    installed = Version(Version(megatron.core.__version__).public)  # without the commit hash of a source checkout
    assert Version(OLDEST_MEGATRON) <= installed <= Version(NEWEST_MEGATRON)


def test_a_megatron_without_what_is_relied_upon_is_told_by_what_it_lacks():
    def backward_step(input_tensor, output_tensor):
        """Of a version that does not exist."""

    lacking = SimpleNamespace(**{**vars(schedules), "backward_step": backward_step})
    del lacking.get_model_config
    missing = r"it lacks schedules\.get_model_config.*backward_step\(…, output_tensor_grad\)"
    with pytest.raises(VersionError, match=missing):
        check_megatron(megatron.core, lacking, parallel_state)
    with pytest.raises(VersionError, match=rf"0\.12\.1 is too old for perseus-ds.*megatron-core>={OLDEST_MEGATRON}"):
        check_megatron(SimpleNamespace(__version__="0.12.1"), schedules, parallel_state)


def test_passes_that_recompute_other_layers_than_before_are_other_work(alone, monkeypatch):
    reported = []
    operation = PerseusRuntime.operation

    def note(runtime, made, inputs=None):
        reported.append(inputs)
        return operation(runtime, made, inputs)

    monkeypatch.setattr(PerseusRuntime, "operation", note)
    monkeypatch.setattr(megatron_engine, "ranks_of", lambda group: (0,))
    monkeypatch.setattr(MegatronEngine, "_copies", lambda engine: (0,))
    perseus_ds.attach(megatron.core, alone)
    for granularity in (None, None, "full", None):
        train(0, 2, 1, recompute_granularity=granularity)
    without, recomputing, again = [inputs for inputs in reported if inputs][::2]
    assert without == again != recomputing


def test_a_rank_without_parameters_trains(alone, monkeypatch):
    monkeypatch.setattr(megatron_engine, "ranks_of", lambda group: (0,))
    monkeypatch.setattr(MegatronEngine, "_copies", lambda engine: (0,))
    monkeypatch.setattr(Part, "parameters", lambda part: iter(()))
    perseus_ds.attach(megatron.core, alone)
    for _ in range(2):
        train(0, 2, 2)
    assert megatron.core.perseus.runtime is not None


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        (None, ["mtp"]),
        (SimpleNamespace(layers=[torch.nn.Linear(2, 2)]), ["Linear", "mtp"]),
    ],
    ids=["a stage of its own for multi-token prediction", "layers before"],
)
def test_a_chunk_may_have_no_decoder(decoder, expected):
    chunk = SimpleNamespace(
        pre_process=False, post_process=False, decoder=decoder, mtp=SimpleNamespace(layers=[torch.nn.Linear(2, 2)])
    )
    assert [part.kind for part in parts_of_gpt(chunk)] == expected


def test_a_chunk_of_an_encoder_and_decoder_has_no_layout():
    chunk = SimpleNamespace(pre_process=False, post_process=False, encoder=torch.nn.Linear(2, 2), decoder=None)
    assert parts_of_gpt(chunk) is None


@pytest.mark.parametrize(
    ("ranks", "tensor", "context", "pipeline", "expert_tensor", "expert"),
    [
        (8, 2, 1, 1, 2, 2),
        (16, 2, 1, 2, 1, 4),
        (16, 2, 2, 2, 1, 4),
        (8, 1, 1, 1, 2, 2),
        (8, 1, 1, 1, 2, 4),
        (8, 1, 1, 2, 4, 1),
        (24, 1, 2, 2, 1, 3),
    ],
)
def test_ranks_that_run_in_step_count_as_one_pipeline(
    monkeypatch, ranks, tensor, context, pipeline, expert_tensor, expert
):
    order, copies = "tp-cp-ep-dp-pp", ranks // (tensor * context * pipeline)
    layers = RankGenerator(tp=tensor, ep=1, dp=copies, pp=pipeline, cp=context, order=order)
    copies = ranks // (expert_tensor * expert * pipeline)
    experts = RankGenerator(tp=expert_tensor, ep=expert, dp=copies, pp=pipeline, cp=1, order=order)
    groups = {
        "get_data_parallel_group": layers.get_ranks("dp"),
        "get_tensor_and_context_parallel_group": layers.get_ranks("tp-cp"),
        "get_expert_tensor_and_model_parallel_group": experts.get_ranks("tp-ep"),
    }
    here = {"rank": 0}
    own = {name: partial(lambda found: next(g for g in found if here["rank"] in g), g) for name, g in groups.items()}
    monkeypatch.setattr(megatron_engine, "ranks_of", tuple)
    monkeypatch.setattr(dist, "get_rank", lambda: here["rank"])
    engine = MegatronEngine(megatron.core, schedules, SimpleNamespace(**own))
    pipelines = []
    for here["rank"] in range(ranks):
        pipelines.append(sorted(engine._copies()).index(here["rank"]))
    # All ranks of a stage that share layers or experts with each other, directly or through others.
    in_step = {rank: {rank} for rank in range(ranks)}
    for group in itertools.chain(*list(groups.values())[1:]):
        joined = set().union(*(in_step[rank] for rank in group))
        in_step.update(dict.fromkeys(joined, joined))
    for rank, others in in_step.items():
        assert {pipelines[other] for other in others} == {pipelines[rank]}
    places = {(pipelines[rank], rank // (ranks // pipeline)) for rank in range(ranks)}
    assert len(places) == len({frozenset(others) for others in in_step.values()})


@pytest.fixture
def pipeline(alone, monkeypatch):
    """The ``perseus`` block of a job whose only rank trains a pipeline of one stage."""
    monkeypatch.setattr(megatron_engine, "ranks_of", lambda group: (0,))
    monkeypatch.setattr(MegatronEngine, "_copies", lambda engine: (0,))
    return alone


def test_of_two_models_that_train_in_turn_the_first_is_planned(pipeline, caplog):
    """As actor and critic do."""
    perseus_ds.attach(megatron.core, pipeline)
    session = megatron.core.perseus
    for _ in range(4):
        train(0, 1, 4)
        train(0, 1, 4, model="critic")
    memory = session.runtime.clocks.memory
    assert memory.iteration == 3, "the first one recorded the order"
    assert len(session.engine._orders) == 1
    assert session.state is SessionState.BETWEEN, "the iteration of the first ends before that of the second"
    assert caplog.text.count("this process trains a Part and a Part") == 1


def steps_of(block):
    """Return the step of each recorded iteration."""
    return [record["iteration"] for record in run_log.iterations(run_log.records(Path(block["output_dir"])))]


def test_iterations_that_record_an_order_count_as_steps(pipeline):
    perseus_ds.attach(megatron.core, pipeline)
    for micro_batches in (4, 4, 4, 2, 2, 4):
        train(0, 1, micro_batches)
    perseus_ds.detach(megatron.core)
    assert steps_of(pipeline) == [2, 3, 5, 6]


def test_the_step_is_that_of_megatron_which_continues_a_checkpoint(pipeline, monkeypatch):
    arguments = SimpleNamespace(iteration=100)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=arguments))
    perseus_ds.attach(megatron.core, pipeline)
    for step in (100, 101, 102, 103, 110, 111):  # six steps were skipped
        arguments.curr_iteration = step
        train(0, 1, 2 if step == 103 else 4)
    perseus_ds.detach(megatron.core)
    assert steps_of(pipeline) == [102, 103, 111, 112]
