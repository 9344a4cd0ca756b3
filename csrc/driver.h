// The GPU's driver, CUDA's or HIP's, found at run time: the few functions that launches, sequences and producers
// need, without headers or libraries of either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tilestream {

constexpr int kSuccess = 0;

// As `CUlaunchConfig` and `CUlaunchAttribute` of cuda.h, whose layouts are the ABI of CUDA's driver.
struct LaunchAttribute {
  uint32_t id;
  uint32_t padding;
  alignas(8) unsigned char value[64];
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  uint32_t attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56);

// As `CUstreamBatchMemOpParams` of cuda.h: a write or a wait of a 32-bit word.
struct MemoryOperation {
  enum Kind : uint32_t { kWait = 1, kWrite = 2 };
  Kind kind;
  uint64_t address;
  uint64_t value;
  uint32_t flags;
  uint64_t alias;
  uint64_t padding;
};
static_assert(sizeof(MemoryOperation) == 48);

struct alignas(64) TensorMapBytes {
  uint64_t words[16];
};

struct Driver {
  int (*launch)(const LaunchConfig*, void* function, void** parameters, void** extra) = nullptr;
  int (*encode_tiled)(
      TensorMapBytes*, int element_type, uint32_t rank, void* address, const uint64_t* extents, const uint64_t* strides,
      const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int promotion,
      int fill) = nullptr;  // null for HIP, which has no tensor maps
  int (*context_device)(int*) = nullptr;
  int (*context_id)(void* context, unsigned long long*) = nullptr;  // null before CUDA 12, and for HIP
  int (*stream_is_capturing)(void* stream, int*) = nullptr;
  int32_t (*current_stream)(int32_t device, void**) = nullptr;  // torch's own
  // Of sequences.
  int (*copy_in)(uint64_t to, const void* source, size_t size, void* stream) = nullptr;
  int (*copy_across)(uint64_t to, uint64_t source, size_t size, void* stream) = nullptr;
  int (*write)(void* stream, uint64_t address, uint32_t value, unsigned flags) = nullptr;
  int (*wait)(void* stream, uint64_t address, uint32_t value, unsigned flags) = nullptr;  // until it is at least value
  // Writes and waits of a stream in order; null where there is none.
  int (*batch)(void* stream, uint32_t count, MemoryOperation*, unsigned flags) = nullptr;
  int (*record_event)(void* event, void* stream) = nullptr;
  int (*await_event)(void* event) = nullptr;  // on the host
  int (*wait_event)(void* stream, void* event, unsigned flags) = nullptr;  // null if one of these is missing
  // Of producers, which need those of sequences, too.
  int (*query_event)(void* event) = nullptr;
  int (*exchange_capture_mode)(int* mode) = nullptr;
  int (*get_context)(void** context) = nullptr;  // of this thread; null if it has none. HIP: its device
  int (*set_context)(void* context) = nullptr;   // null if one of these is missing

  bool issues_sequences() const { return wait_event != nullptr; }
  bool runs_producers() const { return issues_sequences() && set_context != nullptr; }
};

// The functions found by `open_driver`; all null before.
const Driver& driver();

// Look the functions up in the driver's library and in torch's GPU library. The driver is HIP's if its library has
// HIP's launch. Returns why a function is missing; empty if none is.
std::string open_driver(const char* driver_library, const char* torch_library);

// Whether this process was forked from one with a driver. CUDA cannot be used here, and threads of the parent may hold
// this library's locks for ever: nothing is launched, and no lock is taken.
bool is_forked();

// The number of this thread's context, which no other context ever has; 0 if the driver numbers none. False if the
// thread has no context, or one of another device; and in a forked process.
bool context_of(int32_t device, int64_t* number);

}  // namespace tilestream
