// C = alpha A B + beta D for every matrix of a batch, with Hopper's warpgroup matrix instructions,
// and the sum of every matrix and the identity.
//
// A cluster of one or two blocks computes one tile after the other, of which each block has 128
// rows and all WIDTH columns. One thread of its last warp asks the copy engine (TMA) for slices of
// A and B; two warpgroups multiply them, 64 rows each. Of two blocks, each loads a half of B's
// slice, which the copy engine writes to both.
//
// Of a symmetric result, only the tiles that reach the diagonal or lie below it are computed. They
// are stored in panels of 64 x 64: those below the diagonal twice, as they are and as their mirror
// images, and those above it not at all.
//
// Some tiles can be cut along the inner dimension, so that all multiprocessors have as much to do:
// a block multiplies a part of the slices and stores its sums in global memory. The block that is
// the last to do so adds all of them and stores the tile. No block waits for others, except for
// those of its cluster.
//
// There are two generations of products, with the same parameters, tiles and results. In the second
// one, a block has a multiprocessor of its own, and its warpgroups take turns: one multiplies while
// the other stores. All blocks add the sums of cut tiles, a panel at a time.
//
// A wait that never ends would keep the device from any other work. Launches that verify a device
// therefore have patience: a block whose barrier takes longer gives up, ends, and leaves NaN.
//
// Elements have 16 bits: bfloat16, or float16 with TYPE_F16. An operand is K-major if its inner
// dimension is contiguous, otherwise MN-major. Tensor maps have the dimensions (contiguous, other,
// matrix) and a swizzle of 128 bytes. Their boxes are 64 x 128 x 1 for A and D, 64 x WIDTH / 2 x 1
// for B, and 64 x 64 x 1 for C and for MN-major operands.

#ifdef EMULATE
#include "emulator.hpp"
#else
#include "device.cuh"
#endif

constexpr int HEIGHT = 128;       // rows of a tile for each block
constexpr int PANEL = 64;         // elements of a swizzled row of 128 bytes
constexpr int DEPTH = PANEL;      // columns of A in a slice
constexpr int STEP = 16;          // columns of A that one matrix instruction takes
constexpr int GROUP = 8;          // rows of tiles in a group, see `tile_of`
constexpr int CONSUMERS = 256;    // threads that multiply
constexpr int THREADS = 288;      // of a block that multiplies
constexpr int MAX_CLUSTER = 2;    // blocks of a cluster
constexpr int SUM_THREADS = 256;  // of a block of `plus_identity`

constexpr int PANEL_BYTES = PANEL * PANEL * 2;
constexpr int A_BYTES = HEIGHT * DEPTH * 2;
constexpr int D_WIDTH = 128;         // columns of D in a stage
constexpr int ATOM_BYTES = 8 * 128;  // 8 swizzled rows, after which the swizzle repeats

static_assert(THREADS == CONSUMERS + 32, "a warp loads for the consumers");
static_assert(SUM_THREADS % 32 == 0, "warps are full");
static_assert(CONSUMERS == HEIGHT / 64 * 128, "a warpgroup multiplies 64 rows");

// The stages, buffers and registers of a block whose tiles have a number of columns, of which a
// multiprocessor has room for a number.
template <int COLUMNS, int BLOCKS_OF_MULTIPROCESSOR>
struct Tile {
    static constexpr int WIDTH = COLUMNS;
    static constexpr int SUMS = WIDTH / 2;  // of a thread
    // Of two blocks, one multiplies while the other stores. A block with larger tiles, or with more
    // stages, needs a multiprocessor of its own.
    static constexpr int BLOCKS = BLOCKS_OF_MULTIPROCESSOR;
    static constexpr int STAGES = (WIDTH == 256 ? 4 : 6) / BLOCKS;  // slices in shared memory
    static constexpr int STAGE_BYTES = A_BYTES + WIDTH * DEPTH * 2;
    static constexpr int BUFFERS = 2 / BLOCKS;  // of every warpgroup, for panels to be stored
    static constexpr int BUFFERS_AT = STAGES * STAGE_BYTES;
    static constexpr int BARRIERS_AT = BUFFERS_AT + CONSUMERS / 128 * BUFFERS * PANEL_BYTES;
    static constexpr int SURRENDER_AT = BARRIERS_AT + 2 * STAGES * 8;
    static constexpr int SHARED_BYTES = SURRENDER_AT + 16;

    static_assert(STAGE_BYTES >= HEIGHT * D_WIDTH * 2, "D fits into a stage");
    // Registers belong to a quarter of a multiprocessor, which has up to a quarter of the warps,
    // rounded up.
    static constexpr int WARPS_OF_QUARTER = (BLOCKS * THREADS / 32 + 3) / 4;
    static_assert(65536 / 4 / 32 / WARPS_OF_QUARTER / 8 * 8 >= SUMS + 32, "registers suffice");
    static_assert(BLOCKS * (SHARED_BYTES + 1024) <= 228 * 1024, "shared memory suffices");
};

// The tiles of both generations, by their columns.
typedef Tile<128, 2> Narrow;
typedef Tile<128, 1> Narrow2;
typedef Tile<256, 1> Wide;

// Dynamic shared memory of a block, by the columns of its tiles.
constexpr int SHARED_BYTES_128 = 114752;
constexpr int SHARED_BYTES_256 = 229456;
constexpr int SHARED2_BYTES_128 = 229488;

static_assert(Narrow::SHARED_BYTES == SHARED_BYTES_128, "the host knows the bytes");
static_assert(Narrow2::SHARED_BYTES == SHARED2_BYTES_128, "the host knows the bytes");
static_assert(Wide::SHARED_BYTES == SHARED_BYTES_256, "the host knows the bytes");

struct Sizes {
    int m, n, k;
    float alpha, beta;
    int lower;     // 1 if the result is symmetric, otherwise 0
    int addend;    // 1 if there is a D, 0 if its map is ignored
    int cluster;   // blocks of a cluster: 1 or 2
    int clusters;  // of the launch
    int tiles;     // of a matrix
    int parts;     // of every tile that is cut, of the first ones of the batch
    int slots;     // parts of all of them, at most one for every cluster
    int tasks;     // parts, and tiles that are not cut
    u32 patience;  // nanoseconds after which a wait is given up, below 2^31, or 0
};

// Eight neighbors of a row.
struct alignas(16) Eight {
    Pair pairs[4];
};

// A tile, or a part of one.
struct Task {
    int row, column;  // of the block's first element
    int matrix;
    int first, slices;  // the first slice, and the number of slices
    int part, parts;
    int slot;  // among all parts
};

// The shared memory of a block. Slices, and D, pass through its stages one after the other: the
// first `STAGES` of these entries are the first to use a stage, and so on.
template <class T>
struct Block {
    char *memory;
    int cluster, rank;  // the number of blocks, and the place of this one
    u32 patience;

    DEVICE int stage(u32 entry) const { return (int)(entry % T::STAGES); }
    DEVICE u32 use(u32 entry) const { return entry / T::STAGES; }
    DEVICE char *at(u32 entry) const {
        return memory + stage(entry) * T::STAGE_BYTES;
    }
    DEVICE Barrier *full(u32 entry) const {
        return (Barrier *)(memory + T::BARRIERS_AT) + stage(entry);
    }
    DEVICE Barrier *empty(u32 entry) const { return full(entry) + T::STAGES; }
    // A word, 1 once a thread of the block has given up to wait, otherwise 0.
    DEVICE u32 *surrender() const { return (u32 *)(memory + T::SURRENDER_AT); }
    // A word of a warpgroup, which tells its threads which panel is the next one.
    DEVICE u32 *panel(int group) const { return surrender() + 1 + group; }
    DEVICE bool has_given_up() const { return patience > 0 && load_shared(surrender()); }
    // Waits for a barrier, or until the block has given up, in which case it returns false.
    DEVICE bool wait(Barrier *barrier, u32 parity) const {
        for (u32 start = 0; !barrier_try_wait(barrier, parity);) {
            if (patience == 0) continue;
            if (start == 0) start = now() | 1;  // perhaps a nanosecond too late
            if ((int)(now() - start) > (int)patience) store_shared(surrender(), 1u);
            if (has_given_up()) return false;
        }
        return true;
    }
    DEVICE bool wait_until_full(u32 entry) const { return wait(full(entry), use(entry) & 1); }
    // Waits until the consumers of all blocks of the cluster have released the stage.
    DEVICE bool wait_until_empty(u32 entry) const {
        return use(entry) == 0 || wait(empty(entry), (use(entry) - 1) & 1);
    }
    // Called by a warp once it has read an entry, into whose stage any block of the cluster may
    // write: a thread for each block tells it.
    DEVICE void release(u32 entry) const {
        sync_warp();
        const int other = THREAD % 32;
        if (other < cluster) barrier_arrive(empty(entry), other);
    }
};

// Finds a tile by its number among those of a matrix. Clusters that run at a time share rows and
// columns in the L2 cache: they walk through `GROUP` rows of tiles column by column.
template <class T>
DEVICE void tile_of(int tile, const Sizes &sizes, int &row, int &column) {
    const int halvings = sizes.cluster - 1, height = HEIGHT << halvings;
    const int rows = ((sizes.m + HEIGHT - 1) / HEIGHT + halvings) >> halvings;
    const int columns = (sizes.n + T::WIDTH - 1) / T::WIDTH;
    for (int first = 0;; first += GROUP) {
        const int end = min(first + GROUP, rows);
        // Columns that all rows of the group have: of a symmetric result, those that begin left of
        // the first row's end.
        int square = columns;
        if (sizes.lower) square = min(columns, ((first + 1) * height + T::WIDTH - 1) / T::WIDTH);
        if (tile < square * (end - first)) {
            row = first + tile % (end - first);
            column = tile / (end - first);
            return;
        }
        tile -= square * (end - first);
        if (!sizes.lower) continue;
        for (column = square; column < columns && column * T::WIDTH < end * height; ++column) {
            row = column * (T::WIDTH / HEIGHT) >> halvings;
            if (tile < end - row) {
                row += tile;
                return;
            }
            tile -= end - row;
        }
    }
}

DEVICE int first_slice(const Sizes &sizes, int part, int parts) {
    return (sizes.k + DEPTH - 1) / DEPTH * part / parts;
}

// The number of slices of a task, without a search for its tile.
DEVICE int slices_of(int number, const Sizes &sizes) {
    if (number >= sizes.slots) return first_slice(sizes, 1, 1);
    const int part = number % sizes.parts;
    return first_slice(sizes, part + 1, sizes.parts) - first_slice(sizes, part, sizes.parts);
}

template <class T>
DEVICE Task task_of(int number, const Sizes &sizes, const Block<T> &block) {
    Task task;
    // Parts come first: their sums are added up while other blocks have tiles to multiply.
    const bool is_part = number < sizes.slots;
    const int whole = number - sizes.slots + sizes.slots / sizes.parts;
    const int tile = is_part ? number / sizes.parts : whole;
    task.slot = number;
    task.parts = is_part ? sizes.parts : 1;
    task.part = is_part ? number % sizes.parts : 0;
    tile_of<T>(tile % sizes.tiles, sizes, task.row, task.column);
    task.row = (task.row * block.cluster + block.rank) * HEIGHT;
    task.column *= T::WIDTH;
    task.matrix = tile / sizes.tiles;
    task.first = first_slice(sizes, task.part, task.parts);
    task.slices = slices_of(number, sizes);
    return task;
}

// D is added to the first part of a tile.
DEVICE bool has_addend(const Task &task, const Sizes &sizes) {
    return sizes.addend && task.part == 0;
}

// The offset of an element in a panel: the copy engine permutes the 16-byte chunks of a row by its
// low bits.
DEVICE u32 swizzled(u32 row, u32 column) {
    return row * 128 + ((column / 8) ^ (row % 8)) * 16 + column % 8 * 2;
}

// Loads a part of an operand, `LINES` rows of A or columns of B, for the blocks in `mask`.
template <bool MN, int LINES>
DEVICE void load_operand(char *to, const TensorMap &map, Barrier *full, int slice, int line,
                         int matrix, int mask) {
    if (MN) {
        for (int i = 0; i < LINES; i += PANEL) {
            load_box(to + i * DEPTH * 2, &map, full, line + i, slice * DEPTH, matrix, mask);
        }
    } else {
        load_box(to, &map, full, slice * DEPTH, line, matrix, mask);
    }
}

template <class T, bool A_MN, bool B_MN>
DEVICE void produce(const Block<T> &block, const Task &task, const Sizes &sizes, u32 &entry,
                    const TensorMap &a, const TensorMap &b, const TensorMap &d) {
    // Columns of B that a block of a full cluster loads.
    constexpr int HALF = T::WIDTH / MAX_CLUSTER;
    const int own = 1 << block.rank, all = (1 << block.cluster) - 1;
    for (int slice = task.first; slice < task.first + task.slices; ++slice, ++entry) {
        if (!block.wait_until_empty(entry)) return;
        char *to = block.at(entry);
        Barrier *full = block.full(entry);
        barrier_expect(full, T::STAGE_BYTES);
        load_operand<A_MN, HEIGHT>(to, a, full, slice, task.row, task.matrix, own);
        for (int half = block.rank; half < MAX_CLUSTER; half += block.cluster) {
            load_operand<B_MN, HALF>(to + A_BYTES + half * HALF * DEPTH * 2, b, full, slice,
                                     task.column + half * HALF, task.matrix, all);
        }
    }
    if (!has_addend(task, sizes)) return;
    for (int i = 0; i < T::WIDTH; i += D_WIDTH, ++entry) {
        if (!block.wait_until_empty(entry)) return;
        Barrier *full = block.full(entry);
        barrier_expect(full, HEIGHT * D_WIDTH * 2);
        for (int j = 0; j < D_WIDTH; j += PANEL) {
            load_box(block.at(entry) + j * HEIGHT * 2, &d, full, task.column + i + j, task.row,
                     task.matrix, own);
        }
    }
}

// Describes an operand with a swizzle of 128 bytes, whose code in bits 62 and 63 is 1. The bits of
// a shared address above the lowest 18 are those of the block's place in its cluster.
DEVICE Descriptor describe(const char *p, u32 leading, u32 stride) {
    return (u64)((address(p) & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 |
           (u64)(stride >> 4) << 32 | (u64)1 << 62;
}

// Only the low half changes.
DEVICE Descriptor advanced(Descriptor d, int bytes) {
    return d >> 32 << 32 | (u32)((u32)d + (bytes >> 4));
}

// The turns that the two warpgroups of a block give each other, one of each for every task.
enum Turn {
    MULTIPLY,  // to the second: the first one's instructions for all slices are in flight
    STORE,     // to the second: what the first one stores has been read, so its buffers are free
    NEXT       // to the first, but for the last task: the second one has used its turns
};

// The last slices of a task that the second warpgroup leaves until it has its turn: while the first
// one stores, the second one multiplies them. The stages have room for no more and for D, which the
// first one needs next.
template <class T>
DEVICE int slices_left(const Sizes &sizes) {
    return T::STAGES - (sizes.addend ? T::WIDTH / D_WIDTH : 0);
}

// Multiplies all slices. A thread receives of every 8 columns two neighbors in one row, and two in
// the row 8 below.
template <bool TURNS, class T, bool A_MN, bool B_MN>
DEVICE void multiply_slices(const Block<T> &block, const Sizes &sizes, int task, u32 &entry,
                            int half, float (&sums)[T::SUMS]) {
    // Bytes between the panels of an MN-major operand; ignored for K-major ones.
    constexpr int A_LEADING = A_MN ? PANEL_BYTES : 16, B_LEADING = B_MN ? PANEL_BYTES : 16;
    // Bytes between the operands of two instructions: 16 rows of 128 bytes, or 16 elements.
    constexpr int A_STEP = A_MN ? STEP * 128 : STEP * 2, B_STEP = B_MN ? STEP * 128 : STEP * 2;
#pragma unroll
    for (int i = 0; i < T::SUMS; ++i) sums[i] = 0.0f;
    const int slices = slices_of(task, sizes);
    // The second warpgroup's first slice of those that it has left.
    const int turn = half == 1 ? max(slices - slices_left<T>(sizes), 0) : slices;
    for (int slice = 0; slice < slices; ++slice, ++entry) {
        const bool is_turn = TURNS && slice == turn;
        if (is_turn) {
            // What it has read may be overwritten while it waits.
            multiply_wait<0>(sums);
            if (slice > 0) block.release(entry - 1);
            take_turn<MULTIPLY>();
        }
        block.wait_until_full(entry);
        char *a = block.at(entry), *b = a + A_BYTES;
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
        if (slice > 0 && !is_turn) block.release(entry - 1);
    }
    if (TURNS && half == 0) {
        if (task != CLUSTER) take_turn<NEXT>();
        give_turn<MULTIPLY>();
    }
    multiply_wait<0>(sums);
    block.release(entry - 1);
}

// sums = alpha sums + beta D
template <class T>
DEVICE void scale(const Block<T> &block, const Sizes &sizes, bool has_addend, u32 &entry,
                  u32 thread, float (&sums)[T::SUMS]) {
    // What did not arrive makes the result NaN.
    const float alpha = block.has_given_up() ? NOT_A_NUMBER : sizes.alpha;
#pragma unroll
    for (int i = 0; i < T::SUMS; ++i) sums[i] *= alpha;
    if (!has_addend) return;
    float beta = sizes.beta;
    const u32 row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
#pragma unroll
    for (int i = 0; i < T::WIDTH / 8; ++i) {
        if (i % (D_WIDTH / 8) == 0 && !block.wait_until_full(entry)) beta = NOT_A_NUMBER;
        const char *panel = block.at(entry) + i * 8 % D_WIDTH / PANEL * (HEIGHT * 128);
        const Pair upper = load_pair(panel + swizzled(row, 8 * i % PANEL + column));
        const Pair below = load_pair(panel + swizzled(row + 8, 8 * i % PANEL + column));
        sums[4 * i] += beta * first(upper);
        sums[4 * i + 1] += beta * second(upper);
        sums[4 * i + 2] += beta * first(below);
        sums[4 * i + 3] += beta * second(below);
        if ((i + 1) % (D_WIDTH / 8) != 0) continue;
        // The copy engine writes after what every thread read before its fence.
        fence_async();
        block.release(entry++);
    }
}

// Adds the sums of all parts of a tile in the block whose part is the last to arrive; returns false
// in the others. The order of the parts is fixed, so the result does not depend on that block.
//
// Every block of a part has `HEIGHT * WIDTH` sums in `partials`, of each thread one in `CONSUMERS`.
// `arrived` counts the parts of the blocks' cut tiles, and is 0 before and after a launch.
template <class T>
DEVICE bool add_parts(const Block<T> &block, const Task &task, float *partials, u32 *arrived,
                      int thread, float (&sums)[T::SUMS]) {
    constexpr int SUMS = T::SUMS;
    const u64 stride = (u64)block.cluster * (HEIGHT * T::WIDTH);  // from part to part
    float *first = partials + block.rank * (HEIGHT * T::WIDTH) + thread;
    float *own = first + task.slot * stride;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) store_global(own + i * CONSUMERS, sums[i]);
    // Another block that sees the count sees the sums of all threads.
    thread_fence();
    sync_consumers();
    bool is_last = false;
    if (thread == 0) {
        u32 *count = arrived + task.slot / task.parts * block.cluster + block.rank;
        // Around the count, for what the meetings before and after it pass on.
        thread_fence();
        is_last = atomic_add(count, 1) == (u32)task.parts - 1;
        thread_fence();
        if (is_last) store_global(count, 0u);
    }
    if (!sync_consumers_or(is_last)) return false;
    thread_fence();
    const float *part = first + (task.slot - task.part) * stride;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = load_global(part + i * CONSUMERS);
    for (int other = 1; other < task.parts; ++other) {
        part += stride;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] += load_global(part + i * CONSUMERS);
    }
    return true;
}

// The panels that a warpgroup stores, one after the other: through a number of buffers, which are
// free at first if it has them in turn with the other one.
template <int BUFFERS, bool IN_TURN>
struct Store {
    char *buffers;
    int group;   // of the two warpgroups
    int thread;  // of the warpgroup
    u32 panels;  // so far

    DEVICE char *buffer() const { return buffers + panels % BUFFERS * PANEL_BYTES; }
    // Waits until the copy engine has read what was in the buffer.
    DEVICE void begin() const {
        if (IN_TURN) return;
        if (thread == 0) store_wait_read<BUFFERS - 1>();
        sync_group(group);
    }
    DEVICE void end(const TensorMap &c, int row, int column, int matrix) {
        // The meeting then tells all threads that the next buffer is free.
        if (IN_TURN && thread == 0) store_wait_read<BUFFERS - 2>();
        // The copy engine reads what every thread wrote before its fence.
        fence_async();
        sync_group(group);
        if (thread == 0) {
            store_box(&c, buffer(), column, row, matrix);
            store_commit();
        }
        ++panels;
    }
};

// Writes the sums of a panel in the rows [16 warp, 16 warp + 16) and the columns [16 square,
// 16 square + 16), or their mirror image.
template <bool MIRROR>
DEVICE void write_square(char *to, u32 warp, u32 lane, u32 square, const float *sums) {
    // An instruction stores four matrices of 8 x 8: rows 0-7 and 8-15, in 8 columns and the next
    // 8. Lane `l` passes the address of row `l % 8` of matrix `l / 8`.
    const u32 row = 16 * warp + lane / 8 % 2 * 8, column = 16 * square + lane / 16 * 8;
    Pair p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = pair(sums[2 * i], sums[2 * i + 1]);
    if (MIRROR) {
        store_transposed(to + swizzled(column + lane % 8, row), p[0], p[1], p[2], p[3]);
    } else {
        store_matrices(to + swizzled(row + lane % 8, column), p[0], p[1], p[2], p[3]);
    }
}

// Writes those sums of such a square that are not above its diagonal.
DEVICE void write_below_diagonal(char *to, u32 warp, u32 lane, const float *sums) {
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const u32 row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (row >= column) {
            store_element(to + swizzled(16 * warp + row, 16 * warp + column), sums[i]);
        }
    }
}

// Stores a panel of the result, and its mirror image.
template <int BUFFERS, bool IN_TURN>
DEVICE void store_panel(Store<BUFFERS, IN_TURN> &store, int row, int column, int matrix,
                        const TensorMap &c, bool lower, const float *panel) {
    const u32 thread = opaque(store.thread), warp = thread / 32, lane = thread % 32;
    if (lower && column > row) return;
    store.begin();
    if (lower && column == row) {
        // Above the diagonal, the mirror image: the result is exactly symmetric.
#pragma unroll
        for (u32 s = 0; s < 4; ++s) {
            write_square<true>(store.buffer(), warp, lane, s, panel + 8 * s);
        }
        sync_group(store.group);
    }
#pragma unroll
    for (u32 s = 0; s < 4; ++s) {
        if (lower && column == row && s == warp) {
            write_below_diagonal(store.buffer(), warp, lane, panel + 8 * s);
        } else if (!lower || column < row || s < warp) {
            write_square<false>(store.buffer(), warp, lane, s, panel + 8 * s);
        }
    }
    store.end(c, row, column, matrix);
    if (!lower || column == row) return;
    store.begin();
#pragma unroll
    for (u32 s = 0; s < 4; ++s) {
        write_square<true>(store.buffer(), warp, lane, s, panel + 8 * s);
    }
    store.end(c, column, row, matrix);
}

// Stores a warpgroup's 64 rows of a tile.
template <class T, int BUFFERS, bool IN_TURN>
DEVICE void store(Store<BUFFERS, IN_TURN> &store, const Task &task, const TensorMap &c, bool lower,
                  const float (&sums)[T::SUMS]) {
    const int row = task.row + store.group * PANEL;
#pragma unroll
    for (int p = 0; p < T::WIDTH / PANEL; ++p) {
        store_panel(store, row, task.column + p * PANEL, task.matrix, c, lower,
                    &sums[p * PANEL / 2]);
    }
}

// The second generation's counters for cut tiles, in `arrived`. They are 0 before and after a
// launch.
struct Counters {
    u32 *arrived;

    // Warpgroups that have stored the sums of their part of a tile.
    DEVICE u32 *stored(int tile) const { return arrived + 2 * tile; }
    // Panels of the tile that a warpgroup has taken to add the sums of all parts.
    DEVICE u32 *taken(int tile) const { return arrived + 2 * tile + 1; }
    // Warpgroups of the launch that take no more, after the counters of all cut tiles.
    DEVICE u32 *done(int cut) const { return arrived + 2 * cut; }
};

// Stores the sums of a part for `add_panels`. Every block of a part has `HEIGHT * WIDTH` of them in
// `partials`, of each thread one in `CONSUMERS`.
template <class T>
DEVICE void store_part(const Block<T> &block, const Task &task, float *partials,
                       const Counters &counters, int thread, const float (&sums)[T::SUMS]) {
    float *own = partials + ((u64)task.slot * block.cluster + block.rank) * (HEIGHT * T::WIDTH);
    own += thread;
#pragma unroll
    for (int i = 0; i < T::SUMS; ++i) store_global(own + i * CONSUMERS, sums[i]);
    // A warpgroup that sees the count sees the sums of all threads.
    thread_fence();
    sync_group(thread / 128);
    if (thread % 128 == 0) {
        // For what the meeting before has passed on.
        thread_fence();
        atomic_add(counters.stored(task.slot / task.parts), 1);
    }
}

// Adds the sums of all parts of cut tiles, always in the same order, and stores them. Warpgroups do
// so once they have nothing else to do, and take one panel of a tile after the other. None waits
// for parts: a tile that lacks some is left to the warpgroup that stores the last of them.
template <class T>
DEVICE void add_panels(const Block<T> &block, const Sizes &sizes, const TensorMap &c,
                       const float *partials, const Counters &counters,
                       Store<T::BUFFERS, false> &stores) {
    constexpr int PANELS = T::WIDTH / PANEL, GROUPS = CONSUMERS / 128;
    // Behind `opaque`, for the reason of `product`.
    const int cut = opaque(sizes.slots) / sizes.parts;
    const int groups = sizes.cluster * GROUPS, panels = groups * PANELS;  // of a tile
    const u64 stride = (u64)sizes.cluster * (HEIGHT * T::WIDTH);            // from part to part
    // Its own tile, if it has stored a part: one of these is the last.
    const int tile = CLUSTER < sizes.slots ? CLUSTER / sizes.parts : CLUSTER % cut;
    for (;;) {
        if (stores.thread == 0) {
            u32 next = panels;
            if (atomic_add(counters.stored(tile), 0) == (u32)(groups * sizes.parts)) {
                next = atomic_add(counters.taken(tile), 1);
            }
            // For what the meeting passes on.
            thread_fence();
            store_shared(block.panel(stores.group), next);
        }
        sync_group(stores.group);
        const int next = load_shared(block.panel(stores.group));
        // Before the word is written again.
        sync_group(stores.group);
        if (next >= panels) break;
        thread_fence();
        const int p = next % PANELS, group = next / PANELS % GROUPS, rank = next / PANELS / GROUPS;
        const float *part = partials + tile * sizes.parts * stride + rank * (HEIGHT * T::WIDTH);
        part += p * (PANEL / 2) * CONSUMERS + group * 128 + stores.thread;
        float sums[PANEL / 2];
#pragma unroll
        for (int i = 0; i < PANEL / 2; ++i) sums[i] = load_global(part + i * CONSUMERS);
#pragma unroll 2
        for (int other = 1; other < sizes.parts; ++other) {
            part += stride;
#pragma unroll
            for (int i = 0; i < PANEL / 2; ++i) sums[i] += load_global(part + i * CONSUMERS);
        }
        const Block<T> of = {nullptr, sizes.cluster, rank, 0};
        const Task task = task_of(tile * sizes.parts, sizes, of);
        store_panel(stores, task.row + group * PANEL, task.column + p * PANEL, task.matrix, c,
                    sizes.lower, sums);
    }
    if (stores.thread > 0) return;
    // The last warpgroup resets the counters for the next launch.
    if (atomic_add(counters.done(cut), 1) != (u32)(sizes.clusters * groups - 1)) return;
    for (int i = 0; i <= 2 * cut; ++i) store_global(counters.arrived + i, 0u);
}

template <int GENERATION, class T, bool A_MN, bool B_MN>
DEVICE void product(const TensorMap &a, const TensorMap &b, const TensorMap &d, const TensorMap &c,
                    const Sizes &sizes, float *partials, u32 *arrived) {
    DYNAMIC_SHARED(shared);
    const int thread = THREAD;
    const Block<T> block = {shared, sizes.cluster, CLUSTER_RANK, sizes.patience};
    if (thread == CONSUMERS) {
        for (const TensorMap *map : {&a, &b, &d, &c}) prefetch_map(map);
    }

    if (thread == 0) {
        for (int s = 0; s < T::STAGES; ++s) {
            barrier_init(block.full(s), 1);
            barrier_init(block.empty(s), CONSUMERS / 32 * block.cluster);
        }
        store_shared(block.surrender(), 0u);
        fence_barriers();
    }
    // The other block of the cluster uses the barriers, too.
    sync_cluster();
    wait_for_launch_before();
    let_next_launch_begin();

    u32 entry = 0;
    if (thread >= CONSUMERS) {
        for (int i = CLUSTER; i < sizes.tasks && thread == CONSUMERS; i += sizes.clusters) {
            const Task task = task_of(i, sizes, block);
            produce<T, A_MN, B_MN>(block, task, sizes, entry, a, b, d);
        }
    } else {
        const int group = thread / 128;
        constexpr bool TURNS = GENERATION > 1;
        char *buffers = shared + T::BUFFERS_AT;
        char *own_buffers = buffers + group * T::BUFFERS * PANEL_BYTES;
        constexpr int BUFFERS = TURNS ? CONSUMERS / 128 * T::BUFFERS : T::BUFFERS;
        Store<BUFFERS, TURNS> stores = {TURNS ? buffers : own_buffers, group, thread % 128, 0};
        for (int i = CLUSTER; i < sizes.tasks; i += sizes.clusters) {
            float sums[T::SUMS];
            multiply_slices<TURNS, T, A_MN, B_MN>(block, sizes, i, entry, group, sums);
            // Behind `opaque`, places are computed anew for each tile. Otherwise the compiler keeps
            // them in registers while slices are multiplied, and spills others.
            const Task task = task_of(opaque(i), sizes, block);
            scale(block, sizes, has_addend(task, sizes), entry, opaque(thread), sums);
            if (TURNS && group == 1) take_turn<STORE>();
            bool stores_tile = true;
            if (task.parts > 1 && TURNS) {
                store_part(block, task, partials, {arrived}, opaque(thread), sums);
                stores_tile = false;
            } else if (task.parts > 1) {
                stores_tile = add_parts(block, task, partials, arrived, opaque(thread), sums);
            }
            if (stores_tile) store<T>(stores, task, c, sizes.lower, sums);
            if (TURNS) {
                if (stores.thread == 0) store_wait_read<0>();
                if (group == 0) give_turn<STORE>();
                if (group == 1 && i + sizes.clusters < sizes.tasks) give_turn<NEXT>();
            }
        }
        if (TURNS && sizes.slots > 0) {
            // The other warpgroup may have all buffers.
            sync_consumers();
            Store<T::BUFFERS, false> own = {own_buffers, group, opaque(thread) % 128, 0};
            add_panels(block, sizes, c, partials, {arrived}, own);
            // The end of a launch waits for all stores, so a block waits only until they are read.
            if (own.thread == 0) store_wait_read<0>();
        }
        if (stores.thread == 0 && !TURNS) store_finish();
    }
    // The other block of the cluster may still write to this one's memory and barriers. The last
    // that it does is to release stages; but a block that gives up may not have filled them.
    if (GENERATION > 1 && sizes.patience == 0) {
        for (int s = 0; s < T::STAGES && thread == CONSUMERS; ++s) {
            block.wait_until_empty(entry + s);
        }
        return;
    }
    sync_cluster();
}

#define PRODUCT(NAME, GENERATION, TILE, A_MN, B_MN)                                           \
    ENTRY BOUNDS(THREADS, TILE::BLOCKS) NAME(                                                 \
        const CONSTANT TensorMap a, const CONSTANT TensorMap b, const CONSTANT TensorMap d,   \
        const CONSTANT TensorMap c, const CONSTANT Sizes sizes, float *partials,              \
        u32 *arrived) {                                                                       \
        product<GENERATION, TILE, A_MN, B_MN>(a, b, d, c, sizes, partials, arrived);          \
    }

// A file with PTX has the kernels of one generation, so that no driver compiles those of another.
#if ONLY_GENERATION != 2
PRODUCT(product_128_kk, 1, Narrow, false, false)
PRODUCT(product_128_km, 1, Narrow, false, true)
PRODUCT(product_128_mm, 1, Narrow, true, true)
PRODUCT(product_256_kk, 1, Wide, false, false)
PRODUCT(product_256_km, 1, Wide, false, true)
PRODUCT(product_256_mm, 1, Wide, true, true)

// sum = z + I for every matrix of a batch, added in float32. `rows` is a multiple of 8, at most
// 185,000, so that a thread's number has 32 bits.
ENTRY BOUNDS(SUM_THREADS, 1) plus_identity(const Eight *z, Eight *sum, int rows, float factor) {
    wait_for_launch_before();
    let_next_launch_begin();
    const u32 width = (u32)rows / 8, i = (u32)BLOCK_X * SUM_THREADS + THREAD;
    if (i >= width * rows) return;
    const u64 at = (u64)BLOCK_Y * width * rows + i;
    // The place of the diagonal in these eight elements, if it is from 0 to 7.
    const int one = (int)(i / width) - (int)(i % width * 8);
    Eight eight = z[at];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        Pair &both = eight.pairs[p];
        both = pair(factor * first(both) + (one == 2 * p ? 1.0f : 0.0f),
                    factor * second(both) + (one == 2 * p + 1 ? 1.0f : 0.0f));
    }
    sum[at] = eight;
}
#endif

#if ONLY_GENERATION != 1
PRODUCT(product2_128_kk, 2, Narrow2, false, false)
PRODUCT(product2_128_km, 2, Narrow2, false, true)
PRODUCT(product2_128_mm, 2, Narrow2, true, true)
PRODUCT(product2_256_kk, 2, Wide, false, false)
PRODUCT(product2_256_km, 2, Wide, false, true)
PRODUCT(product2_256_mm, 2, Wide, true, true)
#endif
