/* libamdhip64 without a device: what it is asked goes to `handler`, which is Python's (tests/emulated_hip.py). */
#define __HIP_PLATFORM_AMD__
#include <hip/hip_runtime_api.h> /* Triton's copy */
#include <stdint.h>
#include <string.h>

typedef uint64_t u;

static int (*handler)(const char *name, const u *arguments);
static hipDeviceProp_t properties;
static char said[512] = "no error";

void emulated_hip_begin(int (*given)(const char *, const u *), const char *arch, int units, int shared) {
    handler = given;
    strncpy(properties.gcnArchName, arch, sizeof properties.gcnArchName - 1);
    properties.multiProcessorCount = units;
    properties.sharedMemPerBlock = shared;
    properties.warpSize = 64;
}

void emulated_hip_say(const char *error) { strncpy(said, error, sizeof said - 1); }

/* Each function under its own name, for the linker: HIP's header has declared it with other types. */
#define ASKED(name, parameters, ...)                                                                                   \
    int asked_##name parameters __asm__(#name);                                                                        \
    int asked_##name parameters {                                                                                      \
        const u given[] = {__VA_ARGS__};                                                                               \
        return handler(#name, given);                                                                                  \
    }

ASKED(hipStreamCreateWithFlags, (u to, unsigned flags), to, flags)
ASKED(hipStreamWriteValue32, (u stream, u at, uint32_t value, unsigned flags), stream, at, value, flags)
ASKED(hipStreamWaitValue32, (u stream, u at, uint32_t value, unsigned flags, uint32_t mask), stream, at, value, flags, mask)
ASKED(hipMemcpyHtoDAsync, (u to, u from, size_t size, u stream), to, from, size, stream)
ASKED(hipMemcpyDtoDAsync, (u to, u from, size_t size, u stream), to, from, size, stream)
ASKED(hipStreamGetCaptureInfo_v2, (u stream, u status, u id, u graph, u deps, u n), stream, status, id, graph, deps, n)
ASKED(hipStreamIsCapturing, (u stream, u status), stream, status)
ASKED(hipEventCreateWithFlags, (u to, unsigned flags), to, flags)
ASKED(hipEventDestroy, (u event), event)
ASKED(hipEventRecord, (u event, u stream), event, stream)
ASKED(hipStreamWaitEvent, (u stream, u event, unsigned flags), stream, event, flags)
ASKED(hipEventQuery, (u event), event)
ASKED(hipEventSynchronize, (u event), event)
ASKED(hipModuleLoadDataEx, (u to, u image, unsigned options, u names, u values), to, image, options, names, values)
ASKED(hipModuleGetFunction, (u to, u module, u name), to, module, name)
ASKED(hipModuleLaunchKernel,
    (u function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
     unsigned block_z, unsigned shared, u stream, u parameters, u extra),
    function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters, extra)

/* What the extension asks, beside launches: its ops are those of tensors of the CPU here, torch's device -1. */
ASKED(aoti_torch_get_current_cuda_stream, (int32_t device, u to), device, to)
int asked_device(int *to) __asm__("hipGetDevice");
int asked_device(int *to) { *to = -1; return 0; }

static int attribute(int *to, hipFunction_attribute which) {
    *to = which == HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return 0;
}

static int device_pointer(u *to, int which, u address) { *to = address; return 0; }
static int device_properties(hipDeviceProp_t *to, int device) { *to = properties; return 0; }
static int refused(void) { return hipErrorNotSupported; }
static const char *error_string(int code) { return said; }

const char *asked_name(int code) __asm__("hipGetErrorName");
const char *asked_name(int code) { return "hipErrorLaunchFailure"; }
const char *asked_string(int code) __asm__("hipGetErrorString");
const char *asked_string(int code) { return said; }
int asked_version(int *to) __asm__("hipDriverGetVersion");
int asked_version(int *to) { *to = 70000000; return 0; }

/* What Triton's driver looks up. */
int asked_address(const char *name, void **to, int version, u flags, int *status) __asm__("hipGetProcAddress");
int asked_address(const char *name, void **to, int version, u flags, int *status) {
    static const struct { const char *name; void *function; } known[] = {
        {"hipModuleLoadDataEx", asked_hipModuleLoadDataEx}, {"hipModuleGetFunction", asked_hipModuleGetFunction},
        {"hipModuleLaunchKernel", asked_hipModuleLaunchKernel}, {"hipFuncGetAttribute", attribute},
        {"hipPointerGetAttribute", device_pointer}, {"hipGetDeviceProperties", device_properties},
        {"hipGetErrorString", error_string},
    };
    *to = refused;
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i].name))
            *to = known[i].function;
    return 0;
}
