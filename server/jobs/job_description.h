// Unparsed descriptions of jobs. A parsed description takes many times its bytes: two bytes are
// enough for a parameter. So its size is computed first.
#ifndef BALLAST_SERVER_JOBS_JOB_DESCRIPTION_H_
#define BALLAST_SERVER_JOBS_JOB_DESCRIPTION_H_

#include <grpcpp/support/byte_buffer.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/engine.h"

namespace ballast::server {

// Descriptions that take no more than this when parsed are parsed without a reservation.
inline constexpr int64_t kSmallDescriptionBytes = int64_t{4} << 20;

// Room in the memory limit to parse a serialized CreateJobRequest; empty for a small one.
// INVALID_ARGUMENT: more parameters, groups, ranges, dimensions or members than a job may have, more
// than kMaxRequestBytes without the description, or not such a message. RESOURCE_EXHAUSTED: no room.
absl::StatusOr<MemoryBudget::Reservation> RoomToRead(Engine& engine,
                                                     const grpc::ByteBuffer& create_request);

// `name` and `uid` of a serialized AttachWorkerRequest. INVALID_ARGUMENT: not such a message, or
// more than kMaxRequestBytes without the description.
struct JobToAttach {
  std::string name;
  std::string uid;
  std::string derived_from;
};
absl::StatusOr<JobToAttach> FindJobToAttach(const grpc::ByteBuffer& attach_request);

// FAILED_PRECONDITION if its description is larger than one of this job can be. Such a description
// has its room already.
absl::Status CheckAsLargeAs(const Job& job, const grpc::ByteBuffer& attach_request);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_JOB_DESCRIPTION_H_
