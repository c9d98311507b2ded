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
#define DYNAMIC_SHARED(name) extern __shared__ char name[]
#define SHARED_BARRIERS(name, count) __shared__ Barrier name[count]

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

// Shared memory and barriers.

DEVICE u32 address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE char *align_1024(char *p) { return p + (-address(p) & 1023); }

DEVICE void sync_block() { __syncthreads(); }

// Lets `COUNT` threads meet.
template <int COUNT>
DEVICE void sync_threads() {
    asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory");
}

// Lets `COUNT` threads meet, and returns true if one of them passes true.
template <int COUNT>
DEVICE bool sync_threads_or(bool own) {
    u32 any;
    asm volatile("{\n"
                 ".reg .pred p, q;\n"
                 "setp.ne.u32 p, %1, 0;\n"
                 "bar.red.or.pred q, 1, %2, p;\n"
                 "selp.u32 %0, 1, 0, q;\n"
                 "}"
                 : "=r"(any)
                 : "r"((u32)own), "n"(COUNT)
                 : "memory");
    return any;
}

DEVICE void barrier_init(Barrier *b, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(b)), "r"(count)
                 : "memory");
}

// Makes initialized barriers visible to other threads and to the copy engine.
DEVICE void fence_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;\n"
                 "fence.proxy.async.shared::cta;" ::: "memory");
}

DEVICE void barrier_expect(Barrier *b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(b)),
                 "r"(bytes)
                 : "memory");
}

DEVICE void barrier_arrive(Barrier *b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(b)) : "memory");
}

DEVICE void barrier_wait(Barrier *b, u32 parity) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@!p bra again;\n"
                 "}" ::"r"(address(b)),
                 "r"(parity)
                 : "memory");
}

// The copy engine.

DEVICE void load_box(char *to, const TensorMap *map, Barrier *full, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(address(to)),
                 "l"(map), "r"(address(full)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

DEVICE void store_box(const TensorMap *map, const char *from, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group "
                 "[%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(address(from)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// Waits until all stores of this thread are complete.
DEVICE void store_finish() {
    asm volatile("cp.async.bulk.commit_group;\n"
                 "cp.async.bulk.wait_group 0;" ::: "memory");
}

// Makes this thread's writes to shared memory visible to the copy engine.
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

// Describes an operand with a swizzle of 128 bytes, whose code in bits 62 and 63 is 1.
DEVICE Descriptor describe(const char *p, u32 leading, u32 stride) {
    return (u64)(address(p) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 |
           (u64)1 << 62;
}

DEVICE Descriptor advanced(Descriptor d, int bytes) { return d + (bytes >> 4); }

// Keeps the compiler from moving accesses of the sums to the other side.
DEVICE void pin(float (&sums)[64]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

DEVICE void multiply_fence(float (&sums)[64]) {
    pin(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

DEVICE void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `PENDING` commits are in flight. The sums are valid after `PENDING` = 0.
template <int PENDING>
DEVICE void multiply_wait(float (&sums)[64]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    if (PENDING == 0) pin(sums);
}

#define SUMS(i)                                                                              \
    "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3]), "+f"(s[i + 4]),              \
        "+f"(s[i + 5]), "+f"(s[i + 6]), "+f"(s[i + 7])

// Adds the product of 64 x 16 and 16 x 128 elements to the sums.
template <bool A_MN, bool B_MN>
DEVICE void multiply(float (&s)[64], Descriptor a, Descriptor b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, %64, %65, 1, 1, 1, %66, %67;"
                 : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48), SUMS(56)
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

// Replaces those of eight neighbors whose index is above `last_kept`.
DEVICE void merge(char *own, const char *other, int last_kept) {
    uint4 a = *(uint4 *)own;
    const uint4 b = *(const uint4 *)other;
    u32 kept[4] = {a.x, a.y, a.z, a.w};
    const u32 taken[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 mask = (2 * i > last_kept ? 0xffffu : 0) | (2 * i + 1 > last_kept ? 0xffff0000u : 0);
        kept[i] = (kept[i] & ~mask) | (taken[i] & mask);
    }
    *(uint4 *)own = make_uint4(kept[0], kept[1], kept[2], kept[3]);
}
