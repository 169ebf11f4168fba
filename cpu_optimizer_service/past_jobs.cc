#include "cpu_optimizer_service/past_jobs.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace ballast {

void PastJobs::AddEnded(const Job& job, const char* how) {
  Ended& end = ended_[ends_++ % ended_.size()];
  job.uid().copy(end.uid.data(), end.uid.size());
  end.how = how;
}

std::string PastJobs::WhatBecameOf(absl::string_view uid, bool begins_anew) const {
  const auto end = std::ranges::find_if(ended_, [&](const Ended& one) {
    return absl::string_view(one.uid.data(), one.uid.size()) == uid;
  });
  if (end != ended_.end()) return end->how;
  if (!uid.empty() && lost_.contains(std::string(uid))) {
    return "; it was lost when the service's process ended: see the service's log";
  }
  if (uid.empty() || !begins_anew || has_taken_over_) return "";
  // Its caller has had the job, and this process has not.
  const auto age = std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - began_);
  return absl::StrCat("; this service started ",
                      age.count() == 0
                          ? "just now"
                          : absl::StrCat(absl::FormatDuration(absl::FromChrono(age)), " ago"),
                      ", and unsaved jobs of an earlier one are lost");
}

}  // namespace ballast
