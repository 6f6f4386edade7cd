"""Perseus attaches to a client's engine without changing the client's own code."""

import json
import logging
from collections import Counter
from pathlib import Path

import deepspeed
import pytest
import run_log
import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from one_rank_engine import batches, config, module, one_rank
from tiny_models import tiny, token_ids

import perseus_ds
from perseus_ds.client.clocks import AgentClocks
from perseus_ds.client.runtime import PerseusRuntime
from perseus_ds.config import misspelt_block
from perseus_ds.engines.deepspeed.engine import attach_if_configured
from perseus_ds.engines.engine import sessions
from perseus_ds.errors import ConfigError
from perseus_ds.huggingface.stages import build_stage

LONGEST_S = 0.001


@pytest.fixture(scope="module", autouse=True)
def _process_group(tmp_path_factory):
    with one_rank(tmp_path_factory.mktemp("rank")):
        yield


@pytest.fixture(autouse=True)
def _leaves_no_session():
    yield
    left = sessions()
    for session in left:
        session.close()
    assert not left, "the test has not closed its engine"


@pytest.fixture
def block(tmp_path):
    """Observe on a simulated GPU whose instructions take almost no time."""
    simulated = {"longest_instruction_s": LONGEST_S, "counter_period_s": 0.001}
    return {"mode": "observe", "device": "simulated", "output_dir": str(tmp_path / "perseus"), "simulated": simulated}


@pytest.fixture
def make(request):
    """A function that makes an engine, which is closed at the end of the test."""
    engines = []

    def make(initialize=perseus_ds.initialize, **keys):
        torch.manual_seed(3)
        model = module()
        engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=config(**keys))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        if hasattr(engine, "perseus"):
            engine.perseus.close()


def records(block):
    return run_log.records(Path(block["output_dir"]))


def iterations(block):
    return run_log.iterations(records(block))


def train(engine, steps=3, seed=0):
    torch.manual_seed(seed)  # for dropout
    data = batches(seed)
    return [engine.train_batch(data).item() for _ in range(steps)]


def test_an_engine_class_that_a_client_has_put_into_deepspeed_is_used(make, block, monkeypatch):
    class MyEngine(PipelineEngine):
        steps_taken = 0

        def train_batch(self, *args, **kwargs):
            self.steps_taken += 1
            return super().train_batch(*args, **kwargs) * 2

    monkeypatch.setattr(deepspeed, "PipelineEngine", MyEngine)
    plain = make(deepspeed.initialize)
    engine = make(perseus=block)
    assert isinstance(engine, MyEngine)
    assert type(engine).__name__ == "MyEngine"
    assert train(engine) == train(plain)
    assert engine.steps_taken == 3


def test_detach_leaves_the_engine_as_it_was(make, block):
    plain = make(deepspeed.initialize)
    engine = make(deepspeed.initialize, perseus=block)
    before = set(vars(engine))
    assert perseus_ds.attach(engine) is engine
    assert perseus_ds.attach(engine) is engine
    perseus_ds.detach(engine)
    assert type(engine) is PipelineEngine
    assert set(vars(engine)) == before
    assert train(engine) == train(plain)
    assert perseus_ds.detach(engine) is engine


def test_a_block_that_is_disabled_attaches_nothing(make, block):
    engine = make(perseus={**block, "enabled": False})
    assert type(engine) is PipelineEngine
    assert type(perseus_ds.attach(engine)) is PipelineEngine


def test_a_misspelt_block_is_named_with_the_right_key(make, block, caplog):
    assert type(make(persues=block)) is PipelineEngine
    expected = 'perseus: the block "persues" of the DeepSpeed config is not used. Rename it to "perseus".'
    assert caplog.messages == [expected]


@pytest.mark.parametrize("key", ["persues", "Perseus", "perseus_ds", "perseus_config"])
def test_only_keys_that_resemble_the_blocks_are_taken_for_it(key):
    assert misspelt_block(["train_batch_size", key]) == key
    assert misspelt_block(["train_batch_size", "pipeline", "flops_profiler"]) is None


def test_the_launcher_reports_a_job_without_settings(make, block, caplog):
    attach_if_configured(make(perseus={**block, "enabled": False}), is_launched=True)
    attach_if_configured(make())
    assert not caplog.messages
    attach_if_configured(make(), is_launched=True)
    assert caplog.messages == [
        'perseus: the job trains without Perseus: its DeepSpeed config has no block "perseus", and the variable '
        "PERSEUS is not set."
    ]


def test_a_model_without_stages_is_refused_with_what_to_do(block):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"the model is a Linear, expected a deepspeed\.pipe\.PipelineModule"):
        perseus_ds.initialize(model=model, model_parameters=list(model.parameters()), config=config(perseus=block))


def test_a_clients_initialize_on_top_of_perseuss_in_place_of_deepspeeds_does_not_recurse(make, block, monkeypatch):
    ours = perseus_ds.initialize
    monkeypatch.setattr(deepspeed, "initialize", lambda **named: tuple(ours(**named)))
    for initialize in (deepspeed.initialize, perseus_ds.initialize):
        engine = make(initialize, perseus=block)
        assert train(engine, 1)
        assert hasattr(engine, "perseus")


def test_a_wrong_goal_before_the_first_step_is_an_error_at_once(make, block):
    with pytest.raises(ConfigError, match="fastest"):
        make(perseus=block).perseus.set_goal({"fastest": True})


def test_evaluations_also_of_another_engine_are_no_iterations_and_run_at_default_clocks(make, block, monkeypatch):
    """A policy model trains, and a reference model only evaluates."""
    reference, plain = make(perseus=block), make(deepspeed.initialize)
    engine = make(perseus=block)
    expected = train(plain)
    data, losses, pauses = batches(), [], []
    torch.manual_seed(0)
    for _ in range(3):
        losses.append(engine.train_batch(data).item())
        with monkeypatch.context() as patched:
            patched.setattr(AgentClocks, "pause", lambda _: pauses.append(None))
            reference.eval_batch(batches(9))
            engine.eval_batch(batches(5))
    assert losses == expected
    assert len(pauses) == 6
    assert reference.perseus.runtime is None
    engine.perseus.close()
    assert len(iterations(block)) == 3
    assert records(block)[0]["engines"] == ["PipelineModule", "PipelineModule"]


def test_the_schedule_object_of_the_client_is_left_as_it_was(make, block):
    kept = schedule.TrainSchedule(micro_batches=2, stages=1, stage_id=0)

    class Caching(PipelineEngine):
        def train_batch(self, data):
            self.set_dataiterator(data)
            self.total_loss = None
            self._compute_loss = True
            self.module.train()
            self._exec_schedule(iter(kept))
            kept.it = None
            return self._aggregate_total_loss()

    engine = make(deepspeed.initialize, perseus=block)
    engine.__class__ = Caching
    perseus_ds.attach(engine)
    data = batches()
    for _ in range(2):
        engine.train_batch(data)
    assert "steps" not in vars(kept)
    engine.perseus.close()
    assert len(iterations(block)) == 2


def test_a_client_that_evaluates_within_a_batch_and_looks_at_steps_trains_as_without_perseus(make, block):
    class Evaluating(PipelineEngine):
        def train_batch(self, data):
            with torch.no_grad():
                self._exec_schedule(schedule.InferenceSchedule(0, stages=1, stage_id=0))
            return super().train_batch(data)

        def _exec_schedule(self, pipe_schedule):
            assert all(len(step) for step in pipe_schedule.steps())
            super()._exec_schedule(pipe_schedule)

    engine = make(deepspeed.initialize, perseus=block)
    engine.__class__ = Evaluating
    expected = train(engine)
    engine = make(deepspeed.initialize, perseus=block)
    engine.__class__ = Evaluating
    assert train(perseus_ds.attach(engine)) == expected
    assert [type(operation).__name__ for operation in engine.perseus.runtime.schedule.ranks[0]].count("Compute") == 5
    engine.perseus.close()
    assert len(iterations(block)) == 3


def test_an_engine_that_compiles_its_layers_compiles_as_without_perseus(make, block):
    compiled, losses = [], []
    for initialize in (deepspeed.initialize, perseus_ds.initialize):
        graphs = []

        def backend(graph, _, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        engine = make(initialize, perseus=block)
        for layer in engine.module.forward_funcs:
            layer.compile(backend=backend)
        losses.append(train(engine, 2))
        compiled.append(len(graphs))
    assert losses[0] == losses[1]
    assert compiled[0] == compiled[1] > 0


def test_every_trained_token_of_a_hugging_face_model_has_the_same_weight_and_its_iterations_are_reported(block):
    model = perseus_ds.pipeline_module(tiny("llama"), num_stages=1)
    engine, *_ = perseus_ds.initialize(
        model=model, model_parameters=list(model.parameters()), config=config(perseus=block)
    )
    pairs = [(ids, ids.clone()) for ids in token_ids(2).split(2)]
    pairs[0][1][:, :9] = -100
    trained = sum((labels[:, 1:] != -100).sum() for _, labels in pairs)
    whole = build_stage(tiny("llama"), (4,), 0).model
    expected = sum(whole(ids, labels=labels, num_items_in_batch=trained).loss for ids, labels in pairs)
    assert engine.train_batch(iter(pairs)).item() == pytest.approx(expected.item(), rel=1e-5)
    engine.perseus.close()
    assert len(iterations(block)) == 1


def test_the_block_is_read_where_deepspeed_reads_its_config_and_the_variable_replaces_its_keys(
    block, tmp_path, monkeypatch
):
    path = tmp_path / "config.json"
    path.write_text("// a comment, which hjson allows\n" + json.dumps(config(perseus={**block, "mode": "auto"})))
    monkeypatch.setenv("PERSEUS", json.dumps({"max_drift": 0.5, "mode": "observe"}))
    model = module()
    engine, *_ = perseus_ds.initialize(model=model, model_parameters=list(model.parameters()), config=str(path))
    settings = engine.perseus.config
    engine.perseus.close()
    assert (settings.mode, settings.max_drift, settings.output_dir) == ("observe", 0.5, block["output_dir"])


def loads_first(self):
    """Steps patched by a client: all micro-batches are loaded before the first forward."""
    slots = range(self.micro_batches)
    yield [schedule.LoadMicroBatch(slot) for slot in slots]
    for slot in slots:
        yield [schedule.ForwardPass(slot), schedule.BackwardPass(slot)]
    yield [schedule.ReduceTiedGrads(), schedule.ReduceGrads(), schedule.OptimizerStep()]


def test_patches_after_initialize_are_used(make, block, monkeypatch):
    """As diffusion-pipe and EasyLLM do."""
    engine, calls = make(perseus=block), []
    train_batch, reduce_grads = PipelineEngine.train_batch, PipelineEngine._INSTRUCTION_MAP[schedule.ReduceGrads]
    monkeypatch.setattr(schedule.TrainSchedule, "steps", loads_first)
    monkeypatch.setitem(
        PipelineEngine._INSTRUCTION_MAP, schedule.ReduceGrads, lambda *_: (calls.append("reduce"), reduce_grads(*_))
    )
    monkeypatch.setattr(PipelineEngine, "train_batch", lambda *_: (calls.append("train"), train_batch(*_))[1])
    train(engine, 1)
    (stream,) = engine.perseus.runtime.schedule.ranks
    assert [type(operation).__name__ for operation in stream] == ["Load"] * 2 + ["Compute"] * 5
    assert calls == ["train", "reduce"]


def test_batch_sizes_set_between_steps_count(make, block):
    """The first is set before the first step, as by EasyLLM. The schedule of another one is read at once."""
    plain = make(deepspeed.initialize)
    engine = make(perseus={**block, "mode": "auto", "cache": False})
    losses = []

    def received():
        engine.perseus.runtime._receive()
        return True

    for trained in (plain, engine):
        torch.manual_seed(0)
        data = batches()
        trained.set_train_batch_size(16)
        losses.append([])
        for step in range(6):
            if step == 3:
                trained.set_train_batch_size(8)
            if trained is engine and step == 4:
                run_log.wait_until(
                    lambda: received() and engine.perseus.runtime._unread, "the server requests the schedule"
                )
            if trained is engine and step == 5:
                run_log.wait_until(lambda: received() and 1 in engine.perseus.runtime._numbers.values(), "it is known")
            losses[-1].append(trained.train_batch(data).item())
    assert losses[0] == losses[1]
    assert engine.perseus.runtime.schedule.micro_batches == 4
    engine.perseus.close()
    found = [(record["order"], record["phase"]) for record in iterations(block)]
    assert {order for order, _ in found[:3]} == {None}
    assert {phase for _, phase in found[:3]} <= {"calibrate", "warm-up"}
    assert [order for order, _ in found[3:]] in ([255, 1, 1], [255, 255, 1])


def test_the_steps_of_a_checkpoint_count_and_the_goal_of_the_last_start_stays(make, block, tmp_path):
    def goals():
        return [r["goal"] for r in records(block) if r.get("event") in ("command", "goal") and r["goal"]]

    engine = make(perseus={**block, "mode": "auto", "cache": False})
    engine.perseus.set_goal({"max_slowdown": None})
    train(engine, 2)
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    engine.perseus.close()
    assert goals() == [{"max_slowdown": None}]
    resumed = make(perseus={**block, "mode": "auto", "cache": False})
    train(resumed, 1)
    path, _ = resumed.load_checkpoint(str(tmp_path / "checkpoint"))
    assert path is not None
    train(resumed, 1)
    resumed.perseus.close()
    assert iterations(block)[-1]["iteration"] == 3
    assert goals() == [{"max_slowdown": None}] * 2


def test_of_two_engines_that_train_only_the_first_is_measured(make, block, caplog):
    first, second = make(perseus=block), make(perseus=block)
    with caplog.at_level(logging.WARNING):
        assert train(first, 2) == train(second, 2)
    assert caplog.text.count("trains two engines") == 1
    assert second.perseus.runtime is None
    first.perseus.close()
    assert len(iterations(block)) == 2


def test_forwards_are_reported_with_the_shapes_of_their_inputs(make, block, monkeypatch):
    """The work of a simulated GPU depends on them."""
    engine = make(perseus=block)
    shapes, inputs, operation = [], [], PerseusRuntime.operation
    monkeypatch.setattr(PerseusRuntime, "operation", lambda *made: inputs.append(made[2:]) or operation(*made))
    for rows in ((4, 4), (4, 6), (6, 4), (6, 6)):
        engine.reset_activation_shape()
        engine.train_batch(iter([next(batches(sizes=(count,))) for count in rows]))
        shapes.append(Counter(inputs))
        inputs.clear()
    assert shapes[1] == shapes[2]
    assert len({frozenset(found.items()) for found in shapes}) == 3
