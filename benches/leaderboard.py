#!/usr/bin/env python3
"""Counts the steps that optimizers, recipes and parts need to reach the final loss of Muon.

Every run trains the default task of `train_lm`, on one core of its own. Its final validation loss
is a row of docs/results/leaderboard.csv, and a run that has a row there is not repeated, so the
program can be ended and started again. docs/results/leaderboard.md says what is counted, and how;
it has one part between two comments, which the program writes from the rows.

    cargo build --release --example train_lm
    benches/leaderboard.py               all entries
    benches/leaderboard.py muon track-3  these alone, and the table of all rows
    benches/leaderboard.py --rates       all entries, without the runs on eight seeds
    benches/leaderboard.py --table       the table alone
"""

import csv
import datetime
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
MARKS = ("<!-- benches/leaderboard.py writes from here -->", "<!-- to here -->")

STEPS = 300
SEEDS = range(1, 9)
# Steps are counted in tens. Near the end of a run, ten steps are worth about two deviations.
GRID = 10
# As in modded-nanogpt's track 3, whose threshold of 0.004 is three deviations of 0.0013.
DEVIATIONS = 3
BASELINE = "burn-muon"


def settings(**changes):
    """The arguments for distmuon's defaults with other settings."""
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

# For every entry: its arguments, the middle one of its first three rates, and the largest number
# of steps. Entries from `momentum 0.95` on are the defaults with other settings.
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
PARTS = {
    "momentum 0.95": {"momentum": {"momentum": constant(0.95)}},
    "momentum 0.9": {"momentum": {"momentum": constant(0.9)}},
    "six steps, Schatten-4": {"newton_schulz": {"steps": 6, "normalization": "Schatten4"}},
    "cautious decay": decay("Cautious", 0.1),
    "NorMuon": {"parts": [NORMUON]},
    "AdaMuon": {
        "parts": [
            part("Sign"),
            part("AdaMuon", beta_2=0.95, epsilon=1e-8),
            part("Renormalization", target={"Rms": 0.2}),
        ],
        "lr_scale": "None",
    },
    "MARS-M": {"parts": [part("Mars", gamma=0.025)], "momentum": CONSTANT},
    "NAMO": {"parts": [part("Namo", **NAMO)]} | OF_NAMO,
    "NAMO-D": {"parts": [part("Namo", **(NAMO | {"per_input": 0.75}))]} | OF_NAMO,
    "Muown": {"parts": [part("Muown", betas=[0.9, 0.95], epsilon=1e-8, weight_decay=0.0)]}
    | {"momentum": {"nesterov": False}}
    | decay("Decoupled", 0.0),
    "EMA-Nesterov": {
        # From a sixth of the run on, as in its record, and back to zero.
        "parts": [
            part("EmaNesterov", decay=0.99, lookahead=linear(0.0, (48, 0.0), (1, 0.6), (181, 0.0)))
        ]
    },
    "K-Maxwell": {
        "parts": [part("MomentumMixture", ages=AGES, weights=WEIGHTS, momentum=0.95)],
        "momentum": {"momentum": constant(0.0), "nesterov": False},
    },
    "Hyperball": {"parts": [part("Hyperball", radius="Initial")]} | decay("Decoupled", 0.0),
    "radial brake": {"parts": [part("RadialBrake", outward=0.5, inward=1.0)]},
    "floor of updates": {"parts": [part("RelativeUpdate", least=0.35, most=None, to="Matrix")]},
    "floor by rows, late decay": {
        "parts": [part("RelativeUpdate", least=0.3825, most=None, to="Outputs")]
    }
    | decay("CautiousAfter", 0.1),
    "row equilibration": {"parts": [part("RowEquilibration")]},
}
ENTRIES |= {name: (settings(**changes), 8e-3, STEPS) for name, changes in PARTS.items()}

running = threading.Semaphore(os.cpu_count())
lock = threading.Lock()
rows = {}
dates = []


def read_rows():
    if not ROWS.exists():
        ROWS.write_text("arguments,rate,steps,seed,loss,date\n")
    with ROWS.open(newline="") as file:
        for row in csv.DictReader(file):
            key = (row["arguments"], row["rate"], int(row["steps"]), int(row["seed"]))
            rows[key] = float(row["loss"])
            dates.append(row["date"])


def rate_text(rate):
    return f"{rate:.1e}"


def loss(name, rate, steps=STEPS, seed=1):
    """The final validation loss of a run."""
    arguments = ENTRIES[name][0]
    key = (" ".join(arguments), rate_text(rate), steps, seed)
    if key in rows:
        return rows[key]
    command = [PROGRAM, "--sample", "0", "--eval-every", "0", "--lr", rate_text(rate)]
    command += ["--steps", str(steps), "--seed", str(seed), *arguments]
    # The digits do not depend on the number of threads, and runs side by side are faster.
    environment = dict(os.environ, RAYON_NUM_THREADS="1", BURN_DEVICE="flex")
    with running:
        done = subprocess.run(command, env=environment, text=True, capture_output=True)
    if done.returncode != 0:
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


def best_rate(name):
    """The best of at least three rates on seed 1, a factor of the root of two apart, of which none
    at the edge is the best."""
    middle = ENTRIES[name][1]
    rate = lambda place: middle * 2 ** (place / 2)
    places = [-1, 0, 1]
    while True:
        losses = in_parallel(lambda place: loss(name, rate(place)), places)
        best = places[losses.index(min(losses))]
        if best == places[0]:
            places.insert(0, best - 1)
        elif best == places[-1]:
            places.append(best + 1)
        else:
            return float(rate_text(rate(best)))


def of_seeds(name, rate, steps):
    return in_parallel(lambda seed: loss(name, rate, steps, seed), SEEDS)


def goal():
    """The mean and the deviation of the baseline's final losses, and its loss on seed 1."""
    losses = of_seeds(BASELINE, best_rate(BASELINE), STEPS)
    return statistics.mean(losses), statistics.stdev(losses), losses[0]


def margin(losses):
    """How far the mean of final losses is below the goal, in deviations of the mean."""
    mean, deviation, _ = goal()
    return (mean - statistics.mean(losses)) * math.sqrt(len(losses)) / deviation


def probable_steps(name, rate):
    """The steps at which seed 1 ends as far below the baseline as the mean has to; None for more
    than the entry may have."""
    most = ENTRIES[name][2]
    _, deviation, of_baseline = goal()
    wanted = of_baseline - DEVIATIONS * deviation / math.sqrt(len(SEEDS))
    # Losses are roughly linear in the logarithm of the steps, with this slope on the default task.
    slope = -0.32
    known, steps = {}, STEPS
    while steps not in known:
        known[steps] = loss(name, rate, steps)
        if len(known) > 1:
            (first, of_first), (second, of_second) = list(known.items())[-2:]
            slope = min(-0.1, (of_second - of_first) / math.log(second / first))
        steps = GRID * math.ceil(steps * math.exp((wanted - known[steps]) / slope) / GRID)
        if steps > most:
            return None
    return steps


def fewest_steps(name):
    """The fewest steps whose final losses are far enough below the goal, and the losses of all
    seeds; None for more than the entry may have."""
    rate = best_rate(name)
    steps = probable_steps(name, rate)
    if steps is None:
        return None
    reached = {}
    while steps not in reached and steps <= ENTRIES[name][2]:
        losses = of_seeds(name, rate, steps)
        reached[steps] = losses if margin(losses) >= DEVIATIONS else None
        steps += GRID if reached[steps] is None else -GRID
    return min(((steps, losses) for steps, losses in reached.items() if losses), default=None)


class Missing(Exception):
    """A run that the table needs and that has no row."""


def table():
    """The table of all entries that have rows, the fewest steps first."""

    def row(name):
        try:
            rate = best_rate(name)
        except Missing:
            return math.inf, math.inf, None
        at_the_end = loss(name, rate)
        cells = [f"`{name}`", f"{rate:.1e}", f"{at_the_end:.4f}"]
        try:
            fewest = fewest_steps(name)
        except Missing:
            return math.inf, at_the_end, [*cells, "", "", ""]
        if name == BASELINE:
            mean, _, _ = goal()
            return STEPS, at_the_end, [*cells, str(STEPS), f"{mean:.4f}", "the goal"]
        if fewest is None:
            return ENTRIES[name][2] + 1, at_the_end, [*cells, f"> {ENTRIES[name][2]}", "", ""]
        steps, losses = fewest
        cells += [str(steps), f"{statistics.mean(losses):.4f}", f"{margin(losses):.1f}"]
        return steps, at_the_end, cells

    mean, deviation, _ = goal()
    head = ["entry", "rate", f"loss, {STEPS} steps, seed 1", "steps", "mean loss", "margin"]
    cells = [cells for _, _, cells in sorted(map(row, ENTRIES), key=lambda row: row[:2]) if cells]
    lines = ["| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *cells]]
    return (
        f"The goal is {mean:.4f}, the mean of eight seeds of `{BASELINE}`, with sigma "
        f"{deviation:.4f}. {len(rows)} runs, from {min(dates)} to {max(dates)}.\n\n"
        + "\n".join(lines).replace("|  |", "| |").replace("|  |", "| |")
    )


def write_table():
    global loss
    run = loss

    def known(name, rate, steps=STEPS, seed=1):
        key = (" ".join(ENTRIES[name][0]), rate_text(rate), steps, seed)
        if key not in rows:
            raise Missing(key)
        return run(name, rate, steps, seed)

    loss = known
    text = TABLE.read_text()
    before, rest = text.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    TABLE.write_text(f"{before}{MARKS[0]}\n\n{table()}\n\n{MARKS[1]}{after}")


def main():
    arguments = sys.argv[1:]
    read_rows()
    if "--table" not in arguments:
        names = [name for name in arguments if name in ENTRIES] or list(ENTRIES)
        # Two entries at a time keep all cores busy while one of them waits for its last run.
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(best_rate, names))
            if "--rates" not in arguments:
                goal()
                names.sort(key=lambda name: loss(name, best_rate(name)))
                list(pool.map(fewest_steps, [name for name in names if name != BASELINE]))
    write_table()


if __name__ == "__main__":
    main()
