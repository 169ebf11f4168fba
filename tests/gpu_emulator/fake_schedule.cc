#include "tests/gpu_emulator/fake_schedule.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

namespace ballast::worker {

void FakeDeviceAbort(const std::string& message) {
  std::fprintf(stderr, "fake device: %s\n", message.c_str());
  std::abort();
}

// Guarded by the schedule's mutex, except the name.
class FakeSchedule::Queue {
 public:
  explicit Queue(std::string name) : name(std::move(name)) {}
  bool reached(uint64_t position) const { return done >= position; }

  const std::string name;
  std::deque<Piece> pieces;  // Not begun.
  uint64_t given = 0;
  uint64_t done = 0;
  uint64_t wanted = 0;  // Up to here it is to be done.
};

FakeSchedule::FakeSchedule(uint64_t seed, std::function<void(bool begins)> around)
    : early_(std::vector<double>{0, 0.25, 0.75, 1}[seed % 4]),
      around_(std::move(around)),
      at_giving_(seed),
      at_choosing_(seed + 1),
      thread_([this] { Run(); }) {}

FakeSchedule::~FakeSchedule() {
  AwaitAll();
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

std::shared_ptr<FakeSchedule::Queue> FakeSchedule::AddQueue(std::string name) {
  auto queue = std::make_shared<Queue>(std::move(name));
  MutexLock lock(mutex_);
  // A stream that is gone leaves its queue until that is empty.
  const Queue* running = running_;
  std::erase_if(queues_, [running](const std::shared_ptr<Queue>& old) {
    return old.use_count() == 1 && old->pieces.empty() && old.get() != running;
  });
  queues_.push_back(queue);
  return queue;
}

FakeSchedule::Point FakeSchedule::Give(const std::shared_ptr<Queue>& queue,
                                       std::function<void()> work,
                                       absl::Span<const std::byte> host) {
  return Push(queue, {.work = std::move(work), .after = {}, .host = host});
}

void FakeSchedule::GiveWait(const std::shared_ptr<Queue>& queue, const Point& point) {
  Push(queue, {.work = nullptr, .after = point, .host = {}});
}

FakeSchedule::Point FakeSchedule::Push(const std::shared_ptr<Queue>& queue, Piece piece) {
  MutexLock lock(mutex_);
  Point point{.queue = queue, .position = ++queue->given};
  if (lost_) return point;
  queue->pieces.push_back(std::move(piece));
  if (std::uniform_real_distribution<>(0, 1)(at_giving_) < early_) Want(*queue, point.position);
  return point;
}

FakeSchedule::Point FakeSchedule::End(const std::shared_ptr<Queue>& queue) const {
  MutexLock lock(mutex_);
  return {.queue = queue, .position = queue->given};
}

bool FakeSchedule::Demand(const Point& point) {
  MutexLock lock(mutex_);
  Want(*point.queue, point.position);
  return point.queue->reached(point.position);
}

bool FakeSchedule::Await(const Point& point) {
  if (std::this_thread::get_id() == thread_.get_id()) {
    FakeDeviceAbort("work of the device waits for the device");
  }
  MutexLock lock(mutex_);
  Want(*point.queue, point.position);
  while (!point.queue->reached(point.position) && !(lost_ && running_ == nullptr)) {
    changed_.Wait(mutex_);
  }
  return point.queue->reached(point.position);
}

void FakeSchedule::AwaitAll() {
  std::vector<Point> ends;
  {
    MutexLock lock(mutex_);
    for (const std::shared_ptr<Queue>& queue : queues_) ends.push_back({queue, queue->given});
    // All at once, so that queues that nothing orders are done in any order.
    for (const Point& end : ends) Want(*end.queue, end.position);
  }
  for (const Point& end : ends) Await(end);
}

void FakeSchedule::Lose() {
  std::vector<std::deque<Piece>> dropped;  // Destroyed without the lock: they own what they like.
  MutexLock lock(mutex_);
  lost_ = true;
  for (const std::shared_ptr<Queue>& queue : queues_) {
    dropped.push_back(std::exchange(queue->pieces, {}));
  }
  changed_.NotifyAll();
}

std::string FakeSchedule::UserOf(absl::Span<const std::byte> host) const {
  const auto overlaps = [&](absl::Span<const std::byte> other) {
    return other.data() < host.data() + host.size() && host.data() < other.data() + other.size();
  };
  MutexLock lock(mutex_);
  if (running_ != nullptr && overlaps(running_host_)) return running_->name;
  for (const std::shared_ptr<Queue>& queue : queues_) {
    for (const Piece& piece : queue->pieces) {
      if (overlaps(piece.host)) return queue->name;
    }
  }
  return "";
}

// Work that waits for other work has that done first.
void FakeSchedule::Want(Queue& queue, uint64_t position) {
  if (queue.wanted >= position) return;
  const uint64_t from = std::exchange(queue.wanted, position);
  const uint64_t begun = queue.given - queue.pieces.size();
  for (size_t i = 0; i < queue.pieces.size() && begun + i < position; ++i) {
    const Point& after = queue.pieces[i].after;
    if (begun + i >= from && after.queue != nullptr) Want(*after.queue, after.position);
  }
  changed_.NotifyAll();
}

// A queue whose next piece can be done and is to be; null if there is none.
FakeSchedule::Queue* FakeSchedule::Choose() {
  std::vector<Queue*> candidates;
  for (const std::shared_ptr<Queue>& queue : queues_) {
    if (queue->pieces.empty() || queue->reached(queue->wanted)) continue;
    const Point& after = queue->pieces.front().after;
    if (after.queue != nullptr && !after.queue->reached(after.position)) continue;
    candidates.push_back(queue.get());
  }
  if (candidates.empty()) return nullptr;
  return candidates[at_choosing_() % candidates.size()];
}

void FakeSchedule::Run() {
  while (true) {
    Queue* queue = nullptr;
    Piece piece;
    {
      MutexLock lock(mutex_);
      while ((queue = Choose()) == nullptr && !stopping_) changed_.Wait(mutex_);
      if (queue == nullptr) return;
      piece = std::move(queue->pieces.front());
      queue->pieces.pop_front();
      running_ = queue;
      running_host_ = piece.host;
    }
    if (piece.work != nullptr) {
      around_(true);
      piece.work();
      around_(false);
      piece.work = nullptr;
    }
    MutexLock lock(mutex_);
    ++queue->done;
    running_ = nullptr;
    running_host_ = {};
    changed_.NotifyAll();
  }
}

}  // namespace ballast::worker
