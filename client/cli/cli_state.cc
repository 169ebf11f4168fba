// state and write-state.
#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/v1/tool.pb.h"
#include "client/calls/service.h"
#include "client/cli/cli_command.h"
#include "client/cli/cli_print.h"
#include "client/cli/cli_text.h"
#include "client/cli/npy.h"
#include "cpu_optimizer_service/common/plane.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "proto/message_json.h"

namespace ballast::client::cli {
namespace {

struct StateRequest {
  std::string job;
  std::string parameter;
  v1::Plane plane = v1::PLANE_UNSPECIFIED;  // All planes.
  std::string file;                         // That is written or read; empty: a summary is printed.
};

absl::StatusOr<std::string> Summarize(Service& service, const StateRequest& request, bool json) {
  v1::SummarizeStateRequest message;
  message.set_name(proto::ParameterName(request.job, request.parameter));
  BALLAST_ASSIGN_OR_RETURN(auto summary,
                           service.Call<v1::StateSummary>("StateService/SummarizeState", message));
  // The service computes all planes in one pass; the one that was asked for is picked here.
  if (request.plane != v1::PLANE_UNSPECIFIED) {
    auto& planes = *summary.mutable_planes();
    planes.erase(std::remove_if(
                     planes.begin(), planes.end(),
                     [&](const v1::PlaneSummary& plane) { return plane.plane() != request.plane; }),
                 planes.end());
    if (planes.empty()) {
      return absl::NotFoundError(
          absl::StrCat("parameter ", request.parameter, " has no plane ", Name(request.plane)));
    }
  }
  return json ? proto::ToJson(summary) : SummaryText(summary);
}

// Writes one plane to a file as its parts arrive.
class PlaneDownload {
 public:
  explicit PlaneDownload(const std::string& path) : path_(path) {}

  // What has arrived before is dropped.
  void Begin() {
    // The writer removes its unfinished file. Another one may be made only after that
    // (output_file.h).
    writer_ = nullptr;
    bytes_ = 0;
  }
  absl::Status Receive(const v1::ReadStateResponse& part) {
    // Only the first part of an answer has the step and the shape.
    if (writer_ == nullptr) {
      step_ = part.step();
      shape_.assign(part.shape().begin(), part.shape().end());
      BALLAST_ASSIGN_OR_RETURN(writer_, NpyWriter::Create(path_, shape_));
    }
    // The file is written in one pass, so a gap or a repeated part would be wrong data.
    if (part.offset() * static_cast<int64_t>(sizeof(float)) != bytes_) {
      return absl::DataLossError(absl::StrCat("the service sent elements from ", part.offset(),
                                              " on, expected from ", bytes_ / sizeof(float)));
    }
    bytes_ += static_cast<int64_t>(part.data().size());
    return writer_->Append(part.data());
  }
  absl::Status Finish() {
    if (writer_ == nullptr) return absl::DataLossError("the service sent nothing");
    return writer_->Commit();
  }

  uint64_t step() const { return step_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t bytes() const { return bytes_; }

 private:
  const std::string path_;
  std::unique_ptr<NpyWriter> writer_;
  uint64_t step_ = 0;
  std::vector<int64_t> shape_;
  int64_t bytes_ = 0;
};

absl::StatusOr<std::string> WriteFile(Service& service, const StateRequest& request, bool json) {
  v1::ReadStateRequest message;
  message.set_name(proto::ParameterName(request.job, request.parameter));
  message.set_plane(request.plane == v1::PLANE_UNSPECIFIED ? v1::MASTER : request.plane);
  PlaneDownload download(request.file);
  BALLAST_RETURN_IF_ERROR(service.ReadState(
      message, [&] { download.Begin(); },
      [&](const v1::ReadStateResponse& part) { return download.Receive(part); }));
  BALLAST_RETURN_IF_ERROR(download.Finish());
  if (json) {
    v1::WrittenPlane written;
    written.set_file(request.file);
    written.set_plane(message.plane());
    written.set_step(download.step());
    written.mutable_shape()->Assign(download.shape().begin(), download.shape().end());
    written.set_bytes(download.bytes());
    return proto::ToJson(written);
  }
  return absl::StrCat("wrote ", Name(message.plane()), " of ", request.parameter, " at step ",
                      download.step(), ", fp32 ", FormatShape(download.shape()), ", ",
                      FormatBytes(download.bytes()), ", to ", request.file, "\n");
}

constexpr size_t kBytesOfMessage = 256 << 10;

absl::StatusOr<std::string> WriteState(Service& service, const StateRequest& request, bool json) {
  BALLAST_ASSIGN_OR_RETURN(NpyReader file, NpyReader::Open(request.file));
  BALLAST_ASSIGN_OR_RETURN(const v1::Job job, service.GetJob(request.job, true));
  const std::string name = proto::ParameterName(request.job, request.parameter);
  for (const v1::Parameter& parameter : job.parameters()) {
    const std::vector<int64_t> shape(parameter.shape().begin(), parameter.shape().end());
    if (parameter.name() != name || shape == file.shape()) continue;
    return absl::InvalidArgumentError(absl::StrCat(request.file, " has shape ",
                                                   FormatShape(file.shape()), ", and ",
                                                   request.parameter, " has ", FormatShape(shape)));
  }
  v1::OpenWriteState open;
  open.set_name(name);
  open.set_plane(request.plane);
  BALLAST_ASSIGN_OR_RETURN(const v1::WriteStateResponse written,
                           service.WriteState(open, [&] { return file.Read(kBytesOfMessage); }));
  if (json) return proto::ToJson(written);
  return absl::StrCat(Name(request.plane), " of ", request.parameter, " is ", request.file,
                      " now, after step ", written.step(), "\n");
}

absl::StatusOr<v1::Plane> PlaneOf(const Arguments& arguments) {
  const std::string name = arguments.Get("plane", "");
  if (name.empty()) return v1::PLANE_UNSPECIFIED;
  const auto found = std::ranges::find(kPlaneNames, name);
  if (found != kPlaneNames.end()) {
    return proto::ToProto(static_cast<Plane>(found - kPlaneNames.begin()));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("no plane '", name, "'; there are ", absl::StrJoin(kPlaneNames, ", ")));
}

absl::StatusOr<Action> PrepareState(const Arguments& arguments) {
  StateRequest request{.job = arguments.positional(0),
                       .parameter = arguments.positional(1),
                       .file = arguments.Get("out", "")};
  if (arguments.Has("out") && request.file.empty()) {
    return absl::InvalidArgumentError("--out needs the name of a file");
  }
  BALLAST_ASSIGN_OR_RETURN(request.plane, PlaneOf(arguments));
  return [request](Service& service, bool json) {
    return request.file.empty() ? Summarize(service, request, json)
                                : WriteFile(service, request, json);
  };
}

absl::StatusOr<Action> PrepareWriteState(const Arguments& arguments) {
  StateRequest request{.job = arguments.positional(0),
                       .parameter = arguments.positional(1),
                       .file = arguments.positional(2)};
  BALLAST_ASSIGN_OR_RETURN(request.plane, PlaneOf(arguments));
  if (request.plane == v1::PLANE_UNSPECIFIED) {
    return absl::InvalidArgumentError(
        absl::StrCat("write-state needs --plane: ", absl::StrJoin(kPlaneNames, ", ")));
  }
  return [request](Service& service, bool json) { return WriteState(service, request, json); };
}

}  // namespace

Command StateCommand() {
  return {
      .spec = {.name = "state",
               .positionals = {"JOB", "PARAMETER"},
               .summary = "optimizer state of a parameter, also during a run",
               .details = "Without --out: norm, extremes and magnitudes of every plane, computed "
                          "in the\nservice. With --out: a plane's values at the committed step.",
               .flags = {{"plane", "PLANE",
                          "master, or another that the group's rule has (default: all, or "
                          "master with --out)"},
                         {"out", "FILE.npy", "write the plane to this file, for NumPy"}}},
      .timeout_seconds = 600,
      .prepare = PrepareState};
}

Command WriteStateCommand() {
  return {
      .spec =
          {.name = "write-state",
           .positionals = {"JOB", "PARAMETER", "FILE.npy"},
           .summary = "writes a plane of a parameter between two steps of a run",
           .details =
               "The file has the whole plane in fp32. It is written once no step is in progress, "
               "all or\nnothing, and the run goes on. Trainers get written weights (master) with "
               "those of the next\nstep. The step before cannot be undone afterwards.",
           .flags = {{"plane", "PLANE", "master, or another that the group's rule has; required"}}},
      .timeout_seconds = 600,
      .prepare = PrepareWriteState};
}

}  // namespace ballast::client::cli
