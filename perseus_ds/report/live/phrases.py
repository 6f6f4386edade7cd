"""The facts of a job in words, for terminals: no characters but ASCII."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perseus_ds.report.live.facts import JobFacts
from perseus_ds.report.units import duration, joules, number, percent, watt_hours
from perseus_ds.report.words import policy_in_words

_PHASES = {
    "calibrate": "one iteration to calibrate the simulated GPU",
    "warm-up": "warming up at default clocks",
    "profile": "measuring a profile",
    "plan": "optimising, at default clocks",
    "default": "measuring default clocks, to compare plans with",
    "run": "running under plans",
    "pause": "paused: default clocks",
    "halt": "standing still until a cheaper hour",
    "observe": "default clocks",
    "verdict": "comparing plan and default clocks",
}
_ASCII = str.maketrans(
    {
        "\N{NARROW NO-BREAK SPACE}": " ",
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "\N{PLUS-MINUS SIGN}": "+/-",
        "\N{MULTIPLICATION SIGN}": "x",
    }
)
_MANY = 6
_MOST_PIPELINES = 16
_UNITS = ((86_400.0, "days"), (3_600.0, "h"), (60.0, "min"))


def plain(text: str) -> str:
    """Return a text in ASCII, as far as it is made of figures and plain words, without control characters."""
    return "".join(character if character.isprintable() else " " for character in text.translate(_ASCII))


def title(facts: JobFacts) -> str:
    """Return the job, its GPUs and its mode."""
    parts = [facts.gpu or "", f"{facts.mode} mode" if facts.mode else "", _starts(facts)]
    if facts.simulated and "simulated" not in (facts.gpu or ""):
        parts.append("SIMULATED")
    return plain(": ".join(part for part in (facts.name, ", ".join(filter(None, parts))) if part))


def state(facts: JobFacts) -> str:
    """Return whether the job runs, and at which step it is."""
    step = "no step yet" if facts.step is None else f"step {facts.step}"
    if facts.step is not None and facts.total_steps:
        step += f" of {facts.total_steps}"
    if facts.ended:
        return f"ended at {step}"
    ago = "" if facts.silent_s is None else f", {about(facts.silent_s)} ago"
    if facts.is_silent:
        return f"{step}{ago}: no record since; killed, or busy outside of iterations"
    return f"{step}{ago}"


def phase(facts: JobFacts) -> str:
    """Return what the job does, and what comes next."""
    if facts.phase is None:
        return "ended" if facts.ended else "starting"
    text = _PHASES.get(facts.phase) or plain(facts.phase)
    if facts.phase == "run" and facts.plan is not None:
        text = f"running under plan {facts.plan.plan}"
    if facts.next_phase is None:
        return text
    following = _PHASES.get(facts.next_phase) or plain(facts.next_phase)
    when = "" if facts.next_in_s is None else f" in about {about(facts.next_in_s)}" if facts.next_in_s >= 1 else " soon"
    return f"{text}; then{when}: {following}"


def about(time_s: float) -> str:
    """Return a time in whole units, as estimates need no more."""
    fitting = ((size, unit) for size, unit in _UNITS if time_s >= 2 * size)
    size, unit = next(fitting, (1.0, "s"))
    return f"{time_s / size:.0f} {unit}"


def end(facts: JobFacts) -> str:
    """Return when the job is done."""
    if facts.ended:
        return "ended"
    if facts.total_steps is None:
        return "not known: the policy names no total_steps"
    if facts.remaining_s is None:
        return "not known yet"
    return f"in about {about(facts.remaining_s)}"


def promised(facts: JobFacts) -> str:
    """Return what the plan promises."""
    plan = facts.plan
    return "" if plan is None else _changes(plan.promised_slowdown, plan.promised_saving)


def real(facts: JobFacts) -> str:
    """Return how the plan runs."""
    plan = facts.plan
    if plan is None or plan.slowdown is None:
        return "no iteration yet that is typical of it"
    return f"{_changes(plan.slowdown, plan.saving)} (typical of {plan.iterations} iterations)"


def compared_with(facts: JobFacts) -> str:
    """Return what savings are relative to."""
    return "default clocks, " + ("as measured in this job" if facts.default_measured else "by the profile")


def energy(facts: JobFacts) -> str:
    """Return time and energy so far."""
    text = f"{plain(joules(facts.energy_j))} ({plain(watt_hours(facts.energy_j))}) in {facts.iterations} iterations"
    text += f", {plain(duration(facts.time_s))}"
    if facts.without_energy:
        text += f"; the energy of {facts.without_energy} could not be read"
    return text


def saved(facts: JobFacts) -> str:
    """Return what the plans saved so far, profiling not counted."""
    if not facts.planned:
        return "nothing yet: no iteration under a plan"
    share = percent(-facts.saved_j / facts.default_j)
    energy = f"{plain(joules(abs(facts.saved_j)))} {'saved' if facts.saved_j >= 0 else 'more used'}"
    time = f"{plain(duration(abs(facts.gained_s)))} {'gained' if facts.gained_s >= 0 else 'lost'}"
    return f"{energy} ({plain(share)}), {time}, in {facts.planned} iterations under plans"


def profiling(facts: JobFacts) -> str:
    """Return what profiling took; empty if there was none."""
    if not facts.profiling_s and not facts.profiling_j:
        return ""
    amounts = ((facts.profiling_s, duration), (facts.profiling_j, joules))
    parts = (f"{plain(write(abs(value)))} {'less' if value < 0 else 'more'}" for value, write in amounts)
    return " and ".join(parts)


def pipelines(facts: JobFacts) -> list[str]:
    """Return energy and saving of each pipeline, if there are several."""
    if len(facts.pipelines) < 2:
        return []
    shown = [
        f"{each.pipeline}: {plain(joules(each.energy_j))}"
        + (f", {plain(joules(each.saved_j))} saved" if facts.planned else "")
        for each in facts.pipelines[:_MOST_PIPELINES]
    ]
    rest = facts.pipelines[_MOST_PIPELINES:]
    if rest:
        energies_j = [each.energy_j for each in rest]
        least, most = plain(joules(min(energies_j))), plain(joules(max(energies_j)))
        shown.append(f"{rest[0].pipeline} to {rest[-1].pipeline}: {least} to {most} each")
    return shown


def clocks(facts: JobFacts) -> str:
    """Return the clocks asked for, and the ranks that do not reach theirs."""
    if not any(facts.clocks_asked_mhz):
        return "default"
    return f"{asked_for(facts)} asked for, {reached(facts)}"


def asked_for(facts: JobFacts) -> str:
    """Return the range of the clocks that GPUs were asked for."""
    asked = [clock for clock in facts.clocks_asked_mhz if clock is not None]
    return f"{min(asked)} to {max(asked)} MHz" if len(set(asked)) > 1 else f"{asked[0]} MHz"


def reached(facts: JobFacts) -> str:
    """Return which ranks do not reach the clock that they were asked for."""
    below = [
        f"rank {rank} at {facts.clocks_reached_mhz[rank]} of {facts.clocks_asked_mhz[rank]} MHz"
        for rank in facts.ranks_below_their_clock
    ]
    more = f" and {len(below) - _MANY} more" if len(below) > _MANY else ""
    return f"not reached: {', '.join(below[:_MANY])}{more}" if below else "reached by all ranks"


def straggler(facts: JobFacts) -> str:
    """Return the pipeline that the others wait for."""
    if facts.straggler is None:
        return "none"
    return f"pipeline {facts.straggler} takes {number(facts.straggler_slowdown, 3)} times as long as the others"


def problems(facts: JobFacts) -> str:
    """Return what does not work; empty if nothing."""
    ranks = ", ".join(map(str, facts.failed_ranks[:_MANY]))
    more = max(0, len(facts.failed_ranks) - _MANY) + facts.more_failed_ranks
    return f"fallen back to default clocks: rank {ranks}{f' and {more} more' if more else ''}" if ranks else ""


def policy(facts: JobFacts) -> str:
    """Return the policy."""
    return plain(policy_in_words(facts.policy)).removeprefix("policy ") if facts.policy else "none"


def sentences(facts: JobFacts, asked: Mapping[str, Any]) -> Iterator[str]:
    """Yield the facts as sentences.

    Args:
        facts: The facts.
        asked: What users have asked the running job for: ``paused`` and ``policy``.
    """
    yield f"{title(facts)}; {state(facts)}."
    yield f"Now: {phase(facts)}."
    yield f"End of the training: {end(facts)}."
    yield f"Policy: {policy(facts.model_copy(update={'policy': asked.get('policy', facts.policy)}))}; " + (
        "paused." if asked.get("paused") else "not paused."
    )
    if facts.plan is not None:
        yield f"Plan {facts.plan.plan}, against {compared_with(facts)}:"
        yield f"  promised  {promised(facts)}"
        yield f"  real      {real(facts)}"
    if facts.iteration_s is not None:
        power = "" if facts.power_w is None else f" at {facts.power_w:.0f} W"
        yield f"An iteration takes {plain(duration(facts.iteration_s))}{power}."
    yield f"So far: {energy(facts)}."
    yield f"Saved so far: {saved(facts)}."
    if profiling(facts):
        yield f"Profiling took {profiling(facts)} than training at default clocks."
    for text in pipelines(facts):
        yield f"Pipeline {text}."
    yield f"Clocks: {clocks(facts)}."
    yield f"Straggler: {straggler(facts)}."
    if problems(facts):
        yield f"Problem: {problems(facts)}."
    if facts.events:
        yield f"Last event: {plain(facts.events[-1].text)}."


def _starts(facts: JobFacts) -> str:
    return f"{facts.starts} starts" if facts.starts > 1 else ""


def _changes(slowdown: float | None, saving: float | None) -> str:
    time = "time not known" if slowdown is None else f"{percent(slowdown)} time"
    energy = "energy not known" if saving is None else f"{percent(-saving)} energy"
    return plain(f"{time}, {energy}")
