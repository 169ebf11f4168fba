#include "server/jobs/state_service.h"

#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "proto/status.h"
#include "server/find_job.h"

namespace ballast::server {
namespace {

static_assert(std::endian::native == std::endian::little, "payloads are little-endian");

constexpr int64_t kElementsPerMessage = 64 << 10;

struct FoundParameter {
  std::shared_ptr<Job> job;
  int index = 0;
  const ParameterSpec& spec() const { return job->spec().layout.parameters[index]; }
  int64_t elements() const { return job->layout().place(index).elements; }
};

absl::StatusOr<FoundParameter> FindParameter(const Engine& engine, const std::string& name) {
  BALLAST_ASSIGN_OR_RETURN(const proto::ResourceName parsed, proto::ParseParameterName(name));
  BALLAST_ASSIGN_OR_RETURN(std::shared_ptr<Job> job, engine.FindJob(parsed.job));
  const int index = job->layout().FindParameter(parsed.child);
  if (index < 0) {
    return absl::NotFoundError(
        absl::StrCat("job ", parsed.job, " has no parameter '", parsed.child, "'"));
  }
  return FoundParameter{.job = std::move(job), .index = index};
}

absl::StatusOr<Plane> FromProto(v1::Plane plane) {
  switch (plane) {
    case v1::MASTER:
      return Plane::kMaster;
    case v1::EXP_AVG:
      return Plane::kExpAvg;
    case v1::EXP_AVG_SQ:
      return Plane::kExpAvgSq;
    case v1::MAX_EXP_AVG_SQ:
      return Plane::kMaxExpAvgSq;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("plane is ", static_cast<int>(plane),
                       ", which is none of MASTER, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ"));
  }
}

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

absl::Status SendState(const Engine& engine, const v1::ReadStateRequest& request,
                       grpc::ServerWriter<v1::ReadStateResponse>& writer) {
  BALLAST_ASSIGN_OR_RETURN(const Plane plane, FromProto(request.plane()));
  BALLAST_ASSIGN_OR_RETURN(const FoundParameter parameter, FindParameter(engine, request.name()));
  if (!parameter.spec().trainable) {
    return absl::InvalidArgumentError(
        absl::StrCat(request.name(), " is frozen and has no state here"));
  }
  BALLAST_ASSIGN_OR_RETURN(const Snapshot snapshot, parameter.job->TakeSnapshot({parameter.index}));
  if (!snapshot.has_plane(parameter.index, plane)) {
    return absl::InvalidArgumentError(absl::StrCat(request.name(), " has no plane ", Name(plane),
                                                   ": its group does not use amsgrad"));
  }
  v1::ReadStateResponse message;
  message.set_step(snapshot.step());
  message.set_update_count(snapshot.update_count(parameter.index));
  message.mutable_shape()->Add(parameter.spec().shape.begin(), parameter.spec().shape.end());
  std::vector<float> piece;
  int64_t offset = 0;
  do {  // A parameter of no elements still has a first message.
    piece.resize(std::min(kElementsPerMessage, parameter.elements() - offset));
    snapshot.Read(parameter.index, plane, offset, absl::MakeSpan(piece));
    message.set_offset(offset);
    message.set_data(piece.data(), piece.size() * sizeof(float));
    if (!writer.Write(message)) return absl::CancelledError("the reader is gone");
    message.Clear();
    offset += static_cast<int64_t>(piece.size());
  } while (offset < parameter.elements());
  return absl::OkStatus();
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

absl::Status SummarizeParameter(const Engine& engine, const v1::SummarizeStateRequest& request,
                                v1::StateSummary& response) {
  BALLAST_ASSIGN_OR_RETURN(const FoundParameter parameter, FindParameter(engine, request.name()));
  const Job& job = *parameter.job;
  BALLAST_ASSIGN_OR_RETURN(const Snapshot snapshot, parameter.job->TakeSnapshot({parameter.index}));
  response.set_name(proto::ParameterName(job.spec().name, parameter.spec().name));
  response.set_step(snapshot.step());
  response.mutable_shape()->Add(parameter.spec().shape.begin(), parameter.spec().shape.end());
  response.set_group(
      proto::GroupName(job.spec().name, job.spec().groups[parameter.spec().group].name));
  response.set_trainable(parameter.spec().trainable);
  response.set_update_count(snapshot.update_count(parameter.index));
  if (!parameter.spec().trainable) return absl::OkStatus();
  for (const Plane plane :
       {Plane::kMaster, Plane::kExpAvg, Plane::kExpAvgSq, Plane::kMaxExpAvgSq}) {
    if (!snapshot.has_plane(parameter.index, plane)) continue;
    AddPlane(Summarize(snapshot, parameter.index, parameter.elements(), plane), plane, response);
  }
  return absl::OkStatus();
}

absl::Status CheckDirectory(const std::string& directory) {
  if (!directory.empty() && directory.front() == '/') return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("directory is '", directory, "'; give an absolute path on the service's host"));
}

absl::Status Save(const Engine& engine, const v1::SaveJobRequest& request,
                  v1::SaveJobResponse& response) {
  BALLAST_RETURN_IF_ERROR(CheckDirectory(request.directory()));
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, FindJob(engine, request.name()));
  BALLAST_ASSIGN_OR_RETURN(const CheckpointInfo saved, job->Save(request.directory()));
  response.set_directory(request.directory());
  response.set_step(saved.step);
  response.set_bytes(saved.size_bytes);
  return absl::OkStatus();
}

absl::Status Load(const Engine& engine, const v1::LoadJobRequest& request,
                  v1::LoadJobResponse& response) {
  BALLAST_RETURN_IF_ERROR(CheckDirectory(request.directory()));
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, FindJob(engine, request.name()));
  BALLAST_ASSIGN_OR_RETURN(const CheckpointInfo loaded, job->Load(request.directory()));
  response.set_step(loaded.step);
  response.set_generation(loaded.generation);
  return absl::OkStatus();
}

}  // namespace

grpc::Status StateService::ReadState(grpc::ServerContext*, const v1::ReadStateRequest* request,
                                     grpc::ServerWriter<v1::ReadStateResponse>* writer) {
  return proto::ToGrpc(SendState(engine_, *request, *writer));
}

grpc::Status StateService::SummarizeState(grpc::ServerContext*,
                                          const v1::SummarizeStateRequest* request,
                                          v1::StateSummary* response) {
  return proto::ToGrpc(SummarizeParameter(engine_, *request, *response));
}

grpc::Status StateService::SaveJob(grpc::ServerContext*, const v1::SaveJobRequest* request,
                                   v1::SaveJobResponse* response) {
  return proto::ToGrpc(Save(engine_, *request, *response));
}

grpc::Status StateService::LoadJob(grpc::ServerContext*, const v1::LoadJobRequest* request,
                                   v1::LoadJobResponse* response) {
  return proto::ToGrpc(Load(engine_, *request, *response));
}

}  // namespace ballast::server
