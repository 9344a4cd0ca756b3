// A GPU's driver for tests without one: it records what is launched, and launches nothing. CUDA's, or, with FAKE_HIP,
// HIP's, in which Triton's own launcher finds what it needs, too.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

namespace {

struct Attribute {
  uint32_t id, padding;
  unsigned char value[64];
};

struct Config {
  uint32_t grid[3], block[3], shared;
  void* stream;
  const Attribute* attributes;
  uint32_t count;
};

// Per thread, as a GPU's driver has them: a fresh thread has no context.
thread_local int device = 0, has_context = 0;
thread_local unsigned long long context = 1;
thread_local void* stream = nullptr;
int capturing = 0, launch_code = 0, encode_code = 0, recording = 1;
int left = -1;  // launches until all are refused; negative: none is
std::atomic<int> holds{0}, held{0};  // whether launches are held back; how many are

std::mutex mutex;
std::map<void*, std::vector<int64_t>> sizes_of;     // of a function's parameters
std::vector<std::vector<unsigned char>> launches;   // configuration, attributes, parameters

template <typename T>
void append(std::vector<unsigned char>& bytes, const T* values, size_t count) {
  const auto* first = reinterpret_cast<const unsigned char*>(values);
  bytes.insert(bytes.end(), first, first + count * sizeof(T));
}

int record(const Config* config, void* function, void** parameters) {
  if (!has_context) return 201;
  for (held++; holds;) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  held--;
  if (launch_code || !recording) return launch_code;
  if (left == 0) return 700;
  if (left > 0) left--;
  std::lock_guard lock(mutex);
  std::vector<unsigned char> bytes;
  append(bytes, config->grid, 7);
  append(bytes, &config->stream, 1);
  append(bytes, &config->count, 1);
  append(bytes, config->attributes, config->count);
  const auto& sizes = sizes_of[function];
  for (size_t i = 0; i < sizes.size(); i++) append(bytes, static_cast<unsigned char*>(parameters[i]), sizes[i]);
  launches.push_back(std::move(bytes));
  return 0;
}

int device_of_thread(int* found) {
  *found = device;
  return has_context ? 0 : 201;
}

int capture_of(void*, int* status) {
  *status = capturing;
  return 0;
}

}  // namespace

extern "C" {

void fake_function(void* function, const int64_t* sizes, int64_t count) {
  std::lock_guard lock(mutex);
  sizes_of[function].assign(sizes, sizes + count);
}

void fake_thread(int of_device, int with_context, unsigned long long context_number, void* current_stream) {
  device = of_device, has_context = with_context, context = context_number, stream = current_stream;
}

void fake_state(int is_capturing, int launches_return, int encodes_return, int records) {
  capturing = is_capturing, launch_code = launches_return, encode_code = encodes_return, recording = records;
}

void fake_refuse_after(int launches_left) { left = launches_left; }

void fake_block(int launches) { holds = launches; }

int fake_blocked() { return holds ? held.load() : 0; }

int64_t fake_launches() {
  std::lock_guard lock(mutex);
  return static_cast<int64_t>(launches.size());
}

int64_t fake_launch(int64_t i, unsigned char* bytes, int64_t room) {
  std::lock_guard lock(mutex);
  const auto& launch = launches[i];
  if (static_cast<int64_t>(launch.size()) <= room) std::memcpy(bytes, launch.data(), launch.size());
  return static_cast<int64_t>(launch.size());
}

void fake_forget() {
  std::lock_guard lock(mutex);
  launches.clear();
}

int32_t aoti_torch_get_current_cuda_stream(int32_t, void** found) {
  *found = stream;
  return 0;
}

#ifdef FAKE_HIP

int hipModuleLaunchKernel(
    void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared, void* on, void** parameters, void**) {
  const Config config{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, on, nullptr, 0};
  return record(&config, function, parameters);
}

int hipGetDevice(int* found) { return device_of_thread(found); }

int hipStreamIsCapturing(void* of, int* status) { return capture_of(of, status); }

int hipDriverGetVersion(int* version) {
  *version = 70000000;
  return 0;
}

int unused() { return 0; }

int hipGetProcAddress(const char* name, void** found, int, uint64_t, int*) {
  const bool launch = std::string_view(name) == "hipModuleLaunchKernel";
  *found = launch ? reinterpret_cast<void*>(hipModuleLaunchKernel) : reinterpret_cast<void*>(unused);
  return 0;
}

#else

int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void**) {
  return record(config, function, parameters);
}

// All that it was told, told apart by position: enough to compare two maps.
int cuTensorMapEncodeTiled(
    uint64_t* map, int type, uint32_t rank, void* address, const uint64_t* extents, const uint64_t* strides,
    const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill) {
  if (encode_code) return encode_code;
  if (reinterpret_cast<uint64_t>(map) % 64) return 1;
  std::memset(map, 0, 128);
  map[0] = reinterpret_cast<uint64_t>(address);
  map[1] = ~uint64_t{0};
  uint64_t hash = 0xcbf29ce484222325;
  const auto mix = [&](uint64_t value) { hash = (hash ^ value) * 0x100000001b3; };
  for (const int value : {type, static_cast<int>(rank), interleave, swizzle, promotion, fill}) mix(value);
  for (uint32_t i = 0; i < rank; i++) mix(extents[i]), mix(box[i]), mix(steps[i]), mix(i + 1 < rank ? strides[i] : 0);
  map[2] = hash;
  return 0;
}

int cuCtxGetDevice(int* found) { return device_of_thread(found); }

int cuCtxGetId(void*, unsigned long long* number) {
  *number = context;
  return has_context ? 0 : 201;
}

int cuStreamIsCapturing(void* of, int* status) { return capture_of(of, status); }

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

#endif

}  // extern "C"
