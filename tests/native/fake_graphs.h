// Graphs of the fake driver: part of fake_driver.cpp, for CUDA alone.
#pragma once

#include <set>
#include <utility>

namespace {

struct MemoryOperation {
  uint32_t kind;
  uint64_t address, value;
  uint32_t flags;
  uint64_t alias, padding;
};

bool is_wrong(const MemoryOperation& one) {
  return one.flags || one.alias || (one.kind != 1 && one.kind != 2) || one.value >> 32;
}

// Graphs. A launch does what its nodes say, in an order that their edges allow: each node once what it is behind is done,
// the oldest one first, or the newest.
struct Node {
  Config config{};
  void* function = nullptr;
  std::vector<unsigned char> parameters;
  std::vector<Attribute> attributes;
  std::vector<Operation> operations;  // a copy, or words
  std::set<size_t> behind;
};

struct Graph {
  std::vector<Node> nodes;
};

struct Executable {
  Graph* of;
  std::vector<Node> nodes;
};

using Handle = std::pair<Graph*, size_t>;
std::mutex graph_mutex;  // held by each function of graphs
std::set<Graph*> alive;
std::set<Executable*> instances;
std::vector<std::pair<int64_t, int64_t>> edges;  // of the graph that was launched last: a node, and one that it is behind
std::vector<int64_t> nodes_of;                   // the node of each operation of that launch
int newest_first = 0;
int failing = -1, failing_after = 0, failing_code = 0;  // a function of graphs, after so many calls of it
std::vector<int64_t> graph_calls(12);

// Counts the call of a function of graphs; its code.
int calls(int function) {
  if (!has_context) return 201;
  graph_calls[function]++;
  if (function != failing) return 0;
  return failing_after-- > 0 ? 0 : failing_code;
}

int made(Graph* graph, Node node, void* const* behind, size_t count, void** handle) {
  if (!alive.contains(graph)) return 400;
  for (size_t i = 0; i < count; i++) {
    const auto* one = static_cast<Handle*>(behind[i]);
    if (one->first != graph || !node.behind.insert(one->second).second) return 1;
  }
  *handle = new Handle(graph, graph->nodes.size());
  graph->nodes.push_back(std::move(node));
  return 0;
}

Node* updated(Executable* executable, void* handle) {
  const auto* node = static_cast<Handle*>(handle);
  return instances.contains(executable) && executable->of == node->first ? &executable->nodes[node->second] : nullptr;
}

int run(const Node& node, void* on) {
  if (node.function == nullptr) {
    for (const Operation& one : node.operations) {
      note(one.kind, reinterpret_cast<uint64_t>(on), one.operands[1], one.operands[2], one.operands[3]);
    }
    return 0;
  }
  Config config = node.config;
  config.stream = on;
  config.attributes = node.attributes.data(), config.count = static_cast<uint32_t>(node.attributes.size());
  std::vector<unsigned char> bytes = node.parameters;
  std::vector<void*> parameters;
  size_t at = 0;
  for (const int64_t size : sizes_of[node.function]) parameters.push_back(bytes.data() + at), at += size;
  return record(&config, node.function, parameters.data());
}

struct KernelNode {
  void* function;
  uint32_t grid[3], block[3], shared;
  void **parameters, **extra, *kernel, *context;
};

struct CopyEnd {
  uint64_t x, y, z, level;
  uint32_t memory;
  uint64_t host, device;
  void *array, *reserved;
  uint64_t pitch, height;
};

struct CopyNode {
  CopyEnd source, target;
  uint64_t width, height, depth;
};

struct BatchNode {
  void* context;
  uint32_t count;
  const MemoryOperation* operations;
  uint32_t flags;
};

int set(Node& node, const KernelNode& given) {
  if (given.extra || given.kernel || given.context) return 1;
  node.function = given.function;
  std::memcpy(node.config.grid, given.grid, sizeof given.grid);
  std::memcpy(node.config.block, given.block, sizeof given.block);
  node.config.shared = given.shared;
  node.parameters.clear();
  const auto& sizes = sizes_of[given.function];
  for (size_t i = 0; i < sizes.size(); i++) {
    append(node.parameters, static_cast<unsigned char*>(given.parameters[i]), static_cast<size_t>(sizes[i]));
  }
  return 0;
}

int set(Node& node, const CopyNode& given, const void* of_context) {
  const auto& [source, target, width, height, depth] = given;
  const bool from_host = source.memory == 1;
  if (of_context != &primary || width == 0 || height != 1 || depth != 1 || target.memory != 2 || target.host) return 1;
  if ((source.memory != 2 && !from_host) || (from_host ? source.device : source.host) || source.pitch < width) return 1;
  node.operations = {{from_host ? 0 : 1, {0, target.device, from_host ? source.host : source.device, width}}};
  return 0;
}

int set(Node& node, const BatchNode& given) {
  if (given.context != &primary || given.flags || given.count == 0 || given.count > 256) return 1;
  if (!node.operations.empty() && node.operations.size() != given.count) return 1;
  node.operations.clear();
  for (const MemoryOperation* one = given.operations; one != given.operations + given.count; one++) {
    if (is_wrong(*one)) return 1;
    node.operations.push_back({one->kind == 2 ? 2 : 3, {0, one->address, one->value, 0}});
  }
  return 0;
}

}  // namespace
extern "C" {

// How a launched graph orders what its edges leave open, and which function of graphs fails.
void fake_graphs(int takes_newest_first, int fails, int after, int code) {
  newest_first = takes_newest_first, failing = fails, failing_after = after, failing_code = code;
  graph_calls.assign(graph_calls.size(), 0);
}

// Of the last launch: the node of each operation; then the edges.
int64_t fake_graph_nodes(int64_t* found) {
  for (size_t i = 0; found != nullptr && i < nodes_of.size(); i++) found[i] = nodes_of[i];
  return static_cast<int64_t>(nodes_of.size());
}

int64_t fake_graph_edges(int64_t* found) {
  for (size_t i = 0; found != nullptr && i < edges.size(); i++) found[2 * i] = edges[i].first, found[2 * i + 1] = edges[i].second;
  return static_cast<int64_t>(edges.size());
}

int64_t fake_graph_calls(int function) { return graph_calls[function]; }

int64_t fake_graphs_alive() { return static_cast<int64_t>(alive.size() + instances.size()); }

int cuGraphCreate(void** made, unsigned flags) {
  const std::lock_guard lock(graph_mutex);
  if (const int code = calls(0)) return code;
  *made = *alive.insert(new Graph).first;
  return static_cast<int>(flags);
}

int cuGraphAddKernelNode_v2(
    void** handle, Graph* graph, void* const* behind, size_t count, const KernelNode* given) {
  const std::lock_guard lock(graph_mutex);
  if (const int code = calls(1)) return code;
  Node node;
  const int code = set(node, *given);
  return code ? code : made(graph, std::move(node), behind, count, handle);
}

int cuGraphKernelNodeSetAttribute(void* handle, uint32_t id, const unsigned char* value) {
  const std::lock_guard lock(graph_mutex);
  if (const int code = calls(2)) return code;
  const auto* node = static_cast<Handle*>(handle);
  if (id == 6) return 1;  // no attribute of a node
  Attribute made{id, 0, {}};
  std::memcpy(made.value, value, sizeof made.value);
  node->first->nodes[node->second].attributes.push_back(made);
  return 0;
}

int cuGraphAddMemcpyNode(
    void** handle, Graph* graph, void* const* behind, size_t count, const CopyNode* given, const void* of_context) {
  const std::lock_guard lock(graph_mutex);
  if (const int code = calls(3)) return code;
  Node node;
  const int code = set(node, *given, of_context);
  return code ? code : made(graph, std::move(node), behind, count, handle);
}

int cuGraphAddBatchMemOpNode(void** handle, Graph* graph, void* const* behind, size_t count, const BatchNode* given) {
  const std::lock_guard lock(graph_mutex);
  if (const int code = calls(4)) return code;
  Node node;
  const int code = set(node, *given);
  return code ? code : made(graph, std::move(node), behind, count, handle);
}

int cuGraphInstantiateWithFlags(void** executable, Graph* graph, unsigned long long flags) {
  const std::lock_guard lock(graph_mutex);
  if (const int code = calls(5)) return code;
  *executable = *instances.insert(new Executable{graph, graph->nodes}).first;
  return static_cast<int>(flags);
}

int cuGraphExecKernelNodeSetParams_v2(Executable* executable, void* handle, const KernelNode* given) {
  const std::lock_guard lock(graph_mutex);
  if (const int code = calls(6)) return code;
  Node* node = updated(executable, handle);
  return node == nullptr || node->function != given->function ? 1 : set(*node, *given);
}

int cuGraphExecMemcpyNodeSetParams(Executable* executable, void* handle, const CopyNode* given, const void* of) {
  const std::lock_guard lock(graph_mutex);
  if (const int code = calls(7)) return code;
  Node* node = updated(executable, handle);
  return node == nullptr ? 1 : set(*node, *given, of);
}

int cuGraphExecBatchMemOpNodeSetParams(Executable* executable, void* handle, const BatchNode* given) {
  const std::lock_guard lock(graph_mutex);
  if (const int code = calls(8)) return code;
  Node* node = updated(executable, handle);
  if (node == nullptr) return 1;
  const std::vector<Operation> before = node->operations;
  if (const int code = set(*node, *given)) return code;
  for (size_t i = 0; i < before.size(); i++) {
    if (before[i].kind != node->operations[i].kind) return 1;  // the kind of an operation stays
  }
  return 0;
}

int cuGraphLaunch(Executable* executable, void* on) {
  const std::lock_guard lock(graph_mutex);
  if (const int code = calls(9)) return code;
  if (!instances.contains(executable) || !alive.contains(executable->of)) return 400;
  const auto& nodes = executable->nodes;
  std::vector<bool> done(nodes.size());
  edges.clear();
  nodes_of.clear();
  for (size_t left = nodes.size(); left > 0; left--) {
    int64_t next = -1;
    for (size_t i = 0; i < nodes.size(); i++) {
      bool ready = !done[i];
      for (const size_t one : nodes[i].behind) ready = ready && done[one];
      if (ready && (next < 0 || newest_first)) next = static_cast<int64_t>(i);
    }
    const Node& node = nodes[next];
    done[next] = true;
    for (const size_t one : node.behind) edges.emplace_back(next, one);
    nodes_of.insert(nodes_of.end(), node.function ? 1 : node.operations.size(), next);
    if (const int code = run(node, on)) return code;
  }
  return 0;
}

int cuGraphExecDestroy(Executable* executable) {
  const std::lock_guard lock(graph_mutex);
  if (const int code = calls(10)) return code;
  if (!instances.erase(executable)) return 1;
  delete executable;
  return 0;
}

int cuGraphDestroy(Graph* graph) {
  const std::lock_guard lock(graph_mutex);
  if (const int code = calls(11)) return code;
  if (!alive.erase(graph)) return 1;
  delete graph;
  return 0;
}

}  // extern "C"
