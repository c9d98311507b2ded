// The operations of product.cu on a CPU, for tests: the threads of a block are coroutines that are
// resumed in random order, some warps rarely, and everything that a GPU does asynchronously happens
// late, early or out of order.
//
// - The copy engine serves requests at random times, in random order.
// - Matrix instructions read their operands, and write their sums, when they are waited for or when
//   they are committed.
// - Memory that a thread writes is undefined for the copy engine and for matrix instructions until
//   the same thread executes `fence_async`.
// - Shared memory is poisoned at first, and all addresses are checked. Nothing may reach the memory
//   of a block that has ended. A launch stores every element of its result once.
// - The blocks of a cluster run at a time. Of a copy to several blocks, each receives its own.
// - Clusters run one after the other in random order. What a thread stores in global memory is
//   undefined for other blocks unless it executes `thread_fence`, and its warpgroup, or one that it
//   meets, `atomic_add` afterwards; they see it after an `atomic_add` and a `thread_fence` of their
//   own.
// - A launch overlaps with the one before it: global memory and matrices may not be accessed before
//   a thread has executed `wait_for_launch_before`.
//
// If no thread can run and nothing is in flight, time passes for the threads that try a barrier. If
// that does not end it, the cluster hangs, which is reported at once. Not emulated: how the
// hardware decodes descriptors and tensor maps, and speed.
#pragma once
#include <limits.h>
#include <stdint.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

using std::max;
using std::min;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

#define DEVICE inline
#define ENTRY static void
#define BOUNDS(threads, blocks)
#define CONSTANT
#define THREAD (emulator::thread % emulator::threads)
#define BLOCK_X emulator::block_x
#define BLOCK_Y emulator::block_y
#define CLUSTER emulator::cluster
#define CLUSTER_RANK emulator::rank()
#define NOT_A_NUMBER NAN
#define DYNAMIC_SHARED(name) char *name = emulator::block().memory + emulator::BEGIN

// Its state is that of its place in shared memory.
struct Barrier {
    u64 word;
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
constexpr int MAX_BLOCKS = 2;  // of a cluster
constexpr u32 BEGIN = 1024, MEMORY_BYTES = 228 << 10;

// `thread` counts the threads of a cluster, and `threads` is the number of those of a block.
inline int thread, threads, blocks, block_x, block_y, cluster;
inline u64 cluster_number = 0;
inline u32 end;  // of dynamic shared memory
inline u32 state = 1;
inline std::vector<u32> global;  // memory, except of matrices

inline int rank() { return thread / threads; }

[[noreturn]] inline void fail(const char *problem) {
    printf("FAIL: %s (thread %d of cluster %d)\n", problem, thread, cluster);
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

// A place where threads meet for an instruction that they execute together.
struct Meeting {
    int came = 0;
    unsigned round = 0;
    const char *instruction = nullptr;
};

struct BarrierState {
    int count = 0;  // 0 before it is initialized
    int pending = 0;
    long bytes = 0;  // that are expected and have not arrived
    unsigned phase = 0;
};

// A turn that a warpgroup gives, for which the other one waits.
struct Turn {
    std::unordered_set<int> came;  // threads of both
    unsigned round = 0;
};
constexpr int TURNS = 3;

// A block of the cluster that runs. Threads see shared memory as `memory`, and the copy engine and
// matrix instructions (the async proxy) as `async_memory`. Writes are numbered; of two writes to an
// element, the later one is seen.
struct Block {
    alignas(1024) char memory[MEMORY_BYTES], async_memory[MEMORY_BYTES];
    u64 written[MEMORY_BYTES / 2];  // the last write to an element of `async_memory`
    std::unordered_map<u32, BarrierState> barriers;  // by address
    Meeting consumers, groups[2];
    Turn turns[TURNS];
    int commits[2];    // of matrix instructions, by each warpgroup
    bool gathered;     // in a meeting of the consumers
    bool has_counted[2];  // a warpgroup executed `atomic_add`, or met the other one after it did
    int running;       // threads

    // After a meeting of both warpgroups.
    void share_count() { has_counted[0] = has_counted[1] = has_counted[0] || has_counted[1]; }
};
inline Block cluster_blocks[MAX_BLOCKS];
inline u64 writes = 0;
// The least number of commits by which a warpgroup that gives the first turn is ahead, in a launch.
inline int least_lead;

inline Block &block() { return cluster_blocks[rank()]; }

inline Block &running(int rank) {
    if (rank >= blocks) fail("an access to a block outside of the cluster");
    if (cluster_blocks[rank].running == 0) fail("an access to a block that has ended");
    return cluster_blocks[rank];
}

struct Write {
    u32 at;
    int bytes;
    u64 number;
    char data[16];
};

inline u32 checked(long at, int bytes) {
    if (at < BEGIN || at + bytes > end) fail("an address outside of shared memory");
    if (at % bytes) fail("an address that is not aligned");
    return (u32)at;
}

inline u32 address(const void *p, int bytes) {
    return checked((const char *)p - block().memory, bytes);
}

inline void write_async(Block &block, u32 at, const char *from, u64 number) {
    if (block.written[at / 2] > number) return;
    block.written[at / 2] = number;
    memcpy(block.async_memory + at, from, 2);
}

inline u32 swizzle(u32 at) { return at ^ (at >> 7 & 7) << 4; }

// Coroutines, one for each thread.

struct Coroutine {
    ucontext_t context;
    std::vector<char> stack;
    const void *waits_for;
    bool tries;  // a barrier, which it may also leave later
    bool done;
    std::vector<Write> unpublished;
    std::vector<std::pair<size_t, u32>> unfenced;  // stores in global memory
    bool acquired;    // it executed `thread_fence` since the last `atomic_add` of its block
    bool is_ordered;  // it executed `wait_for_launch_before`
    bool gave[TURNS];  // a turn, and has taken none since then
};
inline std::vector<Coroutine> coroutines(MAX_THREADS);
inline Coroutine &current() { return coroutines[thread]; }
inline ucontext_t scheduler;
inline std::vector<int> runnable;
inline const void *kernel;  // the function that all threads call

// Writes bytes for other threads, and nothing that the async proxy could rely on.
inline void write(char *p, Write &write) {
    write.at = address(p, write.bytes);
    write.number = ++writes;
    memcpy(p, write.data, write.bytes);
    for (int i = 0; i < write.bytes; i += 2) {
        write_async(block(), write.at + i, "\xff\xff", write.number);
    }
    current().unpublished.push_back(write);
}

// Fails unless the launch before this one is complete.
inline void ensure_ordered() {
    if (!current().is_ordered) fail("an access that overlaps with the launch before");
}

inline void suspend() {
    if (swapcontext(&current().context, &scheduler)) fail("swapcontext");
}

inline void wait_for(const void *event) {
    current().waits_for = event;
    suspend();
}

inline void wake(const void *event) {
    for (int t = 0; t < MAX_THREADS; ++t) {
        if (coroutines[t].waits_for != event) continue;
        coroutines[t].waits_for = nullptr;
        coroutines[t].tries = false;
        runnable.push_back(t);
    }
}

// Gives other threads a chance to run first.
inline void pause() {
    if (random(4)) return;
    runnable.push_back(thread);
    suspend();
}

// Time, in nanoseconds, passes when nothing else happens; and how often it did in a row.
constexpr u32 WHILE = 1 << 29;
constexpr int MAX_WHILES = 100;
inline u32 time = 3 * WHILE;
inline int whiles = 0;

// Lets some threads that try a barrier go on; returns false if that was in vain many times.
inline bool pass_time() {
    time += WHILE;
    for (int t = 0; t < blocks * threads; ++t) {
        Coroutine &c = coroutines[t];
        if (!c.tries || random(2)) continue;
        c.waits_for = nullptr;
        c.tries = false;
        runnable.push_back(t);
    }
    return ++whiles < MAX_WHILES;
}

inline Meeting whole, warps[MAX_THREADS / 32], warpgroups[MAX_THREADS / 128];

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
        whiles = 0;
        wake(&meeting);
    } else {
        for (unsigned round = meeting.round; meeting.round == round;) wait_for(&meeting);
    }
}

// Lets a thread come to a turn, which is over once all threads of both warpgroups have.
inline void come(Turn &turn, bool waits) {
    pause();
    if (!turn.came.insert(thread).second) fail("a turn that is given or taken twice");
    if (turn.came.size() == 256) {
        turn.came.clear();
        ++turn.round;
        whiles = 0;
        wake(&turn);
    } else if (waits) {
        for (unsigned round = turn.round; turn.round == round;) wait_for(&turn);
    }
}

// Barriers.

inline BarrierState &state_of(const Barrier *b, Block &of) {
    return of.barriers[address(b, 8)];
}

inline BarrierState &initialized(const Barrier *b, Block &of) {
    BarrierState &state = state_of(b, of);
    if (state.count == 0) fail("a barrier that is not initialized");
    return state;
}

inline void complete(BarrierState &b) {
    if (b.pending || b.bytes) return;
    ++b.phase;
    whiles = 0;
    b.pending = b.count;
    wake(&b);
}

inline void arrive(BarrierState &b) {
    if (--b.pending < 0) fail("too many arrivals");
    complete(b);
}

// The copy engine.

// The stores of a thread, by their numbers.
struct Stores {
    u64 last = 0;
    std::vector<u64> in_flight;
};

// A request to load or store a box of one block.
struct Transfer {
    bool is_load;
    TensorMap map;
    u32 at;
    int x, y, z;
    int rank;
    BarrierState *full;  // of a load
    Stores *stores;      // of a store, with its number
    u64 number;
};
inline std::vector<Transfer> transfers;  // in flight
inline Stores stores[MAX_THREADS];
inline std::unordered_set<u16 *> stored;  // elements, in this launch

inline void copy_element(const Transfer &t, u32 at, u16 *element) {
    Block &block = running(t.rank);
    if (t.is_load) {
        // Zeros are outside of the matrices.
        u16 h = element ? *element : 0;
        memcpy(block.memory + at, &h, 2);
        write_async(block, at, (const char *)&h, ++writes);
    } else if (element) {
        if (!stored.insert(element).second) fail("an element that is stored twice");
        memcpy(element, block.async_memory + at, 2);
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
        t.full->bytes -= map.box[0] * map.box[1] * 2;
        complete(*t.full);
    } else {
        std::vector<u64> &left = t.stores->in_flight;
        left.erase(std::find(left.begin(), left.end(), t.number));
        wake(t.stores);
    }
}

// Matrix instructions.

struct Instruction {
    Descriptor a, b;
    bool a_mn, b_mn;
    int columns;
    float *sums[128];
};
struct Warpgroup {
    Instruction next;
    bool fenced = false;
    std::vector<Instruction> issued;
    std::vector<std::vector<Instruction>> committed;
};
inline Warpgroup groups[MAX_THREADS / 128];

inline float element(const Block &block, Descriptor d, int outer, int inner, bool mn) {
    const u32 leading = (d >> 16 & 0x3fff) << 4, stride = (d >> 32 & 0x3fff) << 4;
    u32 at = (d & 0x3fff) << 4;
    if (mn) {
        at += outer / 64 * leading + inner / 8 * stride + inner % 8 * 128 + outer % 64 * 2;
    } else {
        at += outer / 8 * stride + outer % 8 * 128 + inner * 2;
    }
    u16 h;
    memcpy(&h, block.async_memory + checked(swizzle(at), 2), 2);
    return widen(h);
}

inline void execute(const Instruction &i, const Block &block) {
    float a[16][64], b[16][256];
    if (i.a >> 62 != 1 || i.b >> 62 != 1) fail("an operand without a swizzle of 128 bytes");
    for (int k = 0; k < 16; ++k) {
        for (int r = 0; r < 64; ++r) a[k][r] = element(block, i.a, r, k, i.a_mn);
        for (int c = 0; c < i.columns; ++c) b[k][c] = element(block, i.b, c, k, i.b_mn);
    }
    for (int t = 0; t < 128; ++t) {
        for (int s = 0; s < i.columns / 2; ++s) {
            int r = t / 32 * 16 + t % 32 / 4 + s / 2 % 2 * 8, c = s / 4 * 8 + t % 4 * 2 + s % 2;
            float sum = i.sums[t][s];
            for (int k = 0; k < 16; ++k) sum += a[k][r] * b[k][c];
            i.sums[t][s] = sum;
        }
    }
}

inline void execute_oldest(Warpgroup &group) {
    for (const Instruction &instruction : group.committed.front()) execute(instruction, block());
    group.committed.erase(group.committed.begin());
}

// Global memory. Its undefined words are all ones: NaN.

inline std::vector<u64> stored_by;                   // the `block_number` that stored a word
inline std::vector<std::pair<size_t, u32>> delayed;  // stores that are seen after the launch

// The number of the block that runs, among all blocks.
inline u64 block_number() { return cluster_number * MAX_BLOCKS + rank(); }

inline size_t global_index(const void *p) {
    ensure_ordered();
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

// A number for the warpgroup of the thread, which no other one of the cluster has.
inline int warpgroup() { return rank() * (MAX_THREADS / 256) + thread % threads / 128; }

// Runs a cluster until all of its threads are done and nothing is in flight.
template <class Kernel>
void run_cluster(int number, int size, int block_threads, u32 shared_bytes, const Kernel &body) {
    ++cluster_number;
    cluster = number;
    blocks = size;
    threads = block_threads;
    end = BEGIN + shared_bytes;
    kernel = &body;
    for (int r = 0; r < blocks; ++r) {
        Block &block = cluster_blocks[r];
        memset(block.memory, 0xff, end);
        memset(block.async_memory, 0xff, end);
        block.barriers.clear();
        block.consumers = block.groups[0] = block.groups[1] = Meeting();
        for (Turn &turn : block.turns) turn = Turn();
        block.commits[0] = block.commits[1] = 0;
        block.gathered = block.has_counted[0] = block.has_counted[1] = false;
        block.running = threads;
    }
    whole = Meeting();
    std::fill(std::begin(warps), std::end(warps), Meeting());
    std::fill(std::begin(warpgroups), std::end(warpgroups), Meeting());
    std::fill(std::begin(groups), std::end(groups), Warpgroup());
    runnable.clear();
    for (int t = 0; t < blocks * threads; ++t) {
        Coroutine &c = coroutines[t];
        c.stack.resize(STACK_BYTES);
        c.waits_for = nullptr;
        c.tries = false;
        c.done = false;
        c.unpublished.clear();
        c.unfenced.clear();
        c.acquired = c.is_ordered = false;
        std::fill_n(c.gave, TURNS, false);
        getcontext(&c.context);
        c.context.uc_stack.ss_sp = c.stack.data();
        c.context.uc_stack.ss_size = STACK_BYTES;
        c.context.uc_link = &scheduler;
        makecontext(&c.context, start<Kernel>, 0);
        runnable.push_back(t);
    }
    const u32 delays[] = {4, 256, 1 << 20};  // of the copy engine
    const u32 delay = delays[random(3)];
    const u32 slow_warps[] = {0, random(1 << 18), 0x10f, 0xf0, 0x1ff, 0x3fe00};
    const u32 slow = slow_warps[random(6)];
    for (int left = blocks * threads; left > 0;) {
        if (!transfers.empty() && (runnable.empty() || random(delay) == 0)) {
            auto chosen = transfers.begin() + random(transfers.size());
            const Transfer transfer = *chosen;
            transfers.erase(chosen);
            serve(transfer);
            continue;
        }
        if (runnable.empty()) {
            if (!pass_time()) fail("threads wait for ever");
            continue;
        }
        u32 next = random(runnable.size());
        for (int i = 0; i < 8 && slow >> runnable[next] / 32 & 1; ++i) {
            next = random(runnable.size());
        }
        std::swap(runnable[next], runnable.back());
        thread = runnable.back();
        runnable.pop_back();
        block_x = cluster * blocks + rank();
        if (swapcontext(&scheduler, &coroutines[thread].context)) fail("swapcontext");
        if (coroutines[thread].done) {
            --left;
            --block().running;
        }
    }
    for (int t = 0; t < blocks * threads; ++t) publish(coroutines[t].unfenced, true);
    for (int r = 0; r < blocks; ++r) {
        for (const Turn &turn : cluster_blocks[r].turns) {
            if (!turn.came.empty()) fail("a turn that is not taken");
        }
    }
    if (!transfers.empty()) fail("a block ends before its copies");
    for (const Warpgroup &group : groups) {
        if (!group.issued.empty() || !group.committed.empty()) {
            fail("a block ends before its matrix instructions");
        }
    }
}

// Runs the clusters of a launch in random order.
template <class Kernel>
void run_launch(int clusters, int size, int block_threads, u32 shared_bytes, const Kernel &body) {
    std::vector<int> order;
    for (int x = 0; x < clusters; ++x) {
        order.push_back(x);
        std::swap(order.back(), order[random(order.size())]);
    }
    stored_by.assign(global.size(), 0);
    stored.clear();
    least_lead = INT_MAX;
    for (int x : order) run_cluster(x, size, block_threads, shared_bytes, body);
    publish(delayed, false);
}

// Stores four matrices of 8 x 8 elements of a warp, one row for each thread.
inline void store_four(char *p, const Pair (&pairs)[4], bool transposed) {
    static Pair fragments[MAX_THREADS][4];
    const int lane = thread % 32;
    memcpy(fragments[thread], pairs, sizeof pairs);
    together(warps[thread / 32], 32, transposed ? "stmatrix.trans" : "stmatrix", [] {});
    Write own;
    own.bytes = 16;
    for (int i = 0; i < 8; ++i) {
        int r = transposed ? i : lane % 8, c = transposed ? lane % 8 : i;
        u16 h = (u16)(fragments[thread - lane + 4 * r + c / 2][lane / 8] >> c % 2 * 16);
        memcpy(own.data + 2 * i, &h, 2);
    }
    write(p, own);
    together(warps[thread / 32], 32, "end of stmatrix", [] {});
}

}  // namespace emulator

DEVICE int opaque(int x) { return x; }

DEVICE void sync_cluster() {
    emulator::together(emulator::whole, emulator::blocks * emulator::threads, "sync_cluster",
                       [] {});
}

DEVICE void sync_warp() {
    emulator::together(emulator::warps[emulator::thread / 32], 32, "sync_warp", [] {});
}

DEVICE void sync_group(int group) {
    emulator::together(emulator::block().groups[group], 128, "sync_group", [] {});
}

DEVICE void sync_consumers() {
    emulator::Block &block = emulator::block();
    emulator::together(block.consumers, 256, "sync_consumers", [&] { block.share_count(); });
}

DEVICE bool sync_consumers_or(bool own) {
    static bool results[emulator::MAX_BLOCKS];
    emulator::Block &block = emulator::block();
    block.gathered |= own;
    emulator::together(block.consumers, 256, "sync_consumers_or", [&] {
        results[emulator::rank()] = block.gathered;
        block.gathered = false;
        block.share_count();
    });
    return results[emulator::rank()];
}

template <int TURN>
DEVICE void give_turn() {
    emulator::Block &block = emulator::block();
    const int ahead = block.commits[0] - block.commits[1];
    if (TURN == 0) emulator::least_lead = min(emulator::least_lead, ahead);
    // The other warpgroup may not have taken the turn before, to which this one would then belong.
    bool &gave = emulator::current().gave[TURN];
    if (gave) emulator::fail("a turn before the other warpgroup has answered the last one");
    gave = true;
    emulator::come(block.turns[TURN], false);
}

template <int TURN>
DEVICE void take_turn() {
    // One turn answers all of the other warpgroup's.
    std::fill_n(emulator::current().gave, emulator::TURNS, false);
    emulator::come(emulator::block().turns[TURN], true);
}

DEVICE void wait_for_launch_before() {
    emulator::pause();
    emulator::current().is_ordered = true;
}

DEVICE void let_next_launch_begin() { emulator::ensure_ordered(); }

DEVICE void barrier_init(Barrier *b, int count) {
    emulator::pause();
    emulator::state_of(b, emulator::block()) = {count, count, 0, 0};
}

DEVICE void fence_barriers() {}

DEVICE void barrier_expect(Barrier *b, u32 bytes) {
    emulator::pause();
    auto &state = emulator::initialized(b, emulator::block());
    state.bytes += bytes;
    emulator::arrive(state);
}

DEVICE void barrier_arrive(Barrier *b, int rank) {
    emulator::pause();
    emulator::arrive(emulator::initialized(b, emulator::running(rank)));
}

DEVICE bool barrier_try_wait(Barrier *b, u32 parity) {
    emulator::pause();
    auto &state = emulator::initialized(b, emulator::block());
    if ((state.phase & 1) == parity && emulator::random(4)) {
        emulator::current().tries = true;
        emulator::wait_for(&state);
    }
    return (state.phase & 1) != parity;
}

DEVICE u32 now() { return emulator::time; }

DEVICE u32 load_shared(const u32 *p) {
    emulator::address(p, 4);
    return *p;
}

DEVICE void store_shared(u32 *p, u32 value) {
    emulator::address(p, 4);
    *p = value;
}

DEVICE void load_box(char *to, const TensorMap *map, Barrier *full, int x, int y, int z,
                     int mask) {
    emulator::pause();
    emulator::ensure_ordered();
    if (mask == 0 || mask >> emulator::blocks) emulator::fail("a copy to no block");
    const u32 at = emulator::address(to, 1024);
    for (int rank = 0; rank < emulator::blocks; ++rank) {
        if (!(mask >> rank & 1)) continue;
        auto *state = &emulator::initialized(full, emulator::running(rank));
        emulator::transfers.push_back({true, *map, at, x, y, z, rank, state, nullptr, 0});
    }
}

DEVICE void store_box(const TensorMap *map, const char *from, int x, int y, int z) {
    emulator::pause();
    emulator::ensure_ordered();
    emulator::Stores &stores = emulator::stores[emulator::thread];
    stores.in_flight.push_back(++stores.last);
    const emulator::Transfer transfer = {
        false,   *map,   emulator::address(from, 1024), x, y, z, emulator::rank(), nullptr,
        &stores, stores.last};
    if (emulator::random(2)) {
        emulator::serve(transfer);
    } else {
        emulator::transfers.push_back(transfer);
    }
}

// Every store is a group of its own.
DEVICE void store_commit() {}

template <int PENDING>
DEVICE void store_wait_read() {
    emulator::Stores &stores = emulator::stores[emulator::thread];
    auto is_old = [&](u64 number) { return number + PENDING <= stores.last; };
    auto &left = stores.in_flight;
    while (std::any_of(left.begin(), left.end(), is_old)) emulator::wait_for(&stores);
}

DEVICE void store_finish() { store_wait_read<0>(); }

DEVICE void fence_async() {
    emulator::pause();
    auto &own = emulator::current().unpublished;
    for (const auto &write : own) {
        for (int i = 0; i < write.bytes; i += 2) {
            emulator::write_async(emulator::block(), write.at + i, write.data + i, write.number);
        }
    }
    own.clear();
}

DEVICE float load_global(const float *p) {
    const size_t index = emulator::global_index(p);
    bool is_defined = emulator::stored_by[index] && emulator::current().acquired;
    u32 word = is_defined ? emulator::global[index] : ~0u;
    for (auto [at, own] : emulator::current().unfenced) {
        if (at == index) word = own;
    }
    float value;
    memcpy(&value, &word, 4);
    return value;
}

template <class Element>
DEVICE void store_global(Element *p, Element value) {
    static_assert(sizeof value == 4, "a word");
    const size_t index = emulator::global_index(p);
    u64 &by = emulator::stored_by[index];
    if (by && by != emulator::block_number()) emulator::fail("a word that two blocks store");
    by = emulator::block_number();
    u32 word;
    memcpy(&word, &value, 4);
    emulator::current().unfenced.push_back({index, word});
    emulator::global[index] = ~0u;
}

DEVICE u32 atomic_add(u32 *p, u32 value) {
    emulator::pause();
    const size_t index = emulator::global_index(p);
    if (emulator::stored_by[index]) emulator::fail("a word that is added to after a store");
    for (int t = 0; t < 128; ++t) {
        emulator::coroutines[emulator::thread - THREAD % 128 + t].acquired = false;
    }
    emulator::block().has_counted[THREAD / 128] = true;
    u32 old = emulator::global[index];
    emulator::global[index] += value;
    return old;
}

DEVICE void thread_fence() {
    emulator::pause();
    auto &own = emulator::current();
    // Blocks that run at the same time may read before a fence that follows the count.
    const bool has_counted = emulator::block().has_counted[THREAD / 128];
    emulator::publish(own.unfenced, has_counted);
    own.acquired = has_counted;
}

// Returns an address in the shared memory of the cluster, which has the block's place above bit 23.
DEVICE u32 address(const char *p) {
    return (u32)emulator::rank() << 24 | emulator::address(p, 1024);
}

DEVICE void prefetch_map(const TensorMap *) {}

// Lets a warpgroup execute a matrix instruction.
template <class Work>
DEVICE void with_group(const char *instruction, Work work) {
    auto &group = emulator::groups[emulator::warpgroup()];
    auto &meeting = emulator::warpgroups[emulator::warpgroup()];
    emulator::together(meeting, 128, instruction, [&] { work(group); });
}

template <int COUNT>
DEVICE void multiply_fence(float (&)[COUNT]) {
    with_group("wgmma.fence", [](auto &group) { group.fenced = true; });
}

template <bool A_MN, bool B_MN, int COUNT>
DEVICE void multiply(float (&sums)[COUNT], Descriptor a, Descriptor b) {
    auto &own = emulator::groups[emulator::warpgroup()].next;
    own.sums[THREAD % 128] = sums;
    with_group("wgmma", [=](auto &group) {
        if (!group.fenced) emulator::fail("a matrix instruction without a fence");
        group.next.a = a;
        group.next.b = b;
        group.next.a_mn = A_MN;
        group.next.b_mn = B_MN;
        group.next.columns = 2 * COUNT;
        group.issued.push_back(group.next);
    });
}

DEVICE void multiply_commit() {
    with_group("wgmma.commit_group", [](auto &group) {
        ++emulator::block().commits[THREAD / 128];
        group.committed.push_back(group.issued);
        group.issued.clear();
        if (group.committed.size() == 1 && emulator::random(3) == 0) execute_oldest(group);
    });
}

template <int PENDING, int COUNT>
DEVICE void multiply_wait(float (&)[COUNT]) {
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

DEVICE void store_element(char *p, float value) {
    emulator::pause();
    emulator::Write own;
    const u16 element = emulator::round(value);
    own.bytes = 2;
    memcpy(own.data, &element, 2);
    emulator::write(p, own);
}
