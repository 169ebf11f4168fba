// What members say to each other, as bytes (host/kept_codec.h). Both ends have the same format; the
// first message on a link says which.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_WORDS_CODEC_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_WORDS_CODEC_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/job/members/words.h"

namespace ballast {

inline constexpr uint32_t kWordsFormat = 3;

std::string Encode(const Follow& follow);
std::string Encode(const MemberWord& word);
std::string Encode(const LeadWord& word);

// INVALID_ARGUMENT: the bytes are no such word, or none of a job with this description.
absl::StatusOr<Follow> DecodeFollow(absl::string_view bytes);
absl::StatusOr<MemberWord> DecodeMemberWord(absl::string_view bytes, const JobSpec& spec);
absl::StatusOr<LeadWord> DecodeLeadWord(absl::string_view bytes, const JobSpec& spec);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_WORDS_CODEC_H_
