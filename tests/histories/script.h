// The calls that the workers of an attempt make, and what they carry.
#ifndef BALLAST_TESTS_HISTORIES_SCRIPT_H_
#define BALLAST_TESTS_HISTORIES_SCRIPT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/job/job.h"
#include "tests/histories/history.h"

namespace ballast::histories {

enum class CallKind : uint8_t { kBegin, kContribute, kEndMicroStep, kSeal };

struct Call {
  CallKind kind = CallKind::kBegin;
  int rank = 0;
  int chunk = 0;            // kContribute
  int segment = 0;          // kContribute
  uint32_t micro_step = 0;  // kEndMicroStep
  uint32_t try_number = 0;  // Of its rank.
};

// `attempt` without what does not apply to this job.
Attempt Normalize(const JobPlan& job, Attempt attempt, const Layout& layout);

// One attempt's calls and their contents. Borrows its arguments. Thread-compatible.
class Script {
 public:
  Script(const JobPlan& job, const Attempt& attempt, const Layout& layout);

  // Those of a rank are in order; `order_seed` interleaves the ranks. Withheld contributions come
  // after a first seal, and a second one after them.
  std::vector<Call> Calls() const;
  std::vector<Call> CallsOf(int rank) const;
  // Index in `calls` of position `at`.
  static int IndexOf(int at, size_t calls) {
    return static_cast<int>(static_cast<size_t>(at) * calls / kPositions);
  }

  StepSettings Settings() const;
  const StepVote& Vote() const { return attempt_.vote; }
  // The micro-steps that a contribution covers.
  std::pair<uint32_t, uint32_t> Range(int chunk, int segment) const;
  bool IsFinal(int chunk, int segment) const;
  bool MayGuess(int chunk, int segment) const;
  bool IsEmpty(int chunk, int segment) const;
  const std::vector<std::byte>& Payload(int chunk, int segment);
  UsedParameters Used(int rank, uint32_t micro_step) const;
  int SegmentCount(int chunk) const;

 private:
  bool IsSpoiltWithPadding(int chunk) const;
  // The value that a worker finds in this micro-step, if it finds the poison.
  std::optional<float> Found(const Poison& poison, const ParameterPlan& parameter,
                             uint32_t micro_step) const;

  const JobPlan& job_;
  const Attempt& attempt_;
  const Layout& layout_;
  const int spoiled_;
  std::map<std::pair<int, int>, std::vector<std::byte>> payloads_;
  std::map<std::pair<int, int>, std::vector<float>> gradients_;  // By parameter and segment.
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_SCRIPT_H_
