/* A driver without a device, in place of libcuda: it records what launches it is given.
 *
 * Loaded by a test in place of the functions that this package asks for, or found as libcuda.so.1 by Triton too.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    unsigned grid[3], block[3], shared;
    uint64_t stream;
    struct { int id; char pad[4]; int value[16]; } *attributes;
    unsigned count;
} Config;

enum { MOST = 4096, BYTES = 1024 };

typedef struct {
    Config config;
    int attributes[4][4]; /* the number, and three words of the value */
    uint64_t function;
    unsigned char parameters[BYTES];
} Launch;

Launch launches[MOST];
int launched, encoded, pause_us, fails, version = 13000;
int sizes[64], parameters;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int cuLaunchKernelEx(const Config *config, uint64_t function, void **values, void **extra) {
    if (fails)
        return fails;
    if (pause_us)
        usleep(pause_us);
    if (extra || (uintptr_t)values[0] % 8)
        return 1;
    pthread_mutex_lock(&lock);
    Launch *to = &launches[launched++ % MOST];
    pthread_mutex_unlock(&lock);
    to->config = *config;
    to->function = function;
    for (unsigned i = 0; i < config->count; i++) {
        to->attributes[i][0] = config->attributes[i].id;
        memcpy(&to->attributes[i][1], config->attributes[i].value, 12);
    }
    unsigned char *at = to->parameters; /* packed, whatever the alignment */
    for (int i = 0; i < parameters; i++) {
        if ((uintptr_t)values[i] % (sizes[i] < 64 ? sizes[i] : 64))
            return 1;
        memcpy(at, values[i], sizes[i]);
        at += sizes[i];
    }
    return 0;
}

/* The "map" is the arguments: 15 words, then the bits that some drivers must have cleared. */
int cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, uint64_t address, const uint64_t *shape,
                           const uint64_t *strides, const unsigned *box, const unsigned *ones, int interleave,
                           int swizzle, int promotion, int fill) {
    if (fails)
        return fails;
    if ((uintptr_t)map % 64 || address % 16)
        return 1;
    encoded++;
    memset(map, 0, 128);
    map[0] = address;
    map[1] = 1 << 21 | type;
    map[2] = rank;
    for (unsigned i = 0; i < rank; i++) {
        map[3 + i] = shape[i];
        map[8 + i] = (uint64_t)ones[i] << 32 | box[i];
        if (i + 1 < rank)
            map[11 + i] = strides[i];
    }
    map[15] = interleave << 24 | swizzle << 16 | promotion << 8 | fill;
    return 0;
}

int cuDriverGetVersion(int *to) {
    *to = version;
    return 0;
}

int cuGetErrorName(int code, const char **to) {
    *to = code == 1 ? "CUDA_ERROR_INVALID_VALUE" : NULL;
    return code == 1 ? 0 : 1;
}

int cuGetErrorString(int code, const char **to) {
    *to = code == 1 ? "invalid argument" : NULL;
    return code == 1 ? 0 : 1;
}

/* What Triton asks for besides. */

int cuCtxGetCurrent(void **to) {
    *to = launches;
    return 0;
}

int cuDeviceGetAttribute(int *to, int attribute, int device) {
    *to = 232448;
    return 0;
}

int cuFuncGetAttribute(int *to, int attribute, uint64_t function) {
    *to = 1024;
    return 0;
}

int cuModuleGetFunction(uint64_t *to, void *module, const char *name) {
    *to = 0xF00D;
    return 0;
}

int cuPointerGetAttribute(uint64_t *to, int attribute, uint64_t address) {
    *to = address;
    return 0;
}

#define NOTHING(name) int name(void) { return 0; }
NOTHING(cuCtxGetDevice)
NOTHING(cuCtxGetLimit)
NOTHING(cuCtxSetCurrent)
NOTHING(cuCtxSetLimit)
NOTHING(cuDeviceGet)
NOTHING(cuDevicePrimaryCtxRetain)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOTHING(cuModuleLoadData)
NOTHING(cuModuleUnload)
NOTHING(cuOccupancyMaxActiveClusters)
NOTHING(cuStreamIsCapturing)
NOTHING(cuTensorMapEncodeIm2col)
