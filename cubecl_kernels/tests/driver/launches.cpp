// Tensor maps, launches and graphs.
#include <atomic>

#include "driver.hpp"

namespace driver {

// The body of a kernel that a test gives: the values of its parameters, and its blocks.
using Body = void (*)(void *const *parameters, const unsigned *grid);

static std::map<std::string, Body> bodies;   // by the beginnings of names
static std::map<std::string, long> counts;  // of launches that ran, by names

// A function of a test that is told of launches: the name of a kernel, its blocks in all
// dimensions, and its parameters.
using Observer = void (*)(const char *name, const unsigned *grid, unsigned count,
                          const void *const *parameters, const size_t *sizes);
static Observer observer = nullptr;

static std::string stalled;  // the beginning of the names of kernels that hang
bool is_idle = false;

static bool begins_with(const std::string &name, const std::string &begin) {
    return name.compare(0, begin.size(), begin) == 0;
}

static void run(const Launch &launch) {
    ++counts[launch.kernel->name];
    if (observer) {
        std::vector<const void *> values;
        for (const auto &value : launch.parameters) values.push_back(value.data());
        observer(launch.kernel->name.c_str(), launch.grid.data(), values.size(), values.data(),
                 launch.kernel->parameters.data());
    }
    if (is_idle || run_native(launch)) return;
    for (const auto &[begin, body] : bodies) {
        if (!begins_with(launch.kernel->name, begin)) continue;
        std::vector<void *> values;
        for (const auto &value : launch.parameters) values.push_back((void *)value.data());
        body(values.data(), launch.grid.data());
    }
}

// `CUlaunchAttribute` and `CUlaunchConfig`.
struct Attribute {
    int id;
    char padding[4];
    int value[16];
};

struct Config {
    unsigned grid[3], block[3], shared;
    void *stream;
    const Attribute *attributes;
    unsigned count;
};

static void queue_launch(const Config &config, Kernel *kernel, void **parameters) {
    constexpr int CLUSTER = 4, PROGRAMMATIC = 6;
    const bool stalls = !stalled.empty() && begins_with(kernel->name, stalled);
    Launch launch = {kernel, {}, {}, config.shared, 1, stalls, {}};
    bool overlaps = false;
    for (unsigned i = 0; i < config.count; ++i) {
        const Attribute &attribute = config.attributes[i];
        if (attribute.id == CLUSTER) launch.cluster = attribute.value[0];
        if (attribute.id == PROGRAMMATIC) overlaps = attribute.value[0];
    }
    unsigned threads = 1;
    for (int i = 0; i < 3; ++i) {
        launch.grid[i] = config.grid[i];
        launch.block[i] = config.block[i];
        threads *= config.block[i];
        REQUIRE(config.grid[i] > 0, INVALID_VALUE, "a grid without blocks");
        REQUIRE(i == 0 || config.grid[i] <= 65535, INVALID_VALUE, "a grid that is too large");
    }
    const char *name = kernel->name.c_str();
    REQUIRE(threads > 0 && threads <= kernel->most_threads, INVALID_VALUE,
            "%s with %u threads in a block", name, threads);
    REQUIRE((int)config.shared <= kernel->shared_limit, INVALID_VALUE,
            "%s with %u bytes of shared memory", name, config.shared);
    REQUIRE(launch.cluster >= 1 && launch.cluster <= 8 && config.grid[0] % launch.cluster == 0,
            INVALID_VALUE, "%s in clusters of %u", name, launch.cluster);
    for (size_t i = 0; i < kernel->parameters.size(); ++i) {
        const char *value = (const char *)parameters[i];
        launch.parameters.emplace_back(value, value + kernel->parameters[i]);
    }

    const auto stream = stream_of(config.stream);
    REQUIRE(!overlaps || stream->ends_with_launch, INVALID_VALUE,
            "%s overlaps with what is not a launch", name);
    // Lazy loading needs calls that a recording does not allow.
    REQUIRE(!stream->recorded || kernel->is_loaded, CAPTURE_UNSUPPORTED,
            "%s is first launched in a recording", name);
    kernel->is_loaded = true;
    Operation operation = {[launch = std::move(launch)] { run(launch); }};
    operation.is_launch = true;
    queue(stream, std::move(operation));
}

}  // namespace driver

using namespace driver;

// For tests.

// Gives a body to the kernels whose names begin with a text.
API standin_kernel(const char *begin, Body body) {
    return call([&](Lock &) { bodies[begin] = body; });
}

// Tells a function of all launches that run from now on, or none of them any more. The function
// makes no call of the driver.
API standin_observe(Observer told) {
    return call([&](Lock &) { observer = told; });
}

// Makes the products whose names begin with a text wait for ever.
API standin_stall(const char *begin) {
    return call([&](Lock &) { stalled = begin; });
}

// Lets products and copies within the device do nothing, or do their work again.
API standin_idle(int idle) {
    return call([&](Lock &) { is_idle = idle; });
}

// The number of launches that ran, of kernels whose names begin with a text.
API standin_count(const char *begin, long *count) {
    return call([&](Lock &) {
        *count = 0;
        for (const auto &[name, launches] : counts) {
            if (begins_with(name, begin)) *count += launches;
        }
    });
}

// Tensor maps.

// https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TENSOR__MEMORY.html
API cuTensorMapEncodeTiled(Map *map, unsigned type, unsigned rank, void *address,
                           const uint64_t *sizes, const uint64_t *strides, const uint32_t *box,
                           const uint32_t *element_strides, unsigned interleave, unsigned swizzle,
                           unsigned, unsigned fill) {
    return call([&](Lock &) {
        constexpr unsigned F16 = 6, BF16 = 9, SWIZZLE_128 = 3;
        // Other maps are not used by the kernels that are computed.
        REQUIRE(rank == 3 && (type == F16 || type == BF16), NOT_SUPPORTED, "a map's kind");
        REQUIRE((uint64_t)map % 64 == 0, INVALID_VALUE, "a map that is not aligned");
        REQUIRE((uint64_t)address % 16 == 0, INVALID_VALUE, "a tensor that is not aligned");
        REQUIRE(interleave == 0 && fill == 0, INVALID_VALUE, "a map's interleave or fill");
        REQUIRE(swizzle == SWIZZLE_128 && box[0] * 2 <= 128, INVALID_VALUE, "a map's swizzle");
        Map made = {Map::MAGIC, (uint64_t)address, {}, {2}, {}, type, {}};
        for (int i = 0; i < 3; ++i) {
            REQUIRE(sizes[i] > 0 && sizes[i] <= 1ull << 32, INVALID_VALUE, "a map's size %d", i);
            REQUIRE(box[i] > 0 && box[i] <= 256, INVALID_VALUE, "a map's box %d", i);
            REQUIRE(element_strides[i] == 1, INVALID_VALUE, "a map's element stride %d", i);
            made.size[i] = sizes[i];
            made.box[i] = box[i];
        }
        for (int i = 0; i < 2; ++i) {
            const bool is_valid = strides[i] % 16 == 0 && strides[i] < 1ull << 40;
            const bool is_apart = strides[i] >= made.stride[i] * sizes[i];
            REQUIRE(is_valid && is_apart, INVALID_VALUE, "a map's stride %d", i);
            made.stride[i + 1] = strides[i];
        }
        *map = made;
    });
}

// Launches.

API cuLaunchKernelEx(const Config *config, Kernel *kernel, void **parameters, void **) {
    return call([&](Lock &) { queue_launch(*config, kernel, parameters); });
}

API cuLaunchKernel(Kernel *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                   void *stream, void **parameters, void **) {
    const Config config = {{grid_x, grid_y, grid_z},
                           {block_x, block_y, block_z},
                           shared,
                           stream,
                           nullptr,
                           0};
    return cuLaunchKernelEx(&config, kernel, parameters, nullptr);
}

// Graphs.

API cuGraphInstantiateWithFlags(Graph **executable, const Graph *graph, uint64_t) {
    *executable = new Graph(*graph);
    return SUCCESS;
}

API cuGraphUpload(Graph *, void *) { return SUCCESS; }

API cuGraphLaunch(const Graph *executable, void *stream) {
    return call([&](Lock &) {
        const auto run_graph = [graph = *executable] {
            for (const Operation &operation : graph.operations) operation.run();
        };
        queue(stream_of(stream), {run_graph});
    });
}

API cuGraphGetNodes(const Graph *graph, const void **nodes, size_t *count) {
    if (nodes) {
        for (size_t i = 0; i < *count; ++i) nodes[i] = &graph->operations.at(i);
    }
    *count = graph->operations.size();
    return SUCCESS;
}

// No operation allocates memory, so that all are told as kernels.
API cuGraphNodeGetType(const void *, int *type) {
    *type = 0;
    return SUCCESS;
}

API cuGraphDestroy(Graph *graph) {
    delete graph;
    return SUCCESS;
}

API cuGraphExecDestroy(Graph *executable) { return cuGraphDestroy(executable); }
