// The end of an engine's former jobs, for callers who ask for them. Thread-compatible.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_PAST_JOBS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_PAST_JOBS_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <set>
#include <string>

#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/job/job.h"

namespace ballast {

class PastJobs {
 public:
  // This process has taken over an earlier one's jobs.
  void SetTakenOver() { has_taken_over_ = true; }
  // An earlier process's job that cannot be taken over.
  void AddLost(const std::string& uid) { lost_.insert(uid); }
  // `how`: for example "; it was closed". It outlives this. The last 64 are remembered.
  void AddEnded(const Job& job, const char* how);
  // Such a text for the job with this uid; empty: unknown. `begins_anew`: the service was not told
  // to go on.
  std::string WhatBecameOf(absl::string_view uid, bool begins_anew) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Ended {
    std::array<char, kJobUidCharacters> uid = {};
    const char* how = "";
  };

  const Clock::time_point began_ = Clock::now();
  bool has_taken_over_ = false;
  std::set<std::string> lost_;  // Uids.
  std::array<Ended, 64> ended_ = {};
  uint64_t ends_ = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_PAST_JOBS_H_
