// A producer: a thread that issues the copies of a step of `stream_experts` without Python. It waits until the host has
// the offsets that a GPU computes, and issues each expert's copy with its signal, most rows first. The thread is kept
// for the next step, and sleeps until then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace tilestream {

class Producer {
 public:
  // What a job came to: all is issued; `stop` was faster; the offsets are none; the driver refused an operation; the
  // process was forked from the one that has the thread.
  enum class End : int64_t { kIssued, kStopped, kBadEnds, kRefused, kLost };
  enum class Operation : int64_t { kQuery, kCopy, kSignal, kRecord };

  struct Result {
    End end;
    int64_t experts;      // whose copies and signals are issued
    Operation operation;  // the one that was refused
    int64_t code;         // the driver's
    int64_t cpu_nanoseconds;
  };

  // Starts the thread. Throws std::invalid_argument if the driver lacks a function, std::system_error without a thread.
  Producer();
  // Ends the thread, after its present driver call.
  ~Producer();
  Producer(const Producer&) = delete;
  Producer& operator=(const Producer&) = delete;

  // A job follows at once: the thread wakes up, and looks for it for a while without sleeping.
  void wake();

  // Begin a job in the context of the calling thread. The integers are those of `tilestream.runtime.producer`: the
  // version; the event behind the copy of the offsets; the address of int32 offsets, and their number; the bytes of an
  // expert; the addresses of destination, source and signals; the epoch; the stream; the event behind the last signal;
  // events behind the launches that read signals of earlier epochs, but for those that the first event is behind. All
  // must be valid until the job has ended. Throws std::invalid_argument for other integers, without a context, or if a
  // job is under way.
  void start(std::span<const int64_t> integers);

  // Have the job end before its next expert.
  void stop();

  bool is_busy() const;

  // Wait for the job's end; whether it has ended.
  bool wait(int64_t nanoseconds);

  // Of the last job, which has ended.
  Result result() const;

 private:
  struct Shared;
  // The thread may outlive this object, by one driver call.
  std::shared_ptr<Shared> shared_;
};

}  // namespace tilestream
