// Which checkpoints are being read, so that they are not deleted meanwhile.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_USES_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_USES_H_

#include <map>
#include <memory>
#include <string>

#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast {

// For one process. Thread-safe. It reads no disk, so a hanging disk blocks no caller. It outlives
// the results of its calls.
class CheckpointUses {
 public:
  // Until it and all copies are gone.
  using Use = std::shared_ptr<const void>;

  // Null: the directory is being deleted.
  Use Read(const std::string& directory);
  // Null: it is in use, or being deleted.
  Use Delete(const std::string& directory);

 private:
  Use Enter(const std::string& directory, bool deletes);

  Mutex mutex_;
  std::map<std::string, int> users_
      ABSL_GUARDED_BY(mutex_);  // The number of readers; -1: being deleted.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_USES_H_
