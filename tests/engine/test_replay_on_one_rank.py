"""Passes of a real engine are repeated, and nothing of it remains."""

import logging
import math
import os
import queue
import random
import sys
import types
import weakref

import deepspeed
import numpy as np
import pytest
import torch
from client_parts import Tracker
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe import schedule
from one_rank_engine import MICRO_BATCHES, Layer, batches, config, module, one_rank, same, weights
from torch import nn

from perseus_ds.engine import isolation
from perseus_ds.engine.isolation import isolated
from perseus_ds.engine.replay import Replay
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute

PASSES = {Kind.FORWARD: schedule.ForwardPass, Kind.BACKWARD: schedule.BackwardPass}
CONFIGS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "zero1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
}
ALL_BUT_BF16 = [
    pytest.param(CONFIGS[name], marks=pytest.mark.extended if name == "bf16" else (), id=name) for name in CONFIGS
]


@pytest.fixture(scope="module", autouse=True)
def _process_group(tmp_path_factory):
    with one_rank(tmp_path_factory.mktemp("rank")):
        yield


def make_engine(keys=None, **arguments):
    torch.manual_seed(3)
    model = module(**arguments)
    keys = keys or {}
    dtype = torch.bfloat16 if "bf16" in keys else torch.float32
    engine, *_ = deepspeed.initialize(
        model=model.to(dtype), model_parameters=list(model.parameters()), config=config(**keys)
    )
    return engine, batches(dtype=dtype)


def replay_of(engine, data):
    """Train two iterations; the passes of the second are kept."""
    replay = Replay(engine, lambda kind, arguments: engine._INSTRUCTION_MAP[PASSES[kind]](engine, **arguments))
    original = dict(engine._INSTRUCTION_MAP)

    def recording(kind):
        def execute(engine, buffer_id):
            replay.record(Compute(Instruction(0, kind, 0)), {"buffer_id": buffer_id})
            original[PASSES[kind]](engine, buffer_id=buffer_id)

        return execute

    engine.train_batch(data)
    engine._INSTRUCTION_MAP = {**original, **{PASSES[kind]: recording(kind) for kind in PASSES}}
    engine.train_batch(data)
    engine._INSTRUCTION_MAP = original
    return replay


def repeat(replay, times=3):
    for _ in range(times):
        for stage, kind in replay.instructions:
            replay.prepare(stage, kind)
            replay.run(stage, kind)


@pytest.mark.parametrize("keys", ALL_BUT_BF16)
def test_training_goes_on_as_if_nothing_had_been_repeated(keys):
    outcomes = []
    for repeated in (False, True):
        engine, data = make_engine(keys, seed_layers=True)
        replay = replay_of(engine, data)
        if repeated:
            with replay.isolated():
                repeat(replay)
        losses = [engine.train_batch(data).item() for _ in range(3)]
        outcomes.append((losses, weights(engine), torch.rand(1).item(), random.random(), np.random.rand()))
    (losses, bits, *drawn), (losses_repeated, bits_repeated, *drawn_repeated) = outcomes
    assert losses == losses_repeated
    assert same(bits, bits_repeated)
    assert drawn == drawn_repeated


def test_what_is_repeated_is_the_pass_that_was_recorded():
    engine, data = make_engine()
    replay = replay_of(engine, data)
    assert replay.instructions == ((0, Kind.FORWARD), (0, Kind.BACKWARD))
    with replay.isolated():
        torch.manual_seed(1)
        replay.prepare(0, Kind.FORWARD)
        replay.run(0, Kind.FORWARD)
        first = engine.loss.item()
        replay.run(0, Kind.BACKWARD)
        gradient = next(engine.module.parameters()).grad.clone()
        assert gradient.abs().sum() > 0
        torch.manual_seed(1)
        replay.prepare(0, Kind.FORWARD)
        replay.run(0, Kind.FORWARD)
        replay.run(0, Kind.BACKWARD)
        assert engine.loss.item() == first
        assert torch.equal(next(engine.module.parameters()).grad, 2 * gradient)


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_isolation_puts_back_engine_modules_buffers_gradients_and_generators(fails):
    engine, data = make_engine()
    replay = replay_of(engine, data)
    layer = next(m for m in engine.module.modules() if isinstance(m, Layer))
    before = {
        "loss": engine.loss,
        "buffers": [dict(enumerate(slots)) for slots in engine.pipe_buffers.values()],
        "offset": engine.module.micro_offset,
        "forwards": layer.forwards,
        "total": engine.total_loss,
    }
    weights_before = weights(engine)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    outputs = list(engine.fwd_outputs)

    def use():
        with replay.isolated():
            assert engine.total_loss is None
            assert engine.fwd_outputs == []
            assert all(slot is None for slots in engine.pipe_buffers.values() for slot in slots)
            repeat(replay)
            random.random(), np.random.rand(), torch.rand(1)
            if fails:
                raise ValueError("inside")

    if fails:
        with pytest.raises(ValueError, match="inside"):
            use()
    else:
        use()
    assert engine.loss is before["loss"]
    assert engine.total_loss is before["total"]
    assert all(a is b for a, b in zip(engine.fwd_outputs, outputs, strict=True))
    assert [dict(enumerate(slots)) for slots in engine.pipe_buffers.values()] == before["buffers"]
    assert (engine.module.micro_offset, layer.forwards) == (before["offset"], before["forwards"])
    assert same(weights(engine), weights_before)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]
    assert not any(p.grad is not None and p.grad.any() for p in engine.module.parameters())


def test_what_a_pass_did_not_have_before_is_removed():
    engine, data = make_engine()
    replay = replay_of(engine, data)
    vars(engine).pop("_exec_instr", None)
    with replay.isolated():
        engine._exec_instr = print
    assert "_exec_instr" not in vars(engine)


def held_by_a_module_variable(source):
    client = types.ModuleType("client_of_deepspeed")
    client.SOURCE = source
    sys.modules[client.__name__] = client
    return {}


def held_by_a_layer(source):
    class Drawing(Layer):
        def __init__(self):
            super().__init__()
            self.sources = {"own": [source]}

    return {"layer": Drawing}


def held_by_the_loss(source):
    return {"loss_fn": lambda outputs, labels: nn.functional.mse_loss(outputs, labels) + 0 * (source is None)}


SOURCES = {
    "tracker": (Tracker, lambda tracker: tracker.dropout(torch.ones(20)).tolist()),
    "torch": (lambda: torch.Generator().manual_seed(1), lambda generator: torch.rand(1, generator=generator).item()),
    "numpy": (lambda: np.random.default_rng(1), lambda generator: generator.random()),
    "numpy RandomState": (lambda: np.random.RandomState(1), lambda generator: generator.rand()),
    "python": (lambda: random.Random(1), lambda generator: generator.random()),
}


@pytest.mark.parametrize("holder", [held_by_a_module_variable, held_by_a_layer, held_by_the_loss])
@pytest.mark.parametrize("source", SOURCES)
def test_every_generator_of_a_client_is_put_back(holder, source):
    make, draw = SOURCES[source]
    expected = [draw(generator) for generator in [make()] for _ in range(3)]
    generator = make()
    engine, _ = make_engine(**holder(generator))
    try:
        assert draw(generator) == expected[0]
        with isolated(engine):
            assert draw(generator) == expected[1]
            draw(generator)
        assert [draw(generator) for _ in range(2)] == expected[1:]
    finally:
        sys.modules.pop("client_of_deepspeed", None)


def test_repeated_passes_read_their_own_shapes_and_the_engine_keeps_those_of_training():
    """Where tensor-parallel ranks share activations, the engine keeps the shapes of its last inputs."""
    engine, _ = make_engine()
    engine.pipe_partition_input_meta_cache = torch.tensor([2, 6, 8])
    with isolated(engine):
        assert engine.pipe_partition_input_meta_cache is None
        engine.pipe_partition_input_meta_cache = torch.tensor([2, 4, 8])
    assert engine.pipe_partition_input_meta_cache.tolist() == [2, 6, 8]


def test_deepspeeds_own_tracker_is_put_back():
    engine, _ = make_engine()
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.states_ = {"model-parallel-rng": torch.tensor([1, 2, 3])}
    try:
        with isolated(engine):
            tracker.states_["model-parallel-rng"] = torch.tensor([4, 5, 6])
        assert tracker.states_["model-parallel-rng"].tolist() == [1, 2, 3]
    finally:
        tracker.reset()


def test_offsets_of_checkpointing_and_gradient_stores_are_put_back():
    class WeightGradStore: ...

    WeightGradStore.cache = ["kept"]
    WeightGradStore.weight_grad_queue = queue.Queue()
    WeightGradStore.weight_grad_queue.put("queued")
    client = types.ModuleType("client_of_deepspeed")
    client.WeightGradStore = WeightGradStore
    sys.modules[client.__name__] = client
    engine, _ = make_engine()
    checkpointing.data_offsets = [3]
    try:
        with isolated(engine):
            checkpointing.data_offsets[0] = 9
            WeightGradStore.cache.append("of a repeated pass")
            WeightGradStore.weight_grad_queue.get()
        assert checkpointing.data_offsets == [3]
        assert WeightGradStore.cache == ["kept"]
        assert WeightGradStore.weight_grad_queue.get_nowait() == "queued"
    finally:
        del sys.modules["client_of_deepspeed"]
        checkpointing.data_offsets = []


@pytest.fixture
def contiguous_checkpoints(monkeypatch):
    """DeepSpeed keeps the checkpoints of all forwards in one buffer, with room for those of one micro-batch."""
    # A DeepSpeed that keeps its device makes a stream, which the CPU has none of, where it knows none; nothing uses it.
    monkeypatch.setattr(checkpointing, "cuda_device", "cpu", raising=False)
    settings = {"partition_activations": True, "contiguous_checkpointing": True}
    checkpointing.configure(None, **settings, num_checkpoints=2)
    yield
    checkpointing.configure(None, **dict.fromkeys(settings, False), num_checkpoints=2)


@pytest.mark.usefixtures("contiguous_checkpoints")
def test_forwards_are_repeated_however_few_checkpoints_there_is_room_for():
    losses = []
    # Of the configuration, older versions also decide whether inputs require gradients, without which none arrive.
    keys = {"pipeline": {"activation_checkpoint_interval": 1}}
    for repeated in (False, True):
        engine, data = make_engine(keys, seed_layers=True)
        replay = replay_of(engine, data)
        if repeated:
            with replay.isolated():
                for _ in range(3):
                    replay.prepare(0, Kind.FORWARD)
                    replay.run(0, Kind.FORWARD)
                repeat(replay)
        losses.append([engine.train_batch(data).item() for _ in range(3)])
    assert losses[0] == losses[1]


def ours(caplog):
    return [record for record in caplog.records if record.name == "perseus_ds"]


def test_what_could_not_be_put_back_is_named(caplog):
    engine, _ = make_engine()
    name, parameter = next(iter(engine.module.named_parameters()))
    with caplog.at_level(logging.WARNING), isolated(engine), torch.no_grad():
        parameter.add_(1)
    (record,) = ours(caplog)
    assert f"measuring changed parameter {name}" in record.getMessage()


def test_nothing_is_named_where_all_was_put_back(caplog):
    engine, data = make_engine({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    replay = replay_of(engine, data)
    with replay.isolated():
        repeat(replay)
    assert not ours(caplog)


def agreed(reason):
    """One rank agrees with itself."""
    return reason


@pytest.mark.parametrize("keys", CONFIGS.values(), ids=CONFIGS)
def test_nothing_stands_in_the_way_of_repeating_plain_passes(keys):
    replay = replay_of(*make_engine(keys))
    assert replay.obstacle(agreed) is None


def test_an_optimizer_inside_the_backward_is_an_obstacle_before_any_pass_is_repeated():
    """As gradient release has it."""
    engine, data = make_engine()
    replay = replay_of(engine, data)
    steps = []

    def step(parameter):
        steps.append(parameter)

    for parameter in engine.module.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    assert "step runs inside the backward" in replay.obstacle(agreed)
    assert not steps


def test_a_backward_that_trains_in_another_way_is_an_obstacle_and_is_undone():
    engine, data = make_engine()
    replay = replay_of(engine, data)
    parameter = next(engine.module.parameters())

    def train(gradient):
        with torch.no_grad():
            parameter.sub_(0.1 * gradient)

    parameter.register_hook(train)
    before = weights(engine)
    assert "a repeated pass changes parameter" in replay.obstacle(agreed)
    assert same(weights(engine), before)


def test_a_kind_that_cannot_be_repeated_is_an_obstacle():
    engine, data = make_engine()
    replay = replay_of(engine, data)
    replay.record(Compute(Instruction(0, Kind.RECOMPUTE, 0)), {"buffer_id": 0})
    assert "recompute" in replay.obstacle(agreed)


def test_recording_keeps_no_reference_to_the_engines_own_tensors():
    engine, data = make_engine()
    replay = replay_of(engine, data)
    kept = {id(value) for tape in replay._tapes.values() for value in tape.data.values()}
    assert not kept & {id(slot) for slots in engine.pipe_buffers.values() for slot in slots}
    assert len(kept) == MICRO_BATCHES  # inputs and labels


def test_something_else_with_methods_of_a_trackers_names_is_left_alone():
    class States:
        def get_states(self, country):
            raise AssertionError

        def set_states(self, states):
            raise AssertionError

    engine, _ = make_engine()
    engine.module.atlas = States()
    with isolated(engine):
        pass


def test_a_checksum_tells_every_change_of_bits_and_of_places(monkeypatch):
    monkeypatch.setattr(isolation, "_PART_BYTES", 64)
    values = torch.arange(100, dtype=torch.bfloat16)[1:]  # not aligned, and in several parts
    original = isolation._checksum(values)
    assert isolation._checksum(values.clone()) == original
    for first, second in ((0, 1), (3, 70)):
        swapped = values.clone()
        swapped[[first, second]] = values[[second, first]]
        assert isolation._checksum(swapped) != original
    changed = values.clone()
    changed[98] += 1
    assert isolation._checksum(changed) != original
    assert isolation._checksum(torch.zeros(0)) == (0, 0)


def test_without_memory_for_copies_a_pass_that_trains_is_still_found(monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 1)
    engine, data = make_engine()
    replay = replay_of(engine, data)
    parameter = next(engine.module.parameters())

    def train(gradient):
        with torch.no_grad():
            parameter.sub_(0.1 * gradient)

    parameter.register_hook(train)
    assert replay.obstacle(agreed).endswith(", as it just did")


def test_nothing_of_a_repeated_forward_is_left_when_the_next_one_begins():
    """Its graph holds the activations of a micro-batch, for which a full GPU has no room beside the next one's."""
    engine, data = make_engine()
    replay = replay_of(engine, data)
    execute, graphs, left = replay._execute, [], []

    def watched(kind, arguments):
        left.append([graph() for graph in graphs if graph() is not None])
        execute(kind, arguments)
        if kind is Kind.FORWARD:
            graphs.append(weakref.ref(engine.pipe_buffers["outputs"][arguments["buffer_id"]]))
            graphs.append(weakref.ref(engine.loss))

    replay._execute = watched
    with replay.isolated():
        for _ in range(3):
            replay.prepare(0, Kind.FORWARD)
            replay.run(0, Kind.FORWARD)
    assert len(graphs) == 6
    assert left == [[], [], []]


def trained_on(engine, data, attempt):
    """Train, try to repeat passes, and train on; return losses, weights, and why passes cannot be repeated."""
    losses = []
    engine_batch = engine.train_batch
    engine.train_batch = lambda batch: losses.append(engine_batch(batch).item())
    replay = replay_of(engine, data)
    reason = attempt(engine, replay)
    for _ in range(3):
        engine.train_batch(data)
    return losses, weights(engine), reason


def out_of_memory(*_):
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    "keys",
    ALL_BUT_BF16,
)
@pytest.mark.parametrize("where", ["keeping", "forward", "backward"])
def test_a_gpu_without_memory_for_a_repeated_pass_trains_as_if_none_had_been_tried(monkeypatch, keys, where):
    losses, bits, _ = trained_on(*make_engine(keys), lambda engine, replay: None)

    def attempt(engine, replay):
        execute = replay._execute

        def fails(kind, arguments):
            if kind.value == where:
                out_of_memory()
            execute(kind, arguments)

        replay._execute = fails
        return replay.obstacle(agreed)

    if where == "keeping":
        monkeypatch.setattr("perseus_ds.engine.replay._copy", out_of_memory)
    after_losses, after_bits, reason = trained_on(*make_engine(keys), attempt)
    assert "memory" in reason
    assert losses == after_losses
    assert same(bits, after_bits)


def test_passes_are_repeated_only_where_every_rank_has_the_memory_for_it():
    engine, data = make_engine()
    replay = replay_of(engine, data)
    replay._execute = pytest.fail
    replay._spare_bytes = lambda: 0.0
    assert "training leaves 0 MiB" in replay.obstacle(agreed)
    replay._spare_bytes = lambda: math.inf
    assert replay.obstacle(lambda reason: "rank 3 has no memory") == "rank 3 has no memory"
