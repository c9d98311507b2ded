// A stand-in for NVIDIA's driver, `libcuda.so.1`, with which host code runs without a GPU:
//
//     g++ -std=c++17 -O3 -march=native -fvisibility=hidden -fPIC -shared -o libcuda.so.1 *.cpp
//
// - Memory of the device is memory of the host. What is read before it was written is NaN, and what
//   lies outside of allocations is an error.
// - Streams are queues of operations. An operation at the head of its queue runs once all that it
//   waits for has happened. By default, all operations that can run do so at the end of each call.
//   A test that holds them (`standin_hold`) chooses the order itself (`standin_step`).
// - The kernels of `src/native` are computed from the parameters of their launches, in their own
//   tiles (`kernels.cpp`). Other kernels do nothing, unless a test gives them a body
//   (`standin_kernel`). A test can also make products wait for ever (`standin_stall`), modules be refused
//   (`standin_refuse_modules`), or products and copies within the device do nothing (`standin_idle`).
// - A test can be told of all launches, with their arguments (`standin_observe`).
// - Calls are counted by their names (`standin_calls`), and so are the bytes of copies within the
//   device (`standin_copied`).
// - Arguments that the driver documents as invalid are refused; the reason is printed. A kernel
//   that could not run on a GPU fails there, after which every call fails, as on a GPU.
//
// The files: `queues.cpp` (streams, events, and the order of operations), `memory.cpp`,
// `device.cpp` (the device, its context and modules), `launches.cpp` (tensor maps, launches and
// graphs), `kernels.cpp`.
#pragma once
#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) Result

namespace driver {

// `CUresult`.
enum Result : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_PTX = 218,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_TIMEOUT = 702,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
};

// Thrown by what a call refuses, and by kernels.
struct Error {
    Result code;
};

// Fails with a code, and prints the reason.
[[noreturn]] void fail(Result code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

// Fails unless a condition holds.
#define REQUIRE(condition, ...) \
    if (!(condition)) driver::fail(__VA_ARGS__)

// Queues.

struct Stream;

// The end of what a stream was given.
struct Position {
    std::shared_ptr<Stream> stream;
    uint64_t end;

    bool is_passed() const;
};

struct Operation {
    std::function<void()> run;
    bool is_launch = false;
    // All of these are passed before it runs, and the function returns true if there is one.
    std::vector<Position> after = {};
    std::function<bool()> is_ready = nullptr;

    bool can_run() const;
};

struct Graph {
    std::vector<Operation> operations;
};

struct Stream {
    bool waits_for_legacy;  // and is waited for by the legacy stream
    std::deque<Operation> queue = {};
    uint64_t end = 0, done = 0;  // operations that it was given, and those that have run
    bool ends_with_launch = false;
    bool is_destroyed = false;
    std::unique_ptr<Graph> recorded = nullptr;  // while it records
    int mode = 0;                               // of the recording
    bool is_invalidated = false;                // the recording
};

struct Event {
    std::vector<Position> positions = {};  // when it was recorded
    // When it was passed, in milliseconds; an event may be destroyed before.
    std::shared_ptr<double> time = nullptr;
};

using Lock = std::unique_lock<std::mutex>;

// Makes a call: alone, and not after a kernel has failed. What can run then does. The call is
// counted by the name of the function that makes it.
Result call(const std::function<void(Lock &)> &body, const char *name = __builtin_FUNCTION());

// The stream of a handle.
std::shared_ptr<Stream> stream_of(void *handle);

// Gives a stream an operation, or the graph that it records.
void queue(const std::shared_ptr<Stream> &stream, Operation operation);

// Waits on the host until positions are passed, and fails if nothing leads there.
void wait_until(Lock &lock, const std::vector<Position> &positions);

// The ends of all streams.
std::vector<Position> everything();

// Fails if the call could disturb a recording: of its own thread, or of any in global mode.
void ensure_no_recording();

// True if a stream records.
bool is_recording();

// Runs an operation of a graph or a stream.
void run(const Operation &operation);

// True if kernels, and copies from the device to the device, do nothing.
extern bool is_idle;

// Memory.

// The bytes of the device, as it tells them.
constexpr size_t TOTAL_MEMORY = 16ull << 30;

// Fails unless all of some bytes are memory of the device, or of the host and known to the device.
void ensure_memory(uint64_t address, size_t bytes, const char *what);

// Kernels.

struct Kernel {
    std::string name;
    std::vector<size_t> parameters;  // their sizes in bytes
    unsigned most_threads;           // of a block
    bool is_bf16;                    // its module multiplies bfloat16
    int shared_limit = 48 << 10;     // bytes of dynamic shared memory
    bool is_loaded = false;          // it was launched before
};

struct Launch {
    const Kernel *kernel;
    std::array<unsigned, 3> grid, block;
    unsigned shared, cluster;
    bool stalls;  // its barriers never let threads pass
    std::vector<std::vector<char>> parameters;

    template <class T>
    T parameter(size_t index) const {
        T value;
        REQUIRE(parameters.at(index).size() == sizeof value, LAUNCH_FAILED, "a parameter's size");
        memcpy(&value, parameters[index].data(), sizeof value);
        return value;
    }
};

// `CUtensorMap`, as this driver encodes it.
struct alignas(64) Map {
    uint64_t magic, address;
    uint64_t size[3], stride[3];  // of x, y and z: elements, and bytes
    uint32_t box[3];
    uint32_t type;
    uint64_t unused[5];

    static constexpr uint64_t MAGIC = 0x70616d20726f736e;
};
static_assert(sizeof(Map) == 128, "as CUtensorMap");

// Runs one of the kernels of `src/native`; returns false for other kernels.
bool run_native(const Launch &launch);

}  // namespace driver
