#include "producer.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "driver.h"

namespace tilestream {
namespace {

constexpr int64_t kVersion = 1;
constexpr size_t kHead = 11;
constexpr int kNotReady = 600;    // both drivers' code of an event that is not complete
constexpr int kRelaxed = 2;       // cudaStreamCaptureModeRelaxed, and HIP's
constexpr int kStoppedCode = -1;  // no driver's

using Clock = std::chrono::steady_clock;
// A short router is waited for without sleeping; behind a long one, a nap may last as long as the host's other
// latencies of a step.
constexpr auto kSpin = std::chrono::microseconds(100), kAwake = std::chrono::microseconds(300);
constexpr auto kFirstNap = std::chrono::microseconds(5), kLongestNap = std::chrono::microseconds(50);

[[noreturn]] void refuse(const char* why) { throw std::invalid_argument(std::string("producer: ") + why); }

void* pointer(int64_t value) { return reinterpret_cast<void*>(value); }

struct Job {
  void* context = nullptr;
  void* copied = nullptr;
  const int32_t* ends = nullptr;
  size_t experts = 0;
  uint64_t bytes = 0, to = 0, source = 0, words = 0;
  uint32_t epoch = 0;
  void* stream = nullptr;
  void* landed = nullptr;
  std::vector<void*> readers;
  // The experts, most rows first; sized before the thread has the job, since a thread must not throw.
  std::vector<uint32_t> order;

  int64_t rows(uint32_t expert) const {
    return int64_t{ends[expert]} - (expert == 0 ? 0 : int64_t{ends[expert - 1]});
  }

  // As `tilestream.core.groups.by_load`, which the kernel follows. False if an end falls or is negative.
  bool sort(size_t* wanted) {
    std::iota(order.begin(), order.end(), 0);
    if (std::ranges::any_of(order, [&](uint32_t expert) { return rows(expert) < 0; })) return false;
    std::ranges::stable_sort(order, [&](uint32_t one, uint32_t other) { return rows(one) > rows(other); });
    *wanted = static_cast<size_t>(std::ranges::count_if(order, [&](uint32_t expert) { return rows(expert) > 0; }));
    return true;
  }
};

int64_t cpu_nanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

}  // namespace

struct Producer::Shared {
  std::mutex mutex;
  std::condition_variable begun, ended;
  bool quits = false, wakes = false;  // guarded by the mutex
  std::atomic<bool> busy{false};      // written under the mutex
  std::atomic<bool> stops{false};
  Job job;  // the thread's while it is busy, else the caller's
  Result result{};

  void run();
  void issue();
  int await_offsets() const;
  bool is_done(Operation operation, int code);
  void fail_rest();
};

// The code of the event; `kStoppedCode` if the job is to end.
int Producer::Shared::await_offsets() const {
  const auto begin = Clock::now();
  for (auto nap = kFirstNap;;) {
    const int code = driver().query_event(job.copied);
    if (code != kNotReady) return code;
    if (stops) return kStoppedCode;
    if (Clock::now() - begin < kSpin) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(nap);
    nap = std::min(2 * nap, kLongestNap);
  }
}

// Whether the driver took the operation; else this is the job's result.
bool Producer::Shared::is_done(Operation operation, int code) {
  if (code == kSuccess) return true;
  result.end = End::kRefused;
  result.operation = operation;
  result.code = code;
  return false;
}

void Producer::Shared::issue() {
  const Driver& gpu = driver();
  result = {End::kStopped, 0, Operation::kQuery, kSuccess, 0};
  if (!is_done(Operation::kQuery, gpu.set_context(job.context))) return;
  const int come = await_offsets();
  if (come == kStoppedCode || !is_done(Operation::kQuery, come)) return;
  size_t wanted = 0;
  if (!job.sort(&wanted)) {
    result.end = End::kBadEnds;
    return;
  }
  for (size_t i = 0; i < wanted; i++) {
    if (stops) return;
    const uint64_t expert = job.order[i], at = expert * job.bytes;
    const int copied = gpu.copy_in(job.to + at, pointer(static_cast<int64_t>(job.source + at)), job.bytes, job.stream);
    if (!is_done(Operation::kCopy, copied)) return;
    if (!is_done(Operation::kSignal, gpu.write(job.stream, job.words + 4 * expert, job.epoch, 0))) return;
    result.experts++;
  }
  result.end = End::kIssued;
}

// Signal that the others do not come, so that a launch that waits for them ends at once. Launches of earlier epochs may
// not have read the words yet. Python says the same when it hears of the end: here no error is another failure.
void Producer::Shared::fail_rest() {
  const Driver& gpu = driver();
  job.readers.push_back(job.copied);
  for (void* event : job.readers) {
    if (gpu.wait_event(job.stream, event, 0) != kSuccess) return;
  }
  std::vector<uint32_t>& order = job.order;
  const size_t issued = static_cast<size_t>(result.experts);
  if (issued == 0) std::iota(order.begin(), order.end(), 0);
  for (size_t i = issued; i < order.size(); i++) {
    if (gpu.write(job.stream, job.words + 4 * uint64_t{order[i]}, 0U - job.epoch, 0) != kSuccess) return;
  }
}

void Producer::Shared::run() {
  pthread_setname_np(pthread_self(), "tilestream-lane");
  prctl(PR_SET_TIMERSLACK, 1UL);  // else a nap takes 50 us more than it is to
  int mode = kRelaxed;            // a query by another thread would end a capture in the default mode
  driver().exchange_capture_mode(&mode);
  std::unique_lock lock(mutex);
  while (true) {
    // `wait` would ask for a libstdc++ that is newer than Debian 12's glibc: the wheel would be for fewer systems.
    while (!begun.wait_for(lock, std::chrono::hours(1), [&] { return quits || busy || wakes; })) {
    }
    lock.unlock();
    for (const auto end = Clock::now() + kAwake; !busy && Clock::now() < end;) std::this_thread::yield();
    lock.lock();
    wakes = false;
    if (!busy && quits) return;
    if (!busy) continue;
    lock.unlock();
    const int64_t before = cpu_nanoseconds();
    issue();
    const int recorded = driver().record_event(job.landed, job.stream);
    if (result.end == End::kIssued) is_done(Operation::kRecord, recorded);
    if (result.end != End::kIssued) fail_rest();
    result.cpu_nanoseconds = cpu_nanoseconds() - before;
    lock.lock();
    busy = false;
    ended.notify_all();
  }
}

Producer::Producer() : shared_(std::make_shared<Shared>()) {
  if (!driver().runs_producers()) refuse("the driver lacks a function");
  if (is_forked()) refuse("the process was forked");
  // Signals are handled by Python's threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread([shared = shared_] { shared->run(); }).detach();
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Producer::~Producer() {
  if (is_forked()) return;
  shared_->stops = true;
  std::lock_guard lock(shared_->mutex);
  shared_->quits = true;
  shared_->begun.notify_all();
}

void Producer::wake() {
  if (is_forked()) return;
  std::lock_guard lock(shared_->mutex);
  shared_->wakes = true;
  shared_->begun.notify_all();
}

void Producer::start(std::span<const int64_t> integers) {
  if (is_forked()) refuse("the process was forked");
  if (integers.size() < kHead || integers[0] != kVersion) refuse("another version");
  if (integers[3] < 1 || integers[3] > INT32_MAX || integers[4] < 1) refuse("there are no experts");
  Job job;
  if (driver().get_context(&job.context) != kSuccess || job.context == nullptr) refuse("the thread has no context");
  job.copied = pointer(integers[1]);
  job.ends = static_cast<const int32_t*>(pointer(integers[2]));
  job.experts = static_cast<size_t>(integers[3]);
  job.bytes = static_cast<uint64_t>(integers[4]);
  job.to = static_cast<uint64_t>(integers[5]);
  job.source = static_cast<uint64_t>(integers[6]);
  job.words = static_cast<uint64_t>(integers[7]);
  job.epoch = static_cast<uint32_t>(integers[8]);
  job.stream = pointer(integers[9]);
  job.landed = pointer(integers[10]);
  job.readers.reserve(integers.size() - kHead + 1);
  for (const int64_t event : integers.subspan(kHead)) job.readers.push_back(pointer(event));
  job.order.resize(job.experts);
  std::lock_guard lock(shared_->mutex);
  if (shared_->busy) refuse("a job is under way");
  shared_->job = std::move(job);
  shared_->stops = false;
  shared_->busy = true;
  shared_->begun.notify_all();
}

void Producer::stop() { shared_->stops = true; }

bool Producer::is_busy() const { return !is_forked() && shared_->busy; }

bool Producer::wait(int64_t nanoseconds) {
  if (is_forked()) return true;
  std::unique_lock lock(shared_->mutex);
  return shared_->ended.wait_for(lock, std::chrono::nanoseconds(nanoseconds), [&] { return !shared_->busy; });
}

Producer::Result Producer::result() const {
  if (is_forked()) return {End::kLost, 0, Operation::kQuery, kSuccess, 0};
  std::lock_guard lock(shared_->mutex);
  return shared_->result;
}

}  // namespace tilestream
