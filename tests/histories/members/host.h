// A process with an engine, as its callers see it: when it dies, calls under way end, and the next
// calls wait for the next process.
#ifndef BALLAST_TESTS_HISTORIES_MEMBERS_HOST_H_
#define BALLAST_TESTS_HISTORIES_MEMBERS_HOST_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/engine.h"
#include "tests/histories/engine/deaths.h"

namespace ballast::histories {

// Thread-safe.
class Host {
 public:
  // A caller of one process. As long as it lives, the engine is not destroyed.
  class Visit {
   public:
    Visit(Host& host, Engine& engine, DeathFlag dead, uint64_t number)
        : engine_(engine), host_(host), dead_(std::move(dead)), number_(number) {}
    ~Visit() { host_.Leave(number_); }

    Engine& engine() const { return engine_; }
    // What the engine says from then on nobody hears.
    bool is_dead() const { return dead_ != nullptr && *dead_; }
    // What comes before a death; UNAVAILABLE: it comes too late.
    absl::Status Heard(const absl::Status& status) const { return is_dead() ? Died() : status; }

    // Calls `call` with a Done, and waits for that, or for the death.
    template <typename T, typename Call>
    absl::StatusOr<T> Await(Call&& call) {
      auto came = std::make_shared<std::optional<absl::StatusOr<T>>>();
      call(Done<T>([&host = host_, came](absl::StatusOr<T> result) {
        MutexLock lock(host.mutex_);
        came->emplace(std::move(result));
        host.changed_.NotifyAll();
      }));
      MutexLock lock(host_.mutex_);
      while (!came->has_value() && !is_dead()) host_.changed_.Wait(host_.mutex_);
      if (is_dead()) return Died();
      return std::move(**came);
    }

   private:
    Engine& engine_;
    Host& host_;
    const DeathFlag dead_;
    const uint64_t number_;
  };

  static absl::Status Died() { return absl::UnavailableError("the process died"); }

  // `on_death` may be null. It must not call the host.
  std::unique_ptr<Visit> Enter(std::function<void()> on_death = nullptr) {
    MutexLock lock(mutex_);
    while (engine_ == nullptr || (dead_ != nullptr && *dead_)) changed_.Wait(mutex_);
    visitors_.emplace(++last_, std::move(on_death));
    return std::make_unique<Visit>(*this, *engine_, dead_, last_);
  }

  // ---- the owner's
  void Begin(Engine& engine, DeathFlag dead) {
    MutexLock lock(mutex_);
    engine_ = &engine;
    dead_ = std::move(dead);
    changed_.NotifyAll();
  }
  // The process has died. Waits until all have left.
  void End() {
    MutexLock lock(mutex_);
    engine_ = nullptr;
    for (const auto& [number, on_death] : visitors_) {
      if (on_death != nullptr) on_death();
    }
    changed_.NotifyAll();
    while (!visitors_.empty()) changed_.Wait(mutex_);
  }

 private:
  void Leave(uint64_t number) {
    MutexLock lock(mutex_);
    visitors_.erase(number);
    changed_.NotifyAll();
  }

  Mutex mutex_;
  CondVar changed_;
  Engine* engine_ ABSL_GUARDED_BY(mutex_) = nullptr;  // Null: the next process is not there yet.
  DeathFlag dead_ ABSL_GUARDED_BY(mutex_);            // Null: it does not die.
  std::map<uint64_t, std::function<void()>> visitors_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_MEMBERS_HOST_H_
