// The kernels of `src/native`, computed from the parameters of their launches: the same tasks with
// the same tiles, whose sums are added one after the other. What would leave a block waiting, or
// read or write what it should not, is an error.
#include "driver.hpp"

// Kernels for an emulator of threads, of which only the places of tasks are used here.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#pragma GCC diagnostic ignored "-Wunused-function"
#define EMULATE
#include "../../src/native/kernels/product.cu"
#pragma GCC diagnostic pop

namespace driver {

static float number(u32 bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static u32 bits_of(float value) {
    u32 bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Elements, as 16 bits.
struct Type {
    bool is_bf16;

    float widened(u16 element) const {
        if (is_bf16) return number((u32)element << 16);
        const u32 sign = (u32)(element >> 15) << 31, rest = (u32)(element & 0x7fff) << 13;
        const bool is_finite = (element & 0x7c00) != 0x7c00;
        // The exponents of float32 are larger by 112.
        const float size = is_finite ? number(rest) * 0x1p112f : number(rest | 0x7f800000);
        return number(sign | bits_of(size));
    }

    // Rounds to the nearest element, and to the even one of two.
    u16 rounded(float value) const {
        const u32 bits = bits_of(value), size = bits & 0x7fffffff;
        if (is_bf16) return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        const u16 sign = bits >> 16 & 0x8000;
        if (size > 0x7f800000) return sign | 0x7fff;
        if (size >= bits_of(65520.0f)) return sign | 0x7c00;
        // Next to 0.5, neighbours in float32 are as far apart as subnormal elements.
        if (size < bits_of(0x1p-14f)) return sign | (bits_of(number(size) + 0.5f) - bits_of(0.5f));
        return sign | ((size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13);
    }
};

// Numbers of a batch in rows, with zeros outside of the tensor up to multiples of the largest tile.
struct Numbers {
    int matrices, rows, columns;
    std::vector<float> values;

    // Of a tensor whose lines are the columns, or the rows.
    Numbers(const Map &map, Type type, bool are_columns) {
        constexpr int MULTIPLE = 256;
        const auto padded = [](u64 size) { return (int)((size + MULTIPLE - 1) / MULTIPLE) * MULTIPLE; };
        matrices = map.size[2];
        rows = padded(map.size[!are_columns]);
        columns = padded(map.size[are_columns]);
        values.resize(map.size[2] * rows * columns);
        for (u64 z = 0; z < map.size[2]; ++z) {
            for (u64 y = 0; y < map.size[1]; ++y) {
                const auto line = (const u16 *)(map.address + y * map.stride[1] + z * map.stride[2]);
                const size_t step = are_columns ? columns : 1;
                float *to = &values[z * rows * columns + (are_columns ? y : y * columns)];
                for (u64 x = 0; x < map.size[0]; ++x) to[x * step] = type.widened(line[x]);
            }
        }
    }

    const float *row(int matrix, int row) const {
        return &values[((size_t)matrix * rows + row) * columns];
    }
};

// Thrown instead of a wait that never ends, by launches with patience.
struct GivenUp {};

// One launch of a product, with tiles of a kind.
template <class T>
struct Products {
    static constexpr int WIDTH = T::WIDTH;
    using Sums = std::array<float, HEIGHT * WIDTH>;  // in rows

    Type type;
    Sizes sizes;
    Map d, c;
    float *partials;
    u32 *arrived;
    Numbers left, right;  // [matrix, row, inner] and [matrix, inner, column]

    Products(const Launch &launch, bool a_mn, bool b_mn)
        : type{launch.kernel->is_bf16},
          sizes(launch.parameter<Sizes>(4)),
          d(map(launch, 2, {64, 128, 1})),
          c(map(launch, 3, {64, 64, 1})),
          partials(launch.parameter<float *>(5)),
          arrived(launch.parameter<u32 *>(6)),
          left(map(launch, 0, {64, a_mn ? 64u : HEIGHT, 1}), type, a_mn),
          right(map(launch, 1, {64, b_mn ? 64u : WIDTH / 2u, 1}), type, !b_mn) {
        const u32 blocks = sizes.clusters * sizes.cluster;
        REQUIRE(launch.block == (std::array<unsigned, 3>{THREADS, 1, 1}), LAUNCH_FAILED,
                "a product with %u threads in a block", launch.block[0]);
        REQUIRE(launch.shared >= T::SHARED_BYTES, LAUNCH_FAILED,
                "a product with %u bytes of shared memory", launch.shared);
        REQUIRE(launch.grid == (std::array<unsigned, 3>{blocks, 1, 1}), LAUNCH_FAILED,
                "a product of %u blocks in a grid of %u", blocks, launch.grid[0]);
        REQUIRE((int)launch.cluster == sizes.cluster && sizes.cluster <= MAX_CLUSTER,
                LAUNCH_FAILED, "a product in clusters of %u", launch.cluster);
        REQUIRE(sizes.parts > 0 && sizes.slots % sizes.parts == 0 && sizes.clusters > 0 &&
                    sizes.slots <= sizes.clusters,
                LAUNCH_TIMEOUT, "a product whose parts wait for each other");
        REQUIRE(sizes.tiles > 0 && sizes.tiles <= all_tiles(), LAUNCH_TIMEOUT,
                "a search for one of %d tiles", sizes.tiles);
    }

    // A parameter, of which copies have a size.
    Map map(const Launch &launch, int index, std::array<u32, 3> box) const {
        const Map map = launch.parameter<Map>(index);
        REQUIRE(map.magic == Map::MAGIC, LAUNCH_FAILED, "parameter %d is no map", index);
        const bool is_complete = std::equal(box.begin(), box.end(), map.box);
        if (sizes.patience && (!is_complete || launch.stalls)) throw GivenUp();
        REQUIRE(!launch.stalls, LAUNCH_TIMEOUT, "a product waits for ever");
        REQUIRE(is_complete, LAUNCH_TIMEOUT,
                "a block waits for bytes of parameter %d, whose boxes are %u x %u", index,
                map.box[0], map.box[1]);
        REQUIRE(map.type == (type.is_bf16 ? 9 : 6), LAUNCH_FAILED, "parameter %d's type", index);
        ensure_memory(map.address, map.stride[2] * map.size[2], "a tensor");
        return map;
    }

    // The tiles of a matrix: of a symmetric one, those that reach the diagonal or lie below it.
    int all_tiles() const {
        const int height = HEIGHT * sizes.cluster, columns = (sizes.n + WIDTH - 1) / WIDTH;
        int tiles = 0;
        for (int row = 0; row < sizes.m; row += height) {
            const int reached = (row + height + WIDTH - 1) / WIDTH;
            tiles += sizes.lower ? min(reached, columns) : columns;
        }
        return tiles;
    }

    void run() const {
        const auto memory = std::make_unique<Sums>();
        Sums &sums = *memory;
        for (int cluster = 0; cluster < sizes.clusters; ++cluster) {
            for (int i = cluster; i < sizes.tasks; i += sizes.clusters) {
                for (int rank = 0; rank < sizes.cluster; ++rank) {
                    const Block<T> block = {nullptr, sizes.cluster, rank, sizes.patience};
                    const Task task = task_of(i, sizes, block);
                    multiply(task, sums);
                    scale(task, sums);
                    if (task.parts > 1 && !add_parts(task, rank, sums)) continue;
                    store(task, sums);
                }
            }
        }
    }

    void multiply(const Task &task, Sums &sums) const {
        sums.fill(0.0f);
        if (task.matrix >= min(left.matrices, right.matrices)) return;
        for (int row = 0; row < HEIGHT && task.row + row < left.rows; row += SQUARE_ROWS) {
            for (int column = 0; column < WIDTH; column += SQUARE_COLUMNS) {
                if (task.column + column >= right.columns) break;
                if (sizes.lower && task.column + column >= task.row + row + SQUARE_ROWS) break;
                multiply_square(task, row, column, &sums[row * WIDTH + column]);
            }
        }
    }

    // Sums that fit into the registers of a processor.
    static constexpr int SQUARE_ROWS = 4, SQUARE_COLUMNS = 32;

    void multiply_square(const Task &task, int row, int column, float *sums) const {
        float square[SQUARE_ROWS][SQUARE_COLUMNS] = {};
        const float *a = left.row(task.matrix, task.row + row);
        const float *b = right.row(task.matrix, 0) + task.column + column;
        const int first = task.first * DEPTH;
        // Beyond the tensors, there are zeros.
        const int inner = min(left.columns, right.rows);
        for (int k = first; k < min(first + task.slices * DEPTH, inner); ++k) {
            for (int i = 0; i < SQUARE_ROWS; ++i) {
                const float factor = a[i * (size_t)left.columns + k];
                for (int j = 0; j < SQUARE_COLUMNS; ++j) {
                    square[i][j] += factor * b[k * (size_t)right.columns + j];
                }
            }
        }
        for (int i = 0; i < SQUARE_ROWS; ++i) memcpy(sums + i * WIDTH, square[i], sizeof square[i]);
    }

    // sums = alpha sums + beta D
    void scale(const Task &task, Sums &sums) const {
        const bool has_addend = ::has_addend(task, sizes);
        for (int row = 0; row < HEIGHT; ++row) {
            for (int column = 0; column < WIDTH; ++column) {
                float &sum = sums[row * WIDTH + column];
                sum *= sizes.alpha;
                if (!has_addend) continue;
                const u16 *added = element(d, task.matrix, task.row + row, task.column + column);
                if (added) sum += sizes.beta * type.widened(*added);
            }
        }
    }

    // Adds the sums of all parts in the block whose part is the last; returns false in the others.
    bool add_parts(const Task &task, int rank, Sums &sums) const {
        const int tile = task.slot / task.parts, first = task.slot - task.part;
        u32 &count = arrived[tile * sizes.cluster + rank];
        ensure_memory((u64)&count, sizeof count, "a counter of parts");
        const auto part = [&](int slot) {
            float *part = partials + (slot * sizes.cluster + rank) * sums.size();
            ensure_memory((u64)part, sizeof sums, "the sums of a part");
            return part;
        };
        memcpy(part(task.slot), sums.data(), sizeof sums);
        if (count++ != (u32)task.parts - 1) return false;
        count = 0;
        memcpy(sums.data(), part(first), sizeof sums);
        for (int other = 1; other < task.parts; ++other) {
            const float *added = part(first + other);
            for (size_t i = 0; i < sums.size(); ++i) sums[i] += added[i];
        }
        return true;
    }

    void store(const Task &task, const Sums &sums) const {
        for (int i = 0; i < HEIGHT; ++i) {
            for (int j = 0; j < WIDTH; ++j) {
                const int row = task.row + i, column = task.column + j;
                if (sizes.lower && column > row) continue;
                const u16 value = type.rounded(sums[i * WIDTH + j]);
                if (u16 *to = element(c, task.matrix, row, column)) *to = value;
                if (!sizes.lower) continue;
                if (u16 *mirrored = element(c, task.matrix, column, row)) *mirrored = value;
            }
        }
    }

    // An element of a tensor, or null outside of it.
    static u16 *element(const Map &map, u64 z, u64 y, u64 x) {
        if (x >= map.size[0] || y >= map.size[1] || z >= map.size[2]) return nullptr;
        return (u16 *)(map.address + z * map.stride[2] + y * map.stride[1] + x * 2);
    }
};

// sum = z + I
static void add_identity(const Launch &launch) {
    const Type type = {launch.kernel->is_bf16};
    const auto z = launch.parameter<const u16 *>(0);
    const auto sum = launch.parameter<u16 *>(1);
    const u64 rows = launch.parameter<int>(2);
    const auto factor = launch.parameter<float>(3);
    REQUIRE((u64)z % 16 == 0 && (u64)sum % 16 == 0, ILLEGAL_ADDRESS, "a matrix is not aligned");
    const u64 elements = rows * rows * launch.grid[1];
    ensure_memory((u64)z, elements * 2, "a matrix");
    ensure_memory((u64)sum, elements * 2, "a sum with the identity");
    for (u64 matrix = 0; matrix < launch.grid[1]; ++matrix) {
        for (u64 thread = 0; thread < (u64)launch.grid[0] * SUM_THREADS; ++thread) {
            if (thread % SUM_THREADS >= launch.block[0] || thread * 8 >= rows * rows) continue;
            for (u64 i = thread * 8; i < thread * 8 + 8; ++i) {
                const u64 at = matrix * rows * rows + i;
                const float one = i / rows == i % rows ? 1.0f : 0.0f;
                sum[at] = type.rounded(factor * type.widened(z[at]) + one);
            }
        }
    }
}

template <class T>
static void multiply(const Launch &launch, bool a_mn, bool b_mn) {
    try {
        Products<T>(launch, a_mn, b_mn).run();
    } catch (const GivenUp &) {
        // The result is not written.
    }
}

bool run_native(const Launch &launch) {
    const std::string &name = launch.kernel->name;
    if (name == "plus_identity") {
        add_identity(launch);
        return true;
    }
    // The generations have the same tasks. They count cut tiles in other ways, which only they see.
    for (const auto &[layout, a_mn, b_mn] :
         {std::tuple{"kk", false, false}, {"km", false, true}, {"mm", true, true}}) {
        for (const auto &[beginning, multiply] : {std::pair{"product_128_", multiply<Narrow>},
                                                  {"product_256_", multiply<Wide>},
                                                  {"product2_128_", multiply<Narrow2>},
                                                  {"product2_256_", multiply<Wide>}}) {
            if (name != std::string(beginning) + layout) continue;
            multiply(launch, a_mn, b_mn);
            return true;
        }
    }
    return false;
}

}  // namespace driver
