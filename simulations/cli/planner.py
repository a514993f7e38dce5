"""`lacquer plan`: what can be expected of these settings, and which others have more signal for the same budget."""

import json
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from simulations.cli.exits import refusals
from simulations.cli.progress import say_working
from simulations.report.notation import delta_text, number_text, plain_table

if TYPE_CHECKING:
    from server.config.schema import RunConfig
    from simulations.planning.choices import Advice, Choice, Situation
    from simulations.planning.signal import Agreement

_LEGEND = (
    "S = sqrt(T) a m / (z sqrt(d)): how long the signal of the whole run is beside its noise. It says nothing of the "
    "clip threshold, of the learning rate, or whether so many rounds are enough."
)


def plan_command(
    preset: Annotated[str, typer.Argument(help="A preset (see `lacquer presets`) or a TOML file.")] = "quickstart",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key, such as privacy.epsilon=2. Repeatable."),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Number of clients, or of protected records of one site, N.")
    ] = None,
    records: Annotated[
        int | None, typer.Option("--records-per-client", min=1, help="Records of a client, on average.")
    ] = None,
    labels: Annotated[int | None, typer.Option(min=2, help="Classes of a classification.")] = None,
    cost: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most client updates (record gradients) of a run.", show_default="four times as many as now"
        ),
    ] = None,
    agreement: Annotated[
        float | None, typer.Option(help="Agreement a of one client's update with the mean, in (0, 1].")
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(help="Measure a in the releases of this run folder.", exists=True, file_okay=False),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder in which relative data files are looked for.", show_default=".")
    ] = None,
    correlated: Annotated[
        bool, typer.Option("--correlated", help="What noise correlated over rounds buys against independent noise.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Choose rounds, sampling rate and what is trained, before anything is spent; refuse what is hopeless.

    With --clients, --records-per-client and --labels no data are read, so it can be asked before there are any.
    """
    here = Path.cwd()
    sys.path.append(str(here))  # a user's own methods are found beside their work, and shadow nothing
    with refusals(ValueError):
        if agreement is not None and like is not None:
            raise ValueError("give --agreement or --like, not both: each says what a is")
        from simulations.presets.asked import ask

        asked = ask(preset, settings or [], {}, here, data or here)
        if asked.phases is not None or asked.run.several_sites or asked.run.is_deployed:
            raise ValueError(
                f"{preset}: clients of a simulation, or the records of one site, are planned; for several sites plan "
                "each by itself (clients = 1), for phases each private phase"
            )
        console = Console()
        if correlated:
            _say_correlated(asked.run, clients, console, as_json=as_json)
            return
        if (noise := asked.run.privacy.noise_correlation) != "none":
            raise ValueError(
                f"privacy.noise-correlation = {noise!r}: S adds up noise that is independent from round to round; plan "
                "with --set privacy.noise-correlation=none, then see --correlated"
            )
        if asked.run.site.sampling_level != "user":
            raise ValueError(
                "site.sampling-level = 'example': S is of units that are drawn whole; plan with "
                "--set site.sampling-level=user"
            )
        from simulations.planning.choices import advise

        with say_working("calibrating"):
            situation = _situation(asked.run, clients, records, labels, cost, agreement, like)
            advice = advise(situation)
    if as_json:
        typer.echo(json.dumps(_plain(situation, advice), indent=2))
    else:
        console.print(_page(situation, advice))
        chosen = {**advice.best.pace.settings, **advice.best.trained.settings}
        options = " ".join(f"--set {shlex.quote(f'{key}={value}')}" for key, value in chosen.items())
        console.print(f"  lacquer run {shlex.quote(preset)} {options}", markup=False, highlight=False, soft_wrap=True)


def _situation(
    config: "RunConfig",
    clients: int | None,
    records: int | None,
    labels: int | None,
    cost: int | None,
    agreement: float | None,
    like: Path | None,
) -> "Situation":
    """Describe what is to be planned; the data say what was not given."""
    from simulations.planning.choices import Situation, changed_settings
    from simulations.planning.signal import default_agreement, given_agreement, measured_agreement

    if clients is not None and not config.is_single_site:
        config = changed_settings(config, {"clients": clients})
    population = clients or (0 if config.is_single_site else config.clients)
    known = records is not None or config.is_single_site or agreement is not None or like is not None
    if not population or not known or (labels is None and config.model.task == "classification"):
        from client.data.prepare import prepare
        from client.record_level.units import UnitIndex
        from server.runs.assembly import data_spec

        found = prepare(data_spec(config))
        labels = labels or found.num_labels
        records = records or max(1, round(len(found.train) / config.clients))
        if config.is_single_site and not population:
            population = len(UnitIndex.of(found.train, grouped=config.privacy.unit == "group"))
    if config.is_single_site:
        size = 1.0 if config.privacy.unit == "record" else float(max(1, config.site.records_per_unit))
    else:
        most = config.local.max_steps * config.local.batch_size or math.inf
        size = float(min(records or 1, most))
    chosen: Agreement
    if like is not None:
        chosen = measured_agreement(like)
    elif agreement is not None:
        chosen = given_agreement(agreement)
    else:
        chosen = default_agreement(config.model.task, size)
    now = config.site.batch_size * config.rounds if config.is_single_site else config.expected_cohort * config.rounds
    return Situation(config, population, labels or 2, chosen, cost or round(4 * now))


def _say_correlated(config: "RunConfig", clients: int | None, console: Console, *, as_json: bool) -> None:
    """Print what every number of bands and of buffers costs a run with these clients, rate and rounds."""
    from simulations.cli.calibrate.correlated import page, plain_prices

    if config.privacy.unit != "client" or config.privacy.trust != "server":
        raise ValueError(
            "--correlated is of clients whose sum a server gives noise, got "
            f"privacy.unit = {config.privacy.unit!r} and privacy.trust = {config.privacy.trust!r}"
        )
    privacy = config.privacy
    asked = (privacy.epsilon, privacy.delta, clients or config.clients, config.sampling_rate, config.rounds)
    with say_working("calibrating"):
        found = plain_prices(*asked) if as_json else page(*asked)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        console.print(found)


def _plain(situation: "Situation", advice: "Advice") -> dict[str, Any]:
    config = situation.config
    return {
        "population": situation.population,
        "unit": config.unit,
        "epsilon": config.privacy.epsilon,
        "delta": config.privacy.delta,
        "agreement": situation.agreement.value,
        "agreement_source": situation.agreement.source,
        "cost_limit": situation.limit,
        "recommended": _row(advice.best),
        "why": advice.why,
        "expected_share": _expected(config, advice),
        "trained": [_row(one) for one in advice.sizes],
        "paces": [_row(one) for one in advice.paces],
    }


def _expected(config: "RunConfig", advice: "Advice") -> tuple[float, float] | None:
    """The share of the way that the recommended choice should cover, where it was measured: language models."""
    from simulations.planning.signal import expected_share

    return None if config.model.task == "classification" else expected_share(advice.best.signal)


def _gain(config: "RunConfig", advice: "Advice") -> str:
    """Say what the recommended choice should add to public records alone."""
    expected = _expected(config, advice)
    if expected is None:
        return (
            "What it adds to public records alone is not predicted for classifiers; a run that starts from them "
            "(public.warm-start-epochs) measures it."
        )
    return (
        f"Expect {expected[0]:.0%} to {expected[1]:.0%} of the way from public records alone to training without "
        "noise, as far as a is right and public.warm-start-epochs starts from those records."
    )


def _row(one: "Choice") -> dict[str, Any]:
    pace, trained = one.pace, one.trained
    return {
        "trained": trained.name,
        "dimension": trained.dimension,
        "sampling_rate": pace.rate,
        "rounds": pace.rounds,
        "expected_cohort": pace.cohort,
        "noise_multiplier": pace.noise_multipliers[0],
        "signal_to_noise": one.signal,
        "cost": pace.cost,
        "settings": {**pace.settings, **trained.settings},
    }


def _page(situation: "Situation", advice: "Advice") -> RenderableType:
    config, best = situation.config, advice.best
    site = config.is_single_site
    units = config.units_text if site else "clients"
    headline = (
        f"Epsilon {number_text(config.privacy.epsilon)} at delta {delta_text(config.privacy.delta)}: "
        f"{situation.population:,} {units}, {config.model.name}, agreement a = "
        f"{number_text(round(situation.agreement.value, 3))} ({situation.agreement.source})"
    )
    sizes = plain_table()
    for name, side in (("Trained", "left"), ("values d", "right"), ("S", "right"), ("", "left")):
        sizes.add_column(name, justify=side)  # type: ignore[arg-type]
    for one in advice.sizes:
        chosen = one is best
        sizes.add_row(
            one.trained.name,
            f"{one.trained.dimension:,}",
            f"{one.signal:.2f}",
            "recommended" if chosen else "",
            style="bold" if chosen else "",
        )
    paces = plain_table()
    for name in ("Rate q", "cohort m", "rounds T", "noise z", "S", "gradients" if site else "client updates"):
        paces.add_column(name, justify="right")
    for one in sorted(advice.paces, key=lambda one: -one.signal)[:8]:
        pace = one.pace
        paces.add_row(
            f"{pace.rate:.4g}",
            number_text(pace.cohort),
            f"{pace.rounds:,}",
            f"{pace.noise_multipliers[0]:.4g}",
            f"{one.signal:.2f}",
            f"{pace.cost:,}",
            style="bold" if pace is best.pace else "",
        )
    return Group(
        Text(headline, style="bold"),
        Padding(Text(f"At rate {best.pace.rate:.4g} and {best.pace.rounds} rounds:"), (1, 0, 0, 0)),
        Padding(sizes, (0, 0, 1, 2)),
        Text(f"Training {best.trained.name}, at most {situation.limit:,} updates:"),
        Padding(paces, (0, 0, 1, 2)),
        Padding(Text(_LEGEND, style="dim"), (0, 0, 1, 2)),
        Text(f"Recommended: {best.trained.name}, because {advice.why}.", style="bold"),
        Text(_gain(config, advice)),
    )
