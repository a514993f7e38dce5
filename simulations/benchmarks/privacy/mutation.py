"""How many small changes of the privacy kernel, or of a client's side of it, the tests notice.

Run: `python -m simulations.benchmarks privacy.mutation [PATTERN ...] [--share 0.05] [--clients]`, with the extra
`mutation`. With `--again` only those are tried that nobody noticed and nobody explained when the results were written.

mutmut changes one expression at a time (`[tool.mutmut]` in pyproject.toml says where: all that a proof leans on but for
the words of errors; `[tool.mutmut-clients]` what is other for a client's side: records, nodes, the reader of data) and
runs the tests that reach it. A change that no test notices is a survivor. It is listed with its line, and with the
reason where ANY_CHANGE or GONE knows one: the change makes no difference that a guarantee could feel. Everything else
that survives is a test that is missing.

All of it takes hours of one core; a share is drawn at random, and the score then has an interval. With `--folder` the
checkout stays, and the same command goes on where it was ended.
"""

import ast
import fnmatch
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer
from scipy.stats import beta

from simulations.benchmarks.harness.markdown import provenance, table
from simulations.benchmarks.harness.results import RESULTS, ROOT, environment, say, write

KILLED, SURVIVED, UNREACHED, TIMEOUT = "killed", "survived", "reached by no test", "ended by its time limit"
GONE_LINE = "the line is gone"
NOTICED = (KILLED, TIMEOUT)
STATUS = {0: SURVIVED, 1: KILLED, 3: KILLED, 33: UNREACHED, 36: TIMEOUT, 24: TIMEOUT, 152: TIMEOUT, -24: TIMEOUT}
"""Exit codes of mutmut's workers."""

ACCELERATORS = "on accelerators only"

ANY_CHANGE = {
    r"_fail\(|_HELD\.format|__repr__|check_(vector|scales|length|matrix)\('|names = ', '|'votes', ": "words for people",
    r"InsecureSeededNoise": "noise for tests, which stamp the ledger NOT PRIVATE",
    r"NoiseSearch\.(_solve|_search_interval|guess|root)|calibration\._as_one_row|pld\.first_interval|xtol=1e-09": (
        "a search, whose answer is priced in full"
    ),
    r"minimize\(|buffered\._parameters|np\.cumprod|best / max": "a search for a good strategy; what it finds is priced",
    r"x = left \+|np\.clip\(x, left, right\), right": "where Newton's steps begin; they end inside",
    r"composition\._(gdp|prv)": "in no guarantee; both have left since",
    r"_Coins\.(__init__|_lanes|words)|// _AT_ONCE": "how much is computed or drawn ahead",
    r"F_FULLFSYNC|fcntl\(descriptor, full\)": "on macOS only",
    r"torch\.dot\(row, row\)": ACCELERATORS,
    r"<= least <= most <=": "no float32 equals the limits",
    r"> longest:|> MAX_UNITS|> MOST_VALUES": "a limit that nobody reaches",
    r"chosen = \[points": "the same runs of holders, in another order",
    r"impulse\[0\] = 1\.0": "a factor, of which the logarithm is a constant",
    r"add_\(0\.5\)": "a uniform moves by 2^-63",
    r"term = Decimal\(1\)": "all of it is in the first number",
    r"pld\.rounding|if units == 1|FloorOdometer\.epsilon|min\(_BATCH": "a little more is counted, drawn or computed",
    r"norms\[lost\] = 0\.0": "such a row is zero already",
    r"token_hex\(8\)": "a name that nobody else takes",
    r"torch\.zeros\(0, dtype|np\.einsum|astype\(np\.float64\)": "the type is that anyway",
    r"refuse_weak|delta > population": "when a warning, or a sharper look, is due",
}
"""Where a change makes no difference (a line, or a function), and why."""

GONE = {
    r"strict=True": "lengths are equal where the values are made; `strict` is a second look",
    r"strict=False": "what zip does anyway",
    r"'(ascii|utf-8)'": "the file holds ASCII; names of encodings are the same in capitals",
    r"metadata\.version\('[a-z-]+'\)": "names that are the same in capitals",
    r"> 700\.0": "a guard against overflow, far below where it would happen",
    r"'cpu'|\.device\b|device=device": ACCELERATORS,
    r"epsilon\(events, delta, 'pld'": "`pld` is the default",
    r"dtype=np\.(float64|int64)\)|copy=False": "the type is that anyway, or one copy more",
    r"adjacency in \('add_remove', 'zero_out'\)|type\(sampling\) is Poisson": "the general formula says it too",
    r"if momentum else": "the powers of zero",
    r"1\.0 - 1e-09|> epsilon:|math\.ceil\(best\[0\] / _GRID\), 4": "a step of the grid more noise at most",
    r"excess\(math\.log\(best\[0\]\)\) > 0\.0|> 0\.5 \* self\.delta": "a tie",
    r"0\.0 < scale <= 1\.0": "the sum of the scales is limited by the same line",
    r"invalid='ignore'": "warnings of numpy, which change no value",
    r"ignore_cleanup_errors=True": "nothing is left to clean up: the folder was renamed",
    r"coarse \+ noise\.draw": "the noise is symmetric",
    r"allow_nan=False": "as false as it was",
    r"head\.partition": "a head holds one colon",
}
"""What a change took away, and why that does not matter."""

WORDS = re.compile(r"(remedy=|stamp_not_private\(|, remedy: str=)('[^']*'|\"[^\"]*\"|None)|, remedy=.*(?=\))")
"""What people read, as arguments."""

TO_DEVICE = re.compile(r"(?<=\.to\()(None|copy|(\w+\.)?device)\b(, )?")
"""Where a tensor is moved; on a machine without accelerators there is one place."""


def tried(folder: Path) -> Iterator[tuple[str, int]]:
    """Name and exit code of every mutant that was tried below ``folder`` (mutmut's own)."""
    for path in sorted(folder.rglob("*.meta")):
        for name, code in json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"].items():
            if code is not None:
                yield name, code


def all_names(folder: Path) -> list[str]:
    """Every mutant that could be tried."""
    return [
        name
        for path in sorted(folder.rglob("*.meta"))
        for name in json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"]
    ]


def changed_line(folder: Path, name: str) -> tuple[str, str]:
    """The first line in which a mutant is not its original, and the original's."""
    module, _, function = name.rpartition(".")
    tree = ast.parse((folder / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    made = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    original, mutant = made[re.sub(r"__mutmut_\d+$", "__mutmut_orig", function)], made[function]
    original.name = mutant.name = "it"
    pairs = zip(ast.unparse(mutant).split("\n"), ast.unparse(original).split("\n"), strict=False)
    return next(((new.strip(), old.strip()) for new, old in pairs if new != old), ("", ""))


def reason(survivor: Mapping[str, str]) -> str:
    """Why it makes no difference; empty where nobody said so."""
    name, new, old = (survivor[key] for key in ("where", "became", "was"))
    if WORDS.sub("", old) == WORDS.sub("", new):
        return "words for people"
    if TO_DEVICE.sub("", old) == TO_DEVICE.sub("", new):
        return ACCELERATORS
    everywhere = (why for pattern, why in ANY_CHANGE.items() if re.search(pattern, f"{name}\n{old}"))
    taken = (why for pattern, why in GONE.items() if re.search(pattern, old) and not re.search(pattern, new))
    return next(itertools.chain(everywhere, taken), "")


def readable(name: str) -> str:
    """`privacy.mechanism.Release.answer` for mutmut's name of one of its mutants."""
    module, _, function = name.rpartition(".")
    function = re.sub(r"__mutmut_\d+$", "", function).removeprefix("x_").removeprefix("x")
    return f"{module}.{function.strip('ǁ').replace('ǁ', '.')}"


def summary(folder: Path) -> dict[str, Any]:
    """Counts for each module, and the survivors."""
    counts: dict[str, Counter[str]] = {}
    survivors = []
    for name, code in tried(folder):
        module, status = name.rpartition(".")[0], STATUS.get(code, KILLED)
        counts.setdefault(module, Counter())[status] += 1
        if status in (SURVIVED, UNREACHED):
            new, old = changed_line(folder, name)
            survivors.append({"where": readable(name), "module": module, "was": old, "became": new, "status": status})
    rows = [{"module": module, **{status: found[status] for status in COUNTED}} for module, found in counts.items()]
    return {"rows": rows, "survivors": survivors}


def tried_again(folder: Path, results: dict[str, Any]) -> dict[str, Any]:
    """The results, with what becomes now of every survivor that had no reason."""
    missed = [each for each in results["survivors"] if not reason(each)]
    functions = {each["where"] for each in missed}
    found = {}
    for name in all_names(folder / "mutants"):
        if (where := readable(name)) in functions:
            new, old = changed_line(folder / "mutants", name)
            found[where, old, new] = name
    keys = {id(each): (each["where"], each["was"], each["became"]) for each in missed}
    mutmut(folder, *(found[key] for key in keys.values() if key in found))
    codes = dict(tried(folder / "mutants"))
    for each in missed:
        mutant = found.get(keys[id(each)])
        each["again"] = GONE_LINE if mutant is None else STATUS.get(codes[mutant], KILLED)
    return {**results, "again": environment()["commit"]}


COUNTED = (KILLED, TIMEOUT, SURVIVED, UNREACHED)


def score(row: Mapping[str, int]) -> tuple[float, float, float]:
    """Share of the mutants that matter which were noticed, with a 95 % interval (Clopper-Pearson)."""
    noticed = row[KILLED] + row[TIMEOUT]
    missed = row[SURVIVED] + row[UNREACHED] - row["explained"]
    low = float(beta.ppf(0.025, noticed, missed + 1)) if noticed else 0.0
    high = float(beta.ppf(0.975, noticed + 1, missed)) if missed else 1.0
    return noticed / max(1, noticed + missed), low, high


def groups(results: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """Counts by folder or module of a package, with those that make no difference, and of all."""
    found: dict[str, Counter[str]] = {}
    explained = Counter(each["module"] for each in results["survivors"] if reason(each))
    for row in results["rows"]:
        parts = row["module"].split(".")
        for name in (f"`{parts[1]}/`" if len(parts) > 2 else f"`{parts[1]}.py`", "all"):
            found.setdefault(name, Counter()).update({status: row[status] for status in COUNTED})
            found[name]["explained"] += explained[row["module"]]
    total = found.pop("all", Counter())
    return {**found, "all": total}


def scores(results: Mapping[str, Any]) -> str:
    """A row a folder, and one for all."""
    return table(
        [{"name": name, **found} for name, found in groups(results).items()],
        {
            "what was changed": "{name}",
            "changes tried": lambda row: f"{sum(row[status] for status in COUNTED):,}",
            "noticed": lambda row: f"{row[KILLED] + row[TIMEOUT]:,}",
            "make no difference": lambda row: f"{row['explained']:,}",
            "missed": lambda row: f"{row[SURVIVED] + row[UNREACHED] - row['explained']:,}",
            "score": lambda row: "{:.1%} ({:.1%} to {:.1%})".format(*score(row)).replace("%", " %"),
        },
    )


def page(results: Mapping[str, Any]) -> str:
    """The table of docs/results/guarantee.md, the reasons of its survivors, and those that have none."""
    reasons = Counter(reason(each) for each in results["survivors"] if reason(each))
    why = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    missed = [each for each in results["survivors"] if not reason(each)]
    gone = [each for each in missed if each.get("again") == GONE_LINE]
    left = [each for each in missed if each.get("again") not in (*NOTICED, GONE_LINE)]
    listed = "".join(f"- `{each['where']}`: `{each['was']}` became `{each['became']}`\n" for each in left)
    others = "".join(
        f"; {each['share']:.0%} of {each['made']:,} of `{each['names']}` at commit `{each['commit']}`"
        for each in results.get("samples", ())
    )
    tried = (
        f" Of the {len(missed)} missed, the tests of commit `{results['again']}` notice "
        f"{len(missed) - len(left) - len(gone)}; lines that are gone: {len(gone)}."
        if "again" in results
        else ""
    )
    return (
        f"{scores(results)}\n{results['share']:.0%} of {results['made']:,} changes, drawn with seed "
        f"{results['seeds'][0]}{others}; of the scores 95 % intervals (Clopper-Pearson). No difference: {why}.{tried}\n"
        + (f"\nStill missed:\n\n{listed}" if listed else "")
        + provenance(results)
    ).replace("% of", " % of")


def added(results: Mapping[str, Any], sample: Mapping[str, Any], names: str) -> dict[str, Any]:
    """Results with the rows and survivors of another sample, in place of what they say about its modules."""
    modules = {row["module"] for row in sample["rows"]}
    both = {
        part: sorted(
            [*(each for each in results[part] if each["module"] not in modules), *sample[part]],
            key=lambda each: each["module"],
        )
        for part in ("rows", "survivors")
    }
    note = {
        "names": names,
        "commit": environment()["commit"],
        **{key: sample[key] for key in ("made", "share", "seeds")},
    }
    return {**results, **both, "samples": [*results.get("samples", ()), note]}


def checked_out(folder: Path, clients: bool) -> None:
    """Make a checkout of the last commit, with all its mutants, unless it is there."""
    if not folder.is_dir():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        settings = folder / "pyproject.toml"
        told = tomllib.loads(settings.read_text(encoding="utf-8"))
        if clients:
            told["tool"]["mutmut"] |= told["tool"]["mutmut-clients"]
        settings.write_text(tomli_w.dumps(told), encoding="utf-8")
    mutmut(folder, "none of them", check=False)  # makes all, tries none, and says that it is an error


def mutmut(folder: Path, *names: str, check: bool = True) -> None:
    """Try these mutants in a checkout, after making all."""
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", "2", *names]
    subprocess.run(command, check=check, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})  # it forks


def main(
    patterns: Annotated[list[str] | None, typer.Argument(help="as privacy.mechanism*; all else")] = None,
    share: Annotated[float, typer.Option(min=0.001, max=1.0, help="of the mutants, drawn at random")] = 1.0,
    seed: Annotated[int, typer.Option(help="of that draw")] = 0,
    least: Annotated[float, typer.Option(help="fail below this score; write nothing")] = 0.0,
    add: Annotated[bool, typer.Option("--add", help="to the results there are, in place of these modules")] = False,
    again: Annotated[bool, typer.Option("--again", help="only what was missed when the results were written")] = False,
    clients: Annotated[bool, typer.Option("--clients", help="a client's side, not the kernel")] = False,
    kept: Annotated[Path | None, typer.Option("--folder", help="of a checkout that stays, to go on with")] = None,
) -> None:
    """Try the changes and write the results."""
    results = "mutation-clients" if clients else "mutation"
    file = RESULTS / f"{results}.json"
    with tempfile.TemporaryDirectory() as place:
        folder = kept or Path(place) / "checkout"
        checked_out(folder, clients)
        if again:
            found = tried_again(folder, json.loads(file.read_text(encoding="utf-8")))
            say(*(f"{each['where']}: {each['again']}" for each in found["survivors"] if "again" in each))
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            return
        names = [name for name in all_names(folder / "mutants") if fits(name, patterns or ["*"])]
        chosen = set(random.Random(seed).sample(names, max(1, round(share * len(names)))))
        if left := sorted(chosen - dict(tried(folder / "mutants")).keys()):
            mutmut(folder, *left)
        found = {"made": len(names), "share": share, "seeds": [seed], **summary(folder / "mutants")}
        if add:
            found = added(json.loads(file.read_text(encoding="utf-8")), found, " ".join(patterns or ["*"]))
    say(scores(found), *(f"{each['where']}: {each['became']}" for each in found["survivors"] if not reason(each)))
    if least:
        raise typer.Exit(score(groups(found)["all"])[0] < least)
    write(results, found)


def fits(name: str, patterns: list[str]) -> bool:
    """Whether a mutant's name is like one of the patterns."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


if __name__ == "__main__":
    typer.run(main)
