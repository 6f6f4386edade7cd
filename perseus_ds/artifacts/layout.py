"""A layout: the parts of a model on each pipeline stage, and its spelling for each engine.

A *part* is moved between stages as a whole: the embedding, a layer, a multi-token prediction (MTP) layer, or the head
with the loss. Parts of one *kind* have the same costs. Megatron-Core writes a layout as a string of letters in which
``|`` ends a stage. Stages are in the order of the model: the second stages of all ranks follow the first ones of all.
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
from perseus_ds.artifacts.validation import MOST_STAGES, Text, brief
from perseus_ds.errors import ConfigError

EngineName = Literal["megatron", "torch", "deepspeed", "huggingface"]
EMBEDDING, DENSE, MOE, MTP, HEAD = "embedding", "dense", "moe", "mtp", "head"
_MOST_PARTS = 65_536
_LETTERS = {"E": EMBEDDING, "t": "decoder", "m": MTP, "L": HEAD}


def kind_of_layer(classes: Iterable[type]) -> str:
    """Return the kind of a layer, given the classes of its modules."""
    return MOE if any(re.search("moe|experts", each.__name__, re.IGNORECASE) for each in classes) else DENSE


class Part(FileModel):
    """A part of a model: its kind, the names of its modules in the engine, and its parameters on this rank.

    The kind is ``embedding``, ``dense``, ``moe``, ``mtp``, ``head`` or the name of a class.
    """

    kind: Annotated[Text, Field(pattern=r"^[^\s\x00-\x1f\x7f-\x9f][^\x00-\x1f\x7f-\x9f]*$")]
    names: list[Text] = Field(default_factory=list)
    parameters: Annotated[int, Field(ge=0)] = 0


class Layout(FileModel):
    """The parts of each stage, with stages in the order of the model.

    ``tied`` is true if the embedding and the head share a weight.
    """

    engine: EngineName
    stages: Annotated[list[list[Part]], Field(min_length=1, max_length=MOST_STAGES)]
    tied: bool = False

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

    def spelled(self) -> str:
        """Return the layout in the notation of its engine, ready to paste."""
        match self.engine:
            case "megatron":
                return f"--pipeline-model-parallel-layout '{megatron_layout(self)}'"
            case "torch":
                names = [list(chain.from_iterable(part.names for part in parts)) for parts in self.stages]
                return f"module_fqns_per_model_part = {json.dumps(names)}"
            case "deepspeed":
                layers = [sum(len(part.names) for part in parts) for parts in self.stages]
                return _DEEPSPEED.format(parts=list(accumulate(layers, initial=0)))
            case "huggingface":
                return f"cut={[sum(part.kind not in (EMBEDDING, HEAD) for part in parts) for parts in self.stages]}"

    def summary(self) -> str:
        """Return the parts of each stage in Megatron-Core's letters, or their number for other engines."""
        return megatron_layout(self) if self.engine == "megatron" else " ".join(map(str, self.cut))


def _joined(parts: Sequence[Part], counts: Mapping[str, int]) -> Iterator[Part]:
    for single, group in groupby(parts, lambda part: counts[part.kind] == 1):
        own = list(group)
        if single and len(own) > 1:
            names = list(chain.from_iterable(part.names for part in own))
            kind = "+".join(part.kind for part in own)
            yield Part(kind=kind, names=names, parameters=sum(part.parameters for part in own))
        else:
            yield from own


_DEEPSPEED = """\
class Balanced(PipelineModule):  # in place of PipelineModule, with the same arguments
    def _partition_layers(self, method="uniform"):
        self.parts = {parts}
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])"""


def megatron_layout(layout: Layout) -> str:
    """Return a layout in Megatron-Core's letters, with repetitions abbreviated."""

    def abbreviated(stage: str) -> str:
        runs = [(letter, len(list(same))) for letter, same in groupby(stage)]
        return "".join(f"{letter}*{times}" if times > 2 else letter * times for letter, times in runs)

    letter_of = {kind: letter for letter, kind in _LETTERS.items()}
    stages = ["".join(letter_of.get(part.kind.split()[0], "t") for part in parts) for parts in layout.stages]
    runs = [(text, len(list(same))) for text, same in groupby(map(abbreviated, stages))]
    # The last stage has no bar at its end, so it is not part of a repetition.
    last, count = runs.pop()
    if count > 1:
        runs.append((last, count - 1))
    return "".join(f"({text}|)*{times}" if times > 2 else f"{text}|" * times for text, times in runs) + last


def stages_of_megatron(text: str) -> list[str]:
    """Return the letters of each stage of a Megatron-Core layout, with repetitions expanded."""

    def repeat(found: re.Match[str]) -> str:
        if len(found[1]) * int(found[2]) > _MOST_PARTS:
            raise ConfigError(f"layout {brief(text)!r}: {brief(found[0])} repeats too often.")
        return found[1] * int(found[2])

    letters = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^()]+)\)\*(\d{1,5})", r"([A-Za-z|])\*(\d{1,5})"):
        letters = re.sub(pattern, repeat, letters)
    if unknown := sorted(set(letters) - {*_LETTERS, "|"}):
        known = "E (embedding), t (decoder layer), m (MTP layer), L (head and loss), | between stages, and x*n or (…)*n"
        raise ConfigError(f"layout {brief(text)!r}: {unknown[0]!r} is not a known letter; expected {known}.")
    return letters.split("|")


def cut_of_megatron(text: str, layout: Layout) -> tuple[int, ...]:
    """Return the number of parts on each stage of a Megatron-Core layout, which must fit the model."""
    stages = stages_of_megatron(text)
    letters = "".join(stages)
    own = "".join(stages_of_megatron(megatron_layout(layout))).replace("|", "")
    for letter, meaning in (("E", "embeddings"), ("t", "decoder layers"), ("m", "MTP layers"), ("L", "heads")):
        if letters.count(letter) != own.count(letter):
            raise ConfigError(
                f"layout {brief(text)!r} has {letters.count(letter)} {meaning} ({letter}), the model "
                f"{own.count(letter)}. Give each part of the model exactly once."
            )
    if letters != own:
        raise ConfigError(
            f"layout {brief(text)!r}: Megatron-Core has the embedding first, then decoder layers, MTP layers, and the "
            "loss last (E, t, m, L). Write them in this order."
        )
    if "" in stages:
        raise ConfigError(f"layout {brief(text)!r}: stage {stages.index('')} is empty. Give each stage a part.")
    return tuple(map(len, stages))


def check_cut_of_megatron(layout: Layout, cut: Sequence[int], ranks: int) -> None:
    """Raise a ConfigError with the rule if Megatron-Core does not support a cut."""
    if len(cut) % ranks:
        raise ConfigError(
            f"The layout has {len(cut)} stages for {ranks} pipeline ranks. Megatron-Core requires the same number of "
            "stages on each rank: give a multiple."
        )
    with_mtp = [s for s, parts in enumerate(layout.cut_into(cut).stages) if any(p.kind.startswith(MTP) for p in parts)]
    if with_mtp and (len(with_mtp) > 1 or with_mtp[0] < len(cut) - ranks):
        raise ConfigError(
            f"The layout has MTP layers on the stages {', '.join(map(str, with_mtp))}. Megatron-Core keeps all of them "
            "on one stage, which is the last of its rank."
        )


def default_cut_of_megatron(
    layout: Layout,
    stages: int,
    ranks: int,
    *,
    accounts_for_embedding: bool = False,
    accounts_for_loss: bool = False,
) -> tuple[int, ...]:
    """Return Megatron-Core's default cut, with equally many decoder layers on each stage of all ranks.

    The embedding counts as a layer with ``account_for_embedding_in_pipeline_split``, and head and loss do with
    ``account_for_loss_in_pipeline_split``.

    Raises:
        ConfigError: If the layers do not divide evenly. The message names the rule.
    """
    kinds = [part.kind.split()[0] for part in layout.parts]
    ends = (EMBEDDING, MTP, HEAD)
    layers = sum(kind not in ends for kind in kinds)
    counted = layers + accounts_for_embedding + accounts_for_loss
    if counted % stages:
        per_rank = stages // ranks
        rule = "num_layers must be divisible by pipeline_model_parallel_size"
        if counted % ranks == 0:
            rule = "the layers of a rank must be divisible by virtual_pipeline_model_parallel_size"
        raise ConfigError(
            f"{counted} layers do not divide among {ranks} ranks with {per_rank} stages each: in Megatron-Core {rule}. "
            "Give a layout, or another number of stages."
        )
    cut = [counted // stages] * stages
    cut[0] += kinds.count(EMBEDDING) - accounts_for_embedding
    cut[-1] += sum(kind in (MTP, HEAD) for kind in kinds) - accounts_for_loss
    return tuple(cut)
