#!/usr/bin/env python3
"""Counts the files and functions that a gradient passes, from the backward pass to the new model.

Two ranks that are threads run `examples/ranks.rs` and `examples/layout.rs` in builds without
optimisation, on Flex. Valgrind's callgrind lists every function of the crate that their calls of
`backward` and `step` enter. Functions of one or two lines do not count, nor do comments and blank
lines, nor the files of ELSEWHERE. `-v` lists the functions of every file; cargo gets all other
arguments.

    benches/way_of_a_gradient.py -v --features cuda,vulkan
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
ENTRIES = ["backward", "step"]
# The iteration, the operations of Flex, and the threads in which the ranks run.
ELSEWHERE = (
    "comm/world.rs",
    "orthogonalize/",
    "backend/program.rs",
    "backend/matrix.rs",
    "backend/tf32.rs",
    "backend/flex/",
)
# The shortest body that counts.
LINES = 3

FUNCTION = re.compile(r"(\s*)(?:pub(?:\([^)]*\))? )?(?:const )?(?:unsafe )?fn (\w+)")
IMPLEMENTATION = re.compile(r"(?:unsafe )?impl\b|(?:pub(?:\([^)]*\))? )?trait ")


def functions():
    """By name: the module, the file, the lines of the body and the implementation of functions."""
    found = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.rs")):
        file = path.relative_to(SOURCE).as_posix()
        lines = re.split(r"\n#\[cfg\((?:all\()?test\b[^\n]*\nmod ", path.read_text())[0].split("\n")
        implementation = ""
        for number, line in enumerate(lines):
            if IMPLEMENTATION.match(line) or line == "}":
                implementation = line
            function = FUNCTION.match(line)
            if function:
                module = re.sub(r"(/mod)?\.rs$", "", file).replace("/", "::")
                body = body_of(lines, number, function[1])
                found[function[2]].append((module, file, body, implementation))
    return found


def body_of(lines, number, indent):
    """The number of lines of code in a function's body, as rustfmt writes them."""
    while not lines[number].endswith(("{", "}", ";")):
        number += 1
    if not lines[number].endswith("{"):
        return 1
    body = (line.strip() for line in lines[number + 1 : lines.index(f"{indent}}}", number)])
    return sum(bool(line) and not line.startswith("//") for line in body)


def entered(program):
    """The symbols of all functions that a program enters in its calls of ENTRIES."""
    optimizer = "distmuon::distributed::optimizer::DistModuleOptimizer"
    toggles = [f"--toggle-collect={optimizer}::{entry}" for entry in ENTRIES]
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], check=True, capture_output=True, text=True)
    # For builds that link the standard library dynamically.
    libraries = f"{sysroot.stdout.strip()}/lib:{os.environ.get('LD_LIBRARY_PATH', '')}"
    environment = {**os.environ, "BURN_DEVICE": "flex", "LD_LIBRARY_PATH": libraries}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        command = ["valgrind", "--tool=callgrind", "--collect-atstart=no", *toggles]
        command += [f"--callgrind-out-file={out}", program]
        subprocess.run(command, check=True, capture_output=True, env=environment)
        text = out.read_text(errors="replace")
    return set(re.findall(r"^c?fn=\(\d+\) (.*)$", text, flags=re.M))


def source_of(symbol, known):
    """The function in the sources. `None` for those of other crates, and for derived ones."""
    symbol = re.sub(r"(?:::\{\{closure\}\})+|'\d+$", "", symbol)
    if not re.match(r"<?distmuon::", symbol):
        return None
    name = symbol.split("::")[-1]
    # The modules and types of the path: of the function, of its type and of its trait.
    modules = {path.rstrip(":") for path in re.findall(r"distmuon::((?:[a-z_0-9]+::)*)", symbol)}
    types = re.findall(r"\b([A-Z]\w*)", symbol.rsplit("::", 1)[0])
    fits = [function for function in known[name] if function[0] in modules]
    of_type = [
        function
        for function in fits or known[name]
        if all(re.search(rf"\b{of}\b", function[3]) for of in types) and bool(types) == bool(function[3])
    ]
    chosen = of_type or fits
    return (chosen[0][1], f"{types[0]}::{name}" if types else name, chosen[0][2]) if chosen else None


def main():
    examples = ["ranks", "layout"]
    build = ["cargo", "build", "--config", "profile.dev.package.distmuon.opt-level=0"]
    build += [f"--example={example}" for example in examples]
    build += [argument for argument in sys.argv[1:] if argument != "-v"]
    subprocess.run(build, cwd=ROOT, check=True)
    programs = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"), "debug/examples")
    known = functions()
    for example in examples:
        found = (source_of(symbol, known) for symbol in entered(programs / example))
        files = defaultdict(set)
        for file, name, body in filter(None, found):
            if body >= LINES and not file.startswith(ELSEWHERE):
                files[file].add(name)
        print(f"{example}: {len(files)} files, {sum(map(len, files.values()))} functions")
        if "-v" in sys.argv:
            for file, names in sorted(files.items()):
                print(f"  {file}: {', '.join(sorted(names))}")


if __name__ == "__main__":
    main()
