#include "tests/histories/run.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/session/log.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "tests/histories/engine/engine_player.h"
#include "tests/histories/generate.h"
#include "tests/histories/session/session_player.h"
#include "tests/histories/shrink.h"

namespace ballast::histories {
namespace {

// Ends the process, saying what was being played, when a history takes too long: it hangs, and
// there is no way out of a call that does not return.
class Watchdog {
 public:
  Watchdog() : thread_([this] { Watch(); }) {}
  ~Watchdog() {
    {
      MutexLock lock(mutex_);
      over_ = true;
      changed_.NotifyAll();
    }
    thread_.join();
  }
  void Playing(const History& history) {
    MutexLock lock(mutex_);
    history_ = history;
    deadline_ = std::chrono::steady_clock::now() + std::chrono::minutes(3);
    changed_.NotifyAll();
  }

 private:
  void Watch() {
    MutexLock lock(mutex_);
    while (!over_) {
      changed_.WaitUntil(mutex_, deadline_);
      if (over_ || std::chrono::steady_clock::now() < deadline_) continue;
      std::fprintf(stderr, "This history hangs:\n%s", Describe(history_).c_str());
      std::abort();
    }
  }

  Mutex mutex_;
  CondVar changed_;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  History history_ ABSL_GUARDED_BY(mutex_);
  std::chrono::steady_clock::time_point deadline_ ABSL_GUARDED_BY(mutex_) =
      std::chrono::steady_clock::now() + std::chrono::minutes(3);
  std::thread thread_;
};

}  // namespace

absl::Status Play(Engines& engines, const History& history) {
  if (history.layer == Layer::kEngine) return EnginePlayer(engines, history).Play();
  return SessionPlayer(engines, history).Play();
}

std::string RunHistories(Engines& engines, uint64_t first, int64_t count,
                         const RunOptions& options) {
  client::Log().set_level(spdlog::level::off);  // Streams break all the time here.
  Watchdog watchdog;
  const auto play = [&](const History& history) {
    watchdog.Playing(history);
    return Play(engines, history);
  };
  for (uint64_t seed = first; seed < first + static_cast<uint64_t>(count); ++seed) {
    const History history = Generate(seed);
    if (options.only.has_value() && history.layer != *options.only) continue;
    const absl::Status status = play(history);
    if (status.ok()) continue;
    const std::string summary = absl::StrCat("seed ", seed, " fails: ", status.message(), "\n");
    if (!options.shrink) return summary + Describe(history);
    absl::Status smallest_failure = status;
    const History smallest = Shrink(history, [&](const History& candidate) {
      const absl::Status failure = play(candidate);
      if (!failure.ok()) smallest_failure = failure;
      return !failure.ok();
    });
    return absl::StrCat(summary, "(histories --seed ", seed, " --count 1)\n",
                        "The smallest history that fails, with: ", smallest_failure.message(), "\n",
                        Describe(smallest));
  }
  return "";
}

}  // namespace ballast::histories
