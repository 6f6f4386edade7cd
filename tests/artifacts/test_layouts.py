"""Layouts that are recorded from the parts of all ranks."""

from perseus_ds.artifacts.layout import Layout, Part


def test_layers_of_deepspeed_that_come_once_are_one_part_with_their_neighbours():
    kinds = [["Embedding", "Positions", "Block", "Block"], ["Block", "LayerNorm", "head"]]
    ranks = [{stage: [Part(kind=kind, names=[kind]) for kind in own]} for stage, own in enumerate(kinds)]
    found = Layout.of_ranks("deepspeed", ranks)
    assert [part.kind for part in found.parts] == ["Embedding+Positions", "Block", "Block", "Block", "LayerNorm+head"]
    assert [len(part.names) for part in found.parts] == [2, 1, 1, 1, 2]


def test_layouts_of_ranks_are_put_together_and_sizes_are_kinds():
    small, large = Part(kind="dense", parameters=4), Part(kind="dense", parameters=9)
    found = Layout.of_ranks("megatron", [{0: [small], 2: [large]}, {1: [small], 3: [large]}])
    assert [part.kind for part in found.parts] == ["dense", "dense", "dense 2", "dense 2"]
    assert Layout.of_ranks("megatron", [{0: [small]}, {2: [small]}]) is None
