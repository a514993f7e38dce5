"""Tables of docs/results/{faults,scale}.md: bad replies, faults survived, images, what clients cost the SuperLink."""

from collections.abc import Mapping
from typing import Any

from simulations.benchmarks.harness.markdown import Columns, distinct, markdown, written
from simulations.report.notation import duration_text

Results = Mapping[str, Any]

_KINDS = {
    "absent": "a record, a setting or everything is missing",
    "broken_bytes": "array cut off, or its header changed",
    "failed": "error replies whose text quotes data",
    "huge": "megabytes where bytes belong, hundreds of names",
    "mutated": "random bytes of the whole message changed",
    "norm_above_one": "more than one clipped update, up to the largest integers",
    "not_finite": "NaN and infinities, as floats or as their bits",
    "other_code": "of a client that runs other code",
    "replayed": "an honest reply of the round before",
    "surplus": "further records, arrays, settings, metrics",
    "unasked": "sent twice, in another node's name, to a message of before",
    "wrong_dtype": "other number types, undeclared types, pickles",
    "wrong_names": "arrays under other names",
    "wrong_round": "another round, or none",
    "wrong_shape": "other shapes, and shapes that are declared but not there",
}


def bad_replies(result: Results) -> str:
    """One line per kind of bad reply."""
    lines = [(_KINDS[kind], f"{count:,}") for kind, count in sorted(result["kinds"].items())]
    outcome = (
        f"{result['refused']:,} were refused, {result['unparsable']} had no form that Flower can read, "
        f"{result['honest_looking']} of the randomly changed ones had become possible replies and were counted within "
        f"their bound; {result['crashes']} crashes in {result['rounds']} rounds. "
        f"Seed {result['seed']}; machine: {result['machine']}; commit `{result['commit']}`."
    )
    total = ("**all**", f"**{result['replies']:,}**")
    return f"{markdown(('kind of reply', 'tried'), [*lines, total], 'lr')}\n{outcome}\n"


def soak(result: Results) -> str:
    """One column per leg of the soak run."""

    def each(key: str) -> Any:
        return lambda leg: f"{leg[key]:,}" if isinstance(leg.get(key), int) else str(leg.get(key, "none"))

    def faults(part: str) -> Any:
        def text(leg: Results) -> str:
            named = (name + (f" ×{count}" if count > 1 else "") for name, count in leg.get(part, {}).items())
            return ", ".join(named) or "none"

        return text

    def memory(leg: Results) -> str:
        if "rss_rounds" not in leg:
            return "not followed"
        return (
            f"{leg['rss_first_mb']} MB after 1, {leg['rss_middle_mb']} after {leg['rss_rounds'] // 2}, "
            f"{leg['rss_last_mb']} after {leg['rss_rounds']} rounds"
            f" ({leg['rss_growth_mb_per_100_rounds']:+.2f} MB per 100 rounds in the second half)"
        )

    rows: Columns = {
        "rounds planned and paid for": each("rounds_planned"),
        "rounds released": each("rounds_released"),
        "kill -9": faults("kills"),
        "faults of nodes": faults("faults"),
        "ended by a failed round": each("ended_by_a_fault"),
        "resumes": each("resumes"),
        "charges in the ledger": each("charges"),
        "charged, and lost with the process": each("charged_and_lost"),
        "rounds released without a charge (lost in the ledger)": each("lost_rounds_in_the_ledger"),
        "ε that the ledger states": "{epsilon_stated:.4f}",
        "ε of all its charges, computed anew": "{epsilon_of_all_charges:.4f}",
        "ε of the released rounds alone": "{epsilon_of_the_rounds_kept:.4f}",
        "adapter loads with PEFT": lambda leg: "yes" if leg["adapter_loads"] else "no",
        "memory of the longest-lived process": memory,
        "time": lambda leg: duration_text(leg["seconds"]),
    }
    legs = result["legs"]
    lines = [(name, *written(text, legs)) for name, text in rows.items()]
    machines = "; ".join(distinct(legs, "machine"))
    commits = ", ".join(f"`{commit}`" for commit in distinct(legs, "commit"))
    return f"{markdown(('', *(leg['engine'] for leg in legs)), lines, 'lr')}\nMachine: {machines}; commit {commits}.\n"


def soak_containers(result: Results) -> str:
    """One column per run of the soak of a deployment."""

    def size(key: str) -> Any:
        return lambda leg: f"{leg[key][0]:.0f} MB, {max(leg[key]):.0f} MB"

    def counted(key: str, words: str) -> Any:
        return lambda leg: ", ".join(f"{count:,} {words} {name}" for name, count in leg[key].items()) or "none"

    rows: Columns = {
        "rounds planned and paid for": "{rounds_planned}",
        "rounds released": "{rounds_released}",
        "faults": lambda leg: "; ".join(leg["faults"]),
        "ends of containers that were caused": lambda leg: str(sum(leg["killed"].values())),
        "ends of clients' own, each named in its log": lambda leg: str(sum(leg["ended_by_themselves"].values())),
        "resumes": "{resumes}",
        "charges in the ledger": "{charges}",
        "charged and lost": "{charged_and_lost}",
        "rounds released without a charge (lost in the ledger)": "{lost_rounds_in_the_ledger}",
        "ε that the ledger states": "{epsilon_stated:.4f}",
        "ε of all its charges, computed anew": "{epsilon_of_all_charges:.4f}",
        "rounds with all three clients connected": lambda leg: str(leg["rounds_by_connected_clients"].get("3", 0)),
        "longest wait for a round after a fault": lambda leg: (
            f"{leg['longest_wait'][1]:.0f} s ({leg['longest_wait'][0]})"
        ),
        "calls that the gateway answered with other than success": counted("answers", "with"),
        "SuperLink's database: first, largest": size("database_mb"),
        "... after a restart of the SuperLink": "{database_after_restart_mb:.1f} MB",
        "SuperLink's memory: first, largest": size("superlink_mb"),
        "executor's memory: first, largest": size("executor_mb"),
        "time": lambda leg: duration_text(leg["seconds"]),
    }
    legs = result["legs"]
    names = (f"messages of {leg['message_mb']:.2g} MB" for leg in legs)
    lines = [(name, *written(text, legs)) for name, text in rows.items()]
    machines = "; ".join(distinct(legs, "machine"))
    commits = ", ".join(f"`{commit}`" for commit in distinct(legs, "commit"))
    loads = ", ".join(f"{leg['load']:.0f}" for leg in legs)
    return (
        f"{markdown(('', *names), lines, 'lr')}\n"
        f"Three clients were online {legs[0]['stack_seconds']} s after the first `docker compose up -d`. "
        f"Machine: {machines}, busy with other work (load {loads}); commit {commits}.\n"
    )


def deployment_cost(result: Results) -> str:
    """What idle clients and rounds cost the SuperLink."""
    asking, still, run = result["asking"], result["still"], result.get("run")
    cpu = [part["cpu_seconds"] / part["seconds"] for part in (asking, still)]
    client = (cpu[0] - cpu[1]) / result["clients"]
    call = client / (1 / 3 + 1 / 20)
    rows = {
        "CPU of an idle client": f"{1000 * client:.1f} ms a second",
        "idle clients that fill a core (computed)": f"{(1 - cpu[1]) / client:,.0f}",
        "CPU of a call (computed: a poll every 3 s, a heartbeat every 20 s)": f"{1000 * call:.0f} ms",
        "CPU without clients: executor, health check": f"{1000 * cpu[1]:.0f} ms a second",
        "all clients are online after the first `docker compose up -d`": f"{result['stack_seconds']} s",
    }
    text = f"{asking['seconds']:.0f} s with idle clients, {still['seconds']:.0f} s with paused ones; "
    if run is not None:
        title = f"CPU of a round of {result['clients']} clients, the run's start included"
        rows[title] = f"{run['cpu_seconds'] / result['rounds']:.2f} s"
        text += f"a run of {result['rounds']} rounds in {run['seconds']:.0f} s; "
    environment = result["environment"]
    return (
        f"{markdown(('what', 'measured'), list(rows.items()), 'lr')}\n{text}{environment['processor']}, load "
        f"{environment['load'][1]:.0f} on {environment['cores']} cores; commit `{environment['commit']}`.\n"
    )


def organisations(result: Results) -> str:
    """What nodes with many clients have learned, beside their simulation."""
    nodes = " + ".join(f"{clients:,}" for clients in result["clients_of_nodes"])
    return (
        f"{result['rounds']} rounds without noise over nodes of {nodes} clients, {result['smallest_cohort']} to "
        f"{result['largest_cohort']} of them in a round: {result['values_compared']:,} values of the adapter compared "
        f"({result['values_of_lora_B_not_zero']:,} of `lora_B` are not 0), {result['values_different']} different. "
        f"Machine: {result['machine']}, load {result['load']:.0f}; commit `{result['commit']}`.\n"
    )


def containers(result: Results) -> str:
    """Sizes and the container test."""
    sizes = {
        "base: Debian 12 with Python 3.11": result["base_bytes"],
        'Lacquer with torch for CPUs and the model "minilm"': result["image_bytes"],
        "SuperLink": result["superlink_bytes"],
    }
    lines = [(name, f"{size / 1e6:,.0f} MB") for name, size in sizes.items()]
    return (
        f"{markdown(('image', 'size'), lines, 'lr')}\n"
        f"`docker/container_test.sh` took {result['seconds'] // 60}:{result['seconds'] % 60:02d} at load "
        f"{result['load']:.0f} on {result['cores']} cores, the engine's installation included; commit "
        f"`{result['commit']}`.\n"
    )
