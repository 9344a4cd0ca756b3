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
SAME_SIZE(KernelNode, CUDA_KERNEL_NODE_PARAMS);
SAME(KernelNode, grid, CUDA_KERNEL_NODE_PARAMS, gridDimX);
SAME(KernelNode, block, CUDA_KERNEL_NODE_PARAMS, blockDimX);
SAME(KernelNode, shared_bytes, CUDA_KERNEL_NODE_PARAMS, sharedMemBytes);
SAME(KernelNode, parameters, CUDA_KERNEL_NODE_PARAMS, kernelParams);
SAME(KernelNode, kernel, CUDA_KERNEL_NODE_PARAMS, kern);
SAME(KernelNode, context, CUDA_KERNEL_NODE_PARAMS, ctx);
SAME_SIZE(CopyNode, CUDA_MEMCPY3D);
SAME(CopyNode, source.memory, CUDA_MEMCPY3D, srcMemoryType);
SAME(CopyNode, source.host, CUDA_MEMCPY3D, srcHost);
SAME(CopyNode, source.device, CUDA_MEMCPY3D, srcDevice);
SAME(CopyNode, source.pitch, CUDA_MEMCPY3D, srcPitch);
SAME(CopyNode, target.memory, CUDA_MEMCPY3D, dstMemoryType);
SAME(CopyNode, target.device, CUDA_MEMCPY3D, dstDevice);
SAME(CopyNode, target.height, CUDA_MEMCPY3D, dstHeight);
SAME(CopyNode, width, CUDA_MEMCPY3D, WidthInBytes);
SAME(CopyNode, depth, CUDA_MEMCPY3D, Depth);
NUMBER(CopyEnd::kHost, CU_MEMORYTYPE_HOST);
NUMBER(CopyEnd::kDevice, CU_MEMORYTYPE_DEVICE);
SAME_SIZE(BatchNode, CUDA_BATCH_MEM_OP_NODE_PARAMS);
SAME(BatchNode, count, CUDA_BATCH_MEM_OP_NODE_PARAMS, count);
SAME(BatchNode, operations, CUDA_BATCH_MEM_OP_NODE_PARAMS, paramArray);
SAME(BatchNode, flags, CUDA_BATCH_MEM_OP_NODE_PARAMS, flags);
NUMBER(6, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
NUMBER(2, CU_STREAM_CAPTURE_MODE_RELAXED);
using Node = CUgraphNode;
IS(cuStreamBatchMemOp, CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);
IS(cuGraphCreate, CUgraph*, unsigned);
IS(cuGraphAddKernelNode, Node*, CUgraph, const Node*, size_t, const CUDA_KERNEL_NODE_PARAMS*);
IS(cuGraphKernelNodeSetAttribute, Node, CUlaunchAttributeID, const CUlaunchAttributeValue*);
IS(cuGraphAddMemcpyNode, Node*, CUgraph, const Node*, size_t, const CUDA_MEMCPY3D*, CUcontext);
IS(cuGraphAddBatchMemOpNode, Node*, CUgraph, const Node*, size_t, const CUDA_BATCH_MEM_OP_NODE_PARAMS*);
IS(cuGraphInstantiateWithFlags, CUgraphExec*, CUgraph, unsigned long long);
IS(cuGraphExecKernelNodeSetParams, CUgraphExec, Node, const CUDA_KERNEL_NODE_PARAMS*);
IS(cuGraphExecMemcpyNodeSetParams, CUgraphExec, Node, const CUDA_MEMCPY3D*, CUcontext);
IS(cuGraphExecBatchMemOpNodeSetParams, CUgraphExec, Node, const CUDA_BATCH_MEM_OP_NODE_PARAMS*);
IS(cuGraphLaunch, CUgraphExec, CUstream);
