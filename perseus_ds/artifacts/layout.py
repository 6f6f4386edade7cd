"""A layout: the parts of a model on each pipeline stage, as recorded in ``profile.json``.

A *part* is moved between stages as a whole: the embedding, a layer, a multi-token prediction (MTP) layer, or the head
with the loss. Parts of one *kind* have the same costs. Stages are in the order of the model: the second stages of all
ranks follow the first ones of all.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, groupby
from typing import Annotated, Literal

from pydantic import Field

from perseus_ds.artifacts.io import FileModel
from perseus_ds.artifacts.validation import MOST_STAGES, Text

EngineName = Literal["megatron", "torch", "deepspeed", "huggingface"]
EMBEDDING, DENSE, MOE, MTP, HEAD = "embedding", "dense", "moe", "mtp", "head"


def kind_of_layer(classes: Iterable[type]) -> str:
    """Return the kind of a layer, given the classes of its modules."""
    return MOE if any(re.search("moe|experts", each.__name__, re.IGNORECASE) for each in classes) else DENSE


class Part(FileModel):
    """A part of a model: its kind, the names of its modules in the engine, and its parameters on this rank."""

    kind: Annotated[Text, Field(pattern=r"^[^\s\x00-\x1f\x7f-\x9f][^\x00-\x1f\x7f-\x9f]*$")] = Field(
        description="`embedding`, `dense`, `moe`, `mtp`, `head` or a class's name; with a number if sizes differ."
    )
    names: list[Text] = Field(default_factory=list, description="Names of its modules.")
    parameters: Annotated[int, Field(ge=0)] = Field(0, description="Number of its parameters on one rank.")


class Layout(FileModel):
    """The parts of each stage, with stages in the order of the model."""

    engine: EngineName = Field(description="`megatron`, `torch`, `deepspeed` or `huggingface`.")
    stages: Annotated[list[list[Part]], Field(min_length=1, max_length=MOST_STAGES)] = Field(
        description="The parts of each stage."
    )
    tied: bool = Field(False, description="Whether the embedding and the head share a weight.")

    @classmethod
    def of_ranks(
        cls, engine: EngineName, ranks: Iterable[Mapping[int, Sequence[Part]]], *, tied: bool = False
    ) -> Layout | None:
        """Return the layout of the stages of all ranks, or None if the parts of a stage are unknown.

        Parts of one kind with different numbers of parameters become separate kinds. Adjacent parts with unique kinds,
        such as DeepSpeed's layers for tokens and positions, become one part.
        """
        by_stage = {stage: parts for rank in ranks for stage, parts in rank.items()}
        if not by_stage or sorted(by_stage) != list(range(len(by_stage))):
            return None
        sizes: dict[str, list[int]] = {}
        stages = []
        for stage in range(len(by_stage)):
            named = []
            for part in by_stage[stage]:
                known = sizes.setdefault(part.kind, [])
                if part.parameters not in known:
                    known.append(part.parameters)
                number = known.index(part.parameters)
                named.append(part.model_copy(update={"kind": f"{part.kind} {number + 1}"}) if number else part)
            stages.append(named)
        if engine == "deepspeed":
            counts = Counter(part.kind for parts in stages for part in parts)
            stages = [list(_joined(parts, counts)) for parts in stages]
        return cls(engine=engine, stages=stages, tied=tied)

    @property
    def parts(self) -> list[Part]:
        return list(chain.from_iterable(self.stages))

    @property
    def cut(self) -> tuple[int, ...]:
        """Number of parts on each stage."""
        return tuple(map(len, self.stages))

    def cut_into(self, cut: Sequence[int]) -> Layout:
        """Return the layout of the same parts with the given number on each stage."""
        parts = self.parts
        ends = list(accumulate(cut))
        stages = [parts[end - count : end] for count, end in zip(cut, ends, strict=True)]
        return self.model_copy(update={"stages": stages})


def encode_parts(by_stage: Mapping[int, Sequence[Part] | None]) -> dict[int, bytes]:
    """Return the parts of stages as JSON, without stages whose parts are unknown."""
    encoded = {}
    for stage, parts in by_stage.items():
        if parts is not None:
            encoded[stage] = json.dumps([part.model_dump(mode="json") for part in parts]).encode()
    return encoded


def decode_parts(by_stage: Mapping[int, bytes]) -> dict[int, list[Part]]:
    """Return the parts of stages from what :func:`encode_parts` returns."""
    decoded = {}
    for stage, content in by_stage.items():
        decoded[stage] = [Part.model_validate(part) for part in json.loads(content)]
    return decoded


def _joined(parts: Sequence[Part], counts: Mapping[str, int]) -> Iterator[Part]:
    for single, group in groupby(parts, lambda part: counts[part.kind] == 1):
        own = list(group)
        if single and len(own) > 1:
            names = list(chain.from_iterable(part.names for part in own))
            kind = "+".join(part.kind for part in own)
            yield Part(kind=kind, names=names, parameters=sum(part.parameters for part in own))
        else:
            yield from own
