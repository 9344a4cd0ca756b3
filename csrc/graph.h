// A graph of a program: what the program issues behind its first waits, as nodes that one call of the driver launches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "driver.h"
#include "program.h"

namespace tilestream {

// The nodes have the order that the streams and events of the program give them, so branches may run side by side. Two
// things differ from the program's streams. An operation that waits for a word is also behind all launches before it: a
// kernel of the graph may be what writes the word, and nothing says that two branches run at the same time. (A kernel
// that waits at a gate for its own side branch needs that, as in `tilestream.distributed.graph_calls`; its deadline
// bounds the wait.) And a kernel begins where the node before it has ended: there are no programmatic launches.
//
// Between two launches of the graph, only nodes whose parameters differ are updated. A launch in flight keeps its own.
class Graph {
 public:
  enum class Result { kUnused, kRefused, kStopped, kIssued, kUnrecorded };

  // `events`: recorded on the calling stream behind each launch of the graph.
  explicit Graph(std::vector<void*> events) : events_(std::move(events)) {}
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // Issue a program, from its third issue on. Unused, or from now on refused: nothing but waits was issued. Stopped: as a
  // sequence. Unrecorded: it is issued, but for the events.
  Result issue(
      const Program& program, std::span<const uint64_t> values, void* stream, int32_t device, int64_t context);

  // Why it is refused; empty if it is not. And how often it was launched.
  const std::string& why() const { return why_; }
  int64_t launches() const { return launches_; }

 private:
  struct Node {
    const Program::Launch* launch;  // of a kernel; null for operations
    const Kernel* kernel;
    bool ends_launch;
    std::vector<const Sequence::Operation*> operations;  // a copy; or words of one stream
    std::set<size_t> behind;
    void* handle;
    std::vector<std::byte> given;  // what the executable graph has
  };
  using Stream = std::pair<int64_t, uint64_t>;

  Result refuse(const char* what, int code = kSuccess);
  bool plan(const Program& program);
  const char* add(const Sequence::Operation& operation);
  void add(const Program::Launch& launch);
  size_t add(Node node, const Stream& stream);
  bool joins(const Sequence::Operation& operation, const Stream& stream) const;
  int make(std::span<const uint64_t> values, Workspace* words, int64_t* base);
  int give(Node& node, std::span<const uint64_t> values, Workspace* words, int64_t* base);
  int give_kernel(Node& node, std::span<const uint64_t> values, Workspace* words, int64_t* base);
  int give_copy(Node& node, std::span<const uint64_t> values);
  int give_words(Node& node, std::span<const uint64_t> values);
  std::vector<void*> handles_behind(const Node& node) const;

  std::mutex mutex_;
  std::string why_;
  int64_t issues_ = 0, launches_ = 0, made_in_ = 0;  // the number of the context
  const std::vector<void*> events_;
  // The waits that are issued before the graph: the first operations of sequences.
  std::vector<std::pair<const Sequence*, size_t>> waits_;
  std::vector<Node> nodes_;
  // While it is planned: the last nodes of a stream, and those that an event is behind; all launches' nodes.
  std::map<Stream, std::set<size_t>> last_;
  std::map<uint64_t, std::set<size_t>> recorded_;
  std::set<size_t> launched_;
  void *context_ = nullptr, *graph_ = nullptr, *executable_ = nullptr;
};

}  // namespace tilestream
