#include "server/ballastd/ballastd_flags.h"

#include <cmath>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/available_memory.h"

ABSL_FLAG(
    std::vector<std::string>, listen, {"127.0.0.1:7070"},
    "Addresses to listen on, separated by commas: HOST:PORT or unix:/path. Port 0: the system "
    "chooses.");
ABSL_FLAG(bool, insecure, false,
          "Allow addresses that other hosts can reach. Nothing is encrypted or authenticated.");
ABSL_FLAG(
    std::string, memory_limit, "",
    "Memory for all jobs together: bytes, or a number with KiB, MiB, GiB or TiB. Default: 80% of "
    "what the machine has left at start, or the process's control groups if that is less.");
ABSL_FLAG(int, threads, 0, "Threads for updates; 0: one per core.");
ABSL_FLAG(std::string, log_level, "info", "debug, info, warning, error or off.");
ABSL_FLAG(double, seal_deadline_seconds, 60,
          "When a step's first seal is this old, sealed ranks are told which ranks they wait for.");
ABSL_FLAG(std::string, checkpoint_dir, "",
          "Where jobs are saved when the service is told to stop, each in DIR/JOB, and where names "
          "lead that SaveJob and LoadJob are given.");
ABSL_FLAG(bool, allow_paths, false,
          "Take absolute paths in SaveJob and LoadJob from anybody who reaches an address. Without "
          "it, only over a unix socket that nobody but this user can connect to.");
// Under the ten seconds after which container runtimes kill, with room for a save.
ABSL_FLAG(double, drain_seconds, 5,
          "On SIGTERM, SIGINT or SIGHUP, how long steps in progress may take to end. Saving comes "
          "after that, and is not bounded.");
ABSL_FLAG(std::string, shared_memory, "auto",
          "auto: workers on this host share memory with the service where they ask for it; never.");
ABSL_FLAG(std::string, port_file, "",
          "Write the addresses here, one a line, once the service listens.");
ABSL_FLAG(bool, self_benchmark, false,
          "Measure how fast this host updates against what its memory allows, print it and exit.");
ABSL_FLAG(bool, startup_benchmark, true,
          "Measure the same briefly at start, and log it with what makes the host slow.");

namespace ballast::server {
namespace {

// Both spellings, --memory-limit and --memory_limit, are understood.
std::string WithUnderscores(absl::string_view argument) {
  std::string text(argument);
  if (!absl::StartsWith(text, "--")) return text;
  for (size_t i = 2; i < text.size() && text[i] != '='; ++i) {
    if (text[i] == '-') text[i] = '_';
  }
  return text;
}

constexpr char kThisFile[] = "ballastd_flags.cc";

// The flags of this file; null if `name` is none of them.
absl::CommandLineFlag* FindFlag(absl::string_view name) {
  absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
  return flag != nullptr && absl::EndsWith(flag->Filename(), kThisFile) ? flag : nullptr;
}

// Abseil prints the text, of this file's flags and not those of libraries, and ends the process.
void PrintHelpAndExit(std::string program, std::string help) {
  absl::SetProgramUsageMessage("The Ballast optimizer service.");
  absl::FlagsUsageConfig usage;
  usage.contains_help_flags = [](absl::string_view file) {
    return absl::EndsWith(file, kThisFile);
  };
  absl::SetFlagsUsageConfig(usage);
  char* arguments[] = {program.data(), help.data()};
  absl::ParseCommandLine(2, arguments);
}

// Abseil's own parser ends the process with several lines at the first mistake, so the arguments
// are read here, and set Abseil's flags.
absl::Status SetFlags(const std::vector<std::string>& arguments) {
  for (size_t i = 1; i < arguments.size(); ++i) {
    absl::string_view name = arguments[i];
    if (!absl::ConsumePrefix(&name, "--") || name.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("unexpected argument '", arguments[i], "'; see --help"));
    }
    if (name == "help" || name == "helpfull") PrintHelpAndExit(arguments[0], arguments[i]);
    const size_t equals = name.find('=');
    bool has_value = equals != absl::string_view::npos;
    std::string value(has_value ? name.substr(equals + 1) : "");
    name = name.substr(0, equals);
    absl::CommandLineFlag* flag = FindFlag(name);
    if (flag != nullptr && !has_value && flag->IsOfType<bool>()) {
      value = "true";
      has_value = true;
    }
    if (flag == nullptr && !has_value && absl::ConsumePrefix(&name, "no")) {
      flag = FindFlag(name);
      if (flag != nullptr && !flag->IsOfType<bool>()) flag = nullptr;
      value = "false";
      has_value = true;
    }
    if (flag == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("unknown flag '", arguments[i], "'; see --help"));
    }
    if (!has_value && ++i < arguments.size()) {
      value = arguments[i];
      has_value = true;
    }
    std::string error;
    if (!has_value || !flag->ParseFrom(value, &error)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "flag --", name, has_value ? absl::StrCat(": bad value '", value, "'") : " needs a value",
          "; it is: ", flag->Help()));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> ParseMemoryLimit(const std::string& text) {
  if (text.empty()) return DefaultMemoryLimitBytes();
  constexpr struct {
    const char* suffix;
    double bytes;
  } kUnits[] = {{"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}, {"", 1}};
  for (const auto& unit : kUnits) {
    absl::string_view number = text;
    if (!absl::ConsumeSuffix(&number, unit.suffix)) continue;
    double value = 0;
    if (!absl::SimpleAtod(number, &value) || !(value * unit.bytes >= 1) ||
        !(value * unit.bytes < 0x1p60)) {
      break;
    }
    return static_cast<int64_t>(value * unit.bytes);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("flag --memory-limit: bad value '", text, "'; give bytes, or such as 20GiB"));
}

absl::Status CheckSeconds(absl::string_view flag, double seconds) {
  if (seconds >= 0 && seconds <= 1e6) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("flag --", flag, ": ", seconds, " is not between 0 and 1000000 seconds"));
}

absl::StatusOr<bool> ParseSharedMemory(const std::string& text) {
  if (text == "auto" || text == "never") return text == "auto";
  return absl::InvalidArgumentError(
      absl::StrCat("flag --shared-memory: '", text, "' is neither auto nor never"));
}

absl::Status CheckLogLevel(const std::string& level) {
  for (const char* known : {"debug", "info", "warning", "error", "off"}) {
    if (level == known) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("flag --log-level: '", level, "' is none of debug, info, warning, error, off"));
}

}  // namespace

absl::StatusOr<BallastdFlags> ParseBallastdFlags(int argc, char** argv) {
  std::vector<std::string> arguments;
  for (int i = 0; i < argc; ++i) arguments.push_back(WithUnderscores(argv[i]));
  BALLAST_RETURN_IF_ERROR(SetFlags(arguments));

  BallastdFlags flags;
  flags.server.listen = absl::GetFlag(FLAGS_listen);
  flags.server.insecure = absl::GetFlag(FLAGS_insecure);
  flags.server.seal_deadline_seconds = absl::GetFlag(FLAGS_seal_deadline_seconds);
  flags.threads = absl::GetFlag(FLAGS_threads);
  flags.log_level = absl::GetFlag(FLAGS_log_level);
  flags.checkpoint_directory = absl::GetFlag(FLAGS_checkpoint_dir);
  flags.server.allow_paths = absl::GetFlag(FLAGS_allow_paths);
  flags.drain_seconds = absl::GetFlag(FLAGS_drain_seconds);
  flags.port_file = absl::GetFlag(FLAGS_port_file);
  flags.self_benchmark = absl::GetFlag(FLAGS_self_benchmark);
  flags.startup_benchmark = absl::GetFlag(FLAGS_startup_benchmark);
  BALLAST_ASSIGN_OR_RETURN(flags.memory_limit_bytes,
                           ParseMemoryLimit(absl::GetFlag(FLAGS_memory_limit)));
  BALLAST_ASSIGN_OR_RETURN(flags.server.shared_memory,
                           ParseSharedMemory(absl::GetFlag(FLAGS_shared_memory)));
  BALLAST_RETURN_IF_ERROR(CheckSeconds("drain-seconds", flags.drain_seconds));
  BALLAST_RETURN_IF_ERROR(
      CheckSeconds("seal-deadline-seconds", flags.server.seal_deadline_seconds));
  BALLAST_RETURN_IF_ERROR(CheckLogLevel(flags.log_level));
  if (flags.server.listen.empty()) {
    return absl::InvalidArgumentError("flag --listen: give at least one address");
  }
  if (flags.threads < 0 || flags.threads > 4096) {
    return absl::InvalidArgumentError(
        absl::StrCat("flag --threads: ", flags.threads, " is not between 0 and 4096"));
  }
  return flags;
}

}  // namespace ballast::server
