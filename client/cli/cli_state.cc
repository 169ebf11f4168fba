// state and write-state.
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "client/cli/cli_command.h"
#include "client/cli/cli_json.h"
#include "client/cli/cli_print.h"
#include "client/cli/cli_service.h"
#include "client/cli/cli_text.h"
#include "client/cli/npy.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/suggestions.h"
#include "proto/convert.h"

namespace ballast::client::cli {
namespace {

struct StateRequest {
  std::string job;
  std::string parameter;
  v1::Plane plane = v1::PLANE_UNSPECIFIED;  // All planes.
  std::string file;                         // That is written or read; empty: a summary is printed.
};

absl::Status SuggestParameter(Service& service, const absl::Status& status,
                              const StateRequest& request) {
  // NOT_FOUND may also mean that there is no such job: then GetJob's error says so.
  if (!absl::IsNotFound(status)) return status;
  BALLAST_ASSIGN_OR_RETURN(const v1::Job there, service.GetJob(request.job, true));
  std::vector<std::string> names;
  for (const v1::Parameter& known : there.parameters()) {
    names.push_back(BareName(known.name()));
    // The parameter is there, so something else was not found: the first error says what.
    if (names.back() == request.parameter) return status;
  }
  return absl::NotFoundError(absl::StrCat("job ", request.job, " has no parameter ",
                                          request.parameter, Suggestion(request.parameter, names)));
}

absl::StatusOr<std::string> Summarize(Service& service, const StateRequest& request, bool json) {
  v1::SummarizeStateRequest message;
  message.set_name(proto::ParameterName(request.job, request.parameter));
  absl::StatusOr<v1::StateSummary> summary =
      service.Read(service.state(), &v1::StateService::Stub::SummarizeState, message);
  if (!summary.ok()) return SuggestParameter(service, summary.status(), request);
  // The service computes all planes in one pass; the one that was asked for is picked here.
  if (request.plane != v1::PLANE_UNSPECIFIED) {
    v1::StateSummary one = *summary;
    one.clear_planes();
    for (const v1::PlaneSummary& plane : summary->planes()) {
      if (plane.plane() == request.plane) *one.add_planes() = plane;
    }
    if (one.planes().empty()) {
      return absl::NotFoundError(
          absl::StrCat("parameter ", request.parameter, " has no plane ", Name(request.plane)));
    }
    *summary = std::move(one);
  }
  return json ? Dump(ToJson(*summary)) : SummaryText(*summary);
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
  const absl::Status read = service.ReadState(
      message, [&] { download.Begin(); },
      [&](const v1::ReadStateResponse& part) { return download.Receive(part); });
  if (!read.ok()) return SuggestParameter(service, read, request);
  BALLAST_RETURN_IF_ERROR(download.Finish());
  const std::string plane = Name(message.plane());
  if (json) {
    return Dump({{"parameter", request.parameter},
                 {"plane", plane},
                 {"step", download.step()},
                 {"shape", download.shape()},
                 {"file", request.file},
                 {"bytes", download.bytes()}});
  }
  return absl::StrCat("wrote ", plane, " of ", request.parameter, " at step ", download.step(),
                      ", fp32 ", FormatShape(download.shape()), ", ", FormatBytes(download.bytes()),
                      ", to ", request.file, "\n");
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
  const absl::StatusOr<v1::WriteStateResponse> written =
      service.WriteState(open, [&] { return file.Read(kBytesOfMessage); });
  if (!written.ok()) return SuggestParameter(service, written.status(), request);
  const std::string plane = Name(request.plane);
  if (json) {
    return Dump({{"parameter", request.parameter}, {"plane", plane}, {"step", written->step()}});
  }
  return absl::StrCat(plane, " of ", request.parameter, " is ", request.file, " now, after step ",
                      written->step(), "\n");
}

absl::StatusOr<v1::Plane> PlaneOf(const Arguments& arguments) {
  static const std::map<std::string, v1::Plane> kPlanes = {{"", v1::PLANE_UNSPECIFIED},
                                                           {"master", v1::MASTER},
                                                           {"exp_avg", v1::EXP_AVG},
                                                           {"exp_avg_sq", v1::EXP_AVG_SQ},
                                                           {"max_exp_avg_sq", v1::MAX_EXP_AVG_SQ}};
  const auto plane = kPlanes.find(arguments.Get("plane", ""));
  if (plane != kPlanes.end()) return plane->second;
  return absl::InvalidArgumentError(
      absl::StrCat("no plane '", arguments.Get("plane", ""),
                   "'; there are master, exp_avg, exp_avg_sq and max_exp_avg_sq"));
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
        "write-state needs --plane=master, exp_avg, exp_avg_sq or max_exp_avg_sq");
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
                          "master, exp_avg, exp_avg_sq or max_exp_avg_sq (default: all, or "
                          "master with --out)"},
                         {"out", "FILE.npy", "write the plane to this file, for NumPy"}}},
      .timeout_seconds = 600,
      .prepare = PrepareState};
}

Command WriteStateCommand() {
  return {
      .spec = {.name = "write-state",
               .positionals = {"JOB", "PARAMETER", "FILE.npy"},
               .summary = "write a plane of a parameter, between two steps of a run",
               .details = "The file has all of the plane in fp32. It is written once no step is "
                          "in progress, whole or\nnot at all; the run goes on. Trainers have "
                          "written weights (master) with those of the next step.\nThe step "
                          "before cannot be undone any more.",
               .flags = {{"plane", "PLANE",
                          "master, exp_avg, exp_avg_sq or max_exp_avg_sq; required"}}},
      .timeout_seconds = 600,
      .prepare = PrepareWriteState};
}

}  // namespace ballast::client::cli
