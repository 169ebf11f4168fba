// Which checkpoints are read, so that none of them is deleted meanwhile.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_USES_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_USES_H_

#include <map>
#include <memory>
#include <string>

#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast {

// Of one process. Thread-safe; reads no disk, so that one that hangs holds up nobody here. It
// outlives what its calls return.
class CheckpointUses {
 public:
  // Until it, and all copies, are gone.
  using Use = std::shared_ptr<const void>;

  // Null: the directory is being deleted.
  Use Read(const std::string& directory);
  // Null: it is read, or being deleted.
  Use Delete(const std::string& directory);

 private:
  Use Enter(const std::string& directory, bool deletes);

  Mutex mutex_;
  std::map<std::string, int> users_
      ABSL_GUARDED_BY(mutex_);  // How many read it; -1: it is deleted.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_USES_H_
