#!/usr/bin/env python3
"""Tests and times the native kernels for Hopper from their PTX, through the driver alone.

    python benches/peers/native_probe.py [--ptx FOLDER] [--dtype bf16|f16] [--seconds N]
        [--candidates] [MODE...]

Needs an NVIDIA driver, Python and NumPy, but neither Rust nor LLVM: what fails here is wrong in the
kernels, or in the driver's compiler. Modes run in the order in which they are given:

    facts   the driver, the device, and the registers and occupancy of every kernel
    check   products of integers, which are exact: every type, layout, tile and number of parts.
            A block whose barrier never opens gives up. Each of the eight combinations of type and
            tile is a process, which fails after 60 seconds
    order   chains of launches that overlap, a recorded chain, events of the whole context
    launch  the time of a launch in a recorded chain of small products that need each other, by
            tile
    time    every tile and number of parts, with cuBLAS next to them where PyTorch is installed
    sweep   the time of a round of tiles by the length of their sums: its slope is the rate of a
            multiprocessor, and its rest the cost of filling and storing
    generations
            every tile and number of parts, by the kernels of all generations in turns

With --candidates, the modes `facts`, `check`, `launch` and `generations` also take the kernels of
later generations, which the library does not use yet. `check` then also compares the bits of all
generations, of numbers that are no integers.

Without modes: facts, check, order. Exit status 0 means that all results are exact. With PROBE_SMALL
set, sizes are small: for `cubecl_kernels/tests/driver`, which stands in for the driver on machines
without a GPU.
"""

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, Structure, addressof, byref, sizeof
from ctypes import c_char, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Next to this program in a packed folder; in the sources otherwise.
PTX_FOLDERS = [HERE, HERE.parent.parent / "cubecl_kernels/src/native/kernels"]
SMALL = bool(os.environ.get("PROBE_SMALL"))
START = time.monotonic()

# As in `tile_choice.rs`, `launches.rs` and `ptx_module.rs` of cubecl_kernels/src/native.
HEIGHT, DEPTH, THREADS = 128, 64, 288
SPREADING_BYTES = (114 << 10) - 1024 + 128
MAX_SHARED_BYTES = 227 << 10
# By name: whether the inner dimension of A and that of B is contiguous.
LAYOUTS = {"kk": (True, True), "km": (True, False), "mm": (False, False)}
# Columns of a tile, and blocks of its cluster.
TILES = [(128, 1), (128, 2), (256, 1), (256, 2)]
# By their numbers: the beginnings of the names of a generation's files and products, and by the
# columns of a tile the bytes of shared memory of a block, and the blocks of a multiprocessor. The
# library has the first generation; others are candidates to replace it, which the argument
# `--candidates` adds.
GENERATIONS = {1: ("hopper", "product", {128: (114_752, 2), 256: (229_456, 1)})}
CANDIDATES = {2: ("hopper2", "product2", {128: (229_488, 1), 256: (229_456, 1)})}
# Their numbers in CUtensorMapDataType.
DTYPES = {"f16": 6, "bf16": 9}
# Four fifths of the data sheet's rate of an H100 or H200 SXM, as in `benches/gpu.rs`.
FLOOR_TFLOPS = 790
# Nanoseconds after which a block gives up to wait for others, as in `switch.rs`. Its tile is NaN.
PATIENCE = 1_000_000_000
# Seconds after which a combination of type and tile counts as hung.
DEADLINE = 300 if SMALL else 60


class CudaError(RuntimeError):
    """An error that the driver returned."""


class Sizes(Structure):
    """The parameter `sizes` of a product, as in `product.cu`."""

    _fields_ = [("m", c_int), ("n", c_int), ("k", c_int), ("alpha", c_float), ("beta", c_float)] + [
        (name, c_int)
        for name in ("lower", "addend", "cluster", "clusters", "tiles", "parts", "slots", "tasks")
    ] + [("patience", c_uint)]


class Attribute(Structure):
    """CUlaunchAttribute."""

    CLUSTER, OVERLAPS = 4, 6
    _fields_ = [("id", c_int), ("padding", c_char * 4), ("value", c_int * 16)]


class Config(Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
        ("attributes", POINTER(Attribute)), ("count", c_uint),
    ]


assert (sizeof(Sizes), sizeof(Attribute), sizeof(Config)) == (56, 72, 56)


class Driver:
    """The driver's library, whose functions raise `CudaError`."""

    def __init__(self):
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            sys.exit(f"the NVIDIA driver is missing: expected libcuda.so.1, got {error}")

    def __getattr__(self, name):
        function = getattr(self.library, name)

        def checked(*arguments):
            code = function(*arguments)
            if code:
                text = c_char_p()
                self.library.cuGetErrorName(code, byref(text))
                raise CudaError(f"{name}: {code} {(text.value or b'?').decode()}")

        return checked


@dataclass
class Product:
    """`C = alpha A B + beta D` of a batch. `beta` may be missing; `lower` if C is symmetric."""

    layout: str
    batch: int
    sizes: tuple  # m, n, k
    alpha: float = 1.0
    beta: float | None = None
    lower: bool = False

    def __str__(self):
        m, n, k = self.sizes
        lower = ", symmetric" if self.lower else ""
        return f"{self.layout} {self.batch} x {m}x{n}x{k}{lower}, beta {self.beta}"

    @property
    def operations(self):
        m, n, k = self.sizes
        return 2 * self.batch * m * n * k


@dataclass
class Grid:
    """A distribution of a product's tiles: more are tried than `tile_choice.rs` chooses from."""

    tile: tuple
    tiles: int  # of a matrix
    whole: int
    cut: int
    parts: int
    clusters: int
    product: Product
    multiprocessors: int
    generation: int

    def of(self, generation):
        """Returns the same distribution for kernels of a generation."""
        grids = type(self).all(self.product, self.tile, self.multiprocessors, generation)
        return grids[self.parts - 1]

    @classmethod
    def all(cls, product, tile, multiprocessors, generation=1):
        """Returns the distributions of a tile, by the number of parts of the last tiles."""
        (m, n, k), (width, cluster) = product.sizes, tile
        height, places = cluster * HEIGHT, multiprocessors // cluster
        rows, columns = -(-m // height), -(-n // width)
        reached = [-(-(row + 1) * height // width) if product.lower else columns for row in range(rows)]
        tiles = sum(min(reach, columns) for reach in reached)
        count = product.batch * tiles
        rest = count % places
        most = max(1, min(places // rest if rest else 1, -(-k // DEPTH)))
        grids = []
        for parts in range(1, most + 1):
            cut = rest if parts > 1 else 0
            tasks = count - cut + cut * parts
            _, blocks = GENERATIONS[generation][2][width]
            clusters = min(tasks, places * blocks)
            numbers = (tiles, count - cut, cut, parts, clusters)
            grids.append(cls(tile, *numbers, product, multiprocessors, generation))
        return grids

    def __str__(self):
        width, cluster = self.tile
        cut = f", {self.cut} in {self.parts} parts" if self.cut else ""
        return f"{self.whole} tiles of {cluster * HEIGHT} x {width}{cut}"


def generations_of(tile):
    """Returns the generations that have kernels for a tile."""
    return [number for number, (_, _, widths) in GENERATIONS.items() if tile[0] in widths]


def test_grid():
    """Distributions that were computed by hand."""
    for rows, tile, parts, expected in [
        (2048, (128, 2), 11, (72, 66, 6, 132)),
        (7168, (256, 2), 6, (406, 396, 10, 66)),
    ]:
        square = Product("kk", 1, (rows, rows, rows), lower=True)
        grid = Grid.all(square, tile, 132)[parts - 1]
        assert (grid.tiles, grid.whole, grid.cut, grid.clusters) == expected, grid


class Device:
    """A device, the kernels of a type on it, and a stream with scratch memory for cut tiles."""

    MULTIPROCESSORS, L2_BYTES, CAPABILITY = 16, 38, (75, 76)
    SHARED_OF_BLOCK, SHARED_OF_MULTIPROCESSOR = 97, 81

    def __init__(self, dtype=None, folder=None, patience=0):
        self.driver, self.id, self.context = Driver(), c_int(), c_void_p()
        self.patience = patience
        self.driver.cuInit(0)
        self.driver.cuDeviceGet(byref(self.id), 0)
        self.driver.cuDevicePrimaryCtxRetain(byref(self.context), self.id)
        self.driver.cuCtxSetCurrent(self.context)
        self.multiprocessors = self.attribute(self.MULTIPROCESSORS)
        self.stream = self.new_stream()
        if dtype:
            self.load(dtype, folder)
            self.partials = self.zeros(self.multiprocessors * HEIGHT * 256 * 4)
            # Two counters for every cut tile, and one more.
            self.arrived = self.zeros((2 * self.multiprocessors + 1) * 4)

    def attribute(self, number):
        value = c_int()
        self.driver.cuDeviceGetAttribute(byref(value), number, self.id)
        return value.value

    def new_stream(self):
        """Returns a stream that does not wait for the legacy one."""
        stream = c_void_p()
        self.driver.cuStreamCreate(byref(stream), 1)
        return stream

    def load(self, dtype, folder):
        """Compiles the kernels of a type, and prints the compiler's log if it refuses them. Returns
        the seconds of every file."""
        self.dtype, self.kernels, seconds = dtype, {}, {}
        for generation, (file, product, widths) in GENERATIONS.items():
            start = time.perf_counter()
            module = self.compiled(folder / f"{file}_{dtype}.ptx")
            seconds[generation] = time.perf_counter() - start
            names = [f"{product}_{width}_{layout}" for width in widths for layout in LAYOUTS]
            for name in names + ["plus_identity"] * (generation == 1):
                kernel = c_void_p()
                self.driver.cuModuleGetFunction(byref(kernel), module, name.encode())
                if name != "plus_identity":
                    self.driver.cuFuncSetAttribute(kernel, 8, MAX_SHARED_BYTES)
                self.driver.cuFuncSetAttribute(kernel, 9, 100)  # percent of shared memory
                self.kernels[name] = kernel
        return seconds

    def compiled(self, path):
        """Compiles a file with PTX."""
        module, log = c_void_p(), ctypes.create_string_buffer(1 << 16)
        options = (c_int * 2)(5, 6)  # a buffer for errors, and its size
        values = (c_void_p * 2)(addressof(log), len(log))
        try:
            text = path.read_bytes() + b"\0"
            self.driver.cuModuleLoadDataEx(byref(module), text, 2, options, values)
        except CudaError as error:
            sys.exit(f"FAIL {path.name}: {error}\n{log.value.decode(errors='replace')}")
        return module

    # Memory

    def alloc(self, size):
        pointer = c_uint64()
        self.driver.cuMemAlloc_v2(byref(pointer), c_size_t(size))
        return pointer.value

    def fill(self, pointer, byte, size, stream=None):
        stream = stream or self.stream
        self.driver.cuMemsetD8Async(c_uint64(pointer), byte, c_size_t(size), stream)

    def zeros(self, size):
        pointer = self.alloc(size)
        self.fill(pointer, 0, size)
        return pointer

    def copy(self, source, target, size):
        self.driver.cuMemcpyDtoDAsync_v2(c_uint64(target), c_uint64(source), c_size_t(size), self.stream)

    def upload(self, array):
        array = np.ascontiguousarray(array)
        pointer = self.alloc(array.nbytes)
        source = array.ctypes.data_as(c_void_p)
        self.driver.cuMemcpyHtoD_v2(c_uint64(pointer), source, c_size_t(array.nbytes))
        return pointer

    def download(self, pointer, shape, dtype=None):
        array = np.empty(shape, dtype or np.uint16)
        target = array.ctypes.data_as(c_void_p)
        self.driver.cuMemcpyDtoH_v2(target, c_uint64(pointer), c_size_t(array.nbytes))
        return array

    def free(self, *pointers):
        for pointer in pointers:
            self.driver.cuMemFree_v2(c_uint64(pointer))

    # Launches

    def synchronize(self):
        self.driver.cuStreamSynchronize(self.stream)

    def event(self, timed=False):
        event = c_void_p()
        self.driver.cuEventCreate(byref(event), 0 if timed else 2)
        return event

    def tensor_map(self, address, columns, rows, batch, box):
        """Describes a tensor for the copy engine; returns its memory, and the address in it."""
        memory = ctypes.create_string_buffer(256)
        aligned = -(-addressof(memory) // 128) * 128
        self.driver.cuTensorMapEncodeTiled(
            c_void_p(aligned), DTYPES[self.dtype], 3, c_void_p(address),
            (c_uint64 * 3)(columns, rows, batch), (c_uint64 * 2)(2 * columns, 2 * columns * rows),
            (c_uint * 3)(*box, 1), (c_uint * 3)(1, 1, 1),
            # Not interleaved, swizzled by 128 bytes, L2 promotion by 128, zeros outside.
            0, 3, 2, 0,
        )
        return memory, aligned

    def queue(self, kernel, grid, threads, shared, cluster, overlaps, pointers, stream):
        attributes = (Attribute * 2)()
        attributes[0].id, attributes[1].id = Attribute.CLUSTER, Attribute.OVERLAPS
        attributes[0].value[0:3] = [cluster, 1, 1]
        attributes[1].value[0] = int(overlaps)
        config = Config((*grid, 1), (threads, 1, 1), shared, stream or self.stream, attributes, 2)
        parameters = (c_void_p * len(pointers))(*pointers)
        self.driver.cuLaunchKernelEx(byref(config), self.kernels[kernel], parameters, None)

    def product(self, product, grid, a, b, c, d=None):
        """Prepares a launch: a function that queues it, on a stream and with an overlap."""
        (m, n, k), batch, (width, cluster) = product.sizes, product.batch, grid.tile
        has_addend = product.beta is not None

        def operand(address, lines, box, is_inner_contiguous):
            if is_inner_contiguous:
                return self.tensor_map(address, k, lines, batch, (DEPTH, box))
            return self.tensor_map(address, lines, k, batch, (64, DEPTH))

        of_a, of_b = LAYOUTS[product.layout]
        maps = [
            operand(a, m, HEIGHT, of_a),
            operand(b, n, width // 2, of_b),
            self.tensor_map(d if has_addend else c, n, m, batch, (64, HEIGHT)),
            self.tensor_map(c, n, m, batch, (64, 64)),
        ]
        slots = grid.cut * grid.parts
        sizes = Sizes(
            m, n, k, product.alpha, product.beta or 0.0, product.lower, has_addend,
            cluster, grid.clusters, grid.tiles, grid.parts, slots, grid.whole + slots, self.patience,
        )
        scratch = [c_uint64(self.partials), c_uint64(self.arrived)]
        pointers = [address for _, address in maps] + [addressof(value) for value in (sizes, *scratch)]
        _, name, widths = GENERATIONS[grid.generation]
        blocks, shared = grid.clusters * cluster, widths[width][0]
        if blocks <= self.multiprocessors:
            shared = max(shared, SPREADING_BYTES)
        kernel = f"{name}_{width}_{product.layout}"

        def launch(overlaps=False, stream=None, kept=(maps, sizes, scratch)):
            self.queue(kernel, (blocks, 1), THREADS, shared, cluster, overlaps, pointers, stream)

        return launch

    def plus_identity(self, batch, rows, z, total, factor=1.0):
        values = [c_uint64(z), c_uint64(total), c_int(rows), c_float(factor)]
        pointers, blocks = [addressof(value) for value in values], -(-rows * rows // (256 * 8))

        def launch(overlaps=False, stream=None, kept=values):
            self.queue("plus_identity", (blocks, batch), 256, 0, 1, overlaps, pointers, stream)

        return launch

    def microseconds(self, launch, repeats=7, stream=None):
        """Returns the median time of a launch among several in a row, of 3 ms or more."""
        stream = stream or self.stream
        start, end, elapsed = self.event(timed=True), self.event(timed=True), c_float()

        def row(count):
            self.driver.cuEventRecord(start, stream)
            for index in range(count):
                launch(index > 0)
            self.driver.cuEventRecord(end, stream)
            self.driver.cuEventSynchronize(end)
            self.driver.cuEventElapsedTime(byref(elapsed), start, end)
            return elapsed.value * 1e3 / count

        row(2)
        count = 3 if SMALL else max(3, min(500, int(3e3 / max(row(5), 0.1))))
        return statistics.median(row(count) for _ in range(repeats))


# Numbers


def bits(values, dtype):
    """Rounds float32 to a type in half precision, and returns the bits."""
    if dtype == "f16":
        return values.astype(np.float16).view(np.uint16)
    raw = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def rounded(values, dtype):
    if dtype == "f16":
        return values.astype(np.float16).astype(np.float32)
    return (bits(values, dtype).astype(np.uint32) << 16).view(np.float32)


def symmetric(values):
    """Repeats the lower triangle of every matrix above its diagonal."""
    return np.tril(values) + np.tril(values, -1).swapaxes(-1, -2)


# facts


def facts(folder, _):
    device = Device()
    driver, version, name = device.driver, c_int(), ctypes.create_string_buffer(100)
    driver.cuDriverGetVersion(byref(version))
    driver.cuDeviceGetName(name, 100, device.id)
    capability = ".".join(str(device.attribute(number)) for number in device.CAPABILITY)
    print(
        f"{name.value.decode()}, driver {version.value}, compute capability {capability}, "
        f"{device.multiprocessors} multiprocessors, L2 {device.attribute(device.L2_BYTES) >> 20} MiB, "
        f"shared memory {device.attribute(device.SHARED_OF_BLOCK)} bytes of a block, "
        f"{device.attribute(device.SHARED_OF_MULTIPROCESSOR)} of a multiprocessor"
    )
    for dtype in DTYPES:
        for generation, seconds in device.load(dtype, folder).items():
            print(f"{dtype}, generation {generation}: compiled in {seconds:.2f} s")
        for name, kernel in device.kernels.items():
            print(f"  {name}: {resources(device, name, kernel)}")
    return 0


def resources(device, name, kernel):
    """Describes registers, spilled bytes and occupancy of a kernel."""
    driver, count = device.driver, c_int()

    def attribute(number):
        driver.cuFuncGetAttribute(byref(count), number, kernel)
        return count.value

    widths = {f"{start}_{width}": of for _, start, all in GENERATIONS.values() for width, of in all.items()}
    is_product = name != "plus_identity"
    threads, shared = (THREADS, widths[name.rpartition("_")[0]][0]) if is_product else (256, 0)
    text = f"{attribute(4)} registers, {attribute(3)} local bytes"
    driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(byref(count), kernel, threads, c_size_t(shared))
    text += f", {count.value} blocks of a multiprocessor"
    for cluster in (1, 2) if is_product else ():
        attributes = (Attribute * 1)()
        attributes[0].id, attributes[0].value[0:3] = Attribute.CLUSTER, [cluster, 1, 1]
        blocks = cluster * device.multiprocessors
        config = Config((blocks, 1, 1), (threads, 1, 1), shared, None, attributes, 1)
        driver.cuOccupancyMaxActiveClusters(byref(count), kernel, byref(config))
        text += f", {count.value} clusters of {cluster}"
    return text


# check

# Like those of `self_test.rs`, with a batch of two, and with more cuts. The last number, if any, is
# the number of places among which the tiles are distributed, instead of all of the device's.
CASES = [
    (Product("kk", 2, (200, 200, 264), lower=True), None),
    (Product("kk", 2, (136, 136, 72), 2, -1, True), None),
    (Product("kk", 2, (136, 136, 1032), 1, 1, True), None),
    (Product("kk", 2, (264, 264, 328), 1, 1, True), 3),
    (Product("mm", 2, (264, 264, 520), 1, 1, True), 5),
    (Product("kk", 2, (136, 136, 520), 1, 1, True), 3),
    (Product("km", 2, (264, 520, 200), 1, 1), 2),
    (Product("mm", 2, (264, 264, 520), lower=True), None),
    (Product("km", 2, (136, 264, 520), 1, 2), None),
    (Product("kk", 2, (136, 72, 200)), None),
    (Product("kk", 2, (136, 72, 200), 1, 3), None),
    (Product("km", 2, (136, 264, 72)), None),
    (Product("kk", 7, (64, 64, 64), 1, 1, True), None),
    (Product("km", 5, (64, 576, 64)), None),
]
LARGE_CASES = [
    (Product("kk", 1, (2048, 2048, 2048), 1, 1, True), None),
    (Product("kk", 3, (768, 768, 3072), lower=True), None),
    (Product("mm", 1, (1032, 1032, 4104), 2, -1, True), None),
    (Product("km", 2, (1024, 4096, 1024), 1, 1), None),
    (Product("kk", 1, (4096, 1024, 1024), 1, 3), None),
]


# Products whose sums are rounded.
ROUNDED = [
    (Product("kk", 1, (264, 264, 1032), lower=True), 2),
    (Product("kk", 1, (2304, 2304, 1032), lower=True), None),
    (Product("km", 3, (520, 1032, 520), 1, 1), None),
]


def generations_that_differ(device, product, grid):
    """Returns the number of elements whose bits are not those of the first generation."""
    (m, n, k), batch = product.sizes, product.batch
    random = np.random.default_rng(3)
    numbers = [random.uniform(-1, 1, (batch, *size)).astype(np.float32) for size in ((m, k), (k, n), (m, n))]
    a, b, d = (device.upload(bits(values, device.dtype)) for values in numbers)
    b = device.upload(bits(numbers[0], device.dtype)) if product.lower else b
    c, results = device.alloc(2 * batch * m * n), []
    for generation in generations_of(grid.tile):
        device.fill(c, 0xFF, 2 * batch * m * n)
        device.product(product, grid.of(generation), a, b, c, d)()
        device.synchronize()
        results.append(device.download(c, (batch, m, n)))
    device.free(a, b, c, d)
    return sum(int((result != results[0]).sum()) for result in results[1:])


def check(folder, _):
    """Checks every combination of type and tile, four at a time, since the driver compiles each."""

    def fails(combination):
        dtype, (width, cluster) = combination
        name = f"{dtype},{width},{cluster}"
        command = [sys.executable, __file__, "--ptx", folder, "--combination", name]
        command += ["--candidates"] * (len(GENERATIONS) > 1)
        threads = {"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "4"}
        try:
            run = subprocess.run(command, timeout=DEADLINE, env={**os.environ, **threads})
        except subprocess.TimeoutExpired:
            print(f"FAIL {name}: no result within {DEADLINE} s: a hang", flush=True)
            return True
        return run.returncode != 0

    combinations = [(dtype, tile) for dtype in DTYPES for tile in TILES]
    with ThreadPoolExecutor(4) as pool:
        failures = sum(pool.map(fails, combinations))
    print(f"check: {len(combinations) - failures} of {len(combinations)} combinations are exact", flush=True)
    return failures


def check_combination(folder, dtype, tile):
    """Checks all cases with a type and a tile: whole, and in the largest number of parts."""
    device, failures, count = Device(dtype, folder, PATIENCE), 0, 0
    for seed, (product, places) in enumerate(CASES + ([] if SMALL else LARGE_CASES)):
        multiprocessors = min(device.multiprocessors, (places or device.multiprocessors) * tile[1])
        grids = Grid.all(product, tile, multiprocessors)
        operands = Integers(device, product, seed)
        for grid in [grids[0], grids[-1]][: len(grids)]:
            for generation in generations_of(tile):
                count += 1
                wrong = operands.wrong(grid.of(generation))
                if wrong:
                    failures += 1
                    text = f"FAIL {dtype}, generation {generation}, {product}, {grid}: {wrong}"
                    print(text, flush=True)
        operands.free()
    for product, places in ROUNDED[: 1 if SMALL else None] if len(GENERATIONS) > 1 else []:
        multiprocessors = min(device.multiprocessors, (places or device.multiprocessors) * tile[1])
        for grid in Grid.all(product, tile, multiprocessors)[:: 2]:
            count += 1
            if differing := generations_that_differ(device, product, grid):
                failures += 1
                text = f"{differing} elements differ between generations"
                print(f"FAIL {dtype}, {product}, {grid}: {text}", flush=True)
    wrong = wrong_identities(device)
    state = "FAIL" if failures or wrong else "ok  "
    name = f"{dtype} {tile[1] * HEIGHT} x {tile[0]}"
    cases = f"{failures} of {count} cases fail, {wrong} wrong sums with the identity"
    print(f"{state} {name}: {cases}", flush=True)
    return failures + (wrong > 0)


class Integers:
    """The operands of a product: integers, and so few that all sums are exact in half precision."""

    def __init__(self, device, product, seed):
        self.device, self.product = device, product
        (m, n, k), batch = product.sizes, product.batch
        random = np.random.default_rng(seed)
        a, b, d = (
            random.choice(np.float32([-1, 0, 0, 1, 0]), (batch, rows, columns))
            for rows, columns in ((m, k), (k, n), (m, n))
        )
        if product.lower:
            b, d = a.swapaxes(1, 2), symmetric(d)
        self.sums, self.d = np.matmul(a, b), d
        assert np.abs(self.sums).max() < 2000, "float16 rounds no such sum"
        of_a, of_b = LAYOUTS[product.layout]
        pairs = [(a if of_a else a.swapaxes(1, 2)), (b.swapaxes(1, 2) if of_b else b)]
        self.a, self.b = (device.upload(bits(np.ascontiguousarray(x), device.dtype)) for x in pairs)

    def free(self):
        self.device.free(self.a, self.b)

    def wrong(self, grid):
        """Computes the product, with an addend three times in a chain that overlaps; says what is
        wrong, if anything is."""
        device, product, shape = self.device, self.product, self.d.shape
        links = 1 if product.beta is None else 3
        poison = np.full(shape, 0xFFFF, np.uint16)
        chain = [device.upload(bits(self.d, device.dtype))] + [device.upload(poison) for _ in range(links)]
        launches = [
            device.product(product, grid, self.a, self.b, c, d) for d, c in zip(chain, chain[1:])
        ]
        for index, launch in enumerate(launches):
            launch(index > 0)
        device.synchronize()
        got = device.download(chain[-1], shape)
        counters = device.download(device.arrived, 2 * device.multiprocessors + 1, np.uint32)
        device.free(*chain)
        differs = got != bits(self.expected(links) + 0.0, device.dtype)
        if differs.any():
            places = np.argwhere(differs)
            panels = sorted({(int(row) // 64, int(column) // 64) for _, row, column in places[:2000]})
            first = tuple(int(index) for index in places[0])
            return f"{len(places)} wrong, the first at {first}; 64 x 64 panels {panels[:8]}"
        return "the counters of parts are not zero" if counters.any() else ""

    def expected(self, links):
        result = self.d
        for _ in range(links):
            addend = 0 if self.product.beta is None else np.float32(self.product.beta) * result
            result = rounded(np.float32(self.product.alpha) * self.sums + addend, self.device.dtype)
        return result


def wrong_identities(device):
    """Returns the number of wrong entries of matrices to which the identity was added."""
    rows = 72
    z = np.random.default_rng(9).integers(-3, 4, (2, rows, rows)).astype(np.float32)
    source = device.upload(bits(z, device.dtype))
    target = device.upload(np.full(z.shape, 0xFFFF, np.uint16))
    device.plus_identity(2, rows, source, target, -2.0)()
    device.synchronize()
    expected = bits(-2.0 * z + np.eye(rows, dtype=np.float32) + 0.0, device.dtype)
    return int((device.download(target, z.shape) != expected).sum())


# order


def order(folder, _):
    device = Device("bf16", folder)
    chain = Chain(device)
    failures = chain.check_overlaps() + chain.check_recording() + check_context_events(device)
    for streams in (2, 8, 32, 128):
        time_context_events(device, streams)
    return failures


def report(is_right, text):
    """Prints a result, and returns 1 for a failure."""
    print(f"{'ok  ' if is_right else 'FAIL'} {text}", flush=True)
    return int(not is_right)


class Chain:
    """Launches of which each needs the result of the one before it."""

    ROWS, LINKS = (136 if SMALL else 512), 12

    def __init__(self, device, grid_of=None):
        """Of tiles in the largest number of parts, and sums with the identity; with `grid_of`, of
        products in the distribution that it returns."""
        self.device, rows = device, self.ROWS
        random = np.random.default_rng(4).choice(np.float32([-1, 0, 0, 1]), (rows, rows))
        x = device.upload(bits(random, device.dtype))
        first = device.upload(bits(symmetric(random), device.dtype))
        links = [first] + [device.alloc(2 * rows * rows) for _ in range(self.LINKS)]
        self.last, self.launches = links[-1], []
        product = Product("kk", 1, (rows, rows, rows), 0.25, -0.5, True)
        grid = grid_of(product) if grid_of else Grid.all(product, (128, 1), device.multiprocessors)[-1]
        for index, (d, c) in enumerate(zip(links, links[1:])):
            if index % 4 == 3 and not grid_of:
                self.launches.append(device.plus_identity(1, rows, d, c))
            else:
                self.launches.append(device.product(product, grid, x, x, c, d))
        self.run(False)
        self.expected = self.result()

    def run(self, overlaps):
        for index, launch in enumerate(self.launches):
            launch(overlaps and index > 0)

    def result(self):
        self.device.synchronize()
        return self.device.download(self.last, (self.ROWS, self.ROWS))

    def is_right(self):
        return bool((self.result() == self.expected).all())

    def check_overlaps(self):
        times, wrong = 2 if SMALL else 200, 0
        for _ in range(times):
            self.run(True)
            wrong += not self.is_right()
        for overlaps in (True, False):
            us = self.device.microseconds(lambda _: self.run(overlaps))
            print(f"     {self.LINKS} launches {'that overlap' if overlaps else 'in a row'}: {us:.1f} us")
        return report(not wrong, f"chains that overlap: {wrong} of {times} are wrong")

    def recorded(self):
        """Returns whether a recorded chain is right, and its microseconds."""
        device, driver = self.device, self.device.driver
        graph, executable = c_void_p(), c_void_p()
        driver.cuStreamBeginCapture_v2(device.stream, 2)  # in relaxed mode
        self.run(True)
        driver.cuStreamEndCapture(device.stream, byref(graph))
        driver.cuGraphInstantiateWithFlags(byref(executable), graph, c_uint64(0))
        device.fill(self.last, 0xFF, 2 * self.ROWS * self.ROWS)
        replay = lambda _=False: driver.cuGraphLaunch(executable, device.stream)
        replay()
        is_right = self.is_right()
        return is_right, device.microseconds(replay)

    def check_recording(self):
        is_right, us = self.recorded()
        return report(is_right, f"a recorded chain; {us:.1f} us for {self.LINKS} launches")


def launch(folder, options):
    device, failures = Device(options.dtype, folder), 0
    for tile in TILES:
        for generation in generations_of(tile):

            def grid_of(product):
                return Grid.all(product, tile, device.multiprocessors)[0].of(generation)

            chain = Chain(device, grid_of)
            is_right, us = chain.recorded()
            of = f"{tile[1] * HEIGHT} x {tile[0]}, generation {generation}"
            each = f"{us / chain.LINKS:.2f} us for a launch of {chain.ROWS} rows in a recorded chain"
            failures += report(is_right, f"{of}: {each}")
    return failures


def check_context_events(device):
    """A copy on the side stream sees the long work of another stream, given before it, and later
    work of a third stream does not overtake the copy."""
    driver, rounds, wrong, copied = device.driver, 20, 0, 4096
    before, after = device.new_stream(), device.new_stream()
    rows = 136 if SMALL else 8192
    a, b, c = (device.zeros(max(copied, 2 * rows * rows)) for _ in range(3))
    copy = device.alloc(copied)
    product = Product("kk", 1, (rows, rows, rows))
    long = device.product(product, Grid.all(product, (128, 1), device.multiprocessors)[0], a, b, c)
    for _ in range(rounds):
        device.fill(c, 0x55, copied)
        device.synchronize()
        for _ in range(8):
            long(False, before)  # writes zeros, some milliseconds later
        ready, done = device.event(), device.event()
        driver.cuCtxRecordEvent(device.context, ready)
        driver.cuStreamWaitEvent(device.stream, ready, 0)
        device.copy(c, copy, copied)
        driver.cuEventRecord(done, device.stream)
        driver.cuCtxWaitEvent(device.context, done)
        device.fill(c, 0x77, copied, after)
        driver.cuStreamSynchronize(after)
        wrong += bool(device.download(copy, copied // 2).any())
        driver.cuEventDestroy_v2(ready)
        driver.cuEventDestroy_v2(done)
    device.free(a, b, c, copy)
    return report(not wrong, f"events of the context: {wrong} of {rounds} rounds are out of order")


def time_context_events(device, streams):
    driver, times = device.driver, 200
    memory = device.alloc(64)
    for stream in [device.new_stream() for _ in range(streams)]:
        device.fill(memory, 0, 64, stream)
    driver.cuCtxSynchronize()
    events = [(device.event(), device.event()) for _ in range(times)]
    start = time.perf_counter()
    for ready, done in events:
        driver.cuCtxRecordEvent(device.context, ready)
        driver.cuStreamWaitEvent(device.stream, ready, 0)
        driver.cuEventRecord(done, device.stream)
        driver.cuCtxWaitEvent(device.context, done)
    host = time.perf_counter() - start
    driver.cuCtxSynchronize()
    total = time.perf_counter() - start
    us = [seconds / times * 1e6 for seconds in (host, total)]
    text = f"host {us[0]:.1f} us, all {us[1]:.1f} us"
    print(f"     into the side stream and back, {streams} streams: {text}", flush=True)


# time

# Batches of matrices m x n.
TIMED = [
    (1, 512, 512), (1, 768, 768), (48, 768, 768), (1, 768, 3072), (24, 768, 3072),
    (1, 1024, 4096), (16, 1024, 4096), (1, 2048, 2048), (8, 2048, 2048), (1, 2048, 8192),
    (1, 4096, 4096), (1, 4096, 14336), (1, 7168, 18432),
]
TIMED_SMALL = [(1, 64, 128), (2, 128, 136)]
# Numbers of parts that are tried, with the largest.
PARTS = {1, 2, 3, 4, 6, 8, 11}


def random_memory(device):
    """Returns a function that allocates a number of elements, from -1 to 1."""
    seed = np.random.default_rng(1).uniform(-1, 1, 1 << 22).astype(np.float32)
    source = device.upload(bits(seed, device.dtype))

    def random(elements):
        pointer = device.alloc(2 * elements)
        for start in range(0, elements, seed.size):
            count = min(seed.size, elements - start)
            device.copy(source, pointer + 2 * start, 2 * count)
        return pointer

    return random


def products_of(batch, m, n, x, r):
    """Returns the products of an iteration on matrices m x n: their names, and their factors."""
    return [
        ("X X^T", Product("kk", batch, (m, m, n), lower=True), x, x),
        ("b R + c R^2", Product("kk", batch, (m, m, m), 1.0, 2.0, True), r, r),
        ("Q X", Product("km", batch, (m, n, m)), r, x),
    ]


def times(folder, options):
    device, torch = Device(options.dtype, folder), pytorch()
    random = random_memory(device)
    print(f"\n## Native products through the driver, {options.dtype}\n")
    print("| shape | product | tile | by parts, us | fastest, us | TFLOP/s of the full product "
          "| of the floor | cuBLAS, us |")
    print("|---" * 8 + "|")
    for batch, m, n in TIMED_SMALL if SMALL else TIMED:
        x, r, c, d = (random(batch * m * columns) for columns in (n, m, n, n))
        for name, product, left, right in products_of(batch, m, n, x, r):
            if time.monotonic() - START > options.seconds:
                print("\nskipped: products for which there was no time left")
                return 0
            cublas = f"{library_microseconds(device, torch, product):.2f}" if torch else ""
            for tile in TILES:
                row = time_tile(device, product, tile, left, right, c, d)
                print(f"| {batch} x {m}x{n} | {name} | {row} | {cublas} |", flush=True)
        device.free(x, r, c, d)
    return 0


def time_tile(device, product, tile, a, b, c, d):
    grids = Grid.all(product, tile, device.multiprocessors)
    grids = [grid for grid in grids if grid.parts in PARTS | {len(grids)}]
    measured = {grid.parts: device.microseconds(device.product(product, grid, a, b, c, d)) for grid in grids}
    by_parts, us = ", ".join(f"{parts}: {us:.2f}" for parts, us in measured.items()), min(measured.values())
    floor = product.operations / (2 if product.lower else 1) / FLOOR_TFLOPS * 1e-6
    tflops = product.operations / us * 1e-6
    return f"{tile[1] * HEIGHT} x {tile[0]} | {by_parts} | {us:.2f} | {tflops:.0f} | {100 * floor / us:.0f} %"


# Times of every kernel, of which the median counts.
TURNS = 5


def generations(folder, options):
    """Times the kernels of all generations in turns, so that a change of the clock rate reaches all
    of them."""
    device = Device(options.dtype, folder)
    random = random_memory(device)
    print(f"\n## Generations of native kernels, {options.dtype}, us\n")
    titles = "".join(f"generation {generation}: by parts | " for generation in GENERATIONS)
    print(f"| shape | product | tile | {titles}fastest, to the first |")
    print("|---" * (4 + len(GENERATIONS)) + "|")
    for batch, m, n in TIMED_SMALL if SMALL else TIMED:
        x, r, c, d = (random(batch * m * columns) for columns in (n, m, n, n))
        for name, product, left, right in products_of(batch, m, n, x, r):
            for tile in TILES:
                if time.monotonic() - START > options.seconds:
                    print("\nskipped: products for which there was no time left")
                    return 0
                if len(generations_of(tile)) < len(GENERATIONS):
                    continue
                row = in_turns(device, product, tile, left, right, c, d)
                print(f"| {batch} x {m}x{n} | {name} | {row} |", flush=True)
        device.free(x, r, c, d)
    return 0


def in_turns(device, product, tile, a, b, c, d):
    grids = Grid.all(product, tile, device.multiprocessors)
    grids = [grid for grid in grids if grid.parts in PARTS | {len(grids)}]
    launches = {
        (generation, grid.parts): device.product(product, grid.of(generation), a, b, c, d)
        for grid in grids
        for generation in generations_of(tile)
    }
    measured = {key: [] for key in launches}
    for _ in range(TURNS):
        for key, launch in launches.items():
            measured[key].append(device.microseconds(launch, 1))
    medians = {key: statistics.median(values) for key, values in measured.items()}
    cells, least = [], []
    for generation in generations_of(tile):
        of = {parts: us for (number, parts), us in medians.items() if number == generation}
        cells.append(", ".join(f"{parts}: {us:.2f}" for parts, us in of.items()))
        least.append(min(of.values()))
    ratios = ", ".join(f"{us / least[0]:.3f}" for us in least[1:])
    return " | ".join([f"{tile[1] * HEIGHT} x {tile[0]}", *cells, ratios])


def pytorch():
    """Returns PyTorch with the device in use, or `None`."""
    try:
        import torch

        torch.zeros(1, device="cuda")
        return torch
    except Exception as error:  # an import, a library that does not load, a device that is refused
        print(f"skipped: cuBLAS, since PyTorch does not run: {error}")
        return None


def library_microseconds(device, torch, product):
    """Measures the full product by cuBLAS."""
    (m, n, k), kind = product.sizes, {"f16": torch.float16, "bf16": torch.bfloat16}[device.dtype]
    left = torch.randn(product.batch, m, k, device="cuda", dtype=kind)
    right = left.mT if product.lower else torch.randn(product.batch, k, n, device="cuda", dtype=kind)
    result = torch.empty(product.batch, m, n, device="cuda", dtype=kind)
    stream = c_void_p(torch.cuda.current_stream().cuda_stream)
    return device.microseconds(lambda _: torch.matmul(left, right, out=result), stream=stream)


# sweep


def sweep(folder, options):
    device = Device(options.dtype, folder)
    depths = (64, 72, 128, 136) if SMALL else (64, 256, 1024, 4096)
    titles = " | ".join(f"k {depth}, us" for depth in depths)
    print(f"\n## A round of tiles by the length of their sums, {options.dtype}\n")
    print(f"| tile | {titles} | us of a slice | us of the rest |\n|---" + "|---" * (len(depths) + 2) + "|")
    for tile in TILES:
        # Tiles of a symmetric product share operands. Those of others would wait for memory.
        rows = 256 if SMALL else 1024
        matrix = Product("kk", 1, (rows, rows, DEPTH), lower=True)
        of_matrix = Grid.all(matrix, tile, device.multiprocessors)[0].tiles
        places = device.multiprocessors // tile[1] * GENERATIONS[1][2][tile[0]][1]
        batch = 1 if SMALL else max(1, places // of_matrix)
        values = []
        for depth in depths:
            product = Product("kk", batch, (rows, rows, depth), lower=True)
            grid = Grid.all(product, tile, device.multiprocessors)[0]
            a, c = device.zeros(2 * batch * rows * depth), device.zeros(2 * batch * rows * rows)
            values.append(device.microseconds(device.product(product, grid, a, a, c)))
            device.free(a, c)
        slope = (values[3] - values[2]) * DEPTH / (depths[3] - depths[2])
        rest = values[3] - depths[3] / DEPTH * slope
        cells = " | ".join(f"{us:.2f}" for us in values)
        print(f"| {tile[1] * HEIGHT} x {tile[0]} | {cells} | {slope:.3f} | {rest:.2f} |", flush=True)
    return 0


MODES = {
    "facts": facts, "check": check, "order": order, "launch": launch, "time": times,
    "generations": generations, "sweep": sweep,
}


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("modes", nargs="*", metavar="MODE", default=["facts", "check", "order"])
    parser.add_argument("--ptx", type=Path, help="the folder of hopper_bf16.ptx and hopper_f16.ptx")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="the type of the times")
    parser.add_argument("--seconds", type=float, default=150, help="no product is timed after that")
    parser.add_argument("--candidates", action="store_true", help="also kernels of later generations")
    parser.add_argument("--combination", help=argparse.SUPPRESS)  # a process of `check`
    options = parser.parse_args()
    unknown = set(options.modes) - set(MODES)
    if unknown:
        parser.error(f"the mode {unknown.pop()} is unknown: expected one of {', '.join(MODES)}")
    folders = [options.ptx] if options.ptx else PTX_FOLDERS
    folder = next((folder for folder in folders if (folder / "hopper_bf16.ptx").exists()), None)
    if folder is None:
        parser.error(f"hopper_bf16.ptx is missing: expected in {folders[-1]}; set --ptx")
    test_grid()
    if options.candidates:
        GENERATIONS.update(CANDIDATES)
    if options.combination:
        dtype, width, cluster = options.combination.split(",")
        sys.exit(int(check_combination(folder, dtype, (int(width), int(cluster))) > 0))
    failures = 0
    for mode in options.modes:
        try:
            failures += MODES[mode](folder, options)
        except CudaError as error:
            failures += report(False, f"{mode}: {error}")
    print(f"native_probe: {failures} failures, {time.monotonic() - START:.0f} s")
    sys.exit(int(failures > 0))


if __name__ == "__main__":
    try:
        import numpy as np
    except ImportError:
        sys.exit("NumPy is missing: expected the module numpy; run pip install numpy")
    main()
