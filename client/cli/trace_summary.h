// A trace in a few lines: when each step was decided and committed, and how long the service's
// threads were busy with what.
#ifndef BALLAST_CLIENT_CLI_TRACE_SUMMARY_H_
#define BALLAST_CLIENT_CLI_TRACE_SUMMARY_H_

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "ballast/v1/ballast.pb.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"

namespace ballast::client::cli {

// One attempt at a step; one that was aborted has a row of its own.
struct TracedStep {
  uint64_t step = 0;
  int64_t begun_ns = 0;  // 0: not seen, as in the others.
  int64_t decided_ns = 0;
  int64_t committed_ns = 0;
  std::array<int64_t, v1::TraceEventKind_ARRAYSIZE> busy_ns = {};  // By kind, over all threads.
  // Through the channel, empty contributions counted as if they were not.
  int64_t arrived_bytes = 0;
  int64_t sent_bytes = 0;
};

class TraceSummary {
 public:
  // `layout` is the job's; both outlive it. Nothing goes through the channel for ranks in
  // `shares_memory`.
  TraceSummary(const JobSpec& spec, const Layout& layout, std::vector<bool> shares_memory)
      : spec_(spec), layout_(layout), shares_memory_(std::move(shares_memory)) {}

  // In order of begin_ns; has passed CheckEvent (chrome_trace.h).
  void Add(const v1::TraceEvent& event);

  int64_t events() const { return events_; }
  int64_t begun() const;      // How many attempts.
  int64_t committed() const;  // How many of them.

  std::string Text() const;               // A table, without words around it.
  nlohmann::ordered_json ToJson() const;  // An array with an object for each attempt.

 private:
  TracedStep& StepOf(const v1::TraceEvent& event);
  // Whether the chunk went with the one before: the time of a message counts once.
  bool InLastMessage(const v1::TraceEvent& sent) const;
  bool ThroughChannel(int rank) const;

  const JobSpec& spec_;
  const Layout& layout_;
  const std::vector<bool> shares_memory_;  // By rank.
  int64_t events_ = 0;
  v1::TraceEvent last_sent_;  // The latest chunk that was sent.
  std::vector<TracedStep> steps_;
};

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_TRACE_SUMMARY_H_
