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
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/atomic_file.h"

namespace ballast::worker {
namespace {

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  // Where their number is even, this is the upper of the two in the middle.
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The weights of all parameters, in order.
absl::StatusOr<std::string> ReadWeights(TrainingBackend& backend, const TrainingJob& job) {
  std::vector<std::string> spaces(job.layout.group_count());
  for (int group = 0; group < job.layout.group_count(); ++group) {
    // This is up to the end of the flat space; what the buckets add to it has no weights.
    spaces[group].resize(job.layout.flat_elements(group) *
                         SizeBytes(job.spec.groups[group].return_dtype));
    BALLAST_RETURN_IF_ERROR(backend.ReadWeights(
        group, {reinterpret_cast<std::byte*>(spaces[group].data()), spaces[group].size()}));
  }
  std::string weights;
  for (size_t p = 0; p < job.layout.spec().parameters.size(); ++p) {
    const ParameterPlace& place = job.layout.place(p);
    const int group = job.layout.spec().parameters[p].group;
    const int64_t size = SizeBytes(job.spec.groups[group].return_dtype);
    weights.append(spaces[group], place.offset * size, place.elements * size);
  }
  return weights;
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

std::string WorkerJson(const RunFacts& facts, const TrainingJob& job) {
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
  json["rule"] = std::string(RowOf(job.spec.groups.back().hyper_parameters.rule).name);
  if (job.spec.groups.back().hyper_parameters.rule == Rule::kMuon) {
    json["newton_schulz"] =
        job.spec.newton_schulz == Orthogonalizer::kWorkers ? "workers" : "service";
  }
  // Small parameters have fp32 whatever was asked for.
  StateFormat state = StateFormat::kFloat32;
  for (const Chunk& chunk : job.layout.chunks()) state = std::max(state, chunk.format);
  json["state"] = std::string(Name(state));
  json["weights_dtype"] = std::string(Name(job.spec.groups[0].return_dtype));
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
                         const TrainingJob& job, TrainingBackend& backend) {
  BALLAST_ASSIGN_OR_RETURN(const std::string weights, ReadWeights(backend, job));
  // worker.json is last, because files get their names in this order: it is never there without the
  // weights.bin that belongs to it.
  return OutputError(
      WriteAtomically({{absl::StrCat(directory, "/weights.bin"), weights},
                       {absl::StrCat(directory, "/worker.json"), WorkerJson(facts, job)}}));
}

}  // namespace ballast::worker
