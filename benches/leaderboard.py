#!/usr/bin/env python3
"""Counts the steps that optimizers, recipes and parts need to reach the final loss of Muon.

Every run trains the default task of `train_lm`, on one core of its own. Its final validation loss
is a row of docs/results/leaderboard.csv, and a run that has a row there is not repeated, so the
program can be ended and started again. docs/results/leaderboard.md says what is counted, and how.
The program writes the tables there, between comments, from the rows.

    cargo build --release --example train_lm
    benches/leaderboard.py               all entries
    benches/leaderboard.py muon track-3  these alone, and the table of all rows
    benches/leaderboard.py --rates       all entries, without the runs on eight seeds
    benches/leaderboard.py --seeds muon  eight seeds of 300 steps
    benches/leaderboard.py --widths      the best rates of four widths
    benches/leaderboard.py --long        runs of 2,000 steps
    benches/leaderboard.py --table       the tables alone
"""

import csv
import datetime
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "target/release/examples/train_lm"
ROWS = ROOT / "docs/results/leaderboard.csv"
TABLE = ROOT / "docs/results/leaderboard.md"

STEPS = 300
SEEDS = range(1, 9)
# Steps are counted in tens. Near the end of a run, ten steps are worth about two deviations.
GRID = 10
# As in modded-nanogpt's track 3, whose threshold of 0.004 for a difference of two means over
# sqrt(1 / n + 1 / m) is three deviations of 0.0013.
DEVIATIONS = 3
# Deviations above the goal at which one seed is enough for a miss.
FAR = 5
BASELINE = "burn-muon"
WIDTHS = [64, 128, 256, 512]
# The largest width takes sixteen times as long as the default one.
STEPS_OF_WIDTHS = 100
# About seven minutes each.
LONG = ["adamw", BASELINE, "muon", "nanochat", "modded-nanogpt", "momentum 0.95"]
LONG_STEPS = 2000
LONG_SEEDS = [1, 2]


def settings(**changes):
    """The arguments for other settings than those of the defaults, or of a recipe."""
    return ["--settings", json.dumps(changes, separators=(",", ":"))]


def constant(value):
    """The schedule of a constant."""
    return {"start": value, "segments": []}


def linear(start, *points):
    """A schedule that is linear between points of a number of steps and a value."""
    segments = [{"curve": "Linear", "steps": steps, "to": to} for steps, to in points]
    return {"start": start, "segments": segments}


def part(name, **fields):
    return {name: fields or None}


def decay(kind, rate):
    return {"weight_decay": {kind: constant(rate)}}


# The momentum of papers that have no Nesterov.
CONSTANT = {"momentum": constant(0.95), "nesterov": False}
NAMO = {"beta_2": 0.99, "epsilon": 1e-30, "bias_correction": True, "per_input": None}
NAMO |= {"weight_decay": 0.1, "largest_rate": 1.0}
OF_NAMO = {"momentum": CONSTANT | {"bias_correction": True}} | decay("Decoupled", 0.0)
NORMUON = part("NorMuon", beta_2=0.95, epsilon=1e-10, averaged="ShorterDimension")
# The ages and weights of `MomentumMixture::k_maxwell`.
AGES = [3 * (56 / 3) ** (place / 5) for place in range(6)]
SLOPE = (56 - 35) / (56 * 15 - sum((place + 1) * age for place, age in enumerate(AGES[:5])))
WEIGHTS = [SLOPE * (place + 1) for place in range(5)]
WEIGHTS.append(1 - sum(WEIGHTS))

# For every entry: its arguments or its settings, the middle one of its first three rates, and the
# largest number of steps.
ENTRIES = {
    "adamw": (["--optimizer", "adamw"], 4e-3, 1200),
    "burn-muon": (["--optimizer", "burn-muon"], 1.1e-2, STEPS),
    "muon": ([], 8e-3, STEPS),
    "torch": (["--recipe", "torch"], 1.4e-2, STEPS),
    "keller-jordan": (["--recipe", "keller-jordan"], 2.8e-2, STEPS),
    "moonlight": (["--recipe", "moonlight"], 1.1e-2, STEPS),
    "nanochat": (["--recipe", "nanochat"], 4e-2, STEPS),
    "modded-nanogpt": (["--recipe", "modded-nanogpt"], 2.3e-2, STEPS),
    "kimi-k2": (["--recipe", "kimi-k2"], 8e-3, STEPS),
    "deepseek-v4": (["--recipe", "deepseek-v4"], 8e-3, STEPS),
    "motif": (["--recipe", "motif"], 8e-3, STEPS),
    "track-3": (["--recipe", "track-3"], 2.5e-2, STEPS),
    "kimi-k3": (["--recipe", "kimi-k3"], 8e-3, STEPS),
    "glm-5": (["--recipe", "glm-5"], 8e-3, STEPS),
}
# The names that train_lm has.
NAMES = list(ENTRIES)


def ema_nesterov(steps):
    """Ahead from a sixth of the run on, as in its record, and back at three quarters."""
    first, last = 16 * steps // 100, 23 * steps // 30
    lookahead = linear(0.0, (first, 0.0), (1, 0.6), (last - first - 1, 0.0))
    return {"parts": [part("EmaNesterov", decay=0.99, lookahead=lookahead)]}


def cool_down(steps):
    """The defaults' momentum, which falls back over the last sixth of the run."""
    fall = steps // 6
    rise = linear(0.85, (steps - fall, 0.85 + 0.1 * (steps - fall) / STEPS), (fall, 0.85))
    return {"momentum": {"momentum": rise}}


def tail_average(steps):
    """The share and, for this number of steps, the reach of the record's."""
    return ["--average", f"from={4 * steps // 5},span={steps // 20},share=0.6"]


def coefficients(coefficients, **fields):
    return {"newton_schulz": {"coefficients": coefficients} | fields}


CUSHIONED = {"PolarExpressFor": {"lower": 1e-3, "cushion": 0.02, "safety": 1.02}}

# The defaults with other settings.
PARTS = {
    "momentum 0.95": {"momentum": {"momentum": constant(0.95)}},
    "momentum 0.9": {"momentum": {"momentum": constant(0.9)}},
    "six steps, Schatten-4": {"newton_schulz": {"steps": 6, "normalization": "Schatten4"}},
    "cushioned set": coefficients("PolarExpressCushioned"),
    "cushioned, six steps, Schatten-4": coefficients(
        CUSHIONED, steps=6, normalization="Schatten4"
    ),
    "You's set": coefficients("You"),
    "Schatten-4 norm": {"newton_schulz": {"normalization": "Schatten4"}},
    "You's set, Schatten-4": coefficients("You", normalization="Schatten4"),
    "momentum cool-down": cool_down,
    "tail average": tail_average,
    "cautious decay": decay("Cautious", 0.1),
    "NorMuon": {"parts": [NORMUON]},
    "NorMuon by outputs": {
        "parts": [part("NorMuon", beta_2=0.95, epsilon=1e-10, averaged="Inputs")]
    },
    "AdaMuon": {
        "parts": [
            part("Sign"),
            part("AdaMuon", beta_2=0.95, epsilon=1e-8),
            part("Renormalization", target={"Rms": 0.2}),
        ],
        "lr_scale": "None",
        "momentum": CONSTANT,
    },
    "MARS-M": {"parts": [part("Mars", gamma=0.025)], "momentum": CONSTANT},
    "MARS-M, exact": {"parts": [part("Mars", gamma=0.025, exact=True)], "momentum": CONSTANT},
    "NAMO": {"parts": [part("Namo", **NAMO)]} | OF_NAMO,
    "NAMO-D": {"parts": [part("Namo", **(NAMO | {"per_input": 0.75}))]} | OF_NAMO,
    "Muown": {"parts": [part("Muown", betas=[0.9, 0.95], epsilon=1e-8, weight_decay=0.0)]}
    | {"momentum": CONSTANT}
    | decay("Decoupled", 0.0),
    "EMA-Nesterov": ema_nesterov,
    "K-Maxwell": {
        "parts": [part("MomentumMixture", ages=AGES, weights=WEIGHTS, momentum=0.95)],
        "momentum": {"momentum": constant(0.0), "nesterov": False},
    },
    "Hyperball": {"parts": [part("Hyperball", radius="Initial")]} | decay("Decoupled", 0.0),
    "radial brake": {"parts": [part("RadialBrake", outward=0.5, inward=1.0)]},
    "floor by rows, late decay": {
        "parts": [part("RelativeUpdate", least=0.3825, most=None, to="Outputs")]
    }
    | decay("CautiousAfter", 0.1),
    "floor by rows": {
        "parts": [part("RelativeUpdate", least=0.3825, most=None, to="Outputs")]
    },
    "late cautious decay": decay("CautiousAfter", 0.1),
    "update as large as its parameter": {
        "parts": [part("RelativeUpdate", least=1.0, most=1.0, to="Matrix")],
        "lr_scale": "None",
    }
    | decay("Decoupled", 0.0),
    "row equilibration": {"parts": [part("RowEquilibration")]},
    "column equilibration": {"parts": [part("ColumnEquilibration")]},
    "renormalization": {"parts": [part("Renormalization", target="Orthogonal")]},
    # All matrices of the blocks.
    "SOAP": lambda steps: ["--soap", r"^blocks.*weight$"],
}
ENTRIES |= {name: (changes, 8e-3, STEPS) for name, changes in PARTS.items()}
# A floor that acts: updates of the defaults are larger.
FLOOR = {"parts": [part("RelativeUpdate", least=0.35, most=None, to="Matrix")]}
ENTRIES["track-3, floor of updates"] = (["--recipe", "track-3", *settings(**FLOOR)], 5e-2, STEPS)


def spectral(width):
    """Spectral scales for matrices and muP's for AdamW, whose head has a rate that falls with the
    width. At the default width, rates of AdamW are those of the other scale."""
    adamw = {"embedding_lr": 0.44, "vector_lr": 0.44, "head_lr": 0.44 * 128 / width}
    return settings(lr_scale="Spectral", rest={"AdamW": adamw})


ENTRIES["spectral scales"] = (spectral(128), 3.6e-2, STEPS)
SCALES = {"this crate's": (lambda width: [], 1.6e-2), "spectral": (spectral, 3.6e-2)}
OF_WIDTHS = {
    f"{scale}, {width}": (["--width", str(width), *arguments(width)], rate, STEPS_OF_WIDTHS)
    for scale, (arguments, rate) in SCALES.items()
    for width in WIDTHS
}

running = threading.Semaphore(os.cpu_count())
lock = threading.Lock()
rows = {}
dates = []
# No run begins any more: a run without a row is missing.
ended = threading.Event()


class Missing(Exception):
    """A run that a table needs and that has no row."""


def read_rows():
    if not ROWS.exists():
        ROWS.write_text("arguments,rate,steps,seed,loss,date\n")
    with ROWS.open(newline="") as file:
        for row in csv.DictReader(file):
            key = (row["arguments"], row["rate"], int(row["steps"]), int(row["seed"]))
            rows[key] = float(row["loss"])
            dates.append(row["date"])


def arguments_of(name, steps):
    """The arguments of an entry for a run of some steps."""
    arguments = (ENTRIES | OF_WIDTHS)[name][0]
    if callable(arguments):
        arguments = arguments(steps)
    return settings(**arguments) if isinstance(arguments, dict) else arguments


def rate_text(rate):
    return f"{rate:.1e}"


def loss(name, rate, steps=STEPS, seed=1):
    """The final validation loss of a run."""
    arguments = arguments_of(name, steps)
    key = (" ".join(arguments), rate_text(rate), steps, seed)
    if key in rows:
        return rows[key]
    if ended.is_set():
        raise Missing(key)
    command = [PROGRAM, "--sample", "0", "--eval-every", "0", "--lr", rate_text(rate)]
    command += ["--steps", str(steps), "--seed", str(seed), *arguments]
    # The digits do not depend on the number of threads, and runs side by side are faster.
    environment = dict(os.environ, RAYON_NUM_THREADS="1", BURN_DEVICE="flex")
    with running:
        done = subprocess.run(command, env=environment, text=True, capture_output=True)
    if done.returncode != 0:
        ended.set()
        raise RuntimeError(f"{name} fails: {done.stderr.strip()}")
    of_run = [line for line in done.stdout.splitlines() if line.startswith("|")][-1]
    final = float(of_run.split("|")[3])
    date = datetime.date.today().isoformat()
    with lock:
        rows[key] = final
        dates.append(date)
        with ROWS.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([*key, f"{final:.4f}", date])
    print(f"{name} {rate_text(rate)}, {steps} steps, seed {seed}: {final:.4f}", flush=True)
    return final


def in_parallel(function, values):
    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(function, values))


def sweep(name, steps=STEPS):
    """The losses on seed 1 of at least three rates, a factor of the root of two apart, of which
    none at the edge is the best."""
    middle = (ENTRIES | OF_WIDTHS)[name][1]
    rate = lambda place: float(rate_text(middle * 2 ** (place / 2)))
    places = [-1, 0, 1]
    while True:
        losses = in_parallel(lambda place: loss(name, rate(place), steps), places)
        best = losses.index(min(losses))
        if 0 < best < len(places) - 1:
            return dict(zip(map(rate, places), losses))
        places = [places[0] - 1, *places] if best == 0 else [*places, places[-1] + 1]


def best_rate(name):
    losses = sweep(name)
    return min(losses, key=losses.get)


def of_seeds(name, steps=STEPS):
    rate = best_rate(name)
    return in_parallel(lambda seed: loss(name, rate, steps, seed), SEEDS)


def goal():
    """The mean and the deviation of the baseline's final losses, and its loss on seed 1."""
    losses = of_seeds(BASELINE)
    return statistics.mean(losses), statistics.stdev(losses), losses[0]


def margin(losses):
    """How far the mean of final losses is below the goal, in deviations, by track 3's rule for two
    means: the goal is a mean of as many losses."""
    mean, deviation, _ = goal()
    return (mean - statistics.mean(losses)) / math.sqrt(2 / len(losses)) / deviation


def probable_steps(name):
    """The steps at which seed 1 ends as far below the baseline as the mean has to, at most those
    that the entry may have."""
    rate, most = best_rate(name), ENTRIES[name][2]
    _, deviation, of_baseline = goal()
    wanted = of_baseline - DEVIATIONS * deviation * math.sqrt(2 / len(SEEDS))
    # Losses are roughly linear in the logarithm of the steps, with this slope on the default task.
    slope = -0.32
    known, steps = {}, STEPS
    while steps not in known and steps < most or not known:
        known[steps] = loss(name, rate, steps)
        if len(known) > 1:
            (first, of_first), (second, of_second) = list(known.items())[-2:]
            slope = min(-0.1, (of_second - of_first) / math.log(second / first))
        steps = GRID * math.ceil(steps * math.exp((wanted - known[steps]) / slope) / GRID)
    return min(steps, most)


def is_far(name):
    """Returns True if seed 1 misses the goal by so much that no other seed is needed."""
    most = ENTRIES[name][2]
    mean, deviation, _ = goal()
    return loss(name, best_rate(name), most) > mean + FAR * deviation


def fewest_steps(name):
    """The fewest steps whose final losses are far enough below the goal, and the losses of all
    seeds; None for more than the entry may have."""
    most = ENTRIES[name][2]
    steps = probable_steps(name)
    if steps == most and is_far(name):
        return None
    reached = {}
    while steps not in reached and steps <= most:
        losses = of_seeds(name, steps)
        reached[steps] = losses if margin(losses) >= DEVIATIONS else None
        steps += GRID if reached[steps] is None else -GRID
    return min(((steps, losses) for steps, losses in reached.items() if losses), default=None)


def known_steps(name):
    """The fewest steps that are known to be enough while fewer are still to be tried, and their
    losses; None for none."""
    for steps in range(GRID, ENTRIES[name][2] + 1, GRID):
        try:
            losses = of_seeds(name, steps)
            if margin(losses) >= DEVIATIONS:
                return steps, losses
        except Missing:
            continue
    return None


def mean_and_error(losses):
    """The mean with its standard error."""
    error = statistics.stdev(losses) / math.sqrt(len(losses))
    return f"{statistics.mean(losses):.4f} ± {error:.4f}"


def cells_of(name):
    """The order of an entry in the table, and its cells; None for one that has no rate yet."""
    try:
        rate = best_rate(name)
    except Missing:
        return None
    at_the_end = loss(name, rate)
    cells = [f"`{name}`" if name in NAMES else name, rate_text(rate), f"{at_the_end:.4f}"]
    try:
        cells.append(mean_and_error(of_seeds(name)))
    except Missing:
        cells.append("")
    if name == BASELINE:
        return (STEPS, at_the_end), [*cells, f"{STEPS}, the goal", ""]
    most = ENTRIES[name][2]
    try:
        found, sign = fewest_steps(name), ""
        if found is None:
            return (most + 2, at_the_end), [*cells, f"> {most}", ""]
    except Missing:
        found, sign = known_steps(name), "<= "
        if found is None:
            return (most + 1, at_the_end), [*cells, "", ""]
    steps, losses = found
    return (steps, at_the_end), [*cells, f"{sign}{steps}", f"{margin(losses):.1f}"]


def table(head, body):
    line = lambda cells: "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"
    return "\n".join(map(line, [head, ["---"] * len(head), *body]))


def of_entries():
    found = sorted(filter(None, map(cells_of, ENTRIES)), key=lambda found: found[0])
    head = ["entry", "rate", "loss, seed 1", "loss, eight seeds", "steps", "margin"]
    try:
        mean, deviation, _ = goal()
        of_goal = f"The goal is {mean:.4f}, and sigma is {deviation:.4f}. "
    except Missing:
        of_goal = ""
    about = f"{of_goal}{len(rows)} runs, from {min(dates)} to {max(dates)}."
    return f"{about}\n\n{table(head, [cells for _, cells in found])}"


def of_widths():
    body = []
    for scale in SCALES:
        for width in WIDTHS:
            try:
                losses = sweep(f"{scale}, {width}", STEPS_OF_WIDTHS)
            except Missing:
                continue
            best = min(losses, key=losses.get)
            swept = ", ".join(f"{rate_text(rate)}: {loss:.4f}" for rate, loss in losses.items())
            body.append([scale, str(width), rate_text(best), f"{losses[best]:.4f}", swept])
    head = ["scale", "width", "best rate", "loss", "all rates"]
    return table(head, body) if body else "Not measured yet."


def long_run(run):
    name, seed = run
    return loss(name, best_rate(name), LONG_STEPS, seed)


def of_long():
    body = []
    for name in LONG:
        try:
            rate = rate_text(best_rate(name))
            losses = [f"{long_run((name, seed)):.4f}" for seed in LONG_SEEDS]
        except Missing:
            continue
        body.append([f"`{name}`" if name in NAMES else name, rate, *losses])
    return table(["entry", "rate", *(f"seed {seed}" for seed in LONG_SEEDS)], body)


def write_tables():
    text = TABLE.read_text()
    for name, write in {"entries": of_entries, "widths": of_widths, "long": of_long}.items():
        begin, end = f"<!-- {name}: written by benches/leaderboard.py -->", f"<!-- {name} end -->"
        (before, rest) = text.split(begin)
        text = f"{before}{begin}\n\n{write()}\n\n{end}{rest.split(end)[1]}"
    TABLE.write_text(text)


def each(function, names):
    """Calls a function for two entries at a time, which keeps all cores busy while one of them
    waits for its last run."""
    pool = ThreadPoolExecutor(2)
    try:
        list(pool.map(function, names))
    except BaseException:
        ended.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def main():
    flags = {argument for argument in sys.argv[1:] if argument.startswith("--")}
    names = [argument for argument in sys.argv[1:] if argument not in flags]
    known = {"--rates", "--seeds", "--widths", "--long", "--table"}
    unknown = flags - known | set(names) - set(ENTRIES)
    if unknown:
        entries = ", ".join(ENTRIES)
        sys.exit(f"no such entry or flag: {', '.join(sorted(unknown))}; the entries are {entries}")
    read_rows()
    if names and flags & {"--widths", "--long", "--table"}:
        sys.exit("--widths, --long and --table are of all entries: leave the names out")
    names = names or list(ENTRIES)
    if "--widths" in flags:
        each(lambda name: sweep(name, STEPS_OF_WIDTHS), OF_WIDTHS)
    elif "--long" in flags:
        each(best_rate, LONG)
        each(long_run, itertools.product(LONG, LONG_SEEDS))
    elif "--seeds" in flags:
        each(of_seeds, names)
    elif "--rates" in flags:
        each(best_rate, names)
    elif "--table" not in flags:
        each(best_rate, names)
        goal()
        names.sort(key=lambda name: loss(name, best_rate(name)))
        each(fewest_steps, [name for name in names if name != BASELINE])
    ended.set()
    write_tables()


if __name__ == "__main__":
    main()
