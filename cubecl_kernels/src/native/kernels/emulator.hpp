// The operations of product.cu on a CPU, for tests: the threads of a block are coroutines that are
// resumed in random order, some warps rarely, and everything that a GPU does asynchronously happens
// late, early or out of order.
//
// - The copy engine serves requests at random times, in random order.
// - Matrix instructions read their operands, and write their sums, when they are waited for or when
//   they are committed.
// - Memory that a thread writes is undefined for the copy engine and for matrix instructions until
//   the same thread executes `fence_async`.
// - Shared memory is poisoned at first, and all addresses are checked.
// - Blocks run one after the other in random order. What a thread stores in global memory is
//   undefined for other blocks unless it executes `thread_fence`, and its block `atomic_add`
//   afterwards; they see it after an `atomic_add` and a `thread_fence` of their own.
//
// If no thread can run and nothing is in flight, the block hangs, which is reported at once. Not
// emulated: how the hardware decodes descriptors and tensor maps, and speed.
#pragma once
#include <stdint.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

using std::min;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

#define DEVICE inline
#define ENTRY static void
#define BOUNDS(threads, blocks)
#define CONSTANT
#define THREAD emulator::thread
#define BLOCK_X emulator::block_x
#define BLOCK_Y emulator::block_y
#define DYNAMIC_SHARED(name) char *name = emulator::memory + emulator::BEGIN
#define SHARED_BARRIERS(name, count) static Barrier name[count]

struct Barrier {
    int count, pending;
    long bytes;  // that are expected and have not arrived
    unsigned phase;
    u64 block;  // in which it was initialized
};

// Sizes and strides are those of x, y and z, in elements.
struct TensorMap {
    u16 *data;
    long size[3], stride[3];
    int box[2];
};

typedef u64 Descriptor;
typedef u32 Pair;  // two elements, the first in the low bits

namespace emulator {

constexpr int MAX_THREADS = 1024;
constexpr int STACK_BYTES = 64 << 10;
// Dynamic shared memory begins at an address that is aligned to 16 bytes only.
constexpr u32 BEGIN = 1040, MEMORY_BYTES = 228 << 10;

inline int thread, threads, block_x, block_y;
inline u64 block_number = 0;
inline u32 end;  // of dynamic shared memory
inline u32 state = 1;
inline std::vector<u32> global;  // memory, except of matrices

[[noreturn]] inline void fail(const char *problem) {
    printf("FAIL: %s (thread %d of block %d, %d)\n", problem, thread, block_x, block_y);
    fflush(stdout);
    _Exit(1);
}

// A random number below `limit` (xorshift).
inline u32 random(u32 limit) {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state % limit;
}

// Elements.

inline float widen(u16 h) {
#ifdef TYPE_F16
    int exponent = h >> 10 & 31, fraction = h & 1023;
    float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                 : exponent == 0 ? ldexpf(fraction, -24)
                                 : ldexpf(1024 + fraction, exponent - 25);
    return h >> 15 ? -size : size;
#else
    u32 bits = (u32)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
#endif
}

inline u16 round(float f) {
#ifdef TYPE_F16
    u16 sign = std::signbit(f) ? 0x8000 : 0;
    f = fabsf(f);
    if (f != f) return 0x7e00;
    if (f == 0.0f) return sign;
    if (f >= 65520.0f) return sign | 0x7c00;
    int exponent;
    frexpf(f, &exponent);
    int unit = std::max(exponent - 11, -24);
    return sign | ((unit + 24) * 1024 + (int)nearbyintf(ldexpf(f, -unit)));
#else
    u32 bits;
    memcpy(&bits, &f, 4);
    if (f != f) return 0x7fff;
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}

// Shared memory as threads see it, and as the copy engine and matrix instructions (the async proxy)
// do. Writes are numbered; of two writes to an element, the later one is seen.

alignas(1024) inline char memory[MEMORY_BYTES], async_memory[MEMORY_BYTES];
inline u64 written[MEMORY_BYTES / 2], writes = 0;  // the last write to an element of async_memory

struct Write {
    u32 at;
    u64 number;
    char bytes[16];
};

inline u32 checked(long at, int bytes) {
    if (at < BEGIN || at + bytes > end) fail("an address outside of shared memory");
    if (at % bytes) fail("an address that is not aligned");
    return (u32)at;
}

inline u32 address(const char *p, int bytes) { return checked(p - memory, bytes); }

inline void write_async(u32 at, const char *from, u64 number) {
    if (written[at / 2] > number) return;
    written[at / 2] = number;
    memcpy(async_memory + at, from, 2);
}

inline u32 swizzle(u32 at) { return at ^ (at >> 7 & 7) << 4; }

// Coroutines, one for each thread.

struct Coroutine {
    ucontext_t context;
    std::vector<char> stack;
    const void *waits_for;
    bool done;
    std::vector<Write> unpublished;
    std::vector<std::pair<size_t, u32>> unfenced;  // stores in global memory
    bool acquired;  // it executed `thread_fence` since the last `atomic_add` of its block
};
inline std::vector<Coroutine> coroutines(MAX_THREADS);
inline ucontext_t scheduler;
inline std::vector<int> runnable;
inline const void *kernel;  // the function that all threads call

// Writes 16 bytes for other threads, and nothing that the async proxy could rely on.
inline void write(char *p, Write &write) {
    write.at = address(p, 16);
    write.number = ++writes;
    memcpy(p, write.bytes, 16);
    for (int i = 0; i < 16; i += 2) write_async(write.at + i, "\xff\xff", write.number);
    coroutines[thread].unpublished.push_back(write);
}

inline void suspend() {
    int current = thread;
    if (swapcontext(&coroutines[current].context, &scheduler)) fail("swapcontext");
}

inline void wait_for(const void *event) {
    coroutines[thread].waits_for = event;
    suspend();
}

inline void wake(const void *event) {
    for (int t = 0; t < MAX_THREADS; ++t) {
        if (coroutines[t].waits_for != event) continue;
        coroutines[t].waits_for = nullptr;
        runnable.push_back(t);
    }
}

// Gives other threads a chance to run first.
inline void pause() {
    if (random(4)) return;
    runnable.push_back(thread);
    suspend();
}

// A place where threads meet for an instruction that they execute together.
struct Meeting {
    int came = 0;
    unsigned round = 0;
    const char *instruction = nullptr;
};
inline Meeting whole, consumers, warps[MAX_THREADS / 32], warpgroups[MAX_THREADS / 128];

// Lets `size` threads meet; the last one executes `work` for all of them.
template <class Work>
void together(Meeting &meeting, int size, const char *instruction, Work work) {
    pause();
    if (meeting.came == 0) meeting.instruction = instruction;
    if (strcmp(meeting.instruction, instruction)) fail("threads execute different instructions");
    if (++meeting.came == size) {
        work();
        meeting.came = 0;
        ++meeting.round;
        wake(&meeting);
    } else {
        for (unsigned round = meeting.round; meeting.round == round;) wait_for(&meeting);
    }
}

// Barriers.

inline Barrier &initialized(Barrier *b) {
    if (b->block != block_number) fail("a barrier that is not initialized");
    return *b;
}

inline void complete(Barrier &b) {
    if (b.pending || b.bytes) return;
    ++b.phase;
    b.pending = b.count;
    wake(&b);
}

inline void arrive(Barrier &b) {
    if (--b.pending < 0) fail("too many arrivals");
    complete(b);
}

// The copy engine.

// A request to load or store a box.
struct Transfer {
    bool is_load;
    TensorMap map;
    u32 at;
    int x, y, z;
    Barrier *full;
};
inline std::vector<Transfer> transfers;  // in flight
inline int stores = 0;                   // among them

inline void copy_element(const Transfer &t, u32 at, u16 *element) {
    if (t.is_load) {
        // Zeros are outside of the matrices.
        u16 h = element ? *element : 0;
        memcpy(memory + at, &h, 2);
        write_async(at, (const char *)&h, ++writes);
    } else if (element) {
        memcpy(element, async_memory + at, 2);
    }
}

inline void serve(const Transfer &t) {
    const TensorMap &map = t.map;
    for (int i = 0; i < map.box[1]; ++i) {
        for (int j = 0; j < map.box[0]; ++j) {
            const long x = t.x + j, y = t.y + i, z = t.z;
            bool inside = x < map.size[0] && y < map.size[1] && z < map.size[2];
            u16 *element = map.data + x * map.stride[0] + y * map.stride[1] + z * map.stride[2];
            u32 at = checked(swizzle(t.at + i * 128 + j * 2), 2);
            copy_element(t, at, inside ? element : nullptr);
        }
    }
    if (t.is_load) {
        initialized(t.full).bytes -= map.box[0] * map.box[1] * 2;
        complete(*t.full);
    } else if (--stores == 0) {
        wake(&stores);
    }
}

// Matrix instructions.

struct Instruction {
    Descriptor a, b;
    bool a_mn, b_mn;
    float *sums[128];
};
struct Warpgroup {
    Instruction next;
    bool fenced = false;
    std::vector<Instruction> issued;
    std::vector<std::vector<Instruction>> committed;
};
inline Warpgroup groups[MAX_THREADS / 128];

inline float element(Descriptor d, int outer, int inner, bool mn) {
    const u32 leading = (d >> 16 & 0x3fff) << 4, stride = (d >> 32 & 0x3fff) << 4;
    u32 at = (d & 0x3fff) << 4;
    if (mn) {
        at += outer / 64 * leading + inner / 8 * stride + inner % 8 * 128 + outer % 64 * 2;
    } else {
        at += outer / 8 * stride + outer % 8 * 128 + inner * 2;
    }
    u16 h;
    memcpy(&h, async_memory + checked(swizzle(at), 2), 2);
    return widen(h);
}

inline void execute(const Instruction &i) {
    float a[16][64], b[16][128];
    if (i.a >> 62 != 1 || i.b >> 62 != 1) fail("an operand without a swizzle of 128 bytes");
    for (int k = 0; k < 16; ++k) {
        for (int r = 0; r < 64; ++r) a[k][r] = element(i.a, r, k, i.a_mn);
        for (int c = 0; c < 128; ++c) b[k][c] = element(i.b, c, k, i.b_mn);
    }
    for (int t = 0; t < 128; ++t) {
        for (int s = 0; s < 64; ++s) {
            int r = t / 32 * 16 + t % 32 / 4 + s / 2 % 2 * 8, c = s / 4 * 8 + t % 4 * 2 + s % 2;
            float sum = i.sums[t][s];
            for (int k = 0; k < 16; ++k) sum += a[k][r] * b[k][c];
            i.sums[t][s] = sum;
        }
    }
}

inline void execute_oldest(Warpgroup &group) {
    for (const Instruction &instruction : group.committed.front()) execute(instruction);
    group.committed.erase(group.committed.begin());
}

// Global memory. Its undefined words are all ones: NaN.

inline std::vector<u64> stored_by;                   // the block that stored a word in the launch
inline std::vector<std::pair<size_t, u32>> delayed;  // stores that are seen after the launch
inline bool has_counted;                             // the block executed `atomic_add`

inline size_t global_index(const void *p) {
    const size_t at = (const char *)p - (const char *)global.data();
    if (at / 4 >= global.size() || at % 4) fail("an address outside of global memory");
    return at / 4;
}

inline void publish(std::vector<std::pair<size_t, u32>> &stores, bool is_late) {
    for (auto [index, word] : stores) {
        if (is_late) {
            delayed.push_back({index, word});
        } else {
            global[index] = word;
        }
    }
    stores.clear();
}

template <class Kernel>
void start() {
    (*(const Kernel *)kernel)();
    coroutines[thread].done = true;
}

// Runs a block until all of its threads are done and nothing is in flight.
template <class Kernel>
void run_block(int x, int y, int size, u32 shared_bytes, const Kernel &body) {
    ++block_number;
    threads = size;
    block_x = x;
    block_y = y;
    end = BEGIN + shared_bytes;
    kernel = &body;
    memset(memory, 0xff, MEMORY_BYTES);
    memset(async_memory, 0xff, MEMORY_BYTES);
    has_counted = false;
    whole = consumers = Meeting();
    std::fill(std::begin(warps), std::end(warps), Meeting());
    std::fill(std::begin(warpgroups), std::end(warpgroups), Meeting());
    std::fill(std::begin(groups), std::end(groups), Warpgroup());
    runnable.clear();
    for (int t = 0; t < threads; ++t) {
        Coroutine &c = coroutines[t];
        c.stack.resize(STACK_BYTES);
        c.waits_for = nullptr;
        c.done = false;
        c.unpublished.clear();
        c.acquired = false;
        getcontext(&c.context);
        c.context.uc_stack.ss_sp = c.stack.data();
        c.context.uc_stack.ss_size = STACK_BYTES;
        c.context.uc_link = &scheduler;
        makecontext(&c.context, start<Kernel>, 0);
        runnable.push_back(t);
    }
    const u32 delays[] = {4, 256, 1 << 20};  // of the copy engine
    const u32 delay = delays[random(3)];
    const u32 slow_warps[] = {0, random(1 << 16), 0x10f, 0xf0};
    const u32 slow = slow_warps[random(4)];
    for (int left = threads; left > 0;) {
        if (!transfers.empty() && (runnable.empty() || random(delay) == 0)) {
            auto chosen = transfers.begin() + random(transfers.size());
            const Transfer transfer = *chosen;
            transfers.erase(chosen);
            serve(transfer);
            continue;
        }
        if (runnable.empty()) fail("threads wait for ever");
        u32 next = random(runnable.size());
        for (int i = 0; i < 8 && slow >> runnable[next] / 32 & 1; ++i) {
            next = random(runnable.size());
        }
        std::swap(runnable[next], runnable.back());
        thread = runnable.back();
        runnable.pop_back();
        if (swapcontext(&scheduler, &coroutines[thread].context)) fail("swapcontext");
        left -= coroutines[thread].done;
    }
    for (int t = 0; t < threads; ++t) publish(coroutines[t].unfenced, true);
    if (!transfers.empty()) fail("a block ends before its copies");
    for (const Warpgroup &group : groups) {
        if (!group.issued.empty() || !group.committed.empty()) {
            fail("a block ends before its matrix instructions");
        }
    }
}

// Runs the blocks of a launch in random order.
template <class Kernel>
void run_launch(int blocks, int size, u32 shared_bytes, const Kernel &body) {
    std::vector<int> order;
    for (int x = 0; x < blocks; ++x) {
        order.push_back(x);
        std::swap(order.back(), order[random(order.size())]);
    }
    stored_by.assign(global.size(), 0);
    for (int x : order) run_block(x, 0, size, shared_bytes, body);
    publish(delayed, false);
}

// Stores four matrices of 8 x 8 elements of a warp, one row for each thread.
inline void store_four(char *p, const Pair (&pairs)[4], bool transposed) {
    static Pair fragments[MAX_THREADS][4];
    const int warp = thread / 32, lane = thread % 32;
    memcpy(fragments[thread], pairs, sizeof pairs);
    together(warps[warp], 32, transposed ? "stmatrix.trans" : "stmatrix", [] {});
    Write own;
    for (int i = 0; i < 8; ++i) {
        int r = transposed ? i : lane % 8, c = transposed ? lane % 8 : i;
        u16 h = (u16)(fragments[warp * 32 + 4 * r + c / 2][lane / 8] >> c % 2 * 16);
        memcpy(own.bytes + 2 * i, &h, 2);
    }
    write(p, own);
    together(warps[warp], 32, "end of stmatrix", [] {});
}

}  // namespace emulator

DEVICE char *align_1024(char *p) {
    return p + (-(p - emulator::memory) & 1023);
}

DEVICE void sync_block() {
    emulator::together(emulator::whole, emulator::threads, "sync_block", [] {});
}

template <int COUNT>
DEVICE void sync_threads() {
    emulator::together(emulator::consumers, COUNT, "sync_threads", [] {});
}

template <int COUNT>
DEVICE bool sync_threads_or(bool own) {
    static bool gathered, result;
    gathered |= own;
    emulator::together(emulator::consumers, COUNT, "sync_threads_or", [] {
        result = gathered;
        gathered = false;
    });
    return result;
}

DEVICE void barrier_init(Barrier *b, int count) {
    emulator::pause();
    *b = {count, count, 0, 0, emulator::block_number};
}

DEVICE void fence_barriers() {}

DEVICE void barrier_expect(Barrier *b, u32 bytes) {
    emulator::pause();
    emulator::initialized(b).bytes += bytes;
    emulator::arrive(*b);
}

DEVICE void barrier_arrive(Barrier *b) {
    emulator::pause();
    emulator::arrive(emulator::initialized(b));
}

DEVICE void barrier_wait(Barrier *b, u32 parity) {
    emulator::pause();
    while ((emulator::initialized(b).phase & 1) == parity) emulator::wait_for(b);
}

DEVICE void load_box(char *to, const TensorMap *map, Barrier *full, int x, int y, int z) {
    emulator::pause();
    emulator::transfers.push_back({true, *map, emulator::address(to, 1024), x, y, z, full});
}

DEVICE void store_box(const TensorMap *map, const char *from, int x, int y, int z) {
    emulator::pause();
    const emulator::Transfer transfer = {false, *map, emulator::address(from, 1024), x, y, z, 0};
    ++emulator::stores;
    if (emulator::random(2)) {
        emulator::serve(transfer);
    } else {
        emulator::transfers.push_back(transfer);
    }
}

DEVICE void store_finish() {
    while (emulator::stores > 0) emulator::wait_for(&emulator::stores);
}

DEVICE void fence_async() {
    emulator::pause();
    auto &own = emulator::coroutines[THREAD].unpublished;
    for (const auto &write : own) {
        for (int i = 0; i < 16; i += 2) {
            emulator::write_async(write.at + i, write.bytes + i, write.number);
        }
    }
    own.clear();
}

DEVICE float load_global(const float *p) {
    const size_t index = emulator::global_index(p);
    bool is_defined = emulator::stored_by[index] && emulator::coroutines[THREAD].acquired;
    u32 word = is_defined ? emulator::global[index] : ~0u;
    for (auto [at, own] : emulator::coroutines[THREAD].unfenced) word = at == index ? own : word;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

template <class Element>
DEVICE void store_global(Element *p, Element value) {
    static_assert(sizeof value == 4, "a word");
    const size_t index = emulator::global_index(p);
    u64 &by = emulator::stored_by[index];
    if (by && by != emulator::block_number) emulator::fail("a word that two blocks store");
    by = emulator::block_number;
    u32 word;
    memcpy(&word, &value, 4);
    emulator::coroutines[THREAD].unfenced.push_back({index, word});
    emulator::global[index] = ~0u;
}

DEVICE u32 atomic_add(u32 *p, u32 value) {
    emulator::pause();
    const size_t index = emulator::global_index(p);
    if (emulator::stored_by[index]) emulator::fail("a word that is added to after a store");
    for (int t = 0; t < emulator::threads; ++t) emulator::coroutines[t].acquired = false;
    emulator::has_counted = true;
    u32 old = emulator::global[index];
    emulator::global[index] += value;
    return old;
}

DEVICE void thread_fence() {
    emulator::pause();
    auto &own = emulator::coroutines[THREAD];
    // Blocks that run at the same time may read before a fence that follows the count.
    emulator::publish(own.unfenced, emulator::has_counted);
    own.acquired = emulator::has_counted;
}

DEVICE Descriptor describe(const char *p, u32 leading, u32 stride) {
    return (u64)(emulator::address(p, 1024) >> 4) | (u64)(leading >> 4) << 16 |
           (u64)(stride >> 4) << 32 | (u64)1 << 62;
}

DEVICE Descriptor advanced(Descriptor d, int bytes) { return d + (bytes >> 4); }

// Lets a warpgroup execute a matrix instruction.
template <class Work>
DEVICE void with_group(const char *instruction, Work work) {
    auto &group = emulator::groups[THREAD / 128];
    auto &meeting = emulator::warpgroups[THREAD / 128];
    emulator::together(meeting, 128, instruction, [&] { work(group); });
}

DEVICE void multiply_fence(float (&)[64]) {
    with_group("wgmma.fence", [](auto &group) { group.fenced = true; });
}

template <bool A_MN, bool B_MN>
DEVICE void multiply(float (&sums)[64], Descriptor a, Descriptor b) {
    auto &own = emulator::groups[THREAD / 128].next;
    own.sums[THREAD % 128] = sums;
    with_group("wgmma", [=](auto &group) {
        if (!group.fenced) emulator::fail("a matrix instruction without a fence");
        group.next.a = a;
        group.next.b = b;
        group.next.a_mn = A_MN;
        group.next.b_mn = B_MN;
        group.issued.push_back(group.next);
    });
}

DEVICE void multiply_commit() {
    with_group("wgmma.commit_group", [](auto &group) {
        group.committed.push_back(group.issued);
        group.issued.clear();
        if (group.committed.size() == 1 && emulator::random(3) == 0) execute_oldest(group);
    });
}

template <int PENDING>
DEVICE void multiply_wait(float (&)[64]) {
    with_group("wgmma.wait_group", [](auto &group) {
        while (group.committed.size() > PENDING) execute_oldest(group);
        group.fenced = false;
    });
}

DEVICE Pair pair(float low, float high) {
    return emulator::round(low) | (u32)emulator::round(high) << 16;
}

DEVICE Pair load_pair(const char *p) {
    Pair pair;
    emulator::address(p, 4);
    memcpy(&pair, p, 4);
    return pair;
}

DEVICE float first(Pair p) { return emulator::widen((u16)p); }

DEVICE float second(Pair p) { return emulator::widen((u16)(p >> 16)); }

DEVICE void store_matrices(char *p, Pair a, Pair b, Pair c, Pair d) {
    emulator::store_four(p, {a, b, c, d}, false);
}

DEVICE void store_transposed(char *p, Pair a, Pair b, Pair c, Pair d) {
    emulator::store_four(p, {a, b, c, d}, true);
}

// Replaces those of eight neighbors whose index is above `last_kept`.
DEVICE void merge(char *own, const char *other, int last_kept) {
    emulator::pause();
    emulator::address(own, 16);
    emulator::address(other, 16);
    emulator::Write merged;
    for (int i = 0; i < 8; ++i) {
        memcpy(merged.bytes + 2 * i, (i > last_kept ? other : own) + 2 * i, 2);
    }
    emulator::write(own, merged);
}
