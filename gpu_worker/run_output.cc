#include "gpu_worker/run_output.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {
namespace {

absl::Status CannotWrite(const std::string& path, int error) {
  return absl::UnavailableError(absl::StrCat("cannot write ", path, " (", std::strerror(error),
                                             "); free space or choose another --out"));
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

absl::Status WriteAll(int descriptor, const std::string& path, std::string_view contents) {
  while (!contents.empty()) {
    const ssize_t written = write(descriptor, contents.data(), contents.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return CannotWrite(path, errno);
    contents.remove_prefix(written);
  }
  return fsync(descriptor) == 0 ? absl::OkStatus() : CannotWrite(path, errno);
}

absl::Status WriteFile(const std::string& path, std::string_view contents) {
  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor < 0) return CannotWrite(path, errno);
  absl::Status status = WriteAll(descriptor, path, contents);
  if (close(descriptor) != 0 && status.ok()) status = CannotWrite(path, errno);
  return status;
}

}  // namespace

absl::Status WriteFiles(const std::string& directory, absl::Span<const OutputFile> files) {
  const auto path = [&](const OutputFile& file) { return absl::StrCat(directory, "/", file.name); };
  const auto partial = [&](const OutputFile& file) { return absl::StrCat(path(file), ".partial"); };
  absl::Status status;
  for (const OutputFile& file : files) {
    if (status.ok()) status = WriteFile(partial(file), file.contents);
  }
  size_t in_place = 0;
  for (; status.ok() && in_place < files.size(); ++in_place) {
    const OutputFile& file = files[in_place];
    if (rename(partial(file).c_str(), path(file).c_str()) != 0) {
      status = CannotWrite(path(file), errno);
      break;
    }
  }
  if (!status.ok()) {
    for (const OutputFile& file : files.subspan(0, in_place)) unlink(path(file).c_str());
    for (const OutputFile& file : files) unlink(partial(file).c_str());
  }
  return status;
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
  if (descriptor < 0) return CannotWrite(directory, errno);
  const absl::Status status = WriteAll(descriptor, directory, "writable");
  close(descriptor);
  unlink(probe.c_str());
  return status;
}

std::string SerializeWeights(Model& model, const Layout& layout) {
  std::string bytes;
  for (size_t p = 0; p < layout.spec().parameters.size(); ++p) {
    const ParameterPlace& place = layout.place(p);
    const absl::Span<const std::byte> weights =
        WeightBytes(model, layout.spec().parameters[p].group, place.offset, place.elements);
    bytes.append(reinterpret_cast<const char*>(weights.data()), weights.size());
  }
  return bytes;
}

std::string Sha256Hex(const std::string& bytes) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest;
  unsigned int size = 0;
  EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_sha256(), nullptr);
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest.data()), size});
}

std::string LossesCsv(absl::Span<const StepReport> reports) {
  std::string csv =
      "step,loss,norm,clip,tokens_per_second,seconds,compute,reduce,send,update,receive\n";
  for (const StepReport& report : reports) {
    const StepTimes& times = report.times;
    absl::StrAppendFormat(&csv, "%d,%.9g,%.9g,%.9g,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g\n",
                          report.step, report.loss, report.norm, report.clip_coefficient,
                          report.tokens_per_second, report.seconds, times.compute, times.reduce,
                          times.send, times.update, times.receive);
  }
  return csv;
}

std::string WorkerJson(const RunFacts& facts, const TrainingJob& job,
                       const std::string& weights_sha256) {
  std::vector<double> seconds;
  std::vector<double> tokens_per_second;
  for (const StepReport& report : facts.reports) {
    seconds.push_back(report.seconds);
    tokens_per_second.push_back(report.tokens_per_second);
  }
  int64_t elements = 0;
  // Where each parameter stands in weights.bin, so that a difference between two runs has a name.
  nlohmann::ordered_json tensors = nlohmann::ordered_json::array();
  for (size_t p = 0; p < job.layout.spec().parameters.size(); ++p) {
    const int64_t size = job.layout.place(p).elements;
    tensors.push_back(
        {{"name", job.layout.spec().parameters[p].name}, {"begin", elements}, {"elements", size}});
    elements += size;
  }
  nlohmann::ordered_json json;
  json["optimizer"] = facts.optimizer;
  json["steps"] = facts.reports.empty() ? 0 : facts.reports.back().step;
  json["workers"] = facts.workers;
  json["micro_steps"] = facts.micro_steps;
  json["parameters"] = elements;
  json["groups"] = job.spec.groups.size();
  json["first_loss"] = facts.reports.empty() ? 0 : facts.reports.front().loss;
  json["last_loss"] = facts.reports.empty() ? 0 : facts.reports.back().loss;
  json["weights_sha256"] = weights_sha256;
  json["tokens_per_second"] = Median(tokens_per_second);
  json["step_seconds_median"] = Median(seconds);
  json["tensors"] = std::move(tensors);
  return absl::StrCat(json.dump(2), "\n");
}

absl::Status WriteOutput(const std::string& directory, const RunFacts& facts,
                         const TrainingJob& job, Model& model) {
  const std::string weights = SerializeWeights(model, job.layout);
  return WriteFiles(directory, {{"losses.csv", LossesCsv(facts.reports)},
                                {"weights.bin", weights},
                                {"worker.json", WorkerJson(facts, job, Sha256Hex(weights))}});
}

}  // namespace ballast::worker
