#include "server/jobs/job_service.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "proto/status.h"
#include "server/find_job.h"
#include "server/jobs/job_message.h"
#include "server/jobs/trace_message.h"
#include "server/transport_settings.h"

namespace ballast::server {
namespace {

constexpr uint32_t kMostTracedSteps = 1000;

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

// To the process that has just attached. One that reopens its stream has its memory already.
void OfferSharedMemory(SharedMemoryServer& server, const std::shared_ptr<Job>& job,
                       const v1::AttachWorkerRequest& request, v1::AttachWorkerResponse& response) {
  if (!request.shared_memory() || request.has_generation()) return;
  std::optional<v1::SharedMemoryOffer> offer =
      server.Offer(job, {.rank = request.rank(),
                         .process_id = request.process_id(),
                         .generation = response.generation()});
  if (offer) *response.mutable_shared_memory() = *std::move(offer);
}

absl::Status Attach(Engine& engine, SharedMemoryServer* server, const grpc::ServerContext& context,
                    const v1::AttachWorkerRequest& request, v1::AttachWorkerResponse& response) {
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, FindJob(engine, request.name()));
  AttachRequest attach = {.rank = request.rank(),
                          .process_id = request.process_id(),
                          .uid = request.uid(),
                          .expected_committed_step = {},
                          .spec = {},
                          .generation = {}};
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
  if (server != nullptr) OfferSharedMemory(*server, job, request, response);
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

// When a trace must end for its answer to arrive in the caller's time.
std::chrono::system_clock::time_point TraceEnd(const grpc::ServerContext& context) {
  const auto now = std::chrono::system_clock::now();
  const auto given = std::min<std::chrono::system_clock::duration>(context.deadline() - now,
                                                                   std::chrono::hours(1));
  return now + given - given / 10;
}

absl::Status Trace(const Engine& engine, const grpc::ServerContext& context,
                   const v1::TraceJobRequest& request,
                   grpc::ServerWriter<v1::TraceJobResponse>& writer) {
  if (request.steps() == 0 || request.steps() > kMostTracedSteps) {
    return absl::InvalidArgumentError(
        absl::StrCat("a trace of ", request.steps(), " steps; ask for 1 to ", kMostTracedSteps));
  }
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, FindJob(engine, request.name()));
  const auto end = TraceEnd(context);
  BALLAST_ASSIGN_OR_RETURN(const ballast::Trace trace, job->TraceSteps(request.steps(), [&] {
    return !context.IsCancelled() && std::chrono::system_clock::now() < end;
  }));
  const bool sent = ForEachMessage(
      *job, trace, [&](const v1::TraceJobResponse& message) { return writer.Write(message); });
  return sent ? absl::OkStatus() : absl::CancelledError("the reader is gone");
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
  return proto::ToGrpc(Attach(engine_, shared_memory_server_, *context, *request, *response));
}

grpc::Status JobService::AbortStep(grpc::ServerContext*, const v1::AbortStepRequest* request,
                                   v1::AbortStepResponse* response) {
  return proto::ToGrpc(Abort(engine_, *request, *response));
}

grpc::Status JobService::UpdateGroup(grpc::ServerContext*, const v1::UpdateGroupRequest* request,
                                     v1::ParamGroup* response) {
  return proto::ToGrpc(Update(engine_, *request, *response));
}

grpc::Status JobService::TraceJob(grpc::ServerContext* context, const v1::TraceJobRequest* request,
                                  grpc::ServerWriter<v1::TraceJobResponse>* writer) {
  return proto::ToGrpc(Trace(engine_, *context, *request, *writer));
}

}  // namespace ballast::server
