// Descriptions of jobs that have not been parsed yet. Parsed, one takes many times its bytes, two
// of which are enough for a parameter; so its size is known first.
#ifndef BALLAST_SERVER_JOBS_JOB_DESCRIPTION_H_
#define BALLAST_SERVER_JOBS_JOB_DESCRIPTION_H_

#include <grpcpp/support/byte_buffer.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/engine.h"

namespace ballast::server {

// Descriptions of which parsing takes no more than this are parsed without asking.
inline constexpr int64_t kSmallDescriptionBytes = int64_t{4} << 20;

// Room in the memory limit to parse a serialized CreateJobRequest; none for a small one.
// INVALID_ARGUMENT: more parameters, groups, ranges or dimensions than a job may have, a longer
// name, more than kMaxRequestBytes without the description, or no such message.
// RESOURCE_EXHAUSTED.
absl::StatusOr<MemoryBudget::Reservation> RoomToRead(Engine& engine,
                                                     const grpc::ByteBuffer& create_request);

// The `name` and the `uid` of a serialized AttachWorkerRequest. INVALID_ARGUMENT: no such message,
// or more than kMaxRequestBytes without the description.
struct JobToAttach {
  std::string name;
  std::string uid;
  std::string derived_from;
};
absl::StatusOr<JobToAttach> FindJobToAttach(const grpc::ByteBuffer& attach_request);

// FAILED_PRECONDITION if its description is larger than one of this job can be, which has its room
// already. INVALID_ARGUMENT: it has a longer name than a job may have.
absl::Status CheckAsLargeAs(const Job& job, const grpc::ByteBuffer& attach_request);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_JOB_DESCRIPTION_H_
