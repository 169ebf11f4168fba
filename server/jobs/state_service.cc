#include "server/jobs/state_service.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "server/find_job.h"
#include "server/jobs/state_reader.h"

namespace ballast::server {
namespace {

v1::Plane ToProto(Plane plane) {
  switch (plane) {
    case Plane::kMaster:
      return v1::MASTER;
    case Plane::kExpAvg:
      return v1::EXP_AVG;
    case Plane::kExpAvgSq:
      return v1::EXP_AVG_SQ;
    case Plane::kMaxExpAvgSq:
      return v1::MAX_EXP_AVG_SQ;
  }
  return v1::PLANE_UNSPECIFIED;
}

void AddPlane(const PlaneSummary& summary, Plane plane, v1::StateSummary& response) {
  v1::PlaneSummary& to = *response.add_planes();
  to.set_plane(ToProto(plane));
  to.set_norm(summary.norm);
  to.set_mean(summary.mean);
  to.set_min(summary.min);
  to.set_max(summary.max);
  to.set_zeros(summary.zeros);
  to.set_non_finite(summary.non_finite);
  to.mutable_magnitude_histogram()->Add(summary.magnitude_histogram.begin(),
                                        summary.magnitude_histogram.end());
}

void FillSummary(const FoundParameter& parameter, const Snapshot& snapshot,
                 v1::StateSummary& response) {
  const JobSpec& job = parameter.job->spec();
  response.set_name(proto::ParameterName(job.name, parameter.spec().name));
  response.set_step(snapshot.step());
  response.mutable_shape()->Add(parameter.spec().shape.begin(), parameter.spec().shape.end());
  response.set_group(proto::GroupName(job.name, job.groups[parameter.spec().group].name));
  response.set_trainable(parameter.spec().trainable);
  response.set_update_count(snapshot.update_count(parameter.index));
  if (!parameter.spec().trainable) return;
  for (const Plane plane :
       {Plane::kMaster, Plane::kExpAvg, Plane::kExpAvgSq, Plane::kMaxExpAvgSq}) {
    if (!snapshot.has_plane(parameter.index, plane)) continue;
    AddPlane(Summarize(snapshot, parameter.index, parameter.elements(), plane), plane, response);
  }
}

absl::Status CheckDirectory(const std::string& directory) {
  // A file system would take the part before it.
  if (directory.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError("directory has a zero byte; give the path alone");
  }
  if (!directory.empty() && directory.front() == '/') return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("directory is '", directory, "'; give an absolute path on the service's host"));
}

// The job whose state is saved to the request's directory, or loaded from it.
template <typename Request>
absl::StatusOr<std::shared_ptr<Job>> FindJobOf(const Engine& engine, const Request& request) {
  BALLAST_RETURN_IF_ERROR(CheckDirectory(request.directory()));
  return FindJob(engine, request.name());
}

}  // namespace

grpc::ServerWriteReactor<v1::ReadStateResponse>* StateService::ReadState(
    grpc::CallbackServerContext*, const v1::ReadStateRequest* request) {
  return new StateReader(engine_, pools_, *request);
}

// Only the snapshot waits for training, and it copies nothing; its planes are read in the pool.
grpc::ServerUnaryReactor* StateService::SummarizeState(grpc::CallbackServerContext*,
                                                       const v1::SummarizeStateRequest* request,
                                                       v1::StateSummary* response) {
  return UnaryCall::Start(pools_.readers,
                          [=, this](UnaryCall& call) { Summarize(call, *request, *response); });
}

void StateService::Summarize(UnaryCall& call, const v1::SummarizeStateRequest& request,
                             v1::StateSummary& response) {
  const absl::StatusOr<FoundParameter> parameter = FindParameter(engine_, request.name());
  if (!parameter.ok()) return call.End(parameter.status());
  call.Await<Snapshot>(
      [&](Done<Snapshot> done) {
        return parameter->job->TakeSnapshot({parameter->index}, std::move(done));
      },
      [parameter = *parameter, &response](const Snapshot& snapshot) {
        FillSummary(parameter, snapshot, response);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* StateService::SaveJob(grpc::CallbackServerContext*,
                                                const v1::SaveJobRequest* request,
                                                v1::SaveJobResponse* response) {
  return UnaryCall::Start(pools_.control,
                          [=, this](UnaryCall& call) { Save(call, *request, *response); });
}

void StateService::Save(UnaryCall& call, const v1::SaveJobRequest& request,
                        v1::SaveJobResponse& response) {
  const absl::StatusOr<std::shared_ptr<Job>> job = FindJobOf(engine_, request);
  if (!job.ok()) return call.End(job.status());
  call.Await<CheckpointInfo>(
      [&](Done<CheckpointInfo> done) { return (*job)->Save(request.directory(), std::move(done)); },
      [&request, &response](const CheckpointInfo& saved) {
        response.set_directory(request.directory());
        response.set_step(saved.step);
        response.set_bytes(saved.size_bytes);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* StateService::LoadJob(grpc::CallbackServerContext*,
                                                const v1::LoadJobRequest* request,
                                                v1::LoadJobResponse* response) {
  return UnaryCall::Start(pools_.control,
                          [=, this](UnaryCall& call) { Load(call, *request, *response); });
}

void StateService::Load(UnaryCall& call, const v1::LoadJobRequest& request,
                        v1::LoadJobResponse& response) {
  const absl::StatusOr<std::shared_ptr<Job>> job = FindJobOf(engine_, request);
  if (!job.ok()) return call.End(job.status());
  call.Await<CheckpointInfo>(
      [&](Done<CheckpointInfo> done) { return (*job)->Load(request.directory(), std::move(done)); },
      [&response](const CheckpointInfo& loaded) {
        response.set_step(loaded.step);
        response.set_generation(loaded.generation);
        return absl::OkStatus();
      });
}

}  // namespace ballast::server
