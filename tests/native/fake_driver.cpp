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

// An operation of a sequence: its number in csrc/sequence.h, then its operands; or a launch: the stream, the function.
struct Operation {
  int64_t kind;
  uint64_t operands[4];
};

constexpr int64_t kLaunch = 6;
std::vector<Operation> operations;

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
  const auto number = [](void* address) { return reinterpret_cast<uint64_t>(address); };
  operations.push_back({kLaunch, {number(config->stream), number(function), 0, 0}});
  return 0;
}

int operations_left = -1;     // until all are refused; negative: none is
int operation_code = 0;       // what a refused one answers
bool refuse_once = false;     // one alone
std::atomic<int> held_behind{-1};  // operations, until others are held back; negative: none is
std::map<uint64_t, int> codes;     // of events that are asked for; others have not come
std::atomic<int> relaxed{0};       // threads that have asked for relaxed captures
uint64_t events = 0xE0;       // the newest event
std::vector<uint64_t> destroyed;  // events
std::vector<uint64_t> waited;     // events that the host has waited for

int note(int64_t kind, uint64_t a, uint64_t b, uint64_t c = 0, uint64_t d = 0) {
  if (!has_context) return 201;
  std::unique_lock lock(mutex);
  while (held_behind >= 0 && operations.size() >= static_cast<size_t>(held_behind)) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
  }
  if (operations_left == 0) {
    if (refuse_once) operations_left = -1;
    return operation_code;
  }
  if (operations_left > 0) operations_left--;
  operations.push_back({kind, {a, b, c, d}});
  return 0;
}

int64_t batches = 0;  // calls that took several writes and waits

// Of a call that takes `count` operations: all of them, or none.
[[maybe_unused]] int refuses(int count) {
  std::lock_guard lock(mutex);
  if (operations_left < 0 || operations_left >= count) return 0;
  if (refuse_once) operations_left = -1;
  return operation_code;
}

int make_event(void** made, unsigned flags) {
  if (!has_context || flags != 2) return has_context ? 1 : 201;
  *made = reinterpret_cast<void*>(++events);
  return 0;
}

int destroy_event(uint64_t event) {
  destroyed.push_back(event);
  return 0;
}

int wait_for(uint64_t event) {
  std::lock_guard lock(mutex);
  waited.push_back(event);
  return 0;
}

int query(uint64_t event) {
  if (!has_context) return 201;
  std::lock_guard lock(mutex);
  const auto found = codes.find(event);
  return found == codes.end() ? 600 : found->second;
}

int exchange_mode(int* mode) {
  relaxed += *mode == 2;
  *mode = 0;
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
  operations.clear();
  destroyed.clear();
  waited.clear();
  codes.clear();
  operations_left = held_behind = -1;
  batches = 0;
}

int64_t fake_batches() { return batches; }

void fake_refuse_operations(int after, int code) {
  operations_left = after, operation_code = code, refuse_once = false;
}

void fake_refuse_one(int after, int code) { operations_left = after, operation_code = code, refuse_once = true; }

void fake_hold_behind(int count) { held_behind = count; }

void fake_event(uint64_t event, int code) {
  std::lock_guard lock(mutex);
  codes[event] = code;
}

int fake_relaxed() { return relaxed; }

int64_t fake_operations(Operation* found, int64_t room) {
  std::lock_guard lock(mutex);
  const auto count = static_cast<int64_t>(operations.size());
  for (int64_t i = 0; i < count && i < room; i++) found[i] = operations[i];
  return count;
}

void fake_note(int kind, uint64_t a, uint64_t b, uint64_t c, uint64_t d) { note(kind, a, b, c, d); }

int64_t fake_waited(uint64_t* found, int64_t room) {
  std::lock_guard lock(mutex);
  for (int64_t i = 0; i < room && i < static_cast<int64_t>(waited.size()); i++) found[i] = waited[i];
  return static_cast<int64_t>(waited.size());
}

int64_t fake_destroyed() { return static_cast<int64_t>(destroyed.size()); }

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

int hipMemcpyHtoDAsync(uint64_t to, uint64_t from, size_t size, uint64_t on) { return note(0, on, to, from, size); }

int hipMemcpyDtoDAsync(uint64_t to, uint64_t from, size_t size, uint64_t on) { return note(1, on, to, from, size); }

int hipStreamWriteValue32(uint64_t on, uint64_t address, uint32_t value, unsigned flags) {
  return flags ? 1 : note(2, on, address, value);
}

int hipStreamWaitValue32(uint64_t on, uint64_t address, uint32_t value, unsigned flags, uint32_t mask) {
  return flags || mask != 0xFFFFFFFF ? 1 : note(3, on, address, value);
}

int hipEventRecord(uint64_t event, uint64_t on) { return note(4, on, event); }

int hipStreamWaitEvent(uint64_t on, uint64_t event, unsigned) { return note(5, on, event); }

int hipEventCreateWithFlags(void** made, unsigned flags) { return make_event(made, flags); }

int hipEventDestroy(uint64_t event) { return destroy_event(event); }

int hipEventQuery(uint64_t event) { return query(event); }

int hipSetDevice(int made) {
  device = made, has_context = 1;
  return 0;
}

int hipThreadExchangeStreamCaptureMode(int* mode) { return exchange_mode(mode); }

int hipEventSynchronize(uint64_t event) { return wait_for(event); }

const char* hipGetErrorName(int code) { return code == 700 ? "hipErrorIllegalAddress" : nullptr; }

const char* hipGetErrorString(int code) { return code == 700 ? "an illegal memory access" : nullptr; }

int hipStreamGetCaptureInfo_v2(uint64_t, int* status, unsigned long long* number, void*, void*, void*) {
  *status = capturing, *number = capturing;
  return 0;
}

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

int cuMemcpyHtoDAsync_v2(uint64_t to, uint64_t from, size_t size, uint64_t on) { return note(0, on, to, from, size); }

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, uint64_t on) { return note(1, on, to, from, size); }

int cuStreamWriteValue32_v2(uint64_t on, uint64_t address, uint32_t value, unsigned flags) {
  return flags ? 1 : note(2, on, address, value);
}

int cuStreamWaitValue32_v2(uint64_t on, uint64_t address, uint32_t value, unsigned flags) {
  return flags ? 1 : note(3, on, address, value);
}

struct MemoryOperation {
  uint32_t kind;
  uint64_t address, value;
  uint32_t flags;
  uint64_t alias, padding;
};

int cuStreamBatchMemOp_v2(uint64_t on, uint32_t count, const MemoryOperation* batch, unsigned flags) {
  if (flags || count == 0 || count > 256) return 1;
  if (const int code = has_context ? refuses(static_cast<int>(count)) : 201) return code;
  batches++;
  for (const MemoryOperation* one = batch; one != batch + count; one++) {
    if (one->flags || one->alias || (one->kind != 1 && one->kind != 2) || one->value >> 32) return 1;
    if (const int code = note(one->kind == 2 ? 2 : 3, on, one->address, one->value)) return code;
  }
  return 0;
}

int cuEventRecord(uint64_t event, uint64_t on) { return note(4, on, event); }

int cuStreamWaitEvent(uint64_t on, uint64_t event, unsigned) { return note(5, on, event); }

int cuEventCreate(void** made, unsigned flags) { return make_event(made, flags); }

int cuEventDestroy_v2(uint64_t event) { return destroy_event(event); }

int cuEventQuery(uint64_t event) { return query(event); }

int cuThreadExchangeStreamCaptureMode(int* mode) { return exchange_mode(mode); }

int cuCtxSetCurrent(void* made) {
  has_context = made != nullptr;
  return 0;
}

int cuEventSynchronize(uint64_t event) { return wait_for(event); }

int cuGetErrorName(int code, const char** name) {
  *name = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : nullptr;
  return code == 700 ? 0 : 1;
}

int cuGetErrorString(int code, const char** text) {
  *text = code == 700 ? "an illegal memory access" : nullptr;
  return code == 700 ? 0 : 1;
}

int cuCtxGetCurrent(void** found) {
  *found = has_context ? &device : nullptr;
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
