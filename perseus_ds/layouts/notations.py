"""How each engine writes a layout: ready to paste, and Megatron-Core's letters.

Megatron-Core writes a layout as a string of letters, one for each part, in which ``|`` ends a stage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import accumulate, chain, groupby

from perseus_ds.artifacts.layout import EMBEDDING, HEAD, MTP, Layout
from perseus_ds.artifacts.validation import brief
from perseus_ds.errors import ConfigError

_MOST_PARTS = 65_536
_LETTERS = {"E": EMBEDDING, "t": "decoder", "m": MTP, "L": HEAD}


def spelled(layout: Layout) -> str:
    """Return a layout in the notation of its engine, ready to paste."""
    match layout.engine:
        case "megatron":
            return f"--pipeline-model-parallel-layout '{megatron_layout(layout)}'"
        case "torch":
            names = [list(chain.from_iterable(part.names for part in parts)) for parts in layout.stages]
            return f"module_fqns_per_model_part = {json.dumps(names)}"
        case "deepspeed":
            layers = [sum(len(part.names) for part in parts) for parts in layout.stages]
            return _DEEPSPEED.format(parts=list(accumulate(layers, initial=0)))
        case "huggingface":
            layers = [sum(part.kind not in (EMBEDDING, HEAD) for part in parts) for parts in layout.stages]
            return f"cut={layers}"


def summary(layout: Layout) -> str:
    """Return the parts of each stage in Megatron-Core's letters, or their number for other engines."""
    return megatron_layout(layout) if layout.engine == "megatron" else " ".join(map(str, layout.cut))


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
    stages = []
    for parts in layout.stages:
        letters = [letter_of.get(part.kind.split()[0], "t") for part in parts]
        stages.append("".join(letters))
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
    with_mtp = []
    for stage, parts in enumerate(layout.cut_into(cut).stages):
        if any(part.kind.startswith(MTP) for part in parts):
            with_mtp.append(stage)
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
