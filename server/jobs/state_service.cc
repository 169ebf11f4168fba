#include "server/jobs/state_service.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/checkpoint_name.h"
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

v1::Checkpoint ToProto(const FoundCheckpoint& found, const CheckpointDirectory* names) {
  const CheckpointFacts& facts = found.facts;
  v1::Checkpoint to;
  to.set_directory(facts.directory);
  to.set_name(names != nullptr ? names->NameOf(facts.directory) : facts.directory);
  to.set_job(facts.job);
  to.set_uid(facts.uid);
  to.set_step(facts.step);
  to.set_generation(facts.generation);
  to.set_size_bytes(facts.size_bytes);
  to.set_saved_unix_ms(facts.saved_unix_ms);
  to.set_asked_for(facts.asked_for);
  to.set_problem(std::string(found.problem.message()));
  return to;
}

// A job's checkpoints are under its name, unless another place is given.
std::string DirectoryOf(const std::string& given, const Job& job) {
  return given.empty() ? job.spec().name : given;
}

}  // namespace

grpc::ServerWriteReactor<v1::ReadStateResponse>* StateService::ReadState(
    grpc::CallbackServerContext* context, const v1::ReadStateRequest* request) {
  return new StateReader(engine_, pools_, *context,
                         access_.Admit(*context, "StateService.ReadState"), *request);
}

// Only the snapshot waits for training, and it copies nothing; its planes are read in the pool.
grpc::ServerUnaryReactor* StateService::SummarizeState(grpc::CallbackServerContext* context,
                                                       const v1::SummarizeStateRequest* request,
                                                       v1::StateSummary* response) {
  return UnaryCall::Start(access_.Admit(*context, "StateService.SummarizeState"), pools_.readers,
                          [=, this](UnaryCall& call) { Summarize(call, *request, *response); });
}

void StateService::Summarize(UnaryCall& call, const v1::SummarizeStateRequest& request,
                             v1::StateSummary& response) {
  const absl::StatusOr<FoundParameter> parameter =
      FindParameter(engine_, call.caller(), request.name());
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

grpc::ServerUnaryReactor* StateService::SaveJob(grpc::CallbackServerContext* context,
                                                const v1::SaveJobRequest* request,
                                                v1::SaveJobResponse* response) {
  return UnaryCall::Start(access_.Admit(*context, "StateService.SaveJob", request), pools_.control,
                          [=, this](UnaryCall& call) { Save(call, *request, *response); });
}

void StateService::Save(UnaryCall& call, const v1::SaveJobRequest& request,
                        v1::SaveJobResponse& response) {
  const absl::StatusOr<std::shared_ptr<Job>> job = FindJob(engine_, call.caller(), request.name());
  if (!job.ok()) return call.End(job.status());
  const absl::StatusOr<std::string> folder =
      PathOf(call.caller(), DirectoryOf(request.directory(), **job));
  if (!folder.ok()) return call.End(folder.status());
  call.Await<CheckpointInfo>(
      [&](Done<CheckpointInfo> done) {
        return (*job)->Save({.folder = *folder, .background = request.background()},
                            std::move(done));
      },
      [&response](const CheckpointInfo& saved) {
        response.set_directory(saved.directory);
        response.set_step(saved.step);
        response.set_bytes(saved.size_bytes);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* StateService::LoadJob(grpc::CallbackServerContext* context,
                                                const v1::LoadJobRequest* request,
                                                v1::LoadJobResponse* response) {
  return UnaryCall::Start(access_.Admit(*context, "StateService.LoadJob", request), pools_.control,
                          [=, this](UnaryCall& call) { Load(call, *request, *response); });
}

void StateService::Load(UnaryCall& call, const v1::LoadJobRequest& request,
                        v1::LoadJobResponse& response) {
  const absl::StatusOr<std::shared_ptr<Job>> job = FindJob(engine_, call.caller(), request.name());
  if (!job.ok()) return call.End(job.status());
  const absl::StatusOr<std::string> path =
      PathOf(call.caller(), DirectoryOf(request.directory(), **job));
  if (!path.ok()) return call.End(path.status());
  call.Await<CheckpointInfo>(
      [&](Done<CheckpointInfo> done) {
        return (*job)->Load({.path = *path, .weights_only = request.weights_only()},
                            std::move(done));
      },
      [&response](const CheckpointInfo& loaded) {
        response.set_step(loaded.step);
        *response.mutable_generation() = proto::ToProto(loaded.generation);
        response.set_directory(loaded.directory);
        for (const std::string& damage : loaded.passed_over) response.add_passed_over(damage);
        return absl::OkStatus();
      });
}

absl::StatusOr<std::string> StateService::PathOf(const Caller& caller,
                                                 const std::string& directory) const {
  if (IsCheckpointName(directory)) {
    BALLAST_RETURN_IF_ERROR(caller.Check(directory.substr(0, directory.find('/'))));
  }
  return paths_.Resolve(directory, caller.peer());
}

grpc::ServerUnaryReactor* StateService::ListCheckpoints(grpc::CallbackServerContext* context,
                                                        const v1::ListCheckpointsRequest* request,
                                                        v1::ListCheckpointsResponse* response) {
  return UnaryCall::Start(access_.Admit(*context, "StateService.ListCheckpoints", request),
                          pools_.control, [=, this](UnaryCall& call) {
                            Look(call, request->directory(), /*verified=*/false, *response);
                          });
}

grpc::ServerUnaryReactor* StateService::VerifyCheckpoints(
    grpc::CallbackServerContext* context, const v1::VerifyCheckpointsRequest* request,
    v1::ListCheckpointsResponse* response) {
  return UnaryCall::Start(access_.Admit(*context, "StateService.VerifyCheckpoints", request),
                          pools_.control, [=, this](UnaryCall& call) {
                            Look(call, request->directory(), /*verified=*/true, *response);
                          });
}

void StateService::Look(UnaryCall& call, const std::string& directory, bool verified,
                        v1::ListCheckpointsResponse& response) {
  const bool all = directory.empty() && !verified;
  const absl::StatusOr<std::string> path = all ? std::string() : PathOf(call.caller(), directory);
  if (!path.ok()) return call.End(path.status());
  call.Await<std::vector<FoundCheckpoint>>(
      [&](Done<std::vector<FoundCheckpoint>> done) {
        engine_.LookForCheckpoints(*path, verified, std::move(done));
        return Pending();
      },
      [this, all, caller = call.caller(), &response](const std::vector<FoundCheckpoint>& found) {
        for (const FoundCheckpoint& each : found) {
          v1::Checkpoint checkpoint = ToProto(each, engine_.checkpoints());
          const std::string folder = checkpoint.name().substr(0, checkpoint.name().find('/'));
          // Of all those that are the caller's to see.
          if (!all || caller.MayUse(folder)) *response.add_checkpoints() = std::move(checkpoint);
        }
        return absl::OkStatus();
      });
}

}  // namespace ballast::server
