// The layouts and numbers that csrc has of CUDA's driver, beside those of its header; compiled, and never run.
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "../../csrc/driver.h"

using namespace tilestream;

#define SAME_SIZE(ours, theirs) static_assert(sizeof(ours) == sizeof(theirs))
#define SAME(ours, field, theirs, of) static_assert(offsetof(ours, field) == offsetof(theirs, of))
#define NUMBER(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs))
#define IS(function, ...) static_assert(std::is_same_v<decltype(&function), CUresult (*)(__VA_ARGS__)>)

SAME_SIZE(LaunchConfig, CUlaunchConfig);
SAME(LaunchConfig, stream, CUlaunchConfig, hStream);
SAME(LaunchConfig, attribute_count, CUlaunchConfig, numAttrs);
SAME_SIZE(LaunchAttribute, CUlaunchAttribute);
SAME(LaunchAttribute, value, CUlaunchAttribute, value);
SAME_SIZE(MemoryOperation, CUstreamBatchMemOpParams);
SAME(MemoryOperation, address, CUstreamBatchMemOpParams, writeValue.address);
SAME(MemoryOperation, value, CUstreamBatchMemOpParams, writeValue.value);
SAME(MemoryOperation, flags, CUstreamBatchMemOpParams, waitValue.flags);
SAME(MemoryOperation, alias, CUstreamBatchMemOpParams, waitValue.alias);
NUMBER(MemoryOperation::kWait, CU_STREAM_MEM_OP_WAIT_VALUE_32);
NUMBER(MemoryOperation::kWrite, CU_STREAM_MEM_OP_WRITE_VALUE_32);
NUMBER(0, CU_STREAM_WAIT_VALUE_GEQ);
NUMBER(0, CU_STREAM_WRITE_VALUE_DEFAULT);
NUMBER(2, CU_STREAM_CAPTURE_MODE_RELAXED);
IS(cuStreamBatchMemOp, CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);
