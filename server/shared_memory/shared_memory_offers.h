// Tokens from AttachWorker, each for one holder of a rank. The process that shows a token gets the
// rank's shared memory. A token is valid once, for a limited time, until the rank's next offer.
#ifndef BALLAST_SERVER_SHARED_MEMORY_SHARED_MEMORY_OFFERS_H_
#define BALLAST_SERVER_SHARED_MEMORY_SHARED_MEMORY_OFFERS_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/job/job.h"
#include "proto/shared_memory_protocol.h"

namespace ballast::server {

// Thread-safe. A job may be closed while its offers are open.
class SharedMemoryOffers {
 public:
  using Clock = std::chrono::steady_clock;
  struct Claim {
    std::weak_ptr<Job> job;
    RankHolder holder;
  };

  SharedMemoryOffers(size_t most, Clock::duration lifetime) : most_(most), lifetime_(lifetime) {}

  // The token of a new offer. nullopt: a later holder of the rank has one already, or the system
  // has no random bytes. If `most` are open, the oldest ends.
  std::optional<std::string> Add(const std::shared_ptr<Job>& job, RankHolder holder,
                                 Clock::time_point now);
  // Ends the offer with this token, and returns its holder. nullopt: the token is unknown or has
  // expired.
  std::optional<Claim> Take(absl::string_view token, Clock::time_point now);

 private:
  using Token = std::array<uint8_t, proto::kSharedMemoryTokenBytes>;
  struct Offer {
    Token token;
    Claim claim;
    Clock::time_point expires;
  };
  void DropDead(Clock::time_point now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t most_;
  const Clock::duration lifetime_;
  Mutex mutex_;
  // Keyed by the job's uid and the rank.
  std::map<std::pair<std::string, int>, Offer> open_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_SHARED_MEMORY_SHARED_MEMORY_OFFERS_H_
