#include "tests/gpu_emulator/cuda_on_cpu/block_run.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/gpu_emulator/cuda_on_cpu/fiber.h"

// The linker's names for where the section of all __shared__ arrays begins and ends; null where no
// kernel has one.
extern "C" {
extern std::byte __start_ballast_shared[] __attribute__((weak));
extern std::byte __stop_ballast_shared[] __attribute__((weak));
}

namespace ballast::worker::cuda {
namespace {

constexpr size_t kStackBytes = 252 * 1024;
constexpr std::align_val_t kSharedAlignment{128};

// Random enough, and cheap enough to ask at every barrier.
class Shuffler {
 public:
  explicit Shuffler(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du) {}
  uint32_t Below(uint32_t end) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<uint32_t>(((state_ >> 32) * end) >> 32);
  }

 private:
  uint64_t state_;
};

struct Thread {
  Fiber* fiber = nullptr;           // That it runs or is suspended in; null: not begun.
  const char* waits_for = nullptr;  // What it reached last; null: nothing, or released since.
  bool returned = false;
};

struct Warp {
  int lanes = 0;
  int arrived = 0;
  WarpExchange exchange = nullptr;
  const char* what = nullptr;
  WarpArguments arguments = {};
};

// NaN in every floating-point format.
void Poison(std::byte* begin, std::byte* end) { std::fill(begin, end, std::byte{0xff}); }

// The fibers of an OS thread, and the kernel that it runs.
class BlockRunner {
 public:
  void Run(absl::string_view name, const BlockGrid& grid, const std::function<void()>& thread,
           Shuffler& shuffler);

  void MeetInBlock(const char* what);
  void MeetInWarp(const char* what, WarpExchange exchange, void* argument);
  [[noreturn]] void Fail(absl::string_view problem) const;

 private:
  void RunBlock(int threads);
  void Work(Fiber& self);
  int Pick();
  void MakeReady(int thread);
  void Suspend();
  Fiber& IdleFiber();
  [[noreturn]] void FailWaiting() const;

  std::string name_;
  const std::function<void()>* body_ = nullptr;
  Shuffler* shuffler_ = nullptr;

  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<int> ready_;
  int unfinished_ = 0;
  int in_block_ = 0;

  Fiber main_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  int start_ = 0;  // The thread that the idle fiber which is switched to begins.
};

void BlockRunner::Run(absl::string_view name, const BlockGrid& grid,
                      const std::function<void()>& thread, Shuffler& shuffler) {
  name_ = std::string(name);
  body_ = &thread;
  shuffler_ = &shuffler;
  // As long as the kernel asked for, so that sanitizers see who goes beyond.
  auto* const shared = static_cast<std::byte*>(::operator new(grid.shared_bytes, kSharedAlignment));
  current.threads = dim3(grid.threads);
  current.blocks = grid.blocks;
  current.dynamic_shared = shared;

  const auto [x, y, z] = grid.blocks;
  std::vector<uint64_t> order(uint64_t{x} * y * z);
  for (uint64_t i = 0; i < order.size(); ++i) {
    const uint64_t j = shuffler.Below(static_cast<uint32_t>(i + 1));
    order[i] = order[j];
    order[j] = i;
  }
  for (const uint64_t block : order) {
    current.block = {static_cast<unsigned>(block % x), static_cast<unsigned>(block / x % y),
                     static_cast<unsigned>(block / x / y)};
    Poison(shared, shared + grid.shared_bytes);
    Poison(__start_ballast_shared, __stop_ballast_shared);
    RunBlock(static_cast<int>(grid.threads));
  }
  ::operator delete(shared, kSharedAlignment);
}

void BlockRunner::RunBlock(int threads) {
  threads_.assign(threads, {});
  warps_.assign((threads + kWarpThreads - 1) / kWarpThreads, {});
  for (size_t w = 0; w < warps_.size(); ++w) {
    warps_[w].lanes = std::min(kWarpThreads, threads - static_cast<int>(w) * kWarpThreads);
  }
  ready_.clear();
  for (int thread = 0; thread < threads; ++thread) ready_.push_back(thread);
  unfinished_ = threads;
  in_block_ = 0;

  start_ = Pick();
  main_.SwitchTo(IdleFiber());
}

// A fiber begins one thread after another for as long as they return without having waited: most
// kernels need no other.
void BlockRunner::Work(Fiber& self) {
  for (;;) {
    const int thread = start_;
    current.thread.x = thread;
    threads_[thread].fiber = &self;
    (*body_)();
    threads_[thread].returned = true;
    --unfinished_;

    const int next = Pick();
    if (next >= 0 && threads_[next].fiber == nullptr) {
      start_ = next;
      continue;
    }
    idle_.push_back(&self);
    self.SwitchTo(next < 0 ? main_ : *threads_[next].fiber);
  }
}

// One of the threads that can go on; -1 if all have returned.
int BlockRunner::Pick() {
  if (ready_.empty()) {
    if (unfinished_ > 0) FailWaiting();
    return -1;
  }
  const uint32_t index = shuffler_->Below(static_cast<uint32_t>(ready_.size()));
  const int thread = ready_[index];
  ready_[index] = ready_.back();
  ready_.pop_back();
  return thread;
}

void BlockRunner::MakeReady(int thread) {
  threads_[thread].waits_for = nullptr;
  ready_.push_back(thread);
}

// Lets other threads run, until this one, which waits or is ready, is picked.
void BlockRunner::Suspend() {
  const unsigned thread = current.thread.x;
  const int next = Pick();
  if (next == static_cast<int>(thread)) return;
  Fiber* to = threads_[next].fiber;
  if (to == nullptr) {
    start_ = next;
    to = &IdleFiber();
  }
  threads_[thread].fiber->SwitchTo(*to);
  current.thread.x = thread;
}

Fiber& BlockRunner::IdleFiber() {
  if (idle_.empty()) {
    const size_t index = fibers_.size();
    fibers_.push_back(
        std::make_unique<Fiber>(kStackBytes, [this, index] { Work(*fibers_[index]); }));
    return *fibers_.back();
  }
  Fiber& fiber = *idle_.back();
  idle_.pop_back();
  return fiber;
}

void BlockRunner::MeetInBlock(const char* what) {
  threads_[current.thread.x].waits_for = what;
  const int threads = static_cast<int>(threads_.size());
  if (++in_block_ == threads) {
    in_block_ = 0;
    for (int thread = 0; thread < threads; ++thread) MakeReady(thread);
  }
  Suspend();
}

void BlockRunner::MeetInWarp(const char* what, WarpExchange exchange, void* argument) {
  const int thread = static_cast<int>(current.thread.x);
  Warp& warp = warps_[thread / kWarpThreads];
  if (warp.arrived == 0) {
    warp.exchange = exchange;
    warp.what = what;
  } else if (warp.exchange != exchange || warp.what != absl::string_view(what)) {
    Fail(absl::StrCat("is at ", what, " while another lane of its warp waits at ", warp.what));
  }
  warp.arguments[thread % kWarpThreads] = argument;
  threads_[thread].waits_for = what;
  if (++warp.arrived == warp.lanes) {
    if (exchange != nullptr) exchange(warp.arguments);
    warp.arrived = 0;
    const int first = thread - thread % kWarpThreads;
    for (int lane = 0; lane < warp.lanes; ++lane) MakeReady(first + lane);
  }
  Suspend();
}

void BlockRunner::Fail(absl::string_view problem) const {
  std::fprintf(stderr, "kernel %s, block (%u, %u, %u), thread %u: %s\n", name_.c_str(),
               current.block.x, current.block.y, current.block.z, current.thread.x,
               std::string(problem).c_str());
  std::abort();
}

void BlockRunner::FailWaiting() const {
  std::string problem = "nothing can go on:";
  int named = 0;
  for (size_t i = 0; i < threads_.size() && named < 8; ++i) {
    const Thread& thread = threads_[i];
    if (thread.returned) continue;
    absl::StrAppend(&problem, " thread ", i, " waits at ", thread.waits_for, ";");
    ++named;
  }
  Fail(absl::StrCat(problem, " ", threads_.size() - unfinished_, " of ", threads_.size(),
                    " threads have returned"));
}

// Static __shared__ arrays and `current` are there once for all OS threads.
std::mutex running;
Shuffler shuffler(0);           // Guarded by it, as is
BlockRunner* runner = nullptr;  // The one in use now.

}  // namespace

void RunBlocks(absl::string_view name, const BlockGrid& grid, const std::function<void()>& thread) {
  static thread_local BlockRunner of_this_thread;
  const std::lock_guard<std::mutex> lock(running);
  runner = &of_this_thread;
  runner->Run(name, grid, thread, shuffler);
  runner = nullptr;
}

void SetThreadOrder(uint64_t seed) {
  const std::lock_guard<std::mutex> lock(running);
  shuffler = Shuffler(seed);
}

void MeetInBlock(const char* what) { runner->MeetInBlock(what); }

void MeetInWarp(const char* what, WarpExchange exchange, void* argument) {
  runner->MeetInWarp(what, exchange, argument);
}

void FailKernel(absl::string_view problem) { runner->Fail(problem); }

}  // namespace ballast::worker::cuda
