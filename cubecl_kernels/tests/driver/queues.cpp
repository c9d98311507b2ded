// Streams, events, and the order of operations.
#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <random>

#include "driver.hpp"

namespace driver {

using Clock = std::chrono::steady_clock;

// Never destroyed: threads of a program may still wait when it ends.
static auto &mutex = *new std::mutex;
static auto &changed = *new std::condition_variable;  // an operation was queued, or ran
static auto &streams =
    *new std::vector<std::shared_ptr<Stream>>{std::make_shared<Stream>(Stream{false})};
static Result failure = SUCCESS;  // of a kernel
static auto &calls = *new std::map<std::string, long>;  // of functions, by names
static bool is_held = false;
static int value_fault = 0;
static thread_local int capture_mode = 0;

constexpr int RELAXED = 2;

// The time after which the host gives up to wait for other threads.
constexpr std::chrono::seconds PATIENCE(2);

void fail(Result code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("stand-in for libcuda: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    throw Error{code};
}

// The order.

bool Position::is_passed() const { return stream->done >= end; }

bool Operation::can_run() const {
    const auto is_passed = [](const Position &position) { return position.is_passed(); };
    return std::all_of(after.begin(), after.end(), is_passed) && (!is_ready || is_ready());
}

void run(const Operation &operation) {
    if (failure != SUCCESS) return;
    try {
        operation.run();
    } catch (const Error &error) {
        failure = error.code;
    }
}

static bool can_run(const std::shared_ptr<Stream> &stream) {
    return !stream->queue.empty() && stream->queue.front().can_run();
}

static void run_head(Stream &stream) {
    const Operation operation = std::move(stream.queue.front());
    stream.queue.pop_front();
    run(operation);
    ++stream.done;
}

static bool run_all() {
    bool has_run = false;
    for (;;) {
        const auto next = std::find_if(streams.begin(), streams.end(), can_run);
        if (next == streams.end()) return has_run;
        run_head(**next);
        has_run = true;
    }
}

// Runs one operation that leads to a position; returns false if there is none.
static bool run_towards(const Position &position) {
    Stream &stream = *position.stream;
    if (stream.queue.empty()) return false;
    if (stream.queue.front().can_run()) {
        run_head(stream);
        return true;
    }
    for (const Position &before : std::vector(stream.queue.front().after)) {
        if (!before.is_passed()) return run_towards(before);
    }
    // It waits for a value, which any other stream may write.
    const auto other = std::find_if(streams.begin(), streams.end(), can_run);
    if (other == streams.end()) return false;
    run_head(**other);
    return true;
}

void wait_until(Lock &lock, const std::vector<Position> &positions) {
    for (const Position &position : positions) {
        auto last = Clock::now();
        while (failure == SUCCESS && !position.is_passed()) {
            if (run_towards(position)) {
                last = Clock::now();
                continue;
            }
            REQUIRE(Clock::now() - last < PATIENCE, LAUNCH_TIMEOUT, "the host waits for ever");
            changed.wait_for(lock, std::chrono::milliseconds(1));
        }
    }
    if (failure != SUCCESS) throw Error{failure};
}

Result call(const std::function<void(Lock &)> &body, const char *name) {
    Lock lock(mutex);
    ++calls[name];
    Result result = failure;
    if (result == SUCCESS) {
        try {
            body(lock);
        } catch (const Error &error) {
            result = error.code;
        }
    }
    if (!is_held) run_all();
    const auto is_over = [](const auto &stream) {
        return stream->is_destroyed && stream->queue.empty();
    };
    streams.erase(std::remove_if(streams.begin(), streams.end(), is_over), streams.end());
    changed.notify_all();
    return result;
}

std::shared_ptr<Stream> stream_of(void *handle) {
    // The legacy stream has no name, or one of two.
    if ((uintptr_t)handle <= 2) return streams.front();
    for (const auto &stream : streams) {
        if (stream.get() == handle && !stream->is_destroyed) return stream;
    }
    fail(INVALID_HANDLE, "a stream that does not exist");
}

static Position end_of(const std::shared_ptr<Stream> &stream) { return {stream, stream->end}; }

std::vector<Position> everything() {
    std::vector<Position> ends;
    for (const auto &stream : streams) ends.push_back(end_of(stream));
    return ends;
}

void queue(const std::shared_ptr<Stream> &stream, Operation operation) {
    stream->ends_with_launch = operation.is_launch;
    if (stream->recorded) {
        const bool waits = !operation.after.empty() || operation.is_ready;
        REQUIRE(!waits, CAPTURE_UNSUPPORTED, "a wait is recorded");
        stream->recorded->operations.push_back(std::move(operation));
        return;
    }
    // The legacy stream and those that are not independent of it wait for each other.
    const auto &legacy = streams.front();
    if (stream->waits_for_legacy) operation.after.push_back(end_of(legacy));
    for (const auto &other : streams) {
        if (stream == legacy && other->waits_for_legacy) operation.after.push_back(end_of(other));
    }
    stream->queue.push_back(std::move(operation));
    ++stream->end;
}

// Recordings.

bool is_recording() {
    const auto records = [](const auto &stream) { return stream->recorded != nullptr; };
    return std::any_of(streams.begin(), streams.end(), records);
}

void ensure_no_recording() {
    if (capture_mode == RELAXED) return;
    for (const auto &stream : streams) {
        if (!stream->recorded || stream->mode == RELAXED) continue;
        stream->is_invalidated = true;
        fail(CAPTURE_UNSUPPORTED, "a call that a recording does not allow");
    }
}

static Event *event_of(void *handle) {
    REQUIRE(handle, INVALID_HANDLE, "no event");
    return (Event *)handle;
}

// Waits of a stream for an event.
static void queue_wait(const std::shared_ptr<Stream> &stream, const Event *event) {
    Operation wait = {[] {}};
    wait.after = event->positions;
    queue(stream, std::move(wait));
}

static bool is_passed(const Event *event) {
    const auto is_passed = [](const Position &position) { return position.is_passed(); };
    return std::all_of(event->positions.begin(), event->positions.end(), is_passed);
}

}  // namespace driver

using namespace driver;

// Order for tests.

// Lets operations run only when a test steps, or when the host waits for them; 0 ends that.
// The number of calls of the functions whose names begin with a text.
API standin_calls(const char *begin, long *count) {
    Lock lock(mutex);
    *count = 0;
    for (const auto &[name, made] : calls) {
        if (name.compare(0, strlen(begin), begin) == 0) *count += made;
    }
    return SUCCESS;
}

API standin_hold(int hold) {
    return call([&](Lock &) { is_held = hold; });
}

// Runs one of the operations that can run, by a random number; returns `NOT_READY` if none can.
API standin_step(unsigned seed) {
    return call([&](Lock &) {
        std::vector<Stream *> ready;
        for (const auto &stream : streams) {
            if (can_run(stream)) ready.push_back(stream.get());
        }
        if (ready.empty()) throw Error{NOT_READY};
        run_head(*ready[std::minstd_rand(seed + 1)() % ready.size()]);
    });
}

// Adds a number to each value that streams wait for from now on.
API standin_value_fault(int fault) {
    return call([&](Lock &) { value_fault = fault; });
}

// Streams.

API cuStreamCreateWithPriority(void **stream, unsigned flags, int) {
    return call([&](Lock &) {
        const bool is_independent = flags & 1;
        streams.push_back(std::make_shared<Stream>(Stream{!is_independent}));
        *stream = streams.back().get();
    });
}

API cuStreamCreate(void **stream, unsigned flags) {
    return cuStreamCreateWithPriority(stream, flags, 0);
}

API cuStreamDestroy_v2(void *stream) {
    return call([&](Lock &) { stream_of(stream)->is_destroyed = true; });
}

API cuStreamSynchronize(void *handle) {
    return call([&](Lock &lock) {
        ensure_no_recording();
        const auto stream = stream_of(handle);
        REQUIRE(!stream->recorded, CAPTURE_UNSUPPORTED, "the host waits for a recording");
        wait_until(lock, {end_of(stream)});
    });
}

API cuStreamQuery(void *handle) {
    return call([&](Lock &) {
        ensure_no_recording();
        if (!end_of(stream_of(handle)).is_passed()) throw Error{NOT_READY};
    });
}

API cuStreamWaitEvent(void *stream, void *event, unsigned) {
    return call([&](Lock &) { queue_wait(stream_of(stream), event_of(event)); });
}

API cuStreamWaitValue32_v2(void *stream, uint64_t address, uint32_t value, unsigned flags) {
    return call([&](Lock &) {
        REQUIRE(address % 4 == 0, INVALID_VALUE, "a value that is not aligned");
        ensure_memory(address, sizeof value, "a value that a stream waits for");
        value += value_fault;
        Operation wait = {[] {}};
        wait.is_ready = [=] {
            const uint32_t now = *(volatile uint32_t *)address;
            switch (flags & 3) {
                case 0: return (int32_t)(now - value) >= 0;
                case 1: return now == value;
                case 2: return (now & value) != 0;
                default: return ~(now | value) != 0;
            }
        };
        queue(stream_of(stream), std::move(wait));
    });
}

API cuStreamWriteValue32_v2(void *stream, uint64_t address, uint32_t value, unsigned) {
    return call([&](Lock &) {
        ensure_memory(address, sizeof value, "a value that a stream writes");
        queue(stream_of(stream), {[=] { *(volatile uint32_t *)address = value; }});
    });
}

API cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    return call([&](Lock &) { queue(stream_of(stream), {[=] { function(data); }}); });
}

// Recordings.

API cuThreadExchangeStreamCaptureMode(int *mode) {
    std::swap(*mode, capture_mode);
    return SUCCESS;
}

API cuStreamBeginCapture_v2(void *handle, int mode) {
    return call([&](Lock &) {
        const auto stream = stream_of(handle);
        REQUIRE(stream != streams.front(), CAPTURE_UNSUPPORTED, "the legacy stream records");
        REQUIRE(!stream->recorded, INVALID_VALUE, "a stream records already");
        stream->recorded = std::make_unique<Graph>();
        stream->mode = mode;
        stream->is_invalidated = false;
        stream->ends_with_launch = false;
    });
}

API cuStreamEndCapture(void *handle, void **graph) {
    return call([&](Lock &) {
        const auto stream = stream_of(handle);
        REQUIRE(stream->recorded, INVALID_VALUE, "a stream does not record");
        const auto recorded = std::move(stream->recorded);
        stream->ends_with_launch = false;
        REQUIRE(!stream->is_invalidated, CAPTURE_INVALIDATED, "a recording was disturbed");
        *graph = new Graph(*recorded);
    });
}

API cuStreamIsCapturing(void *stream, int *status) {
    return call([&](Lock &) {
        const auto of = stream_of(stream);
        *status = !of->recorded ? 0 : of->is_invalidated ? 2 : 1;
    });
}

// Events.

API cuEventCreate(void **event, unsigned) {
    *event = new Event();
    return SUCCESS;
}

// What waits for an event has its positions, so that it can be destroyed early.
API cuEventDestroy_v2(void *event) {
    return call([&](Lock &) { delete event_of(event); });
}

static void begin_record(Event *event) {
    event->positions.clear();
    event->time = std::make_shared<double>();
}

static void record(const std::shared_ptr<Stream> &stream, Event *event) {
    REQUIRE(!stream->recorded, CAPTURE_UNSUPPORTED, "an event is recorded in a graph");
    queue(stream, {[time = event->time] {
              const auto now = Clock::now().time_since_epoch();
              *time = std::chrono::duration<double, std::milli>(now).count();
          }});
    event->positions.push_back(end_of(stream));
}

API cuEventRecord(void *event, void *stream) {
    return call([&](Lock &) {
        begin_record(event_of(event));
        record(stream_of(stream), event_of(event));
    });
}

API cuEventQuery(void *event) {
    return call([&](Lock &) {
        ensure_no_recording();
        if (!is_passed(event_of(event))) throw Error{NOT_READY};
    });
}

API cuEventSynchronize(void *event) {
    return call([&](Lock &lock) {
        ensure_no_recording();
        wait_until(lock, event_of(event)->positions);
    });
}

API cuEventElapsedTime(float *milliseconds, void *start, void *end) {
    return call([&](Lock &) {
        const Event *first = event_of(start), *last = event_of(end);
        REQUIRE(first->time && last->time, INVALID_HANDLE, "an event that was not recorded");
        if (!is_passed(first) || !is_passed(last)) throw Error{NOT_READY};
        *milliseconds = (float)(*last->time - *first->time);
    });
}

API cuEventElapsedTime_v2(float *milliseconds, void *start, void *end) {
    return cuEventElapsedTime(milliseconds, start, end);
}

// Events of the whole context.

// Neither is allowed while a stream records, which ends the recording.
static void ensure_no_recording_of_context() {
    for (const auto &stream : streams) {
        if (stream->recorded) stream->is_invalidated = true;
    }
    REQUIRE(!is_recording(), CAPTURE_UNSUPPORTED, "an event of a context that records");
}

API cuCtxRecordEvent(void *, void *event) {
    return call([&](Lock &) {
        ensure_no_recording_of_context();
        begin_record(event_of(event));
        for (const auto &stream : streams) record(stream, event_of(event));
    });
}

// Streams that are made later need not wait.
API cuCtxWaitEvent(void *, void *event) {
    return call([&](Lock &) {
        ensure_no_recording_of_context();
        for (const auto &stream : streams) queue_wait(stream, event_of(event));
    });
}

API cuCtxSynchronize() {
    return call([](Lock &lock) {
        ensure_no_recording();
        wait_until(lock, everything());
    });
}
