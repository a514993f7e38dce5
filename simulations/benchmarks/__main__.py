"""Run a benchmark by its name: `python -m simulations.benchmarks NAME [options]`.

Without a name, what there is. Each is a module too: `python -m simulations.benchmarks.engine.speed` is `engine.speed`.
Results go to `results/`; `harness.tables` writes the documentation's tables from them.
"""

import subprocess
import sys

BENCHMARKS = {
    "engine.guard": "three ratios of the engine to plain PEFT beside those committed; fails where speed was lost",
    "engine.speed": "clients per second beside plain PEFT",
    "engine.record_level": "a record-level step beside one without privacy and beside Opacus",
    "engine.against_pfl": "rounds of DP-FedAvg beside pfl-research (in an environment of its own)",
    "engine.against_flower": "whole rounds on Ray: a message per worker beside one per client",
    "engine.memory": "what the frozen model and a step take, by precision, quantisation and checkpointed blocks",
    "engine.gpu": "models of 1.1 billion and 135 million parameters on one GPU",
    "scale.populations": "preparing and training 10^3 to 10^6 clients with records of their own",
    "scale.gpu": "ten minutes on a GPU, in order of worth: `make gpu`",
    "scale.start_up": "how long `lacquer run` takes to its first round, and on what",
    "faults.bad_replies": "malformed and hostile replies through the real strategy",
    "faults.soak": "a long run under failing nodes and kill -9",
    "faults.deployment": "the same in containers, whose lines and lives fail; docker/soak_test.sh calls it",
    "faults.superlink_cost": "what idle clients and a round cost the SuperLink; docker/soak_test.sh calls it",
    "privacy.mechanism_audit": "two-world audits of the release path and of broken copies of it",
    "privacy.audit": "what the attacks of `lacquer audit` find in whole runs, from no privacy to epsilon 0.5",
    "privacy.evaluation": "estimates of private evaluation against exact values, and their cost",
    "privacy.mutation": "how many small changes of the privacy kernel its tests notice",
    "privacy.flower_dp": "Flower's own DP wrappers under the checks that ours pass",
    "privacy.batch_invariance": "how far a record moves what others contribute, by rounding",
    "privacy.published_accounting": "what the accounting of two papers leaves out",
    "privacy.voted_settings": "what a vote of clients over settings costs, and could bring",
    "papers.sst2": "preset sst2 over seeds",
    "papers.atdp.chains": "redaction, noise and ATDP phases on WikiText-2: perplexity and exposure",
    "papers.atdp.frontier": "exposure against perplexity of ways to forget, ATDP beside noise alone",
    "papers.atdp.curves": "the figure of docs/results/atdp.md from the results of papers.atdp.frontier",
    "papers.detectors": "what detectors of sensitive text take for sensitive, and what they miss",
    "papers.pe_sgd.training": "DP-SGD, PDP-SGD, GEP, FixSample and PE-SGD on a few hundred texts",
    "papers.pe_sgd.step": "what one noisy step of these is worth, by direction and by length",
    "papers.rldp_pretraining": "make and judge the policy of the controller rl, and time its rounds",
    "planning.agreement": "how well one client's update agrees with the mean, for `lacquer plan`",
    "planning.worth": "what private training adds to public records, of what training without noise adds",
    "planning.synthetic": "what synthetic texts of a private run are worth to train on",
    "planning.preference": "what clients teach about pairs of E2E sentences, each client protected",
    "planning.further": "what going on from an adapter, the best round, local heads and votes on texts bring",
    "planning.validation": "whether what `lacquer plan` predicts is what runs came to",
    "lacquer_small.train": "train the base model lacquer-small",
    "lacquer_small.package": "put a trained lacquer-small into the package, with its card",
    "harness.tables": "write the tables of the documentation from the results (--check only looks)",
    "harness.structure": "lines, imports and circles of the packages, as in docs/results/structure.md",
    "harness.docstrings": "docstrings that begin in mid-sentence, and functions named by a participle",
    "harness.nightly": "how long each part of the nightly tests takes, and whether it passes",
}
"""Modules below ``simulations.benchmarks`` that can be run, and what each does."""

ALL = (
    "engine.speed", "engine.record_level", "privacy.batch_invariance", "privacy.mechanism_audit", "privacy.flower_dp",
    "harness.tables",
)  # fmt: skip
"""What `all` runs: measurements that need no data from outside and take minutes; then the tables."""


def run(name: str, options: list[str]) -> int:
    """Run one as a module; its exit code."""
    return subprocess.run([sys.executable, "-m", f"simulations.benchmarks.{name}", *options], check=False).returncode


def main(arguments: list[str]) -> int:
    """Run the named benchmark, or `all`; the exit code of the first that fails, else 0."""
    name, *options = arguments or ["--help"]
    if name in ("--help", "-h"):
        width = max(map(len, BENCHMARKS))
        lines = [f"  {name:{width}}  {words}" for name, words in BENCHMARKS.items()]
        sys.stdout.write(
            "python -m simulations.benchmarks NAME [options], or NAME --help; "
            f"`all` runs {', '.join(ALL)}\n\n" + "\n".join(lines) + "\n"
        )
        return 0
    if name == "all" and not options:
        return next((code for each in ALL if (code := run(each, []))), 0)
    if name not in BENCHMARKS:
        sys.exit(f"no benchmark is called {' '.join(arguments)}; there are: {', '.join(BENCHMARKS)}")
    return run(name, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
