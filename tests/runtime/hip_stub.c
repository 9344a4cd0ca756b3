/* HIP's runtime without a device: it does what it is asked at once, and notes it. */
#include <stdint.h>
#include <string.h>

enum { MOST = 64 };

typedef struct { int what; uint64_t stream, address; uint32_t value, flags, mask; } Call;

Call calls[MOST];
int count, fails, capturing, pending;

static int note(int what, uint64_t stream, void *address, uint32_t value, uint32_t flags, uint32_t mask) {
    if (fails)
        return fails;
    calls[count++ % MOST] = (Call){what, stream, (uint64_t)address, value, flags, mask};
    return 0;
}

int hipStreamCreateWithFlags(void **to, unsigned flags) {
    *to = fails ? 0 : (void *)0xB0B0;
    return note(0, 0, 0, 0, flags, 0);
}

int hipStreamWriteValue32(uint64_t stream, void *address, uint32_t value, unsigned flags) {
    if (!fails)
        *(uint32_t *)address = value;
    return note(1, stream, address, value, flags, 0);
}

int hipStreamWaitValue32(uint64_t stream, void *address, uint32_t value, unsigned flags, uint32_t mask) {
    return note(2, stream, address, value, flags, mask);
}

int hipMemcpyHtoDAsync(void *to, const void *from, size_t size, uint64_t stream) {
    if (!fails)
        memcpy(to, from, size);
    return note(3, stream, to, size, 0, 0);
}

int hipMemcpyDtoDAsync(void *to, const void *from, size_t size, uint64_t stream) {
    if (!fails)
        memcpy(to, from, size);
    return note(4, stream, to, size, 0, 0);
}

int hipMemcpyDtoHAsync(void *to, const void *from, size_t size, uint64_t stream) {
    if (!fails)
        memcpy(to, from, size);
    return note(11, stream, to, size, 0, 0);
}

int hipStreamGetCaptureInfo_v2(uint64_t stream, int *status, unsigned long long *id, void *graph, void *deps, void *n) {
    if (graph || deps || n)
        return 1;
    *status = capturing ? 1 : 0;
    *id = capturing;
    return fails;
}

int hipStreamIsCapturing(uint64_t stream, int *status) {
    *status = capturing ? 1 : 0;
    return 0;
}

int hipEventCreateWithFlags(void **to, unsigned flags) {
    *to = fails ? 0 : (void *)0xE0E0;
    return note(5, 0, 0, 0, flags, 0);
}

int hipEventDestroy(void *event) { return note(6, 0, event, 0, 0, 0); }
int hipEventRecord(void *event, uint64_t stream) { return note(7, stream, event, 0, 0, 0); }
int hipStreamWaitEvent(uint64_t stream, void *event, unsigned flags) { return note(8, stream, event, 0, flags, 0); }

int hipEventQuery(void *event) {
    int code = note(9, 0, event, 0, 0, 0);
    return code ? code : pending ? 600 : 0;
}

int hipEventSynchronize(void *event) { return note(10, 0, event, 0, 0, 0); }

const char *hipGetErrorName(int code) { return code == 1 ? "hipErrorInvalidValue" : 0; }
const char *hipGetErrorString(int code) { return code == 1 ? "invalid argument" : 0; }
