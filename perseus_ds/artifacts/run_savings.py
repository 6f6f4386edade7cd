"""Savings, and what trials of plans have shown, as records and all outputs contain and describe them.

``policy/trial.py`` says how plans are compared with default clocks, and ``savings.py`` what a saving is.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from perseus_ds.units import duration, joules, number, percent, plain

VERDICTS: Mapping[str, str] = {
    "good": "certain",
    "unknown": "undecided",
    "late": "harmful",
    "costs energy": "harmful",
    "saves nothing": "useless",
}
"""Verdicts of a trial, with the word that describes a saving of such plans."""
NO_ORDER = 255
"""The number of all orders without plans, which run at default clocks."""


class TrialState(BaseModel):
    """What the trial of the present plans knows (``policy/trial.py``)."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    pairs: int = Field(0, description="Number of pairs of blocks that were compared.")
    verdict: str = Field("unknown", description="`good`, `late`, `costs energy`, `saves nothing` or `unknown`.")
    slowdown: float | None = Field(
        None,
        description="Change of time as a fraction of that at default clocks; null if there are fewer than three pairs.",
    )
    slowdown_error: float | None = Field(None, description="Its error, which is exceeded in at most 5 % of the cases.")
    saved: float | None = Field(
        None,
        description="Saving of energy as a fraction of that at default clocks; null if there are fewer than "
        "three pairs.",
    )
    saved_error: float | None = Field(None, description="Its error, which is exceeded in at most 5 % of the cases.")

    @property
    def word(self) -> str:
        """Whether the saving is certain, in one word."""
        return VERDICTS.get(self.verdict, "undecided")

    @property
    def is_undecided(self) -> bool:
        """True if it is not known whether the plans are good."""
        return self.word == "undecided"

    @property
    def certainty(self) -> str:
        """Whether the saving is certain, with the number of pairs or the reason."""
        if self.is_undecided:
            return f"undecided after {self._pairs_in_words} of blocks"
        return self.word if self.word == "certain" else f"{self.word} ({self.verdict})"

    @property
    def energy(self) -> str:
        """The change of energy with its error. Only the number of pairs while it is undecided."""
        if self.saved is None or self.is_undecided:
            return self._pairs_in_words
        return with_error(-self.saved, self.saved_error)

    @property
    def time(self) -> str:
        """The change of time with its error. Only the number of pairs while it is undecided."""
        if self.slowdown is None or self.is_undecided:
            return self._pairs_in_words
        return with_error(self.slowdown, self.slowdown_error)

    @property
    def _pairs_in_words(self) -> str:
        return f"{self.pairs} pair{'' if self.pairs == 1 else 's'}"


class SavingSummary(TrialState):
    """A saving compared with default clocks, as all outputs show it.

    Errors are exceeded in at most 5 % of the cases.
    """

    iterations: int = Field(description="Iterations that it covers.")
    stalls: int = Field(0, description="Iterations of these that are not compared, because they contain a stall.")
    saved_j: float = Field(description="Energy saved compared with default clocks [J]; negative if more was used.")
    gained_s: float = Field(description="Time saved [s]; negative if the iterations took longer.")
    saved: float | None = Field(
        None, description="Energy saved, as a fraction of that at default clocks; none as long as plans are undecided."
    )
    slowdown: float | None = Field(
        None, description="Change of time as a fraction; 0.01 is 1 % longer; none as long as plans are undecided."
    )
    by_profile: bool = Field(False, description="Whether default clocks are predicted by the profile, not measured.")

    @property
    def baseline(self) -> str:
        """Default clocks, with which the iterations are compared, in words."""
        return "default clocks by the profile" if self.by_profile else "default clocks of this job"

    def in_words(self) -> str:
        """Return a description in one line, with per cents once they are known."""
        text = self.certainty if self.is_undecided else f"{self.energy} energy, {self.time} time: {self.certainty}"
        text += f", compared with {self.baseline}" if self.by_profile else ""
        return plain(text + (f", {self.stalls} with stalls not compared" if self.stalls else ""))


class TokenSummary(BaseModel):
    """Energy and throughput by token, of iterations under plans or otherwise of those at default clocks."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    energy_j: float = Field(description="Energy of a token [J].")
    per_s: float = Field(description="Tokens per second.")
    default_energy_j: float = Field(description="Energy of a token at default clocks [J].")
    default_per_s: float = Field(description="Tokens per second at default clocks.")
    under_plans: bool = Field(description="Whether these are iterations under plans.")

    def in_words(self) -> str:
        """Return a description in one line."""
        default = f"{number(self.default_energy_j)} J a token, {number(self.default_per_s)} tokens/s at default clocks"
        if not self.under_plans:
            return plain(default)
        return plain(f"{number(self.energy_j)} J a token, {number(self.per_s)} tokens/s under plans; {default}")


class PlanSummary(BaseModel):
    """Iterations under one plan, compared with default clocks."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    plan: int = Field(description="Line of `frontier.csv`.")
    order: int = Field(0, description="Number of its order.")
    iterations: int = Field(description="Iterations under it.")
    saved_j: float = Field(description="Energy saved compared with default clocks [J].")
    gained_s: float = Field(description="Time saved [s].")


class OrderSummary(BaseModel):
    """Iterations of one order of passes."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    order: int = Field(0, description="Number of the order; 0 for the first.")
    micro_batches: int | None = Field(None, description="Number of micro-batches; null if unknown.")
    iterations: int = Field(0, description="Its iterations.")
    planned: int = Field(0, description="Number of these that ran under plans.")
    saved_j: float = Field(0.0, description="Energy saved by these compared with default clocks [J].")
    gained_s: float = Field(0.0, description="Time saved by these [s].")

    @property
    def name(self) -> str:
        if self.order == NO_ORDER:
            return "other orders"
        return f"{self.micro_batches} micro-batches" if self.micro_batches is not None else f"order {self.order}"

    def in_words(self) -> str:
        text = f"{self.name}: {self.planned} of {self.iterations} iterations under plans"
        return f"{text}, {against_default_clocks(-self.gained_s, -self.saved_j)}" if self.planned else text


def changes(
    slowdown: float | None, saved: float | None, slowdown_error: float | None = None, saved_error: float | None = None
) -> str:
    """Return a description of changes compared with default clocks, with errors. What is None is unknown."""
    time = "time unknown" if slowdown is None else f"{with_error(slowdown, slowdown_error)} time"
    energy = "energy unknown" if saved is None else f"{with_error(-saved, saved_error)} energy"
    return f"{time}, {energy}"


def with_error(change: float, error: float | None) -> str:
    """Return a relative change with its error."""
    if error is None:
        return percent(change)
    value, unit = percent(change).split()
    return f"{value} \N{PLUS-MINUS SIGN} {100 * error:.1f}\N{NARROW NO-BREAK SPACE}{unit}"


def against_default_clocks(extra_s: float, extra_j: float) -> str:
    """Return a description of additional time and energy compared with default clocks."""
    parts = [(duration(abs(extra_s)), extra_s < 0), (joules(abs(extra_j)), extra_j < 0)]
    words = " and ".join(f"{amount} {'less' if less else 'more'}" for amount, less in parts)
    return plain(f"{words} than at default clocks")
