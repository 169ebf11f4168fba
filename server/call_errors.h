// Errors of calls and streams whose peer is gone, or begins wrongly.
#ifndef BALLAST_SERVER_CALL_ERRORS_H_
#define BALLAST_SERVER_CALL_ERRORS_H_

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/call_watch.h"

namespace ballast::server {

// `who` does not read any more.
inline absl::Status GoneError(absl::string_view who) {
  return absl::CancelledError(absl::StrCat("the ", who, " is gone"));
}

inline absl::Status NoOpenError() {
  return absl::DeadlineExceededError(
      absl::StrCat("no open message arrived within ", WatchedCall::kOpenSeconds,
                   " seconds; begin a stream when there is a rank to send it for"));
}

inline absl::Status NoKindError() {
  return absl::InvalidArgumentError(
      "a message without kind, or of one that this service does not know; see proto/ballast/v1, "
      "and "
      "whether the client is of a newer release");
}

inline absl::Status NotFirstError() {
  return absl::InvalidArgumentError(
      "open must be the first message of a stream, and only that; begin another stream with it");
}

}  // namespace ballast::server

#endif  // BALLAST_SERVER_CALL_ERRORS_H_
