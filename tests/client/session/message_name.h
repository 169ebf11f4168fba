// A rank's messages in words, so that tests can compare sent and expected ones.
#ifndef BALLAST_TESTS_CLIENT_SESSION_MESSAGE_NAME_H_
#define BALLAST_TESTS_CLIENT_SESSION_MESSAGE_NAME_H_

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/v1/train.pb.h"

namespace ballast::client {

// Nothing for the first, as nearly all are.
inline std::string NameOfAttempt(uint32_t attempt) {
  return attempt == 0 ? "" : absl::StrCat(" attempt ", attempt);
}

inline std::string NameOfRefusals(uint32_t refusals) {
  return refusals == 0 ? "" : absl::StrCat(" after ", refusals, " refusals");
}

inline std::string NameOf(const v1::GradientHeader& header) {
  return absl::StrCat("gradient ", header.step(), NameOfAttempt(header.attempt()), " chunk ",
                      header.chunk(), " [", header.micro_step_begin(), ", ",
                      header.micro_step_end(), ")");
}

inline std::string NameOf(const v1::TrainRequest& message) {
  switch (message.kind_case()) {
    case v1::TrainRequest::kOpen:
      return "open";
    case v1::TrainRequest::kBeginStep:
      return absl::StrCat("begin ", message.begin_step().step(),
                          NameOfAttempt(message.begin_step().attempt()));
    case v1::TrainRequest::kGradient:
      return NameOf(message.gradient().header());
    case v1::TrainRequest::kSharedGradients:
      return absl::StrCat("shared gradients ", message.shared_gradients().step(), " chunks ",
                          absl::StrJoin(message.shared_gradients().chunks(), " "), " [",
                          message.shared_gradients().micro_step_begin(), ", ",
                          message.shared_gradients().micro_step_end(), ")",
                          message.shared_gradients().final() ? " final" : "");
    case v1::TrainRequest::kEndMicroStep:
      return absl::StrCat("end ", message.end_micro_step().step(),
                          NameOfAttempt(message.end_micro_step().attempt()), " micro-step ",
                          message.end_micro_step().micro_step());
    case v1::TrainRequest::kSeal:
      return absl::StrCat("seal ", message.seal().step(), NameOfAttempt(message.seal().attempt()),
                          " of ", message.seal().micro_steps(),
                          NameOfRefusals(message.seal().vote().refusals()));
    case v1::TrainRequest::kVote:
      return absl::StrCat("vote ", message.vote().step(), NameOfAttempt(message.vote().attempt()),
                          NameOfRefusals(message.vote().vote().refusals()));
    case v1::TrainRequest::kDiscard:
      return absl::StrCat("discard ", message.discard().step(),
                          NameOfAttempt(message.discard().attempt()));
    case v1::TrainRequest::KIND_NOT_SET:
      break;
  }
  return "nothing";
}

}  // namespace ballast::client

#endif  // BALLAST_TESTS_CLIENT_SESSION_MESSAGE_NAME_H_
