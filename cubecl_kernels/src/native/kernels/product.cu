// C = alpha A B + beta D for every matrix of a batch, with Hopper's warpgroup matrix instructions,
// and the sum of every matrix and the identity.
//
// A block computes a tile of 128 x 128. One thread of its last warp asks the copy engine (TMA) for
// slices of A and B; two warpgroups multiply them, 64 rows each. Two blocks share a multiprocessor,
// so that one multiplies while the other stores. Of a symmetric result, only the tiles on and below
// the diagonal are computed, and each is stored twice: as it is, and as its mirror image.
//
// The last tiles of a batch, which would leave multiprocessors idle, can be cut along the inner
// dimension: a block multiplies a part of the slices and stores its sums in global memory. The
// block that is the last to do so adds all of them and stores the tile. No block waits for others.
//
// Elements have 16 bits: bfloat16, or float16 with TYPE_F16. An operand is K-major if its inner
// dimension is contiguous, otherwise MN-major. Tensor maps have the dimensions (contiguous, other,
// matrix), a swizzle of 128 bytes, and boxes of 64 x 128 x 1, or 64 x 64 x 1 for MN-major operands.

#ifdef EMULATE
#include "emulator.hpp"
#else
#include "device.cuh"
#endif

constexpr int TILE = 128;            // rows and columns of a tile
constexpr int PANEL = 64;            // elements of a swizzled row of 128 bytes
constexpr int DEPTH = PANEL;         // columns of A in a slice
constexpr int STEP = 16;             // columns of A that one matrix instruction takes
constexpr int STAGES = 3;            // slices in shared memory
constexpr int GROUP = 8;             // rows of tiles in a group, see `tile_of`
constexpr int CONSUMERS = 256;       // threads that multiply
constexpr int THREADS = 288;         // of a block that multiplies
constexpr int BLOCKS = 2;            // on a multiprocessor
constexpr int SHARED_BYTES = 99328;  // dynamic shared memory of a block that multiplies
constexpr int SUM_THREADS = 256;     // of a block of `plus_identity`

constexpr int OPERAND_BYTES = TILE * DEPTH * 2;
constexpr int PANEL_BYTES = PANEL * DEPTH * 2;
constexpr int STAGE_BYTES = 2 * OPERAND_BYTES;
constexpr int ATOM_BYTES = 8 * 128;  // 8 swizzled rows, after which the swizzle repeats

static_assert(THREADS == CONSUMERS + 32, "a warp loads for the consumers");
static_assert(CONSUMERS == TILE / 64 * 128, "a warpgroup multiplies 64 rows");
static_assert(SHARED_BYTES == STAGES * STAGE_BYTES + ATOM_BYTES, "there is room to align stages");
static_assert(STAGE_BYTES == TILE * TILE * 2 && STAGES >= 3, "D, a tile and its mirror image fit");
static_assert(65536 / (BLOCKS * THREADS) >= 112, "every thread has at least 112 registers");
static_assert(BLOCKS * (SHARED_BYTES + 2048) <= 228 * 1024, "shared memory suffices");

struct Sizes {
    int m, n, k;
    float alpha, beta;
    int lower;   // 1 if the result is symmetric, otherwise 0
    int addend;  // 1 if there is a D, 0 if its map is ignored
    int whole;   // tiles, of all matrices, that are not cut: those of the first blocks
    int parts;   // of every other tile, each with its own block: at most the number of slices
};

// Eight neighbors of a row.
struct alignas(16) Eight {
    Pair pairs[4];
};

// The work of a block, and its shared memory.
struct Block {
    int row, column;  // of the tile's first element
    int matrix;
    int first, slices;  // the first slice of the block, and the number of its slices
    int parts;          // of the tile
    int slot;           // among the blocks with a part of a cut tile; negative for others
    char *stages;
    Barrier *full, *empty;  // of every stage
    Barrier *added;         // D has arrived

    DEVICE char *stage(int slice) const { return stages + slice % STAGES * STAGE_BYTES; }
};

// Finds the tile of a block. Blocks that run at a time share rows and columns in the L2 cache:
// they walk through `GROUP` rows of tiles column by column.
DEVICE void tile_of(int block, int rows, int columns, bool lower, int &row, int &column) {
    int first = 0;
    for (;;) {
        int height = min(GROUP, rows - first);
        // All columns of a full result, otherwise those left of the group's triangle.
        int square = height * (lower ? first : columns);
        int triangle = lower ? height * (height + 1) / 2 : 0;
        if (block < square) {
            row = first + block % height;
            column = block / height;
            return;
        }
        if (block < square + triangle) {
            block -= square;
            int c = 0;
            for (; block >= height - c; ++c) block -= height - c;
            column = first + c;
            row = column + block;
            return;
        }
        block -= square + triangle;
        first += height;
    }
}

// The offset of an element in a tile of two panels, each of 128 swizzled rows: the copy engine
// permutes the 16-byte chunks of a row by its low bits.
DEVICE int swizzled(int row, int column) {
    int chunk = (column % PANEL / 8) ^ (row % 8);
    return column / PANEL * OPERAND_BYTES + row * 128 + chunk * 16 + column % 8 * 2;
}

template <bool MN>
DEVICE void load_operand(char *to, const TensorMap &map, Barrier *full, int slice, int outer,
                         int matrix) {
    if (MN) {
        load_box(to, &map, full, outer, slice * DEPTH, matrix);
        load_box(to + PANEL_BYTES, &map, full, outer + PANEL, slice * DEPTH, matrix);
    } else {
        load_box(to, &map, full, slice * DEPTH, outer, matrix);
    }
}

// Waits until the slice that was in the same stage has been multiplied.
DEVICE void wait_until_empty(const Block &block, int slice) {
    if (slice >= STAGES) barrier_wait(&block.empty[slice % STAGES], (slice / STAGES - 1) & 1);
}

// D takes the place of one more slice.
DEVICE void load_addend(const Block &block, const TensorMap &d) {
    char *to = block.stage(block.slices);
    barrier_expect(block.added, STAGE_BYTES);
    load_box(to, &d, block.added, block.column, block.row, block.matrix);
    load_box(to + OPERAND_BYTES, &d, block.added, block.column + PANEL, block.row, block.matrix);
}

template <bool A_MN, bool B_MN>
DEVICE void produce(const Block &block, const TensorMap &a, const TensorMap &b, const TensorMap &d,
                    bool addend) {
    for (int slice = 0; slice < block.slices; ++slice) {
        wait_until_empty(block, slice);
        char *to = block.stage(slice);
        Barrier *full = &block.full[slice % STAGES];
        barrier_expect(full, STAGE_BYTES);
        const int from = block.first + slice;
        load_operand<A_MN>(to, a, full, from, block.row, block.matrix);
        load_operand<B_MN>(to + OPERAND_BYTES, b, full, from, block.column, block.matrix);
    }
    // Of a cut tile, only the block that stores it loads D, see `add_parts`.
    if (addend && block.parts == 1) {
        wait_until_empty(block, block.slices);
        load_addend(block, d);
    }
}

// Multiplies all slices. A thread receives of every 8 columns two neighbors in one row, and two in
// the row 8 below.
template <bool A_MN, bool B_MN>
DEVICE void multiply_slices(const Block &block, int half, bool leads_warp, float (&sums)[64]) {
    // Bytes between the panels of an MN-major operand; ignored for K-major ones.
    constexpr int A_LEADING = A_MN ? PANEL_BYTES : 16, B_LEADING = B_MN ? PANEL_BYTES : 16;
    // Bytes between the operands of two instructions: 16 rows of 128 bytes, or 16 elements.
    constexpr int A_STEP = A_MN ? STEP * 128 : STEP * 2, B_STEP = B_MN ? STEP * 128 : STEP * 2;
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] = 0.0f;
    for (int slice = 0; slice < block.slices; ++slice) {
        barrier_wait(&block.full[slice % STAGES], slice / STAGES & 1);
        char *a = block.stage(slice), *b = a + OPERAND_BYTES;
        // 64 rows of A are one panel of an MN-major operand, or half of a K-major one: as large.
        Descriptor da = describe(a + half * PANEL_BYTES, A_LEADING, ATOM_BYTES);
        Descriptor db = describe(b, B_LEADING, ATOM_BYTES);
        multiply_fence(sums);
#pragma unroll
        for (int step = 0; step < DEPTH / STEP; ++step) {
            multiply<A_MN, B_MN>(sums, advanced(da, step * A_STEP), advanced(db, step * B_STEP));
        }
        multiply_commit();
        // One slice stays in flight; the one before it has been read.
        multiply_wait<1>(sums);
        if (slice > 0 && leads_warp) barrier_arrive(&block.empty[(slice - 1) % STAGES]);
    }
    multiply_wait<0>(sums);
    if (block.slices > 0 && leads_warp) {
        barrier_arrive(&block.empty[(block.slices - 1) % STAGES]);
    }
}

// Adds the sums of all parts of a tile in the block whose part is the last to arrive; returns false
// in the others. The order of the parts is fixed, so the result does not depend on that block.
//
// Every part has `TILE * TILE` sums in `partials`, of each thread one in `CONSUMERS`. `arrived`
// counts the parts of every cut tile, and is 0 before and after a launch.
DEVICE bool add_parts(const Block &block, float *partials, u32 *arrived, const TensorMap &d,
                      bool addend, int thread, float (&sums)[64]) {
    float *own = partials + (u64)block.slot * (TILE * TILE) + thread;
#pragma unroll
    for (int i = 0; i < 64; ++i) store_global(own + i * CONSUMERS, sums[i]);
    // Another block that sees the count sees the sums of all threads.
    thread_fence();
    sync_threads<CONSUMERS>();
    bool is_last = false;
    if (thread == 0) {
        u32 *count = arrived + block.slot / block.parts;
        // Around the count, for what the meetings before and after it pass on.
        thread_fence();
        is_last = atomic_add(count, 1) == (u32)block.parts - 1;
        thread_fence();
        if (is_last) {
            store_global(count, 0u);
            // All threads have multiplied the slice that was in the stage.
            if (addend) load_addend(block, d);
        }
    }
    if (!sync_threads_or<CONSUMERS>(is_last)) return false;
    thread_fence();
    const float *part = partials + (u64)(block.slot - block.slot % block.parts) * (TILE * TILE);
    part += thread;
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] = load_global(part + i * CONSUMERS);
    for (int other = 1; other < block.parts; ++other) {
        part += TILE * TILE;
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[i] += load_global(part + i * CONSUMERS);
    }
    return true;
}

// sums = alpha sums + beta D
DEVICE void scale(const Block &block, const Sizes &sizes, int row, int column, float (&sums)[64]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] *= sizes.alpha;
    if (!sizes.addend) return;
    barrier_wait(block.added, 0);
    const char *d = block.stage(block.slices);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        Pair upper = load_pair(d + swizzled(row, 8 * j + column));
        Pair below = load_pair(d + swizzled(row + 8, 8 * j + column));
        sums[4 * j] += sizes.beta * first(upper);
        sums[4 * j + 1] += sizes.beta * second(upper);
        sums[4 * j + 2] += sizes.beta * first(below);
        sums[4 * j + 3] += sizes.beta * second(below);
    }
}

// Stores the tile and, of a symmetric result, its mirror image.
DEVICE void store(const Block &block, const TensorMap &c, bool lower, int thread,
                  const float (&sums)[64]) {
    // All threads have multiplied the last two slices, whose stages are written now.
    sync_threads<CONSUMERS>();
    char *tile = block.stage(block.slices + 1), *mirror = block.stage(block.slices + 2);
    const int lane = thread % 32;
    // An instruction stores four matrices of 8 x 8: rows 0-7 and 8-15 of the warp's 16 rows, in 8
    // columns and the next 8. Lane `l` passes the address of row `l % 8` of matrix `l / 8`.
    const int row = thread / 32 * 16 + lane / 8 % 2 * 8;
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
        Pair p[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) p[i] = pair(sums[4 * j + 2 * i], sums[4 * j + 2 * i + 1]);
        const int column = 8 * (j + lane / 16);
        store_matrices(tile + swizzled(row + lane % 8, column), p[0], p[1], p[2], p[3]);
        if (lower) {
            store_transposed(mirror + swizzled(column + lane % 8, row), p[0], p[1], p[2], p[3]);
        }
    }
    const bool diagonal = lower && block.row == block.column;
    if (diagonal) {
        // Above the diagonal, the mirror image: the result is exactly symmetric.
        sync_threads<CONSUMERS>();
        for (int i = thread; i < TILE * TILE / 8; i += CONSUMERS) {
            int r = i / (TILE / 8), c = i % (TILE / 8) * 8;
            if (c + 7 > r) merge(tile + swizzled(r, c), mirror + swizzled(r, c), r - c);
        }
    }
    // The copy engine reads what every thread wrote before its fence.
    fence_async();
    sync_threads<CONSUMERS>();
    if (thread == 0) {
        store_box(&c, tile, block.column, block.row, block.matrix);
        store_box(&c, tile + OPERAND_BYTES, block.column + PANEL, block.row, block.matrix);
        if (lower && !diagonal) {
            store_box(&c, mirror, block.row, block.column, block.matrix);
            store_box(&c, mirror + OPERAND_BYTES, block.row + PANEL, block.column, block.matrix);
        }
        store_finish();
    }
}

template <bool A_MN, bool B_MN>
DEVICE void product(const TensorMap &a, const TensorMap &b, const TensorMap &d, const TensorMap &c,
                    const Sizes &sizes, float *partials, u32 *arrived) {
    DYNAMIC_SHARED(shared);
    SHARED_BARRIERS(full, STAGES);
    SHARED_BARRIERS(empty, STAGES);
    SHARED_BARRIERS(added, 1);

    const int thread = THREAD, warp = thread / 32, lane = thread % 32;
    Block block;
    const int rows = (sizes.m + TILE - 1) / TILE, columns = (sizes.n + TILE - 1) / TILE;
    const int tiles = sizes.lower ? rows * (rows + 1) / 2 : rows * columns;
    const int slices = (sizes.k + DEPTH - 1) / DEPTH;
    int tile = BLOCK_X, part = 0;
    block.parts = 1;
    block.slot = BLOCK_X - sizes.whole;
    if (block.slot >= 0) {
        block.parts = sizes.parts;
        tile = sizes.whole + block.slot / sizes.parts;
        part = block.slot % sizes.parts;
    }
    tile_of(tile % tiles, rows, columns, sizes.lower, block.row, block.column);
    block.row *= TILE;
    block.column *= TILE;
    block.matrix = tile / tiles;
    block.first = slices * part / block.parts;
    block.slices = slices * (part + 1) / block.parts - block.first;
    block.stages = align_1024(shared);
    block.full = full;
    block.empty = empty;
    block.added = added;

    if (thread == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(&full[s], 1);
            barrier_init(&empty[s], CONSUMERS / 32);
        }
        barrier_init(added, 1);
        fence_barriers();
    }
    sync_block();

    if (thread >= CONSUMERS) {
        if (lane == 0) produce<A_MN, B_MN>(block, a, b, d, sizes.addend);
        return;
    }
    float sums[64];
    multiply_slices<A_MN, B_MN>(block, warp / 4, lane == 0, sums);
    if (block.parts > 1) {
        bool finishes = add_parts(block, partials, arrived, d, sizes.addend, thread, sums);
        if (!finishes) return;
    }
    scale(block, sizes, warp * 16 + lane / 4, lane % 4 * 2, sums);
    store(block, c, sizes.lower, thread, sums);
}

#define PRODUCT(NAME, A_MN, B_MN)                                                             \
    ENTRY BOUNDS(THREADS, BLOCKS) NAME(                                                       \
        const CONSTANT TensorMap a, const CONSTANT TensorMap b, const CONSTANT TensorMap d,   \
        const CONSTANT TensorMap c, const CONSTANT Sizes sizes, float *partials,              \
        u32 *arrived) {                                                                       \
        product<A_MN, B_MN>(a, b, d, c, sizes, partials, arrived);                            \
    }

PRODUCT(product_kk, false, false)
PRODUCT(product_km, false, true)
PRODUCT(product_mm, true, true)

// sum = z + I for every matrix of a batch, added in float32. `rows` is a multiple of 8, at most
// 185,000, so that a thread's number has 32 bits.
ENTRY BOUNDS(SUM_THREADS, 1) plus_identity(const Eight *z, Eight *sum, int rows) {
    const u32 width = (u32)rows / 8, i = (u32)BLOCK_X * SUM_THREADS + THREAD;
    if (i >= width * rows) return;
    const u64 at = (u64)BLOCK_Y * width * rows + i;
    // The place of the diagonal in these eight elements, if it is from 0 to 7.
    const int one = (int)(i / width) - (int)(i % width * 8);
    Eight eight = z[at];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        Pair &both = eight.pairs[p];
        both = pair(first(both) + (one == 2 * p ? 1.0f : 0.0f),
                    second(both) + (one == 2 * p + 1 ? 1.0f : 0.0f));
    }
    sum[at] = eight;
}
