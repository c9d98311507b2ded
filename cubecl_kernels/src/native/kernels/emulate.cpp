// Runs the kernels on the emulator and compares them with loops in float64:
//
//     g++ -std=c++17 -O1 -DEMULATE emulate.cpp && ./a.out [SECONDS]
//
// -DTYPE_F16 selects float16, and -DONLY_GENERATION=2 the kernels of one generation, which take
// less time. Integers are exact. The program ends with 0 if all results are right;
// it stops at the first wrong one, and at a check that takes longer than SECONDS, otherwise 20.
#include "product.cu"

#include <signal.h>
#include <stdarg.h>
#include <unistd.h>

static_assert(sizeof(Sizes) == 56, "the parameters are those of the host");

static unsigned seconds = 20;
static int checks = 0;

static void timed_out(int) {
    const char text[] = "FAIL: a check takes too long\n";
    ssize_t written = write(1, text, sizeof text - 1);
    _exit(written < 0 ? 2 : 1);
}

static void passed(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void passed(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    puts(": exact");
    ++checks;
    alarm(seconds);
}

// Matrices of a batch, in rows or in columns.
struct Matrices {
    std::vector<u16> data;
    int batch, rows, columns;
    bool in_columns;

    Matrices(int batch, int rows, int columns, bool in_columns)
        : data((size_t)batch * rows * columns),
          batch(batch),
          rows(rows),
          columns(columns),
          in_columns(in_columns) {}

    static Matrices integers(int batch, int rows, int columns, bool in_columns) {
        Matrices result(batch, rows, columns, in_columns);
        for (u16 &x : result.data) x = emulator::round((float)emulator::random(7) - 3);
        return result;
    }

    u16 &at(int z, int row, int column) {
        int in_matrix = in_columns ? column * rows + row : row * columns + column;
        return data[(size_t)z * rows * columns + in_matrix];
    }

    std::vector<double> widened() {
        std::vector<double> values;
        for (int z = 0; z < batch; ++z) {
            for (int i = 0; i < rows; ++i) {
                for (int j = 0; j < columns; ++j) values.push_back(emulator::widen(at(z, i, j)));
            }
        }
        return values;
    }

    TensorMap map(int box_height) {
        long x = in_columns ? rows : columns, y = in_columns ? columns : rows;
        return {data.data(), {x, y, batch}, {1, x, x * y}, {PANEL, box_height}};
    }
};

enum Layout { KK, KM, MM };
enum Triangle { FULL, LOWER };

struct Scale {
    float alpha, beta;  // there is a D if `beta` is not 0
};

// Several times as long as any wait.
constexpr u32 PATIENCE = 2 * emulator::WHILE;

// The columns of a tile, the blocks of a cluster, and the generation of the kernels.
struct Shape {
    int width, cluster, generation;
};
static const Shape SHAPES[] = {
#if ONLY_GENERATION != 2
    {128, 2, 1}, {256, 2, 1}, {128, 1, 1}, {256, 1, 1},
#endif
#if ONLY_GENERATION != 1
    {128, 2, 2}, {256, 2, 2}, {128, 1, 2}, {256, 1, 2},
#endif
};

// The first tiles of a batch, each of which is computed in parts.
struct Cut {
    int tiles, parts;
};

typedef void (*Kernel)(TensorMap, TensorMap, TensorMap, TensorMap, Sizes, float *, u32 *);
static const Kernel KERNELS[][3] = {
#if ONLY_GENERATION == 2
    {},
    {},
#else
    {product_128_kk, product_128_km, product_128_mm},
    {product_256_kk, product_256_km, product_256_mm},
#endif
#if ONLY_GENERATION != 1
    {product2_128_kk, product2_128_km, product2_128_mm},
    {product2_256_kk, product2_256_km, product2_256_mm},
#endif
};

// The tiles of a matrix.
static int tiles_of(Shape shape, const Sizes &sizes) {
    const int height = shape.cluster * HEIGHT;
    const int rows = (sizes.m + height - 1) / height;
    const int columns = (sizes.n + shape.width - 1) / shape.width;
    int tiles = 0;
    for (int i = 0; i < rows; ++i) {
        const int reached = ((i + 1) * height + shape.width - 1) / shape.width;
        tiles += sizes.lower ? min(columns, reached) : columns;
    }
    return tiles;
}

// The least number of slices of all tasks that a warpgroup leaves for its turn.
template <class T>
static int least_left(const Sizes &sizes) {
    int least = slices_left<T>(sizes);
    for (int task = 0; task < sizes.tasks; ++task) least = min(least, slices_of(task, sizes));
    return least;
}

// Launches a product, with cut tiles twice, with the same counters and the same result. There are
// at least as many clusters as parts.
static void launch(Layout layout, Shape shape, Sizes sizes, Cut cut, const TensorMap (&maps)[4],
                   Matrices &c) {
    sizes.cluster = shape.cluster;
    sizes.tiles = tiles_of(shape, sizes);
    cut.tiles = min(cut.tiles, c.batch * sizes.tiles);
    const int slots = cut.tiles * cut.parts;
    sizes.parts = cut.parts;
    sizes.slots = slots;
    sizes.tasks = c.batch * sizes.tiles - cut.tiles + slots;
    const size_t sums = (size_t)slots * shape.cluster * HEIGHT * shape.width;
    emulator::global.assign(sums, ~0u);
    emulator::global.resize(sums + 2 * cut.tiles + 1, 0);
    float *partials = (float *)emulator::global.data();
    u32 *arrived = emulator::global.data() + sums;
    const bool second = shape.generation == 2, wide = shape.width == 256;
    const Kernel kernel = KERNELS[2 * second + wide][layout];
    const u32 narrow = second ? Narrow2::SHARED_BYTES : Narrow::SHARED_BYTES;
    const u32 shared = wide ? Wide::SHARED_BYTES : narrow;
    std::vector<u16> previous;
    for (int i = 0; i < (cut.tiles ? 2 : 1); ++i) {
        c.data.assign(c.data.size(), 0x7fff);
        const int clusters = std::max(slots, 1);
        sizes.clusters = clusters + emulator::random(sizes.tasks - clusters + 1);
        emulator::run_launch(sizes.clusters, shape.cluster, THREADS, shared, [=] {
            kernel(maps[0], maps[1], maps[2], maps[3], sizes, partials, arrived);
        });
        // The second warpgroup has slices to multiply while the first one stores.
        const int least = wide ? least_left<Wide>(sizes) : least_left<Narrow2>(sizes);
        if (second && emulator::least_lead < least) {
            emulator::fail("a warpgroup that does not leave its last slices");
        }
        if (i > 0 && c.data != previous) emulator::fail("a result that two launches differ in");
        previous = c.data;
    }
}

static void check_product(Shape shape, Layout layout, Triangle triangle, int batch, int m, int n,
                          int k, Scale scale, Cut cut = {0, 1}) {
    const bool a_mn = layout == MM, b_mn = layout != KK, lower = triangle == LOWER;
    const bool addend = scale.beta != 0;
    Matrices a = Matrices::integers(batch, m, k, a_mn), b = Matrices::integers(batch, k, n, !b_mn);
    Matrices d = Matrices::integers(batch, m, n, false), c(batch, m, n, false);
    // D is symmetric but A B is not, so that the result shows which half is taken.
    for (int z = 0; lower && z < batch; ++z) {
        for (int i = 0; i < m; ++i) {
            for (int j = 0; j < i; ++j) d.at(z, j, i) = d.at(z, i, j);
        }
    }
    const TensorMap maps[] = {a.map(a_mn ? PANEL : HEIGHT),
                              b.map(b_mn ? PANEL : shape.width / MAX_CLUSTER), d.map(HEIGHT),
                              c.map(PANEL)};
    Sizes sizes = {m, n, k, scale.alpha, scale.beta, lower, addend};
    sizes.patience = emulator::random(2) * PATIENCE;
    launch(layout, shape, sizes, cut, maps, c);
    const std::vector<double> wide_a = a.widened(), wide_b = b.widened();
    for (int z = 0; z < batch; ++z) {
        for (int i = 0; i < m; ++i) {
            for (int j = 0; j < n; ++j) {
                const double *row = &wide_a[((size_t)z * m + (lower ? std::max(i, j) : i)) * k];
                const double *column = &wide_b[(size_t)z * k * n + (lower ? std::min(i, j) : j)];
                double sum = 0;
                for (int l = 0; l < k; ++l) sum += row[l] * column[(size_t)l * n];
                sum *= scale.alpha;
                if (addend) sum += scale.beta * emulator::widen(d.at(z, i, j));
                float expected = emulator::widen(emulator::round((float)sum));
                float result = emulator::widen(c.at(z, i, j));
                if (result == expected) continue;
                printf("matrix %d, row %d, column %d: %g, not %g\n", z, i, j, result, expected);
                emulator::fail("a product");
            }
        }
    }
    const char *names[] = {"product_kk", "product_km", "product_mm"};
    passed("%s, %d of %d x %d, inner %d, %s%s, %d cut in %d", names[layout], batch, m, n, k,
           lower ? "lower" : "full", addend ? ", D" : "", cut.tiles, cut.parts);
}

// A result is the same to the last bit in any order of blocks, and in all generations: the first
// two of three parts cancel, so that another order of the sums shows.
static void check_order(Shape shape) {
    const int n = 136, third = 2 * DEPTH, k = 3 * third;
    Matrices a(1, n, k, false), b(1, k, n, true), c(1, n, n, false);
    auto number = [](int size) {
        return emulator::round(((float)emulator::random(255) + 1) / 256 * size);
    };
    for (int i = 0; i < n; ++i) {
        for (int j = 0; j < third; ++j) {
            a.at(0, i, j) = number(256);
            a.at(0, i, j + third) = a.at(0, i, j) ^ 0x8000;
            a.at(0, i, j + 2 * third) = number(1);
            b.at(0, j, i) = b.at(0, j + third, i) = number(256);
            b.at(0, j + 2 * third, i) = number(1);
        }
    }
    const TensorMap maps[] = {a.map(HEIGHT), b.map(shape.width / MAX_CLUSTER), c.map(HEIGHT),
                              c.map(PANEL)};
    const Sizes sizes = {n, n, k, 1};
    // What is left is the sum of the last part.
    std::vector<u16> expected;
    for (int i = 0; i < n * n; ++i) {
        float sum = 0;
        for (int j = 2 * third; j < k; ++j) {
            sum += emulator::widen(a.at(0, i / n, j)) * emulator::widen(b.at(0, j, i % n));
        }
        expected.push_back(emulator::round(sum));
    }
    for (int i = 0; i < 3; ++i) {
        launch(KK, shape, sizes, {2, 3}, maps, c);
        if (c.data != expected) emulator::fail("a result that depends on the order of blocks");
    }
    passed("parts in any order");
}

// Launches that have patience end, with NaN, also if a barrier waits for bytes that never arrive:
// those of a copy of one tensor with boxes of half the height.
static void check_patience(Shape shape, int missing) {
    const int n = 136, k = 520;
    Matrices a(1, n, k, false), b(1, k, n, true), d(1, n, n, false), c(1, n, n, false);
    TensorMap maps[] = {a.map(HEIGHT), b.map(shape.width / MAX_CLUSTER), d.map(HEIGHT),
                        c.map(PANEL)};
    maps[missing].box[1] /= 2;
    Sizes sizes = {n, n, k, 1, 1, 0, 1};
    sizes.patience = PATIENCE;
    launch(KK, shape, sizes, {1, 3}, maps, c);
    for (u16 x : c.data) {
        if (!std::isnan(emulator::widen(x))) emulator::fail("a result of what did not arrive");
    }
    passed("a block without bytes of %c gives up", "ABD"[missing]);
}

// Every panel on and below the diagonal belongs to one tile, for 1 to 40 rows of tiles.
template <class T>
static void check_tiles(int cluster, Triangle triangle) {
    for (int rows = 1; rows <= 40; ++rows) {
        const bool lower = triangle == LOWER;
        Sizes sizes = {};
        sizes.m = rows * HEIGHT - 8;
        sizes.n = lower ? sizes.m : sizes.m + 3 * HEIGHT;
        sizes.lower = lower;
        sizes.cluster = cluster;
        const int height = cluster * HEIGHT;
        const int panels = (sizes.n + PANEL - 1) / PANEL;
        std::vector<int> seen((rows * 2 + 4) * (panels + 4));
        for (int tile = 0; tile < tiles_of({T::WIDTH, cluster, 1}, sizes); ++tile) {
            int row, column;
            tile_of<T>(tile, sizes, row, column);
            if (row < 0 || row * height >= sizes.m || column < 0 || column * T::WIDTH >= sizes.n) {
                emulator::fail("a tile outside");
            }
            if (lower && column * T::WIDTH >= (row + 1) * height) emulator::fail("an idle tile");
            for (int i = row * height / PANEL; i < (row + 1) * height / PANEL; ++i) {
                for (int j = column * T::WIDTH / PANEL; j < (column + 1) * T::WIDTH / PANEL; ++j) {
                    ++seen[i * (panels + 4) + j];
                }
            }
        }
        for (int i = 0; i < (sizes.m + PANEL - 1) / PANEL; ++i) {
            for (int j = 0; j < panels && !(lower && j > i); ++j) {
                if (seen[i * (panels + 4) + j] != 1) emulator::fail("a panel of not one tile");
            }
        }
    }
    passed("tiles, %d columns, %d rows, %s", T::WIDTH, cluster * HEIGHT,
           triangle == LOWER ? "lower" : "full");
}

#if ONLY_GENERATION != 2
static void check_plus_identity(int batch, int rows, float factor) {
    Matrices z = Matrices::integers(batch, rows, rows, false), sum(batch, rows, rows, false);
    const int blocks = (rows * rows / 8 + SUM_THREADS - 1) / SUM_THREADS;
    for (emulator::block_y = 0; emulator::block_y < batch; ++emulator::block_y) {
        emulator::run_launch(blocks, 1, SUM_THREADS, 0, [&] {
            plus_identity((const Eight *)z.data.data(), (Eight *)sum.data.data(), rows, factor);
        });
    }
    for (int i = 0; i < batch * rows * rows; ++i) {
        float one = i / rows % rows == i % rows ? 1.0f : 0.0f;
        if (emulator::widen(sum.data[i]) != factor * emulator::widen(z.data[i]) + one) {
            emulator::fail("a sum with the identity");
        }
    }
    passed("plus_identity, %d of %d x %d, %g", batch, rows, rows, factor);
}
#endif

// Rounding takes every element to itself, and ties to even ones.
static void check_elements() {
    for (u32 i = 0; i < 0x10000; ++i) {
        float f = emulator::widen((u16)i), next = emulator::widen((u16)(i + 1));
        if (f != f) continue;
        if (emulator::round(f) != i) emulator::fail("an element");
        bool has_next = i % 0x8000 < 0x7bff && std::isfinite(next);
        // The mean is exact, except of bfloat16's largest and smallest.
        float tie = f / 2 + next / 2;
        if (!has_next || tie == f || tie == next) continue;
        if (emulator::round(tie) != i + i % 2) emulator::fail("a tie");
    }
    passed("elements");
}

int main(int count, char **arguments) {
    if (count > 1) seconds = (unsigned)atoi(arguments[1]);
    setvbuf(stdout, nullptr, _IOLBF, 0);
    signal(SIGALRM, timed_out);
    alarm(seconds);
    check_elements();
#if ONLY_GENERATION != 2
    check_plus_identity(1, 8, 1.0f);
    check_plus_identity(2, 72, -0.5f);
    check_plus_identity(3, 136, 1.0f);
#endif
    for (Triangle triangle : {FULL, LOWER}) {
        check_tiles<Narrow>(1, triangle);
        check_tiles<Narrow>(2, triangle);
        check_tiles<Wide>(1, triangle);
        check_tiles<Wide>(2, triangle);
    }
    for (Shape shape : SHAPES) {
        printf("tiles of %d columns, clusters of %d, generation %d\n", shape.width, shape.cluster,
               shape.generation);
        check_product(shape, KK, LOWER, 1, 128, 128, 64, {1, 0});
        check_product(shape, KK, LOWER, 1, 256, 256, 192, {2, -1});
        check_product(shape, KK, LOWER, 2, 200, 200, 72, {1, 3});
        check_product(shape, KK, LOWER, 1, 264, 264, 320, {-1, 0});
        check_product(shape, KK, LOWER, 3, 8, 8, 8, {1, 1});
        check_product(shape, KK, FULL, 2, 136, 72, 200, {1, 0});
        check_product(shape, KK, FULL, 1, 128, 264, 136, {1, 2});
        check_product(shape, KM, FULL, 1, 136, 264, 72, {1, 0});
        check_product(shape, KM, FULL, 2, 72, 8, 200, {3, 1});
        check_product(shape, KM, FULL, 1, 264, 136, 520, {1, -2});
        check_product(shape, KM, FULL, 1, 8, 128, 256, {1, 0});
        check_product(shape, MM, LOWER, 1, 128, 128, 64, {1, 0});
        check_product(shape, MM, LOWER, 2, 200, 200, 136, {1, 1});
        check_product(shape, MM, LOWER, 1, 264, 264, 328, {2, -3});
        check_product(shape, MM, LOWER, 1, 8, 8, 448, {1, 0});
        check_product(shape, KK, LOWER, 1, 264, 264, 328, {2, 0}, {2, 2});
        check_product(shape, KK, LOWER, 3, 136, 136, 200, {1, 3}, {4, 3});
        check_product(shape, KK, LOWER, 1, 200, 200, 712, {1, -1}, {3, 5});
        check_product(shape, KK, FULL, 3, 8, 136, 320, {-1, 2}, {5, 5});
        check_product(shape, KM, FULL, 1, 136, 264, 328, {1, 0}, {4, 5});
        check_product(shape, KM, FULL, 3, 72, 200, 456, {1, -2}, {3, 2});
        check_product(shape, KM, FULL, 1, 264, 8, 200, {1, 1}, {1, 3});
        check_product(shape, MM, LOWER, 1, 264, 264, 136, {1, 0}, {6, 3});
        check_product(shape, MM, LOWER, 3, 200, 200, 200, {1, 1}, {5, 2});
        check_product(shape, MM, LOWER, 1, 128, 128, 392, {2, 0}, {1, 5});
        check_order(shape);
        for (int missing : {0, 1, 2}) check_patience(shape, missing);
    }
    printf("%d checks: all right\n", checks);
}
