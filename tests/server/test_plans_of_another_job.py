"""In run mode, plans that were made for something else are an error before training."""

from dataclasses import replace

import pytest
from virtual.job import SLOWER, VirtualJob

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.layout import Layout, Part
from perseus_ds.errors import PlanError
from perseus_ds.server.frontiers import load_frontier


def layout(*layers, engine="torch"):
    return Layout(engine=engine, stages=[[Part(kind="dense", parameters=10)] * count for count in layers])


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A job that has computed plans."""
    job = VirtualJob(tmp_path_factory.mktemp("planned"), mode="auto", **SLOWER)
    job.train_until("run")
    job.close()
    return job


def test_plans_for_another_gpu_are_refused(planned, tmp_path):
    with pytest.raises(PlanError, match=r"another GPU: .*A100.*This job has .*H100"):
        VirtualJob(tmp_path, mode="run", frontier=str(planned.folder), device="h100-sxm")


@pytest.mark.parametrize(
    ("planned_for", "trained", "named"),
    [
        ({"model": "GPT"}, {"model": "Bert"}, "another model: GPT\\. This job has Bert"),
        ({"layout": layout(3)}, {"layout": layout(4)}, "3 parts with 30 parameters. This job has 4 parts with 40"),
        ({"layout": layout(3)}, {"layout": layout(3, engine="deepspeed")}, "engine: torch. This job has deepspeed"),
    ],
)
def test_plans_for_another_model_layout_or_engine_are_refused(planned, tmp_path, planned_for, trained, named):
    job, frontier = planned.server.job, Frontier.load(planned.folder)
    unknown = job.info.model_copy(update={"model": None, "layout": None})
    provenance = frontier.provenance.model_copy(update=planned_for)
    path = replace(frontier, provenance=provenance).save(tmp_path)
    load_frontier(replace(job, info=unknown), path)
    load_frontier(replace(job, info=unknown.model_copy(update=planned_for)), path)
    with pytest.raises(PlanError, match=named):
        load_frontier(replace(job, info=unknown.model_copy(update=trained)), path)
