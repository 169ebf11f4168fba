// Deaths of the service's process, in the process of the test.
//
// At a store that a later process could see (kept_record.h) all threads stop, and what jobs have in
// named memory is copied as it is at that instant. The next engine is opened over the copies: it
// finds what it would find after a death there. The engine before runs on over its own memory,
// because its threads must come to an end, and nobody listens to it any more.
#ifndef BALLAST_TESTS_HISTORIES_ENGINE_DEATHS_H_
#define BALLAST_TESTS_HISTORIES_ENGINE_DEATHS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/host/file_keeper.h"

namespace ballast::histories {

// Becomes true when the process is dead; what an engine says later nobody hears.
using DeathFlag = std::shared_ptr<const std::atomic<bool>>;

// Whether deaths can be played: ThreadSanitizer holds signals back until a thread waits, so that
// threads cannot be stopped where they are.
bool CanDie();

class Deaths {
 public:
  Deaths();
  ~Deaths();

  // The process dies at the how manyth of its stores from now on while it is exposed; and the next
  // one at the `next`th of its own, 0: it lives.
  void Arm(int stores, int next);
  // Called when the process has died, on the thread that it died on. Set it before Expose.
  void Notify(std::function<void()> on_death) { on_death_ = std::move(on_death); }
  // It lives on.
  void Disarm();
  // Between the two it may die. Hide says whether it did.
  void Expose();
  bool Hide();

  DeathFlag flag() const { return dead_; }
  // Of the present process, which has begun with what the one before left.
  FileKeeper& keeper();
  // The next process begins. The engine before, and its named memory, are gone.
  void Begin();
  // By the store at which a process died, since this was last asked.
  std::map<std::string, int64_t> TakeCounts();

 private:
  class Keeper;
  void OnStore(const char* what);

  std::function<void(const char*)> seam_;
  std::function<void()> on_death_;  // May be null.
  std::unique_ptr<Keeper> keeper_;
  std::shared_ptr<std::atomic<bool>> dead_;

  std::atomic<bool> exposed_ = false;
  Mutex mutex_;
  std::map<std::string, FileDescriptor> left_ ABSL_GUARDED_BY(mutex_);  // By one that is dead.
  int64_t stores_left_ ABSL_GUARDED_BY(mutex_) = 0;                     // 0: not armed.
  int64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, int64_t> counts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_ENGINE_DEATHS_H_
