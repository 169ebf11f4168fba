// What a Train stream and an upload say of a peer that does not begin as it must. Where there is no
// memory for a text, OutOfMemoryError stands for it: who says it is then the only one to end the
// stream.
#ifndef BALLAST_SERVER_TRAIN_STREAM_ERRORS_H_
#define BALLAST_SERVER_TRAIN_STREAM_ERRORS_H_

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/system/memory_guard.h"
#include "server/call_watch.h"

namespace ballast::server {

inline absl::Status NoOpenError() {
  return OrOutOfMemory([] {
    return absl::DeadlineExceededError(
        absl::StrCat("no open message arrived within ", WatchedCall::kOpenSeconds,
                     " seconds; begin a stream when there is a rank to send it for"));
  });
}

inline absl::Status NoKindError() {
  return OrOutOfMemory([] {
    return absl::InvalidArgumentError(
        "a message without kind, or of one that this service does not know; see ballast.proto, and "
        "whether the client is of a newer release");
  });
}

inline absl::Status NotFirstError() {
  return OrOutOfMemory([] {
    return absl::InvalidArgumentError(
        "open must be the first message of a stream, and only that; begin another stream with it");
  });
}

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRAIN_STREAM_ERRORS_H_
