#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>

namespace tilestream {
namespace {

constexpr int kNotSupported = 801;        // hipErrorNotSupported
constexpr int kCaptureUnsupported = 900;  // hipErrorStreamCaptureUnsupported
constexpr unsigned kGreaterOrEqual = 0, kWholeWord = 0xFFFFFFFF;

Driver found;
bool forked = false;

template <typename Function>
bool look_up(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

// The launch that Triton makes on HIP.
int (*launch_module)(
    void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared_bytes, void* stream, void** parameters, void** extra) = nullptr;

int launch_by_hip(const LaunchConfig* config, void* function, void** parameters, void** extra) {
  if (config->attribute_count != 0) return kNotSupported;
  const auto &grid = config->grid, &block = config->block;
  return launch_module(
      function, grid[0], grid[1], grid[2], block[0], block[1], block[2], config->shared_bytes, config->stream,
      parameters, extra);
}

int (*hip_write)(void* stream, uint64_t address, uint32_t value, unsigned flags) = nullptr;
int (*hip_wait)(void* stream, uint64_t address, uint32_t value, unsigned flags, uint32_t mask) = nullptr;

// Under capture HIP writes at once, and not in the graph: refused.
int refuse_capture(void* stream) {
  int capturing = 0;
  const int code = found.stream_is_capturing(stream, &capturing);
  return code == kSuccess && capturing != 0 ? kCaptureUnsupported : code;
}

int write_by_hip(void* stream, uint64_t address, uint32_t value, unsigned flags) {
  const int code = refuse_capture(stream);
  return code == kSuccess ? hip_write(stream, address, value, flags) : code;
}

int wait_by_hip(void* stream, uint64_t address, uint32_t value, unsigned) {
  const int code = refuse_capture(stream);
  return code == kSuccess ? hip_wait(stream, address, value, kGreaterOrEqual, kWholeWord) : code;
}

// What sequences need; a driver without it still launches.
bool look_up_sequences(void* library, bool is_hip, Driver& made) {
  if (is_hip) {
    made.write = write_by_hip;
    made.wait = wait_by_hip;
    return look_up(library, "hipMemcpyHtoDAsync", made.copy_in) &&
           look_up(library, "hipMemcpyDtoDAsync", made.copy_across) &&
           look_up(library, "hipStreamWriteValue32", hip_write) &&
           look_up(library, "hipStreamWaitValue32", hip_wait) &&
           look_up(library, "hipEventRecord", made.record_event) &&
           look_up(library, "hipEventSynchronize", made.await_event) &&
           look_up(library, "hipStreamWaitEvent", made.wait_event);
  }
  look_up(library, "cuStreamBatchMemOp_v2", made.batch);
  return look_up(library, "cuMemcpyHtoDAsync_v2", made.copy_in) &&
         look_up(library, "cuMemcpyDtoDAsync_v2", made.copy_across) &&
         look_up(library, "cuStreamWriteValue32_v2", made.write) &&
         look_up(library, "cuStreamWaitValue32_v2", made.wait) &&
         look_up(library, "cuEventRecord", made.record_event) &&
         look_up(library, "cuEventSynchronize", made.await_event) &&
         look_up(library, "cuStreamWaitEvent", made.wait_event);
}

int (*hip_set_device)(int device) = nullptr;

int get_device_of_hip(void** context) {
  int device = 0;
  const int code = found.context_device(&device);
  *context = reinterpret_cast<void*>(2 * static_cast<intptr_t>(device) + 1);  // odd: not null
  return code;
}

int set_device_of_hip(void* context) {
  return hip_set_device(static_cast<int>(reinterpret_cast<intptr_t>(context) >> 1));
}

// What producers need beside that; a driver without it still issues sequences.
bool look_up_producers(void* library, bool is_hip, Driver& made) {
  if (is_hip) {
    made.get_context = get_device_of_hip;
    made.set_context = set_device_of_hip;
    return look_up(library, "hipEventQuery", made.query_event) &&
           look_up(library, "hipThreadExchangeStreamCaptureMode", made.exchange_capture_mode) &&
           look_up(library, "hipSetDevice", hip_set_device);
  }
  return look_up(library, "cuEventQuery", made.query_event) &&
         look_up(library, "cuThreadExchangeStreamCaptureMode", made.exchange_capture_mode) &&
         look_up(library, "cuCtxGetCurrent", made.get_context) && look_up(library, "cuCtxSetCurrent", made.set_context);
}

bool look_up_cuda(void* library, Driver& made) {
  look_up(library, "cuCtxGetId", made.context_id);
  return look_up(library, "cuLaunchKernelEx", made.launch) &&
         look_up(library, "cuTensorMapEncodeTiled", made.encode_tiled) &&
         look_up(library, "cuCtxGetDevice", made.context_device) &&
         look_up(library, "cuStreamIsCapturing", made.stream_is_capturing);
}

bool look_up_hip(void* library, Driver& made) {
  made.launch = launch_by_hip;
  return look_up(library, "hipGetDevice", made.context_device) &&
         look_up(library, "hipStreamIsCapturing", made.stream_is_capturing);
}

}  // namespace

const Driver& driver() { return found; }

std::string open_driver(const char* driver_library, const char* torch_library) {
  void* gpu = dlopen(driver_library, RTLD_NOW);
  if (gpu == nullptr) return std::string("no driver: ") + dlerror();
  void* torch = dlopen(torch_library, RTLD_NOW);
  if (torch == nullptr) return std::string("no GPU build of torch: ") + dlerror();
  Driver made;
  const bool is_hip = look_up(gpu, "hipModuleLaunchKernel", launch_module);
  const bool complete = (is_hip ? look_up_hip(gpu, made) : look_up_cuda(gpu, made)) &&
                        look_up(torch, "aoti_torch_get_current_cuda_stream", made.current_stream);  // HIP's, too
  if (!complete) return std::string("a function is missing: ") + dlerror();
  if (!look_up_sequences(gpu, is_hip, made)) made.wait_event = nullptr;
  if (!look_up_producers(gpu, is_hip, made)) made.set_context = nullptr;
  found = made;
  [[maybe_unused]] static const int watched = pthread_atfork(nullptr, nullptr, [] { forked = true; });
  return "";
}

bool is_forked() { return forked; }

bool context_of(int32_t device, int64_t* number) {
  if (forked) return false;
  // A context has one device, and its number is no other's: the driver is asked for the device once.
  static thread_local unsigned long long asked = 0;
  static thread_local int of_asked = -1;
  unsigned long long id = 0;
  if (found.context_id != nullptr && found.context_id(nullptr, &id) != kSuccess) return false;
  if (id == 0 || id != asked) {
    int current = -1;
    if (found.context_device(&current) != kSuccess) return false;
    asked = id;
    of_asked = current;
  }
  *number = static_cast<int64_t>(id);
  return of_asked == device;
}

}  // namespace tilestream
