"""What a run came to, in words: how it ended, what it guarantees, how long it took."""

from simulations.report.notation import delta_text, duration_text, epsilon_text
from simulations.report.read_run import Run

_STATE_TEXTS = {
    "completed": "Completed",
    "stopped-budget": "Stopped by its privacy budget",
    "failed": "Failed",
    "running": "Still running, or interrupted",
    "preparing": "Preparing, or interrupted",
    "unknown": "State unknown",
}


def state_text(run: Run) -> str:
    """How the run stands, as a person says it."""
    return _STATE_TEXTS.get(run.state, run.state)


def guaranteed(run: Run) -> tuple[float, float] | None:
    """The epsilon and delta that hold for the run; None if nothing guarantees anything."""
    if run.not_private or run.guarantee is None or "epsilon" not in run.guarantee:
        return None
    return float(run.guarantee["epsilon"]), float(run.guarantee["delta"])


def guarantee_sentence(run: Run) -> str:
    """The guarantee in one sentence."""
    guarantee = run.guarantee or {}
    if run.not_private and not guarantee.get("not_private"):
        return f"This run is NOT PRIVATE: {run.not_private}."
    if not guarantee:
        return "There is no readable ledger, so nothing can be said about privacy."
    return str(guarantee["sentence"])


def privacy_text(run: Run) -> str:
    """The guarantee as one pair of numbers, with what of it is spent if that is less."""
    if run.not_private:
        return "none"
    pair = guaranteed(run)
    if pair is None:
        return "unknown"
    used = spent_text(run)
    return f"epsilon at most {epsilon_text(pair[0])} at delta {delta_text(pair[1])}" + (f", {used}" if used else "")


def selective_text(run: Run) -> str:
    """What phases give besides where there is no guarantee at record level; "" if nothing does."""
    guarantee = run.guarantee or {}
    if guarantee.get("kind") != "selective":
        return ""
    epsilon, delta = float(guarantee["selective_epsilon"]), float(guarantee["delta"])
    return f"at record level; selective-DP: ε ≤ {epsilon_text(epsilon)} at δ = {delta_text(delta)}"


def spent_text(run: Run) -> str:
    """ "1.46 spent" if the run has spent less than it is guaranteed to stay within, else empty."""
    pair, spent = guaranteed(run), (run.guarantee or {}).get("epsilon_spent")
    if pair is None or spent is None or epsilon_text(spent) == epsilon_text(pair[0]):
        return ""
    return f"{epsilon_text(spent)} spent"


def resumed_text(run: Run) -> str:
    """How often and after which rounds the run was interrupted and resumed, and at what cost; empty if it never was."""
    if not run.resumed:
        return ""
    rounds = ", ".join(str(max(resumed.round, 0)) for resumed in run.resumed)
    word = "round" if len(run.resumed) == 1 else "rounds"
    times = "once" if len(run.resumed) == 1 else f"{len(run.resumed)} times"
    text = f"It was interrupted and resumed {times}, after {word} {rounds}."
    if lost := run.resumed[-1].lost:
        which = "1 release was" if lost == 1 else f"{lost} releases were"
        text += f" {which} lost after the charge: the budget stands spent, so the run may end that many rounds earlier."
    if code := sorted({change for resumed in run.resumed for change in resumed.code}):
        text += f" It resumed with other code: {'; '.join(code)}."
    return text


def training_time(run: Run) -> str | None:
    """Wall time of the whole run, or of the rounds if the run did not get to its end."""
    seconds = run.result("seconds")
    if seconds is None and run.metrics:
        seconds = sum(record.seconds for record in run.metrics)
    return None if seconds is None else duration_text(seconds)
