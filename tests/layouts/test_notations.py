"""Layouts in the notation of engines, compared with Megatron-Core's own parser."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from perseus_ds.artifacts.layout import Layout, Part
from perseus_ds.errors import ConfigError
from perseus_ds.layouts.notations import (
    check_cut_of_megatron,
    cut_of_megatron,
    default_cut_of_megatron,
    megatron_layout,
    spelled,
    stages_of_megatron,
)

LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def layout(*stages, engine="megatron"):
    """Return a layout, given the parts of each stage, such as ``embedding dense*3``."""
    parts = []
    for stage in stages:
        own = []
        for word in stage.split():
            kind, _, count = word.partition("*")
            own += [Part(kind=kind)] * int(count or 1)
        parts.append(own)
    return Layout(engine=engine, stages=parts)


def of_megatron(text):
    """Read a layout with Megatron-Core's own code."""
    return [
        "".join(LETTERS[kind.name] for kind in stage) for stage in PipelineParallelLayerLayout.parse_str_to_list(text)
    ]


@st.composite
def cuts(draw):
    cut = draw(st.lists(st.integers(1, 5), min_size=2, max_size=12))
    mtp = draw(st.integers(0, min(2, cut[-1] - 1)))
    return layout(f"embedding {'dense ' * (sum(cut) - 2 - mtp)} {'mtp ' * mtp} head").cut_into(cut)


@given(cuts())
def test_megatron_reads_the_layouts_that_are_written(found):
    text = megatron_layout(found)
    assert of_megatron(text) == stages_of_megatron(text)
    assert cut_of_megatron(text, found) == found.cut


def test_a_published_layout_is_read_as_by_megatron():
    text = "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"
    assert stages_of_megatron(text) == of_megatron(text)


MODEL = layout("embedding dense*3", "moe*4 mtp head")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Et*3|x*4,mL", "'x' is not a known letter; expected E"),
        ("Et*3|t*5,mL", "has 8 decoder layers .*the model 7"),
        ("Et*3|t*4L", "has 0 MTP layers .*the model 1"),
        ("t*3,E|t*4,mL", "the embedding first"),
        ("Et*7||mL", "stage 1 is empty"),
        ("(t*99999)*99999", "repeats too often"),
    ],
)
def test_layouts_that_do_not_fit_are_named(text, problem):
    with pytest.raises(ConfigError, match=problem):
        cut_of_megatron(text, MODEL)


def test_rules_of_megatron_are_named():
    with pytest.raises(
        ConfigError, match=r"7 layers do not divide among 2 ranks .*divisible by pipeline_model_parallel"
    ):
        default_cut_of_megatron(MODEL, 2, 2)
    with pytest.raises(ConfigError, match=r"8 layers do not divide among 2 ranks with 3 .*virtual_pipeline"):
        default_cut_of_megatron(layout("embedding dense*8 head"), 6, 2)
    assert default_cut_of_megatron(MODEL, 2, 2, accounts_for_embedding=True) == (4, 6)
    with pytest.raises(ConfigError, match="3 stages for 2 pipeline ranks"):
        check_cut_of_megatron(MODEL, (3, 3, 4), 2)
    with pytest.raises(ConfigError, match=r"MTP layers on the stages 0\. .*the last of its rank"):
        check_cut_of_megatron(MODEL, (9, 1), 1)


def test_each_engine_has_its_notation():
    assert spelled(layout("embedding dense*2", "dense*3 head")) == "--pipeline-model-parallel-layout 'Ett|t*3L'"
    names = [Part(kind="embedding", names=["tok_embeddings"]), Part(kind="dense", names=["layers.0"])]
    names.append(Part(kind="head", names=["norm", "output"]))
    torchtitan = spelled(Layout(engine="torch", stages=[names]).cut_into([1, 2]))
    assert json.loads(torchtitan.partition(" = ")[2]) == [["tok_embeddings"], ["layers.0", "norm", "output"]]
    assert spelled(layout("embedding dense*2", "dense*3 head", engine="huggingface")) == "cut=[2, 3]"
    ranks = [Part(kind=f"Block {number}", names=[f"{2 * number}", f"{2 * number + 1}"]) for number in range(3)]
    of_deepspeed = Layout(engine="deepspeed", stages=[ranks]).cut_into((1, 2))
    assert "self.parts = [0, 2, 6]" in spelled(of_deepspeed)
