#include "gpu_worker/run/run_output.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/atomic_file.h"
#include "cpu_optimizer_service/common/system/sha256.h"

namespace ballast::worker {
namespace {

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  // Where their number is even, this is the upper of the two in the middle.
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The flat space of each group.
absl::StatusOr<std::vector<std::string>> ReadSpaces(TrainingBackend& backend,
                                                    const TrainingJob& job) {
  std::vector<std::string> spaces;
  for (int group = 0; group < job.layout.group_count(); ++group) {
    std::string& space = spaces.emplace_back();
    // This is up to the end of the flat space; what the buckets add to it has no weights.
    space.resize(job.layout.flat_elements(group) * SizeBytes(job.spec.groups[group].return_dtype));
    BALLAST_RETURN_IF_ERROR(
        backend.ReadWeights(group, {reinterpret_cast<std::byte*>(space.data()), space.size()}));
  }
  return spaces;
}

// Each parameter's weights, in order.
std::vector<absl::string_view> ParametersIn(const std::vector<std::string>& spaces,
                                            const TrainingJob& job) {
  std::vector<absl::string_view> parameters;
  for (size_t p = 0; p < job.layout.spec().parameters.size(); ++p) {
    const ParameterPlace& place = job.layout.place(p);
    const int group = job.layout.spec().parameters[p].group;
    const int64_t size = SizeBytes(job.spec.groups[group].return_dtype);
    parameters.push_back(
        absl::string_view(spaces[group]).substr(place.offset * size, place.elements * size));
  }
  return parameters;
}

}  // namespace

absl::Status OutputError(const absl::Status& status) {
  if (status.ok()) return status;
  return absl::UnavailableError(absl::StrCat(status.message(), " (--out chooses the directory)"));
}

absl::Status PrepareOutput(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) {
    return absl::UnavailableError(absl::StrCat("cannot make the directory ", directory, " (",
                                               error.message(), "); choose another --out"));
  }
  std::string probe = absl::StrCat(directory, "/.probe-XXXXXX");
  const int descriptor = mkstemp(probe.data());  // A name that no file of the user has.
  if (descriptor < 0) return OutputError(FileError(errno, "write", directory));
  // Some bytes are written, too: a full disk may still let an empty file be made.
  const absl::Status status = WriteAll(descriptor, directory, "writable");
  close(descriptor);
  unlink(probe.c_str());
  return OutputError(status);
}

std::string WorkerJson(const RunFacts& facts, const TrainingJob& job,
                       const std::string& weights_sha256) {
  std::vector<double> seconds;
  std::vector<double> tokens_per_second;
  double exposed_seconds = 0;
  for (const StepReport& report : facts.reports) {
    if (std::isnan(report.seconds)) continue;  // Recovered after a restart.
    seconds.push_back(report.seconds);
    tokens_per_second.push_back(report.tokens_per_second);
    exposed_seconds += report.times.exposed();
  }
  int64_t elements = 0;
  // Where each parameter is in weights.bin, so that a difference between two runs has a name.
  nlohmann::ordered_json tensors = nlohmann::ordered_json::array();
  for (size_t p = 0; p < job.layout.spec().parameters.size(); ++p) {
    // The file has parameters in the order of declaration, and not as groups and buckets lie.
    const int64_t size = job.layout.place(p).elements;
    tensors.push_back(
        {{"name", job.layout.spec().parameters[p].name}, {"begin", elements}, {"elements", size}});
    elements += size;
  }
  nlohmann::ordered_json json;
  json["optimizer"] = facts.optimizer;
  if (!facts.transport.empty()) json["transport"] = facts.transport;
  json["steps"] = facts.steps;
  json["workers"] = facts.workers;
  json["micro_steps"] = facts.micro_steps;
  json["parameters"] = elements;
  json["groups"] = job.spec.groups.size();
  json["first_loss"] = facts.reports.empty() ? 0 : facts.reports.front().loss;
  json["last_loss"] = facts.reports.empty() ? 0 : facts.reports.back().loss;
  json["weights_dtype"] = std::string(Name(job.spec.groups[0].return_dtype));
  json["weights_sha256"] = weights_sha256;
  json["tokens_per_second"] = Median(tokens_per_second);
  json["step_seconds_median"] = Median(seconds);
  json["exposed_seconds"] = exposed_seconds;
  if (facts.counts.has_value()) {
    json["coverage_complete_steps"] = facts.counts->coverage_complete_steps;
    json["speculated_chunks"] = facts.counts->speculated_chunks;
    json["redone_chunks"] = facts.counts->redone_chunks;
  }
  json["tensors"] = std::move(tensors);
  return absl::StrCat(json.dump(2), "\n");
}

absl::Status WriteOutput(const std::string& directory, const RunFacts& facts,
                         const TrainingJob& job, TrainingBackend& backend,
                         WeightsFile weights_file) {
  BALLAST_ASSIGN_OR_RETURN(const std::vector<std::string> spaces, ReadSpaces(backend, job));
  const std::vector<absl::string_view> parameters = ParametersIn(spaces, job);
  std::vector<FileContents> files;
  if (weights_file == WeightsFile::kWritten) {
    files.push_back({absl::StrCat(directory, "/weights.bin"), absl::StrJoin(parameters, "")});
  }
  // The hash is over the bytes of the file, whether there is a file or not.
  Sha256 sha256;
  for (const absl::string_view parameter : parameters) sha256.Add(parameter);
  // It is last, because files get their names in this order: the worker.json of this run is never
  // there without the weights.bin that belongs to it.
  files.push_back({absl::StrCat(directory, "/worker.json"), WorkerJson(facts, job, sha256.Hex())});
  return OutputError(WriteAtomically(files));
}

}  // namespace ballast::worker
