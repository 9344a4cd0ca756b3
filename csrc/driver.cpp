#include "driver.h"

#include <dlfcn.h>

namespace tilestream {
namespace {

Driver found;

template <typename Function>
bool look_up(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

const Driver& driver() { return found; }

std::string open_driver(const char* driver_library, const char* torch_library) {
  void* cuda = dlopen(driver_library, RTLD_NOW);
  if (cuda == nullptr) return std::string("no driver: ") + dlerror();
  void* torch = dlopen(torch_library, RTLD_NOW);
  if (torch == nullptr) return std::string("no CUDA build of torch: ") + dlerror();
  Driver made;
  look_up(cuda, "cuCtxGetId", made.context_id);
  const bool complete = look_up(cuda, "cuLaunchKernelEx", made.launch) &&
                        look_up(cuda, "cuTensorMapEncodeTiled", made.encode_tiled) &&
                        look_up(cuda, "cuCtxGetDevice", made.context_device) &&
                        look_up(cuda, "cuStreamIsCapturing", made.stream_is_capturing) &&
                        look_up(torch, "aoti_torch_get_current_cuda_stream", made.current_stream);
  if (!complete) return std::string("a function is missing: ") + dlerror();
  found = made;
  return "";
}

bool context_of(int32_t device, int64_t* number) {
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
