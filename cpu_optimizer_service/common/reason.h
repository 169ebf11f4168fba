// Why a call was refused, as a name that a program acts on; the message is for people. The names
// are those of ErrorReason in proto/ballast/v1/jobs.proto, which explains them.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_REASON_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_REASON_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"

namespace ballast {

namespace reason {
inline constexpr absl::string_view kRankReplaced = "RANK_REPLACED";
inline constexpr absl::string_view kRankNotHeld = "RANK_NOT_HELD";
inline constexpr absl::string_view kStreamReplaced = "STREAM_REPLACED";
inline constexpr absl::string_view kOlderGeneration = "OLDER_GENERATION";
inline constexpr absl::string_view kNoSuchJob = "NO_SUCH_JOB";
inline constexpr absl::string_view kOtherJob = "OTHER_JOB";
inline constexpr absl::string_view kOtherStep = "OTHER_STEP";
inline constexpr absl::string_view kOtherDescription = "OTHER_DESCRIPTION";
inline constexpr absl::string_view kOtherSettings = "OTHER_SETTINGS";
inline constexpr absl::string_view kNoWeightsYet = "NO_WEIGHTS_YET";
inline constexpr absl::string_view kHasWeights = "HAS_WEIGHTS";
inline constexpr absl::string_view kSendAndSealAgain = "SEND_AND_SEAL_AGAIN";
inline constexpr absl::string_view kAbortAndRedo = "ABORT_AND_REDO";
inline constexpr absl::string_view kDiscardAndRedo = "DISCARD_AND_REDO";
inline constexpr absl::string_view kVoteAgain = "VOTE_AGAIN";
inline constexpr absl::string_view kMalformedMessage = "MALFORMED_MESSAGE";
inline constexpr absl::string_view kStopping = "STOPPING";
inline constexpr absl::string_view kJobBroken = "JOB_BROKEN";
inline constexpr absl::string_view kJobBeingCreated = "JOB_BEING_CREATED";
inline constexpr absl::string_view kRestarting = "RESTARTING";
inline constexpr absl::string_view kNoCheckpointDir = "NO_CHECKPOINT_DIR";
inline constexpr absl::string_view kDeviceMemoryFull = "DEVICE_MEMORY_FULL";
inline constexpr absl::string_view kOtherMemberLeads = "OTHER_MEMBER_LEADS";
inline constexpr absl::string_view kOtherMembersHaveParts = "OTHER_MEMBERS_HAVE_PARTS";
inline constexpr absl::string_view kSuperseded = "SUPERSEDED";

inline constexpr absl::string_view kAll[] = {
    kRankReplaced,     kRankNotHeld,      kStreamReplaced,   kOlderGeneration,       kNoSuchJob,
    kOtherJob,         kOtherStep,        kOtherDescription, kOtherSettings,         kNoWeightsYet,
    kHasWeights,       kSendAndSealAgain, kAbortAndRedo,     kDiscardAndRedo,        kVoteAgain,
    kMalformedMessage, kStopping,         kJobBroken,        kJobBeingCreated,       kRestarting,
    kNoCheckpointDir,  kDeviceMemoryFull, kOtherMemberLeads, kOtherMembersHaveParts, kSuperseded};
}  // namespace reason

inline constexpr absl::string_view kReasonPayload = "ballast/reason";

// The status with the reason; OK stays OK. Annotate keeps it.
inline absl::Status WithReason(absl::Status status, absl::string_view reason) {
  status.SetPayload(kReasonPayload, absl::Cord(reason));
  return status;
}

// Empty: the status has no reason.
inline std::string ReasonOf(const absl::Status& status) {
  return std::string(status.GetPayload(kReasonPayload).value_or(absl::Cord()));
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_REASON_H_
