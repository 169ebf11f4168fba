// What the lead and the other members of a job say to each other.
//
// A link carries words in order. It may end at any time, and the words that are on it are lost.
// Then the lead opens a new one, with Follow. On that each end says all that the other has to know:
// so no word is acknowledged. Both ends take words from the newest link only.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_WORDS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_WORDS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "cpu_optimizer_service/common/step_record.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/job/core/job_record.h"
#include "cpu_optimizer_service/job/step/state_trial.h"
#include "cpu_optimizer_service/job/step/step_decision.h"
#include "cpu_optimizer_service/job/step/step_lead.h"
#include "cpu_optimizer_service/state/checkpoint_index.h"

namespace ballast {

// What a link is for: the lead says it when it opens one.
struct Follow {
  std::string uid;
  JobSpec spec;
  int member = 0;         // Which of spec.members is meant.
  bool is_new = false;    // The job is being created. Otherwise the member has its part.
  uint64_t creation = 0;  // Rises with every creation by this lead.
};

// To the lead.
struct MemberWord {
  // Whether the member has its part of the job. The first word on a link, and again as it changes.
  struct Seat {
    enum class State : uint8_t {
      kNone,      // No, because of `error`; OK: its part has been closed.
      kReserved,  // There is room for it, reserved as long as this link.
      kKept,      // Yes, and it outlives the link.
    };
    State state = State::kNone;
    absl::Status error;
    // For kReserved, and kNone for lack of room.
    int64_t needed_bytes = 0;
    int64_t free_bytes = 0;  // Without this part.
  };
  // Where the member stands: said first once its part is kept, and again whenever that changes.
  struct Standing {
    Generation generation;
    uint64_t committed_step = 0;
    bool has_weights = false;  // The job has begun here. Otherwise committed_step has no meaning.
    uint64_t loads = 0;        // JobRecord::loads, once the state is loaded.
    // All of the first weights for its part are there, of this state. The lead may begin the job.
    std::optional<FirstState> first_state;
    bool fits_any_state = false;  // There are none for its part.
    // In the step after that.
    bool all_have_begun = false;           // All its ranks have, in whichever attempt.
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
    Generation generation;  // The member's, as the next two.
    uint64_t committed_step = 0;
    bool has_weights = false;            // As in Standing.
    std::optional<std::string> give_up;  // Why the step after that is lost.
  };

  // What a task of the lead asks for is done, or why not. Also said on a new link, of the last one.
  struct Done {
    uint64_t task = 0;
    uint8_t round = 0;  // LeadWord::Task::round().
    absl::Status status;
    std::vector<CheckpointIndex::File> files;  // To Write: that it has written.
  };
  // Its state is half loaded.
  struct NotLoaded {
    uint64_t loads = 0;
    absl::Status why;
  };
  // The service is to end: the member asks for a save.
  struct WantsSave {
    uint64_t id = 0;
  };

  std::variant<Seat, Standing, Report, Checked, Vote, Tried, Ask, Done, NotLoaded, WantsSave> what;
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
    // To a member that has reported: the step waits for these ranks.
    struct Waits {
      std::vector<int> ranks;
      std::string why;
    };
    Generation generation;
    uint64_t step = 0;
    std::variant<ToMember::Live, ToMember::OtherSettings, ToMember::Refused, ToMember::CheckUses,
                 Norm, VoteAgain, Try, Waits>
        what = ToMember::Live();
  };
  // The step is decided, from the member's report of this number among others. Or it is lost, and
  // skipped (SkipCause::kNotKept), whatever the member has of it.
  struct Decided {
    uint64_t report = 0;
    KeptDecision decision;
  };
  // Another generation has begun, behind the same committed step.
  struct Raised {
    Generation generation;
    std::string why;
  };
  // This step, the last one, is undone, in another generation.
  struct Undo {
    uint64_t step = 0;
    uint64_t loads = 0;  // JobRecord::loads with it.
    Generation generation;
    std::string why;
  };
  // To Ask.
  struct Answer {
    uint64_t id = 0;
    absl::Status refused;  // No rank may attach now.
    Generation generation;
    uint64_t committed_step = 0;
    bool has_weights = false;
  };
  // All members have room: makes the part's memory, and keeps it.
  struct Keep {};
  // All members have their first weights, of this state: the job begins with them.
  struct Begin {
    FirstState state;
  };
  // They are of different states: the ranks have to bring others. FAILED_PRECONDITION. A new
  // generation follows.
  struct OtherStates {
    absl::Status why;
  };
  // The job is over, or was not created.
  struct Close {
    std::string why;
  };

  // What the other members do for a save, or before a load, in rounds (tasks.h). A task ends with the
  // lead's process.
  struct Task {
    // Pins its part of the committed state, which is of this step.
    struct Pin {
      uint64_t step = 0;
      uint64_t loads = 0;  // JobRecord::loads.
      std::string folder;  // Below --checkpoint-dir, as all names here.
      bool asked_for = false;
    };
    // Looks whether it sees this directory of the folder.
    struct Look {
      std::string directory;
    };
    // Writes what it has pinned there.
    struct Write {};
    // Looks whether it can load its part of this checkpoint.
    struct Check {
      std::string name;
      bool weights_only = false;
      std::string sha256;  // Of its index, or of the weights.
    };
    // The task is over. It is not answered.
    struct End {
      std::string saved;  // The name of the checkpoint; empty: there is none.
    };
    uint64_t id = 0;
    std::variant<Pin, Look, Write, Check, End> what = End();

    uint8_t round() const { return static_cast<uint8_t>(what.index()); }
    template <typename What>
    static uint8_t RoundOf() {
      return Task{.id = 0, .what = What()}.round();
    }
  };
  // The lead replaces the job's state, and each member its part, for this load.
  struct Load {
    uint64_t loads = 0;
    std::string name;
    bool weights_only = false;
    std::string sha256;  // As in Check.
  };
  // To WantsSave.
  struct Saved {
    uint64_t id = 0;
    absl::Status status;
    std::string name;
    uint64_t step = 0;
    int64_t size_bytes = 0;
  };

  std::variant<OfStep, Decided, Raised, Undo, Answer, Keep, Begin, OtherStates, Close, Task, Load,
               Saved>
      what;
};

// An end of a link. Both calls only queue: they come with the job's lock.
template <typename Word>
class WordSink {
 public:
  virtual ~WordSink() = default;
  virtual void Send(Word word) = 0;
  // A newer link has taken this one's place. Its other end has to hear of that.
  virtual void Replaced() {}
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_WORDS_H_
