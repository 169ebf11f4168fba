#include "server/job_service.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "proto/status.h"
#include "server/find_job.h"
#include "server/job_message.h"
#include "server/transport_settings.h"

namespace ballast::server {
namespace {

absl::Status Create(Engine& engine, const v1::CreateJobRequest& request, v1::Job& response) {
  BALLAST_ASSIGN_OR_RETURN(JobSpec spec, proto::FromProto(request.job()));
  // A reply names parameters in full, so it may be larger than the request, and grows in training.
  const size_t reply_bytes = LargestMessageBytes(spec);
  if (reply_bytes > size_t{kMaxMessageBytes}) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the description of job ", spec.name, " may take ", reply_bytes, " bytes in a reply, of ",
        kMaxMessageBytes, " at most; give the job and its parameters shorter names"));
  }
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, engine.CreateJob(std::move(spec)));
  response = ToMessage(engine, *job, /*with_parameters=*/true);
  if (const std::string& why = response.speculation().unavailable(); !why.empty()) {
    spdlog::warn("job {} updates after each decision, not ahead of it: {}", job->spec().name, why);
  }
  return absl::OkStatus();
}

absl::Status Get(const Engine& engine, const v1::GetJobRequest& request, v1::Job& response) {
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, FindJob(engine, request.name()));
  response = ToMessage(engine, *job, request.with_parameters());
  return absl::OkStatus();
}

absl::Status Close(Engine& engine, const v1::CloseJobRequest& request) {
  BALLAST_ASSIGN_OR_RETURN(const proto::ResourceName name, proto::ParseJobName(request.name()));
  return engine.CloseJob(name.job);
}

absl::Status Attach(Engine& engine, const grpc::ServerContext& context,
                    const v1::AttachWorkerRequest& request, v1::AttachWorkerResponse& response) {
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, FindJob(engine, request.name()));
  AttachRequest attach = {.rank = request.rank(),
                          .process_id = request.process_id(),
                          .uid = request.uid(),
                          .expected_committed_step = {},
                          .spec = {},
                          .generation = {},
                          .still_wanted = [&context] { return !context.IsCancelled(); }};
  if (request.has_generation()) attach.generation = request.generation();
  attach.rejoin = request.rejoin();
  if (request.has_expected_committed_step()) {
    attach.expected_committed_step = request.expected_committed_step();
  }
  if (request.has_job()) {
    BALLAST_ASSIGN_OR_RETURN(attach.spec, proto::FromProto(request.job()));
  }
  BALLAST_ASSIGN_OR_RETURN(const Attachment attachment, job->Attach(attach));
  response.set_uid(job->uid());
  response.set_instance_id(engine.instance_id());
  response.set_generation(attachment.generation);
  response.set_committed_step(attachment.committed_step);
  response.set_awaiting_weights(attachment.awaiting_weights);
  *response.mutable_job() = ToMessage(engine, *job, /*with_parameters=*/true);
  return absl::OkStatus();
}

absl::Status Abort(const Engine& engine, const v1::AbortStepRequest& request,
                   v1::AbortStepResponse& response) {
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, FindJob(engine, request.name()));
  BALLAST_ASSIGN_OR_RETURN(const uint64_t step, job->AbortStep());
  response.set_aborted_step(step);
  return absl::OkStatus();
}

absl::Status Update(const Engine& engine, const v1::UpdateGroupRequest& request,
                    v1::ParamGroup& response) {
  BALLAST_ASSIGN_OR_RETURN(const proto::ResourceName name, proto::ParseGroupName(request.name()));
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, engine.FindJob(name.job));
  BALLAST_ASSIGN_OR_RETURN(const HyperParameterOverrides changes,
                           proto::OverridesFromProto(request.changes()));
  const std::vector<GroupSpec>& groups = job->spec().groups;
  for (size_t group = 0; group < groups.size(); ++group) {
    if (groups[group].name != name.child) continue;
    BALLAST_ASSIGN_OR_RETURN(const HyperParameters values,
                             job->UpdateGroup(static_cast<int>(group), changes));
    response = ToMessage(*job, static_cast<int>(group), values);
    return absl::OkStatus();
  }
  return absl::NotFoundError(absl::StrCat("job ", name.job, " has no group '", name.child, "'"));
}

}  // namespace

grpc::Status JobService::CreateJob(grpc::ServerContext*, const v1::CreateJobRequest* request,
                                   v1::Job* response) {
  return proto::ToGrpc(Create(engine_, *request, *response));
}

grpc::Status JobService::GetJob(grpc::ServerContext*, const v1::GetJobRequest* request,
                                v1::Job* response) {
  return proto::ToGrpc(Get(engine_, *request, *response));
}

grpc::Status JobService::ListJobs(grpc::ServerContext*, const v1::ListJobsRequest*,
                                  v1::ListJobsResponse* response) {
  for (const std::shared_ptr<Job>& job : engine_.ListJobs()) {
    *response->add_jobs() = ToMessage(engine_, *job, /*with_parameters=*/false);
  }
  response->set_instance_id(engine_.instance_id());
  response->set_memory_used_bytes(engine_.memory().used_bytes());
  response->set_memory_limit_bytes(engine_.memory().limit_bytes());
  return grpc::Status::OK;
}

grpc::Status JobService::CloseJob(grpc::ServerContext*, const v1::CloseJobRequest* request,
                                  v1::CloseJobResponse*) {
  return proto::ToGrpc(Close(engine_, *request));
}

grpc::Status JobService::AttachWorker(grpc::ServerContext* context,
                                      const v1::AttachWorkerRequest* request,
                                      v1::AttachWorkerResponse* response) {
  return proto::ToGrpc(Attach(engine_, *context, *request, *response));
}

grpc::Status JobService::AbortStep(grpc::ServerContext*, const v1::AbortStepRequest* request,
                                   v1::AbortStepResponse* response) {
  return proto::ToGrpc(Abort(engine_, *request, *response));
}

grpc::Status JobService::UpdateGroup(grpc::ServerContext*, const v1::UpdateGroupRequest* request,
                                     v1::ParamGroup* response) {
  return proto::ToGrpc(Update(engine_, *request, *response));
}

}  // namespace ballast::server
