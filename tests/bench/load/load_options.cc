#include "tests/bench/load/load_options.h"

#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <map>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/command_line.h"

namespace ballast::bench {

namespace {

template <typename Enum>
std::map<std::string, Enum> Named(std::initializer_list<Enum> choices) {
  std::map<std::string, Enum> named;
  for (const Enum choice : choices) named.emplace(Name(choice), choice);
  return named;
}

void AddFlags(LoadOptions& options, CommandLine& line) {
  line.Add("transport", options.way,
           Named({Way::kInProcess, Way::kSharedMemory, Way::kUnixSocket, Way::kTcp}),
           "in-process, shared-memory, unix or tcp");
  line.Add(
      "service", options.service,
      "a service that runs already, at host:port or unix:/path, instead of one of our own; "
      "memory is shared with it unless --transport is unix or tcp; several with commas between");
  line.Add<int64_t>("members", options.members, 1, 64,
                    "services of our own that hold each job together");
  line.Add<int64_t>("threads", options.threads, 0, 4096,
                    "of each service of our own; 0: one per core");
  line.Add<int64_t>("parameters", options.parameters, 1, int64_t{1} << 40, "of each job");
  line.Add<int64_t>("tensors", options.tensors, 1, kMaxParameters, "in which they are");
  line.Add<int64_t>("groups", options.groups, 1, kMaxGroups, "param groups in which those are");
  line.Add<int64_t>("ranks", options.ranks, 1, 256, "of each job, all in this process");
  line.Add<int64_t>("jobs", options.jobs, 1, 64, "at the same time");
  line.Add<int64_t>("steps", options.steps, 1, 1'000'000, "that are measured");
  line.Add<int64_t>("warmup", options.warmup, 0, 1'000'000, "steps before those");
  line.Add<int64_t>("micro-steps", options.micro_steps, 1, 64, "in a step, summed by the service");
  line.Add("rule", options.rule, {{"adam", Rule::kAdam}, {"muon", Rule::kMuon}},
           "adam or muon; with muon ranks give directions back as they are, without Newton-Schulz");
  line.Add("state", options.state,
           Named({StateFormat::kFloat32, StateFormat::kBFloat16, StateFormat::k8Bit}),
           "how the service holds all groups' state: fp32, bf16 or 8bit");
  line.Add("update", options.update, Named({UpdateMode::kWait, UpdateMode::kSpeculate}),
           "wait or speculate");
  line.Add("clip", options.clipping,
           Named({Clipping::kNone, Clipping::kNotFiring, Clipping::kFiring}),
           "none, not-firing or firing");
  line.Add("pace", options.pace, 0.0, 1e15,
           "parameters a second for which a micro-step makes gradients, last chunk of the model "
           "first; 0: all are there at once");
  line.Add<int64_t>("seed", options.seed, 0, INT64_MAX, "of gradients and first weights");
  line.Add("json", options.json_path, "a file for the figures");
}

absl::Status CheckTogether(const LoadOptions& options) {
  if (options.tensors > options.parameters || options.groups > options.tensors) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.parameters, " parameters in ", options.tensors, " tensors in ",
                     options.groups, " groups: each tensor and group must hold something"));
  }
  if (options.state != StateFormat::kFloat32 &&
      options.parameters / options.tensors < kLeastPackedElements) {
    return absl::InvalidArgumentError(
        absl::StrCat("--state=", Name(options.state), " is for tensors of ", kLeastPackedElements,
                     " elements and more; ", options.parameters, " parameters in ", options.tensors,
                     " tensors have less"));
  }
  if (!options.service.empty() && options.way == Way::kInProcess) {
    return absl::InvalidArgumentError(
        "--service names another process; --transport says in-process");
  }
  if (options.members > 1 && (!options.service.empty() || options.way == Way::kInProcess)) {
    return absl::InvalidArgumentError(
        "--members starts processes; --service or --transport says otherwise");
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view Name(Way way) {
  switch (way) {
    case Way::kInProcess:
      return "in-process";
    case Way::kSharedMemory:
      return "shared-memory";
    case Way::kUnixSocket:
      return "unix";
    case Way::kTcp:
      return "tcp";
  }
  return "unknown";
}

absl::string_view Name(Clipping clipping) {
  switch (clipping) {
    case Clipping::kNone:
      return "none";
    case Clipping::kNotFiring:
      return "not-firing";
    case Clipping::kFiring:
      return "firing";
  }
  return "unknown";
}

absl::string_view Name(UpdateMode mode) {
  return mode == UpdateMode::kSpeculate ? "speculate" : "wait";
}

absl::StatusOr<LoadOptions> ParseLoadOptions(absl::Span<char* const> arguments) {
  LoadOptions options;
  CommandLine line("ballast-bench worker",
                   "ranks without a GPU, whose gradients are made beforehand\n", "");
  AddFlags(options, line);
  BALLAST_ASSIGN_OR_RETURN(const std::string help,
                           line.Parse({arguments.begin(), arguments.end()}));
  if (!help.empty()) {
    std::fputs(help.c_str(), stdout);
    std::exit(0);
  }
  BALLAST_RETURN_IF_ERROR(CheckTogether(options));
  return options;
}

}  // namespace ballast::bench
