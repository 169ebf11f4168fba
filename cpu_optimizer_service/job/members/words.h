// What the lead and the other members of a job say to each other.
//
// A link carries words in order. It may end at any time, and the words that are on it are lost.
// Then the lead opens a new one. On that each end says all that the other has to know: so no word
// is acknowledged. Both ends take words from the newest link only.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_WORDS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_WORDS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "cpu_optimizer_service/common/step_record.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/job/core/job_record.h"
#include "cpu_optimizer_service/job/step/state_trial.h"
#include "cpu_optimizer_service/job/step/step_decision.h"
#include "cpu_optimizer_service/job/step/step_lead.h"

namespace ballast {

// To the lead.
struct MemberWord {
  // Where the member stands: the first word on a link, and again whenever that changes.
  struct Standing {
    Generation generation;
    uint64_t committed_step = 0;
    // In the step after that.
    uint32_t attempt = 0;                  // The live one here,
    int by = 0;                            // which this rank's discard has begun,
    std::optional<StepSettings> settings;  // with these settings.
    // A rank of a reported part wants to discard the live attempt.
    std::optional<int> wants_discard;
  };
  // Its part of the step is sealed and whole. It stays so until the lead ends it.
  struct Report {
    uint64_t number = 0;
    uint32_t attempt = 0;
    StepReport report;
    std::optional<StepVote> vote;
  };
  struct Checked {
    uint64_t round = 0;
    std::optional<SealRefusal> refusal;
  };
  struct Vote {
    uint64_t round = 0;
    StepVote vote;
  };
  struct Tried {
    uint64_t round = 0;
    StateTrial trial;
  };
  // The member asks where the job stands, or for a new generation.
  struct Ask {
    uint64_t id = 0;
    Generation generation;  // The member's, as the next.
    uint64_t committed_step = 0;
    std::optional<std::string> give_up;  // Why the step after that is lost.
  };

  std::variant<Standing, Report, Checked, Vote, Tried, Ask> what;
};

// From the lead.
struct LeadWord {
  // Of the step after the member's committed one, in its generation.
  struct OfStep {
    struct Norm {
      uint64_t round = 0;
      StepNorm norm;
    };
    struct VoteAgain {
      uint64_t round = 0;
      StepNorm norm;
      absl::Status why;
    };
    struct Try {
      uint64_t round = 0;
      Draft draft;
    };
    Generation generation;
    uint64_t step = 0;
    std::variant<ToMember::Live, ToMember::OtherSettings, ToMember::Refused, ToMember::CheckUses,
                 Norm, VoteAgain, Try>
        what;
  };
  // The step is decided, from the member's report of this number among others.
  struct Decided {
    uint64_t report = 0;
    KeptDecision decision;
  };
  // Another generation has begun, behind the same committed step.
  struct Raised {
    Generation generation;
    std::string why;
  };
  // To Ask.
  struct Answer {
    uint64_t id = 0;
    Generation generation;
    uint64_t committed_step = 0;
  };

  std::variant<OfStep, Decided, Raised, Answer> what;
};

// An end of a link. Send only queues the word: it is called with the job's lock.
template <typename Word>
class WordSink {
 public:
  virtual ~WordSink() = default;
  virtual void Send(Word word) = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_WORDS_H_
