#include "gpu_worker/collective/agreement.h"

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/base/fnv1a.h"
#include "gpu_worker/collective/share.h"

namespace ballast::worker {
namespace {

using Hashes = std::array<uint64_t, kMaxAgreedSettings>;

uint64_t Hash(const std::string& bytes) {
  Fnv1a hash;
  for (const char byte : bytes) hash.Add(static_cast<uint8_t>(byte));
  return hash.hash();
}

}  // namespace

absl::Status CheckAgreement(const std::vector<AgreedSetting>& settings, Collective& collective) {
  Check(settings.size() <= kMaxAgreedSettings, "the message has room for all settings");
  Hashes mine{};
  for (size_t i = 0; i < settings.size(); ++i) {
    // With the name: programs of different versions may have other settings in the same place.
    mine[i] = Hash(absl::StrCat(settings[i].name, "=", settings[i].value));
  }
  BALLAST_ASSIGN_OR_RETURN(const std::vector<Hashes> all, Share(mine, collective));
  for (int rank = 1; rank < collective.world_size(); ++rank) {
    for (size_t i = 0; i < mine.size(); ++i) {
      if (all[rank][i] == all[0][i]) continue;
      // Past this rank's own settings its hashes are zeros: another rank's program has more of
      // them.
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", rank, " and rank 0 differ in ",
                       i < settings.size() ? settings[i].name : "their versions",
                       "; start all workers with the same flags and the same text"));
    }
  }
  return absl::OkStatus();
}

}  // namespace ballast::worker
