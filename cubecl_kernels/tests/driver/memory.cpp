// Memory and copies.
#include <cstdlib>
#include <map>

#include "driver.hpp"

namespace driver {

// Bytes of all memory, by their first address: of the device, and of the host where the device
// knows it.
static auto &allocations = *new std::map<uint64_t, size_t>;

// Bytes of the copies within the device that have run.
static long copied = 0;

// Of a page, of which a program may use little, the rest stays untouched.
constexpr size_t POISONED = 64 << 20;

static bool is_memory(uint64_t address, size_t bytes) {
    auto next = allocations.upper_bound(address);
    if (next == allocations.begin()) return false;
    const auto [begin, size] = *--next;
    return address - begin <= size && bytes <= size - (address - begin);
}

void ensure_memory(uint64_t address, size_t bytes, const char *what) {
    REQUIRE(is_memory(address, bytes), ILLEGAL_ADDRESS, "%s: %zu bytes at %#lx are no memory",
            what, bytes, (unsigned long)address);
}

static uint64_t allocate(size_t bytes) {
    REQUIRE(bytes > 0, INVALID_VALUE, "an allocation of no bytes");
    void *memory = nullptr;
    REQUIRE(posix_memalign(&memory, 512, bytes) == 0, OUT_OF_MEMORY, "%zu bytes", bytes);
    memset(memory, 0xff, std::min(bytes, POISONED));
    allocations[(uint64_t)memory] = bytes;
    return (uint64_t)memory;
}

static void release(uint64_t address) {
    REQUIRE(allocations.erase(address), INVALID_VALUE, "memory that was not allocated is freed");
    free((void *)address);
}

// Queues a copy of memory that the device knows. What an argument names is checked when the copy is
// queued, and again when it runs.
static void queue_copy(void *stream, void *to, const void *from, size_t bytes) {
    const auto copy = [=] {
        ensure_memory((uint64_t)from, bytes, "the source of a copy");
        ensure_memory((uint64_t)to, bytes, "the target of a copy");
        memmove(to, from, bytes);
    };
    queue(stream_of(stream), {copy});
}

// Queues a copy from the device to the device, which is counted, and does nothing while products do
// nothing either: its time is the device's.
static void queue_device_copy(void *stream, void *to, const void *from, size_t bytes) {
    const auto copy = [=] {
        ensure_memory((uint64_t)from, bytes, "the source of a copy");
        ensure_memory((uint64_t)to, bytes, "the target of a copy");
        copied += bytes;
        if (!is_idle) memmove(to, from, bytes);
    };
    queue(stream_of(stream), {copy});
}

// Queues a copy from memory of the host. What the device does not know is staged at once.
static void queue_upload(void *stream, uint64_t to, const void *from, size_t bytes) {
    ensure_memory(to, bytes, "the target of a copy");
    if (is_memory((uint64_t)from, bytes)) return queue_copy(stream, (void *)to, from, bytes);
    const char *values = (const char *)from;
    queue(stream_of(stream), {[=, staged = std::vector<char>(values, values + bytes)] {
              ensure_memory(to, bytes, "the target of a copy");
              memcpy((void *)to, staged.data(), bytes);
          }});
}

// Queues a copy to memory of the host. The host waits unless the device knows it.
static void queue_download(Lock &lock, void *stream, void *to, uint64_t from, size_t bytes) {
    ensure_memory(from, bytes, "the source of a copy");
    if (is_memory((uint64_t)to, bytes)) return queue_copy(stream, to, (void *)from, bytes);
    const auto of = stream_of(stream);
    queue(of, {[=] {
              ensure_memory(from, bytes, "the source of a copy");
              memcpy(to, (void *)from, bytes);
          }});
    if (!of->recorded) wait_until(lock, {{of, of->end}});
}

}  // namespace driver

using namespace driver;

// For tests.

// The bytes of the copies from the device to the device that have run.
API standin_copied(long *bytes) {
    return call([&](Lock &) { *bytes = copied; });
}

API cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    return call([&](Lock &) {
        ensure_no_recording();
        *address = allocate(bytes);
    });
}

// Waits for the work of the device.
API cuMemFree_v2(uint64_t address) {
    return call([&](Lock &lock) {
        ensure_no_recording();
        wait_until(lock, everything());
        release(address);
    });
}

API cuMemAllocAsync(uint64_t *address, size_t bytes, void *) {
    return call([&](Lock &) { *address = allocate(bytes); });
}

API cuMemFreeAsync(uint64_t address, void *stream) {
    return call([&](Lock &) { queue(stream_of(stream), {[=] { release(address); }}); });
}

API cuMemAllocHost_v2(void **address, size_t bytes) {
    return call([&](Lock &) {
        ensure_no_recording();
        *address = (void *)allocate(bytes);
    });
}

API cuMemHostAlloc(void **address, size_t bytes, unsigned) {
    return cuMemAllocHost_v2(address, bytes);
}

API cuMemHostGetDevicePointer_v2(uint64_t *address, void *host, unsigned) {
    return call([&](Lock &) {
        ensure_memory((uint64_t)host, 1, "memory of the host");
        *address = (uint64_t)host;
    });
}

API cuMemFreeHost(void *address) { return cuMemFree_v2((uint64_t)address); }

API cuMemGetInfo_v2(size_t *available, size_t *total) {
    *total = *available = TOTAL_MEMORY;
    return SUCCESS;
}

API cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    return call([&](Lock &) { queue_upload(stream, to, from, bytes); });
}

API cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
    return call([&](Lock &lock) {
        ensure_no_recording();
        queue_upload(nullptr, to, from, bytes);
        const auto legacy = stream_of(nullptr);
        wait_until(lock, {{legacy, legacy->end}});
    });
}

API cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    return call([&](Lock &lock) { queue_download(lock, stream, to, from, bytes); });
}

API cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
    return call([&](Lock &lock) {
        ensure_no_recording();
        queue_download(lock, nullptr, to, from, bytes);
        const auto legacy = stream_of(nullptr);
        wait_until(lock, {{legacy, legacy->end}});
    });
}

API cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    return call([&](Lock &) {
        ensure_memory(to, bytes, "the target of a copy");
        ensure_memory(from, bytes, "the source of a copy");
        queue_device_copy(stream, (void *)to, (void *)from, bytes);
    });
}

API cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void *stream) {
    return call([&](Lock &) {
        ensure_memory(address, bytes, "memory that is set");
        queue(stream_of(stream), {[=] {
                  ensure_memory(address, bytes, "memory that is set");
                  memset((void *)address, value, bytes);
              }});
    });
}

// One side of `CUDA_MEMCPY2D`.
struct Side {
    size_t x, y;
    int type;
    char *host;
    char *device;
    void *array;
    size_t pitch;

    char *line(size_t number) const {
        return (type == 1 ? host : device) + (y + number) * pitch + x;
    }
};

struct Copy2D {
    Side from, to;
    size_t width, height;
};

API cuMemcpy2DAsync_v2(const Copy2D *copy, void *stream) {
    return call([&](Lock &lock) {
        for (size_t line = 0; line < copy->height; ++line) {
            char *from = copy->from.line(line), *to = copy->to.line(line);
            if (copy->from.type == 1) {
                queue_upload(stream, (uint64_t)to, from, copy->width);
            } else if (copy->to.type == 1) {
                queue_download(lock, stream, to, (uint64_t)from, copy->width);
            } else {
                queue_device_copy(stream, to, from, copy->width);
            }
        }
    });
}
