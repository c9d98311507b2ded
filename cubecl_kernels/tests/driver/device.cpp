// The device, its context and modules.
#include <cstdio>
#include <sstream>

#include "driver.hpp"

using namespace driver;

// Of ranks that are threads, each needs a device.
constexpr int DEVICES = 2;

static int contexts[DEVICES];
static thread_local void *current = nullptr;

API cuInit(unsigned) { return SUCCESS; }

API cuGetErrorName(Result code, const char **name) {
    switch (code) {
        case SUCCESS: *name = "CUDA_SUCCESS"; break;
        case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
        case LAUNCH_FAILED: *name = "CUDA_ERROR_LAUNCH_FAILED"; break;
        case LAUNCH_TIMEOUT: *name = "CUDA_ERROR_LAUNCH_TIMEOUT"; break;
        case ILLEGAL_ADDRESS: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
        default: *name = "another error of the stand-in for libcuda";
    }
    return SUCCESS;
}

API cuGetErrorString(Result code, const char **text) { return cuGetErrorName(code, text); }

static int driver_version = 13000;

// Sets the version that the driver has from now on.
API standin_set_version(int version) {
    driver_version = version;
    return SUCCESS;
}

API cuDriverGetVersion(int *version) {
    *version = driver_version;
    return SUCCESS;
}

API cuDeviceGetCount(int *count) {
    *count = DEVICES;
    return SUCCESS;
}

API cuDeviceGet(int *device, int index) {
    *device = index;
    return 0 <= index && index < DEVICES ? SUCCESS : INVALID_DEVICE;
}

API cuDeviceGetName(char *name, int size, int) {
    snprintf(name, size, "stand-in for an H100");
    return SUCCESS;
}

API cuDeviceGetPCIBusId(char *id, int size, int device) {
    snprintf(id, size, "0000:00:0%d.0", 6 + device);
    return SUCCESS;
}

API cuDeviceGetUuid_v2(void *uuid, int device) {
    memset(uuid, 7 + device, 16);
    return SUCCESS;
}

API cuDeviceGetUuid(void *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }

API cuDeviceGetLuid(char *luid, unsigned *nodes, int) {
    memset(luid, 0, 8);
    *nodes = 1;
    return SUCCESS;
}

API cuDeviceTotalMem_v2(size_t *bytes, int) {
    *bytes = TOTAL_MEMORY;
    return SUCCESS;
}

API cuDeviceCanAccessPeer(int *can, int, int) {
    *can = 0;
    return SUCCESS;
}

// Those of an H100 that are asked for, by the numbers of `CUdevice_attribute`.
API cuDeviceGetAttribute(int *value, int attribute, int) {
    switch (attribute) {
        case 1: case 2: case 3: *value = 1024; break;  // threads of a block, and in x and y
        case 4: *value = 64; break;                    // threads of a block in z
        case 5: *value = 2147483647; break;            // blocks in x
        case 6: case 7: *value = 65535; break;         // blocks in y and z
        case 8: *value = 48 << 10; break;              // shared memory of a block
        case 10: *value = 32; break;                   // threads of a warp
        case 12: case 82: *value = 65536; break;       // registers
        case 13: *value = 1980000; break;              // clock rate in kHz
        case 16: *value = 132; break;                  // multiprocessors
        case 36: *value = 2619000; break;              // clock rate of memory
        case 37: *value = 5120; break;                 // width of its bus
        case 38: *value = 50 << 20; break;             // L2 cache
        case 39: *value = 2048; break;                 // threads of a multiprocessor
        case 75: *value = 9; break;                    // compute capability
        case 76: *value = 0; break;
        case 81: *value = 228 << 10; break;            // shared memory of a multiprocessor
        case 97: *value = 227 << 10; break;            // shared memory that a block may ask for
        case 106: *value = 32; break;                  // blocks of a multiprocessor
        default: *value = 1;
    }
    return SUCCESS;
}

// The context.

API cuDevicePrimaryCtxRetain(void **retained, int device) {
    *retained = &contexts[device];
    return SUCCESS;
}

API cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }

API cuCtxSetCurrent(void *made) {
    current = made;
    return SUCCESS;
}

API cuCtxGetCurrent(void **made) {
    *made = current;
    return SUCCESS;
}

API cuCtxGetDevice(int *device) {
    *device = current == &contexts[1];
    return SUCCESS;
}

API cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}

// Modules.

// The sizes of parameters, from their declarations in PTX: `.param .u64 x` or
// `.param .align 64 .b8 x[128]`.
static std::vector<size_t> sizes_of(const std::string &declarations) {
    std::vector<size_t> sizes;
    for (size_t at = 0; (at = declarations.find(".param", at)) != std::string::npos;) {
        const size_t end = std::min(declarations.find(',', at), declarations.size());
        const std::string one = declarations.substr(at, end - at);
        at = end;
        if (const size_t bracket = one.find('['); bracket != std::string::npos) {
            sizes.push_back(std::stoul(one.substr(bracket + 1)));
            continue;
        }
        size_t bytes = 0;
        for (const char *bits : {"8", "16", "32", "64"}) {
            for (const char *kind : {".u", ".s", ".b", ".f"}) {
                const std::string type = std::string(kind) + bits + " ";
                if (one.find(type) != std::string::npos) bytes = std::stoul(bits) / 8;
            }
        }
        REQUIRE(bytes, INVALID_PTX, "a parameter without a type: %s", one.c_str());
        sizes.push_back(bytes);
    }
    return sizes;
}

// The product of the numbers with which a text begins, such as the threads of `.maxntid 16, 16, 1`.
static unsigned product_of_numbers(const std::string &text) {
    std::istringstream numbers(text);
    unsigned product = 1, number;
    char comma = ',';
    while (comma == ',' && numbers >> number) {
        product *= number;
        if (!(numbers >> comma)) break;
    }
    return product;
}

static Kernel *parsed(const std::string &ptx, const std::string &name) {
    const size_t entry = ptx.find(".entry " + name + "(");
    REQUIRE(entry != std::string::npos, NOT_FOUND, "no kernel %s", name.c_str());
    const size_t body = ptx.find('{', entry);
    const std::string head = ptx.substr(entry, body - entry);
    const size_t begin = head.find('('), end = head.find(')');
    unsigned most = 1024;
    for (const char *word : {".maxntid", ".reqntid"}) {
        if (const size_t at = head.find(word, end); at != std::string::npos) {
            most = product_of_numbers(head.substr(at + strlen(word)));
        }
    }
    const bool is_bf16 = ptx.find(".f32.bf16.bf16") != std::string::npos;
    return new Kernel{name, sizes_of(head.substr(begin, end - begin)), most, is_bf16};
}

API cuModuleLoadData(void **module, const void *image) {
    return call([&](Lock &) {
        ensure_no_recording();
        REQUIRE(current, INVALID_CONTEXT, "no context is current");
        auto ptx = std::make_unique<std::string>((const char *)image);
        REQUIRE(ptx->find(".version") != std::string::npos, INVALID_PTX, "a module is no PTX");
        *module = ptx.release();
    });
}

static std::string refusal;

// Refuses all modules from now on, for a reason that stands in the log of the driver's compiler.
API standin_refuse_modules(const char *reason) {
    return call([&](Lock &) { refusal = reason; });
}

API cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values) {
    constexpr int ERROR_LOG = 5, ERROR_LOG_BYTES = 6;
    if (refusal.empty()) return cuModuleLoadData(module, image);
    char *log = nullptr;
    size_t bytes = 0;
    for (unsigned i = 0; i < count; ++i) {
        if (options[i] == ERROR_LOG) log = (char *)values[i];
        if (options[i] == ERROR_LOG_BYTES) bytes = (size_t)values[i] & 0xffffffff;
    }
    if (bytes) snprintf(log, bytes, "%s", refusal.c_str());
    return INVALID_PTX;
}

API cuModuleUnload(void *) { return SUCCESS; }

API cuModuleGetFunction(void **function, void *module, const char *name) {
    return call([&](Lock &) { *function = parsed(*(std::string *)module, name); });
}

API cuFuncSetAttribute(void *function, int attribute, int value) {
    return call([&](Lock &) {
        constexpr int SHARED = 8, CARVEOUT = 9;
        if (attribute == SHARED) {
            REQUIRE(value <= 227 << 10, INVALID_VALUE, "%d bytes of shared memory", value);
            ((Kernel *)function)->shared_limit = value;
        } else {
            REQUIRE(attribute == CARVEOUT && value <= 100, INVALID_VALUE, "an attribute");
        }
    });
}

API cuFuncGetAttribute(int *value, int, void *) {
    *value = 0;
    return SUCCESS;
}

API cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *, int, size_t shared) {
    *blocks = shared ? (int)((228 << 10) / (shared + 1024)) : 8;
    return SUCCESS;
}

API cuOccupancyMaxActiveClusters(int *clusters, void *, void *) {
    *clusters = 66;
    return SUCCESS;
}
