// The operations of product.cu on a device: PTX for sm_90a.

typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define ENTRY extern "C" __global__ void
#define BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define CONSTANT __grid_constant__
#define THREAD ((int)threadIdx.x)
#define BLOCK_X ((int)blockIdx.x)
#define BLOCK_Y ((int)blockIdx.y)
#define CLUSTER cluster_id()
#define CLUSTER_RANK cluster_rank()
#define NOT_A_NUMBER __int_as_float(0x7fffffff)
// Swizzled tiles begin at multiples of 1024.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) char name[]

#ifdef TYPE_F16
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

// The driver's CUtensorMap.
struct alignas(64) TensorMap {
    u64 words[16];
};

typedef u64 Barrier;
typedef u64 Descriptor;
typedef u32 Pair;  // two elements, the first in the low bits

// Returns its argument; the compiler does not know that.
DEVICE int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Shared memory and barriers.

// Returns an address in the shared memory of the cluster.
DEVICE u32 address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Returns the number of this block's cluster.
DEVICE int cluster_id() {
    int id;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
    return id;
}

// Returns the place of this block in its cluster.
DEVICE int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Lets all threads of a cluster meet, of which some may have left their warp.
DEVICE void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release;\n"
                 "barrier.cluster.wait.acquire;" ::: "memory");
}

DEVICE void sync_warp() { __syncwarp(); }

// Lets the 128 threads of one of the two warpgroups meet.
DEVICE void sync_group(int group) {
    // With the barrier's number in a register, the block would have all 16 barriers.
    if (group == 0) {
        asm volatile("bar.sync 1, 128;" ::: "memory");
    } else {
        asm volatile("bar.sync 2, 128;" ::: "memory");
    }
}

// Lets the 256 threads of both warpgroups meet.
DEVICE void sync_consumers() { asm volatile("bar.sync 3, 256;" ::: "memory"); }

// Lets them meet, and returns true if one of them passes true.
DEVICE bool sync_consumers_or(bool own) {
    u32 any;
    asm volatile("{\n"
                 ".reg .pred p, q;\n"
                 "setp.ne.u32 p, %1, 0;\n"
                 "bar.red.or.pred q, 3, 256, p;\n"
                 "selp.u32 %0, 1, 0, q;\n"
                 "}"
                 : "=r"(any)
                 : "r"((u32)own)
                 : "memory");
    return any;
}

// Gives a turn to the other warpgroup, without a wait. What this one did before comes before what the
// other one does once it has taken the turn.
template <int TURN>
DEVICE void give_turn() {
    asm volatile("bar.arrive %0, 256;" ::"n"(4 + TURN) : "memory");
}

// Waits for a turn that the other warpgroup gives.
template <int TURN>
DEVICE void take_turn() {
    asm volatile("bar.sync %0, 256;" ::"n"(4 + TURN) : "memory");
}

// Waits until the launch before this one, with which it may overlap, is complete, and its results
// are visible.
DEVICE void wait_for_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next launch begin once all blocks have called it or ended; it then waits for this one.
DEVICE void let_next_launch_begin() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

DEVICE void barrier_init(Barrier *b, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(b)), "r"(count)
                 : "memory");
}

// Makes initialized barriers visible to the threads of the cluster and to the copy engine.
DEVICE void fence_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;\n"
                 "fence.proxy.async.shared::cta;" ::: "memory");
}

DEVICE void barrier_expect(Barrier *b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(b)),
                 "r"(bytes)
                 : "memory");
}

// Arrives at the barrier of a block of the cluster that has the same place as `b` in this one. It
// publishes nothing, and needs no fence of the cluster: what matrix instructions have read may be
// overwritten.
DEVICE void barrier_arrive(Barrier *b, int rank) {
    asm volatile("{\n"
                 ".reg .b32 other;\n"
                 "mapa.shared::cluster.u32 other, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [other];\n"
                 "}" ::"r"(address(b)),
                 "r"(rank)
                 : "memory");
}

// Waits until a phase of a barrier is over, or a while; returns true if it is over.
DEVICE bool barrier_try_wait(Barrier *b, u32 parity) {
    u32 is_over;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(is_over)
                 : "r"(address(b)), "r"(parity)
                 : "memory");
    return is_over;
}

// Returns the time in nanoseconds, of which the high half is left out.
DEVICE u32 now() {
    u32 time;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(time));
    return time;
}

// A word of shared memory that threads access at any time.
DEVICE u32 load_shared(const u32 *p) { return *(const volatile u32 *)p; }

DEVICE void store_shared(u32 *p, u32 value) { *(volatile u32 *)p = value; }

// The copy engine.

// Loads the description of a tensor, which is a parameter of the kernel, to where it is used.
DEVICE void prefetch_map(const TensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads a box for the blocks of the cluster whose bits are set in `mask`, each at the same place.
DEVICE void load_box(char *to, const TensorMap *map, Barrier *full, int x, int y, int z,
                     int mask) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(address(to)),
                 "l"(map), "r"(address(full)), "r"(x), "r"(y), "r"(z), "h"((unsigned short)mask)
                 : "memory");
}

DEVICE void store_box(const TensorMap *map, const char *from, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group "
                 "[%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(address(from)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the memory of all but the last `PENDING` stores of this thread has been read.
template <int PENDING>
DEVICE void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Waits until all stores of this thread are complete.
DEVICE void store_finish() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Makes this thread's writes to shared memory visible to the copy engine, whose writes in turn come
// after what it has read.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Global memory.

DEVICE float load_global(const float *p) { return *p; }

template <class Element>
DEVICE void store_global(Element *p, Element value) {
    *p = value;
}

// Returns the old value.
DEVICE u32 atomic_add(u32 *p, u32 value) { return atomicAdd(p, value); }

// Orders what this thread did in global memory before and does afterwards, for the whole device.
DEVICE void thread_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Matrix instructions of a warpgroup.

// Keeps the compiler from moving accesses of the sums to the other side.
template <int COUNT>
DEVICE void pin(float (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

template <int COUNT>
DEVICE void multiply_fence(float (&sums)[COUNT]) {
    pin(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

DEVICE void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `PENDING` commits are in flight. The sums are valid after `PENDING` = 0.
template <int PENDING, int COUNT>
DEVICE void multiply_wait(float (&sums)[COUNT]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    if (PENDING == 0) pin(sums);
}

#define SUMS_8(i)                                                                            \
    "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3]), "+f"(s[i + 4]),              \
        "+f"(s[i + 5]), "+f"(s[i + 6]), "+f"(s[i + 7])
#define SUMS_32(i) SUMS_8(i), SUMS_8(i + 8), SUMS_8(i + 16), SUMS_8(i + 24)
#define NAMES_0                                                                              \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                 \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "       \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "       \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_64                                                                             \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "       \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "       \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "       \
    "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, "         \
    "%123, %124, %125, %126, %127"

// Adds the product of 64 x 16 and 16 x 128 elements to the sums.
template <bool A_MN, bool B_MN>
DEVICE void multiply(float (&s)[64], Descriptor a, Descriptor b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" NAMES_0
                 "}, %64, %65, 1, 1, 1, %66, %67;"
                 : SUMS_32(0), SUMS_32(32)
                 : "l"(a), "l"(b), "n"((int)A_MN), "n"((int)B_MN));
}

// Adds the product of 64 x 16 and 16 x 256 elements to the sums.
template <bool A_MN, bool B_MN>
DEVICE void multiply(float (&s)[128], Descriptor a, Descriptor b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" NAMES_0
                 ", " NAMES_64 "}, %128, %129, 1, 1, 1, %130, %131;"
                 : SUMS_32(0), SUMS_32(32), SUMS_32(64), SUMS_32(96)
                 : "l"(a), "l"(b), "n"((int)A_MN), "n"((int)B_MN));
}

// Pairs of elements.

DEVICE Pair pair(float low, float high) {
    Pair p;
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(p) : "f"(high), "f"(low));
    return p;
}

DEVICE Pair load_pair(const char *p) { return *(const Pair *)p; }

#ifdef TYPE_F16
DEVICE float widen(unsigned short half) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(half));
    return f;
}
#else
DEVICE float widen(unsigned short half) { return __uint_as_float((u32)half << 16); }
#endif

DEVICE float first(Pair p) { return widen((unsigned short)p); }

DEVICE float second(Pair p) { return widen((unsigned short)(p >> 16)); }

DEVICE void store_matrices(char *p, Pair a, Pair b, Pair c, Pair d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     address(p)),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

DEVICE void store_transposed(char *p, Pair a, Pair b, Pair c, Pair d) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(
            address(p)),
        "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
}

// Writes an element to shared memory.
DEVICE void store_element(char *p, float value) {
    *(unsigned short *)p = (unsigned short)pair(value, 0.0f);
}
