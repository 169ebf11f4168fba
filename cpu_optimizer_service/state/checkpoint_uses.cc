#include "cpu_optimizer_service/state/checkpoint_uses.h"

#include <filesystem>

namespace ballast {

CheckpointUses::Use CheckpointUses::Read(const std::string& directory) {
  return Enter(directory, /*deletes=*/false);
}

CheckpointUses::Use CheckpointUses::Delete(const std::string& directory) {
  return Enter(directory, /*deletes=*/true);
}

CheckpointUses::Use CheckpointUses::Enter(const std::string& directory, bool deletes) {
  // Callers may spell an absolute path in several ways.
  const std::string path = std::filesystem::path(directory).lexically_normal().string();
  MutexLock lock(mutex_);
  const auto [entry, is_new] = users_.try_emplace(path, 0);
  if (!is_new && (deletes || entry->second < 0)) return nullptr;
  entry->second += deletes ? -1 : 1;
  return {this, [path, this](const void*) {
            MutexLock leaving(mutex_);
            int& users = users_[path];
            users -= users > 0 ? 1 : -1;
            if (users == 0) users_.erase(path);
          }};
}

}  // namespace ballast
