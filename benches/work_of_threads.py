#!/usr/bin/env python3
"""Prints the work of each thread in the rows of `gpu.sh host`, without the time in which it waits.

Threads of CubeCL and of Burn's fusion spin while their queues are full or empty, and `/proc` counts
that as work. This program leaves out the samples of a profile that lie in the functions of WAITING.
`perf` has to be installed:

    export PROFILE=release RUNNER='perf record -q -e cpu-clock -k CLOCK_MONOTONIC -F 20000 -o FILE'
    benches/gpu.sh host | benches/work_of_threads.py FILE
"""

import bisect
import re
import subprocess
import sys
import time
from collections import Counter

# As in host.rs.
STEPS = 8
# Parts of names of the functions in which a thread spins, yields or sleeps.
WAITING = ("submit_inner", "run_scoped", "Server::start", "sched_yield", "pthread_cond", "futex")

ROW = re.compile(r"\| (.*?) \| (.*?) \| ([\d.]+) \|")
SAMPLE = re.compile(r"\s*(\S.*?)\s+([\d.]+):\s+(\d+)\s+\S+\s+(.*)")


def rows():
    """The end of each row's last step, its names, and the milliseconds of a step."""
    for line in sys.stdin:
        now = time.clock_gettime(time.CLOCK_MONOTONIC)
        print(line, end="", flush=True)
        if row := ROW.match(line):
            yield now, f"{row[1]} | {row[2]}", float(row[3])


def samples(profile):
    """The time, thread, function and nanoseconds of each sample, in order of time."""
    command = ["perf", "script", "-i", profile, "-F", "comm,time,period,ip,sym"]
    script = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = map(SAMPLE.match, script.splitlines())
    return sorted((float(s[2]), s[1], s[4], int(s[3])) for s in found if s)


def main(profile):
    measured = list(rows())
    taken = samples(profile)
    times = [sample[0] for sample in taken]
    print("\n| model | optimizer | work of each thread, ms a step |\n|---|---|---|")
    for end, names, ms in measured:
        first = bisect.bisect(times, end - STEPS * ms * 1e-3)
        during = taken[first : bisect.bisect(times, end)]
        work = Counter()
        for _, thread, function, nanoseconds in during:
            if not any(part in function for part in WAITING):
                work[thread] += nanoseconds
        each = (f"{thread} {spent * 1e-6 / STEPS:.2f}" for thread, spent in sorted(work.items()))
        print(f"| {names} | {', '.join(each)} |")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
