#include "tests/bench/load/load_options.h"

#include <array>
#include <functional>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::bench {

const char kLoadUsage[] =
    R"(ballast-bench worker [flags]: ranks without a GPU, whose gradients are made beforehand.

  --transport WAY      in-process, shared-memory (default), unix or tcp
  --service TARGET     a service that runs already, at host:port or unix:/path, instead of one of our
                       own; memory is shared with it unless WAY is unix or tcp
  --threads N          of a service of our own; 0: one per core
  --parameters N       of each job (10000000), in
  --tensors N          so many tensors (100), in
  --groups N           so many param groups (2)
  --ranks N            of each job, all in this process (1)
  --jobs N             at the same time (1)
  --steps N            measured (20), after
  --warmup N           steps (3)
  --micro-steps N      in a step, summed by the service (1)
  --update MODE        wait (default) or speculate
  --clip WHAT          none (default), not-firing or firing
  --pace N             parameters a second for which a micro-step makes gradients, last chunk of the
                       model first; 0 (default): all are there at once
  --seed N             of gradients and first weights (1)
  --json FILE          write the figures there
)";

namespace {

constexpr std::array kWays = {Way::kInProcess, Way::kSharedMemory, Way::kUnixSocket, Way::kTcp};
constexpr std::array kClippings = {Clipping::kNone, Clipping::kNotFiring, Clipping::kFiring};
constexpr std::array kModes = {UpdateMode::kWait, UpdateMode::kSpeculate};

using Setter = std::function<bool(const std::string& value)>;

Setter Integer(int64_t& field, int64_t least, int64_t most) {
  return [&field, least, most](const std::string& value) {
    return absl::SimpleAtoi(value, &field) && field >= least && field <= most;
  };
}

template <typename Enum, size_t kCount>
Setter Choice(Enum& field, const std::array<Enum, kCount>& choices) {
  return [&field, &choices](const std::string& value) {
    for (const Enum choice : choices) {
      if (Name(choice) != value) continue;
      field = choice;
      return true;
    }
    return false;
  };
}

Setter Text(std::string& field) {
  return [&field](const std::string& value) {
    field = value;
    return !value.empty();
  };
}

std::map<std::string, Setter> SettersOf(LoadOptions& options) {
  return {
      {"service", Text(options.service)},
      {"transport", Choice(options.way, kWays)},
      {"parameters", Integer(options.parameters, 1, int64_t{1} << 40)},
      {"tensors", Integer(options.tensors, 1, kMaxParameters)},
      {"groups", Integer(options.groups, 1, kMaxGroups)},
      {"ranks", Integer(options.ranks, 1, 256)},
      {"jobs", Integer(options.jobs, 1, 64)},
      {"steps", Integer(options.steps, 1, 1'000'000)},
      {"warmup", Integer(options.warmup, 0, 1'000'000)},
      {"micro-steps", Integer(options.micro_steps, 1, 64)},
      {"update", Choice(options.update, kModes)},
      {"clip", Choice(options.clipping, kClippings)},
      {"pace",
       [&options](const std::string& value) {
         return absl::SimpleAtod(value, &options.pace) && options.pace >= 0 && options.pace < 1e15;
       }},
      {"threads", Integer(options.threads, 0, 4096)},
      {"seed", Integer(options.seed, 0, INT64_MAX)},
      {"json", Text(options.json_path)},
  };
}

absl::Status CheckTogether(const LoadOptions& options) {
  if (options.tensors > options.parameters || options.groups > options.tensors) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.parameters, " parameters in ", options.tensors, " tensors in ",
                     options.groups, " groups: each tensor and group must hold something"));
  }
  if (!options.service.empty() && options.way == Way::kInProcess) {
    return absl::InvalidArgumentError(
        "--service names another process; --transport says in-process");
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
  const std::map<std::string, Setter> setters = SettersOf(options);
  for (size_t i = 0; i < arguments.size(); ++i) {
    absl::string_view word = arguments[i];
    if (!absl::ConsumePrefix(&word, "--")) {
      return absl::InvalidArgumentError(
          absl::StrCat("unexpected argument '", arguments[i], "'; see --help"));
    }
    const size_t equals = word.find('=');
    const std::string name(word.substr(0, equals));
    const auto setter = setters.find(name);
    if (setter == setters.end()) {
      return absl::InvalidArgumentError(absl::StrCat("unknown flag '--", name, "'; see --help"));
    }
    std::string value;
    if (equals != absl::string_view::npos) {
      value = std::string(word.substr(equals + 1));
    } else if (++i < arguments.size()) {
      value = arguments[i];
    }
    if (!setter->second(value)) {
      return absl::InvalidArgumentError(
          absl::StrCat("flag --", name, ": bad value '", value, "'; see --help"));
    }
  }
  BALLAST_RETURN_IF_ERROR(CheckTogether(options));
  return options;
}

}  // namespace ballast::bench
