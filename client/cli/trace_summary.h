// A trace in a few lines: when each step was decided and committed, and for how long the service's
// threads were busy with each kind of work.
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

// One attempt at a step. An aborted attempt has a row of its own.
struct TracedStep {
  uint64_t step = 0;
  int64_t begun_ns = 0;  // 0, here and below: not seen.
  int64_t decided_ns = 0;
  int64_t committed_ns = 0;
  std::array<int64_t, v1::TraceEventKind_ARRAYSIZE> busy_ns = {};  // By kind, summed over threads.
  // Bytes through the channel. Empty contributions are counted as if they were full.
  int64_t arrived_bytes = 0;
  int64_t sent_bytes = 0;
};

class TraceSummary {
 public:
  // `layout` is the job's; both outlive the summary. For a rank whose `shares_memory` is true,
  // nothing goes through the channel.
  TraceSummary(const JobSpec& spec, const Layout& layout, std::vector<bool> shares_memory)
      : spec_(spec), layout_(layout), shares_memory_(std::move(shares_memory)) {}

  // Call in order of begin_ns, after CheckEvent (chrome_trace.h).
  void Add(const v1::TraceEvent& event);

  int64_t begun() const;      // The number of attempts.
  int64_t committed() const;  // The number of committed ones.

  std::string Text() const;               // A table.
  nlohmann::ordered_json ToJson() const;  // An array with an object for each attempt.

 private:
  TracedStep& StepOf(const v1::TraceEvent& event);
  // Whether the chunk was in the same message as the previous one: a message's time counts once.
  bool InLastMessage(const v1::TraceEvent& sent) const;
  bool ThroughChannel(int rank) const;

  const JobSpec& spec_;
  const Layout& layout_;
  const std::vector<bool> shares_memory_;  // By rank.
  v1::TraceEvent last_sent_;               // The latest chunk that was sent.
  std::vector<TracedStep> steps_;
};

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_TRACE_SUMMARY_H_
