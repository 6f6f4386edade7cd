"""The parts of each stage that engines find in models."""

from types import SimpleNamespace

import one_rank_engine
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from tiny_models import tiny
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perseus_ds.artifacts.layout import Layout, Part
from perseus_ds.engines.layers import parts_of_gpt, parts_of_module, parts_of_pipeline_module
from perseus_ds.huggingface.stages import build_stage
from perseus_ds.layouts.notations import spelled

WIDTH = 4


class Block(nn.Module):
    def __init__(self, feed_forward=nn.Linear):
        super().__init__()
        self.feed_forward = feed_forward(WIDTH, WIDTH)


class MoE(nn.Linear):
    pass


class Wrapper(nn.Module):
    """As Megatron's ``Float16Module`` and ``DistributedDataParallel``."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class Titan(nn.Module):
    """The part of a torchtitan model that is left on a rank."""

    def __init__(self, layers, *, first=False, last=False):
        super().__init__()
        self.tok_embeddings = nn.Embedding(8, WIDTH) if first else None
        self.layers = nn.ModuleDict({str(index): Block(MoE if index > 1 else nn.Linear) for index in layers})
        self.norm = nn.LayerNorm(WIDTH) if last else nn.Identity()
        self.output = nn.Linear(WIDTH, 8, bias=False) if last else None


def found(parts):
    return [(part.kind, part.names) for part in parts]


def test_modules_of_torchtitan_keep_their_names():
    first = parts_of_module(Titan(range(2), first=True), is_first=True, is_last=False)
    assert found(first) == [("embedding", ["tok_embeddings"]), ("dense", ["layers.0"]), ("dense", ["layers.1"])]
    middle = parts_of_module(Titan(range(2, 3)), is_first=False, is_last=False)
    assert found(middle) == [("moe", ["layers.2"])]
    last = parts_of_module(Titan([], last=True), is_first=False, is_last=True)
    assert found(last) == [("head", ["norm", "output"])]
    assert [part.parameters for part in last] == [2 * WIDTH + 8 * WIDTH]


def test_modules_around_the_layers_of_a_stage_between_two_others_are_no_known_parts():
    for stage in (Titan(range(1, 2), first=True), Titan(range(1, 2), last=True)):
        assert parts_of_module(stage, is_first=False, is_last=False) is None


def test_layers_of_a_later_stage_of_deepspeed_have_their_numbers_in_the_whole_model():
    module = SimpleNamespace(forward_funcs=[Block(), nn.Linear(WIDTH, 8)], parts=[0, 3, 5], stage_id=1)
    assert found(parts_of_pipeline_module(module)) == [("Block", ["3"]), ("Linear", ["4"])]


def test_the_children_of_a_sequential_are_its_parts():
    module = nn.Sequential(nn.Embedding(8, WIDTH), Block(), nn.Linear(WIDTH, 8))
    parts = parts_of_module(module, is_first=True, is_last=True)
    assert found(parts) == [("embedding", ["0"]), ("dense", ["1"]), ("Linear", ["2"])]


def test_a_module_without_a_list_of_layers_has_no_known_parts():
    module = nn.Module()
    module.encoder, module.decoder = nn.ModuleList([Block()]), nn.ModuleList([Block()])
    assert parts_of_module(module, is_first=True, is_last=True) is None


def test_chunks_of_megatron_have_embedding_layers_mtp_and_head():
    def layer(mlp):
        result = nn.Module()
        result.mlp = mlp
        return result

    model = nn.Module()
    model.pre_process, model.post_process, model.embedding = True, True, nn.Embedding(8, WIDTH)
    model.decoder, model.mtp = nn.Module(), nn.Module()
    model.decoder.layers = nn.ModuleList([layer(nn.Linear(WIDTH, WIDTH)), layer(MoE(WIDTH, WIDTH))])
    model.mtp.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
    model.output_layer = nn.Linear(WIDTH, 8)
    wrapped = Wrapper(Wrapper(model))
    assert [part.kind for part in parts_of_gpt(wrapped)] == ["embedding", "dense", "moe", "mtp", "head"]
    assert parts_of_gpt(nn.Linear(WIDTH, WIDTH)) is None


@pytest.mark.integration
def test_layers_of_a_pipeline_module_are_its_parts(tmp_path):
    with one_rank_engine.one_rank(tmp_path):
        parts = parts_of_pipeline_module(one_rank_engine.module(layers=3))
    assert [(part.kind, part.names) for part in parts] == [("Layer", [str(index)]) for index in range(3)]
    assert parts[0].parameters > 0


@pytest.mark.integration
def test_the_class_that_is_printed_for_deepspeed_cuts_as_it_says(tmp_path):
    layout = Layout(engine="deepspeed", stages=[[Part(kind="Layer", names=[str(n)]) for n in range(3)]])
    names = {"PipelineModule": PipelineModule}
    exec(spelled(layout), names)
    with one_rank_engine.one_rank(tmp_path):
        module = names["Balanced"]([LayerSpec(one_rank_engine.Layer) for _ in range(3)], num_stages=1)
    assert module.parts == [0, 3]
    assert len(module.forward_funcs) == 3


@pytest.fixture
def _one_rank(tmp_path):
    with one_rank_engine.one_rank(tmp_path):
        yield


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(
    "wraps", [(torch.compile,), (DistributedDataParallel,), (DistributedDataParallel, torch.compile)]
)
def test_parts_of_wrapped_stages_are_those_of_the_stages(wraps):
    def wrap(module):
        for wrapper in wraps:
            module = wrapper(module)
        return module

    plain = Titan(range(2), first=True)
    parts = parts_of_module(plain, is_first=True, is_last=False)
    assert parts_of_module(wrap(plain), is_first=True, is_last=False) == parts
    stage = build_stage(tiny("llama"), (4,), 0)
    assert parts_of_module(wrap(stage), is_first=True, is_last=True) == stage.layout_parts
