#include "graph.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <variant>

#include "workspace.h"

namespace tilestream {
namespace {

using Kind = Sequence::Kind;

constexpr int64_t kIssuesBefore = 2;  // by the driver's operations: a kind of call that comes once needs no graph
constexpr int64_t kMostGraphs = 256;  // of a process: each takes memory of the host and of the GPU
constexpr size_t kMostWords = 32, kMostBytes = 0x7FFFFFFF;  // of a batch; of a copy: the driver's limit of a pitch
constexpr int kRelaxed = 2, kInvalid = 1;
constexpr uint32_t kProgrammatic = 6;  // launch attribute: it is none of a node
std::atomic<int64_t> graphs = 0;

// The driver may allocate or free, which another thread's capture in the default mode would not allow this thread.
class Relaxed {
 public:
  Relaxed() { driver().exchange_capture_mode(&mode_); }
  ~Relaxed() { driver().exchange_capture_mode(&mode_); }

 private:
  int mode_ = kRelaxed;
};

bool is_word(const Sequence::Operation& x) { return x.kind == Kind::kWrite || x.kind == Kind::kWait; }

// Whether the host, or the calling stream, can do it before the graph is launched.
bool is_wait(const Sequence::Operation& x) {
  const bool calling = x.operands[0] == Sequence::Operand{0, 0};
  return x.kind == Kind::kAwaitEvent || x.kind == Kind::kCheck || (x.kind == Kind::kWaitEvent && calling);
}

// Whether the bytes differ from those that are kept; keeps them.
bool is_new(std::vector<std::byte>& kept, const void* bytes, size_t count) {
  if (kept.size() == count && std::memcmp(kept.data(), bytes, count) == 0) return false;
  const auto* first = static_cast<const std::byte*>(bytes);
  kept.assign(first, first + count);
  return true;
}

}  // namespace

Graph::~Graph() {
  if (graph_ == nullptr) return;
  graphs--;
  if (is_forked()) return;  // the parent's
  const Relaxed relaxed;
  // What is in flight ends first: the driver frees it then.
  if (executable_ != nullptr) driver().destroy_executable(executable_);
  driver().destroy_graph(graph_);
}

Graph::Result Graph::refuse(const char* what, int code) {
  why_ = code == kSuccess ? what : std::string(what) + ": the driver's code " + std::to_string(code);
  return Result::kRefused;
}

// Plan ----------------------------------------------------------------------------------------------------------------

bool Graph::plan(const Program& program) {
  bool begun = false;
  for (const auto& part : program.parts()) {
    if (const auto* launch = std::get_if<Program::Launch>(&part)) {
      begun = true;
      add(*launch);
      continue;
    }
    const Sequence* sequence = std::get<const Sequence*>(part);
    const auto operations = sequence->operations();
    size_t first = 0;
    while (!begun && first < operations.size() && is_wait(operations[first])) first++;
    if (first > 0) waits_.emplace_back(sequence, first);
    begun = begun || first < operations.size();
    for (const auto& operation : operations.subspan(first)) {
      if (const char* why = add(operation)) return refuse(why), false;
    }
  }
  if (nodes_.empty()) return refuse("it would have no node"), false;
  return true;
}

size_t Graph::add(Node node, const Stream& stream) {
  node.behind.merge(std::set(last_[stream]));
  nodes_.push_back(std::move(node));
  last_[stream] = {nodes_.size() - 1};
  return nodes_.size() - 1;
}

void Graph::add(const Program::Launch& launch) {
  const auto kernels = launch.entry->recipe->kernels();
  for (const Kernel& kernel : kernels) {
    launched_.insert(add({&launch, &kernel, &kernel == &kernels.back(), {}, {}, nullptr, {}}, {0, 0}));
  }
}

// Null; or why a graph cannot have the operation.
const char* Graph::add(const Sequence::Operation& operation) {
  const auto of = [&](size_t i) { return Stream{operation.operands[i].slot, operation.operands[i].constant}; };
  const Stream stream = of(0);
  switch (operation.kind) {
    case Kind::kAwaitEvent:
    case Kind::kCheck:
      return "the host waits or looks behind an operation";
    case Kind::kRecord:
    case Kind::kWaitEvent: {
      const auto& [slot, event] = of(1);
      if (slot >= 0) return "an event is another one at each issue";
      if (operation.kind == Kind::kRecord) {  // `joins` knows the last record of an event alone
        return recorded_.try_emplace(event, last_[stream]).second ? nullptr : "an event is recorded twice";
      }
      const auto found = recorded_.find(event);
      if (found == recorded_.end()) return "it waits for an event of another call behind an operation";
      last_[stream].merge(std::set(found->second));
      return nullptr;
    }
    case Kind::kCopyIn:
    case Kind::kCopyAcross:
      add({nullptr, nullptr, false, {&operation}, {}, nullptr, {}}, stream);
      return nullptr;
    case Kind::kWrite:
    case Kind::kWait:
      break;
  }
  size_t node = 0;
  if (joins(operation, stream)) {
    node = *last_[stream].begin();
    nodes_[node].operations.push_back(&operation);
  } else {
    node = add({nullptr, nullptr, false, {&operation}, {}, nullptr, {}}, stream);
  }
  if (operation.kind == Kind::kWait) nodes_[node].behind.merge(std::set(launched_));
  return nullptr;
}

// Whether a write or a wait can be in the same node as the last operation of its stream: nothing else is behind that.
bool Graph::joins(const Sequence::Operation& operation, const Stream& stream) const {
  const auto found = last_.find(stream);
  if (found == last_.end() || found->second.size() != 1) return false;
  const size_t last = *found->second.begin();
  const Node& node = nodes_[last];
  if (node.launch != nullptr || !is_word(*node.operations[0]) || node.operations.size() == kMostWords) return false;
  if (node.operations[0]->operands[0] != operation.operands[0]) return false;
  if (std::ranges::any_of(recorded_, [&](const auto& one) { return one.second.contains(last); })) return false;
  return operation.kind != Kind::kWait || launched_.empty() || *launched_.rbegin() < last;
}

// Nodes ---------------------------------------------------------------------------------------------------------------

std::vector<void*> Graph::handles_behind(const Node& node) const {
  std::vector<void*> handles;
  for (const size_t one : node.behind) handles.push_back(nodes_[one].handle);
  return handles;
}

// Make the node, or update it if its parameters differ.
int Graph::give(Node& node, std::span<const uint64_t> values, Workspace* words, int64_t* base) {
  if (node.launch != nullptr) return give_kernel(node, values, words, base);
  return is_word(*node.operations[0]) ? give_words(node, values) : give_copy(node, values);
}

int Graph::give_kernel(Node& node, std::span<const uint64_t> values, Workspace* words, int64_t* base) {
  Given given = node.launch->given_of(values);
  const WorkspaceNeed& need = node.launch->entry->recipe->need();
  if (need.any()) {
    std::ranges::copy(words->addresses, given.addresses.begin() + kOperands);
    given.base = *base;
    if (node.ends_launch) *base += need.tickets;
  }
  const Kernel& kernel = *node.kernel;
  Kernel::Parameters parameters;
  if (!kernel.pack(given, parameters)) return kInvalid;
  if (!is_new(node.given, parameters.bytes, kernel.bytes())) return kSuccess;
  const auto& [grid, block, shared_bytes, stream, attributes, count] = kernel.config();
  const KernelNode made{
      kernel.function(), {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared_bytes,
      parameters.addresses, nullptr, nullptr, nullptr};
  if (node.handle != nullptr) return driver().update_kernel(executable_, node.handle, &made);
  const auto behind = handles_behind(node);
  int code = driver().add_kernel(&node.handle, graph_, behind.data(), behind.size(), &made);
  for (const LaunchAttribute& attribute : kernel.attributes()) {
    if (code != kSuccess || attribute.id == kProgrammatic) continue;
    code = driver().set_attribute(node.handle, attribute.id, attribute.value);
  }
  return code;
}

int Graph::give_copy(Node& node, std::span<const uint64_t> values) {
  const auto& [kind, operands, _] = *node.operations[0];
  const std::array<uint64_t, 3> now{operands[1].of(values), operands[2].of(values), operands[3].of(values)};
  const auto [to, from, size] = now;
  if (size > kMostBytes) return kInvalid;
  if (!is_new(node.given, now.data(), sizeof now)) return kSuccess;
  CopyNode made{};
  made.source = {0, 0, 0, 0, CopyEnd::kDevice, nullptr, from, nullptr, nullptr, size, 1};
  made.target = {0, 0, 0, 0, CopyEnd::kDevice, nullptr, to, nullptr, nullptr, size, 1};
  if (kind == Kind::kCopyIn) {
    made.source.memory = CopyEnd::kHost;
    made.source.host = reinterpret_cast<const void*>(from);
    made.source.device = 0;
  }
  made.width = size;
  made.height = made.depth = 1;
  if (node.handle != nullptr) return driver().update_copy(executable_, node.handle, &made, context_);
  const auto behind = handles_behind(node);
  return driver().add_copy(&node.handle, graph_, behind.data(), behind.size(), &made, context_);
}

int Graph::give_words(Node& node, std::span<const uint64_t> values) {
  std::array<MemoryOperation, kMostWords> now;
  const size_t count = node.operations.size();
  for (size_t i = 0; i < count; i++) now[i] = node.operations[i]->word(values);
  if (!is_new(node.given, now.data(), count * sizeof now[0])) return kSuccess;
  const BatchNode made{context_, static_cast<uint32_t>(count), now.data(), 0};
  if (node.handle != nullptr) return driver().update_batch(executable_, node.handle, &made);
  const auto behind = handles_behind(node);
  return driver().add_batch(&node.handle, graph_, behind.data(), behind.size(), &made);
}

int Graph::make(std::span<const uint64_t> values, Workspace* words, int64_t* base) {
  const Relaxed relaxed;
  int code = driver().get_context(&context_);
  if (code == kSuccess) code = driver().create_graph(&graph_, 0);
  if (code != kSuccess) {
    graph_ = nullptr;
    return code;
  }
  graphs++;
  for (Node& node : nodes_) {
    code = give(node, values, words, base);
    if (code != kSuccess) return code;
  }
  code = driver().instantiate(&executable_, graph_, 0);
  if (code != kSuccess) executable_ = nullptr;
  return code;
}

Graph::Result Graph::issue(
    const Program& program, std::span<const uint64_t> values, void* stream, int32_t device, int64_t context) {
  const std::lock_guard lock(mutex_);
  if (!why_.empty() || (issues_ < kIssuesBefore && issues_++ < kIssuesBefore)) return Result::kUnused;
  if (graph_ != nullptr && context != made_in_) return Result::kUnused;
  if (graph_ == nullptr) {
    made_in_ = context;
    if (!driver().launches_graphs()) return refuse("the driver lacks a function of graphs");
    if (graphs >= kMostGraphs) return refuse("the process has as many graphs as it may have");
    if (!plan(program)) return Result::kRefused;
  }
  for (const auto& [sequence, end] : waits_) {
    int code = kSuccess;
    if (sequence->issue(values.first(sequence->slots()), 0, end, &code) == end) continue;
    return code == Sequence::kStopped ? Result::kStopped : Result::kUnused;  // the driver's operations say why
  }
  std::shared_ptr<Workspace> words;
  std::unique_lock<std::mutex> held;
  int64_t base = 0;
  for (const Node& node : nodes_) {
    if (node.launch == nullptr || !node.launch->entry->recipe->need().any()) continue;
    if (words == nullptr) {
      words = find_workspace({device, stream, context});
      if (words == nullptr) return Result::kUnused;
      held = std::unique_lock(words->mutex);
      base = words->base;
    }
    if (!words->holds(node.launch->entry->recipe->need())) return Result::kUnused;
  }
  if (executable_ == nullptr) {
    if (const int code = make(values, words.get(), &base)) return refuse("a graph was not made", code);
  } else {
    for (Node& node : nodes_) {
      if (const int code = give(node, values, words.get(), &base)) return refuse("a node was not updated", code);
    }
  }
  if (const int code = driver().launch_graph(executable_, stream)) return refuse("a graph was not launched", code);
  launches_++;
  if (words != nullptr) words->base = base;
  for (void* event : events_) {
    if (driver().record_event(event, stream) != kSuccess) return Result::kUnrecorded;
  }
  return Result::kIssued;
}

}  // namespace tilestream
