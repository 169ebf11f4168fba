// From resource names to jobs and parameters, for callers who may use them. Other callers get
// PERMISSION_DENIED, whether the job exists or not.
#ifndef BALLAST_SERVER_FIND_JOB_H_
#define BALLAST_SERVER_FIND_JOB_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/engine.h"
#include "server/access/access.h"

namespace ballast::server {

// By "jobs/JOB". INVALID_ARGUMENT: another form. NOT_FOUND.
absl::StatusOr<std::shared_ptr<Job>> FindJob(const Engine& engine, const Caller& caller,
                                             const std::string& name);

// The same. NOT_FOUND also if the job's unique id is not `uid`: another job has the name now.
absl::StatusOr<std::shared_ptr<Job>> FindJob(const Engine& engine, const Caller& caller,
                                             const std::string& name, const std::string& uid);

// The job that is derived from the one with that uid (Engine::FindDerived).
absl::StatusOr<std::shared_ptr<Job>> FindDerived(const Engine& engine, const Caller& caller,
                                                 const std::string& name,
                                                 const std::string& from_uid);

// Whether the job has been closed, or the caller may not use it any more. Cheap; keeps nothing of
// the job alive. The engine outlives it.
std::function<bool()> IsGone(const Engine& engine, const Caller& caller, const Job& job);

struct FoundParameter {
  std::shared_ptr<Job> job;
  int index = 0;
  const ParameterSpec& spec() const { return job->spec().layout.parameters[index]; }
  int64_t elements() const { return job->layout().place(index).elements; }
};
// By "jobs/JOB/parameters/PARAMETER". INVALID_ARGUMENT: another form. NOT_FOUND, also if the job's
// unique id is not `uid` (empty: any).
absl::StatusOr<FoundParameter> FindParameter(const Engine& engine, const Caller& caller,
                                             const std::string& name, const std::string& uid = "");

// Of a trainable parameter, the elements that this member of the job has; ascending, and as few
// ranges as possible. On one host all.
std::vector<ElementRange> ElementsHere(const Job& job, int parameter);
// UNIMPLEMENTED (OTHER_MEMBERS_HAVE_PARTS): not all of them.
absl::Status CheckIsHere(const Job& job, int parameter);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_FIND_JOB_H_
