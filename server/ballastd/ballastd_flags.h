// The command line of ballastd.
#ifndef BALLAST_SERVER_BALLASTD_BALLASTD_FLAGS_H_
#define BALLAST_SERVER_BALLASTD_BALLASTD_FLAGS_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/state/checkpoint_directory.h"
#include "server/holder/log_line.h"
#include "server/server.h"
#include "server/status/status_server.h"

namespace ballast::server {

// The value of --check-state when the holder tries a program (holder/trial.h).
inline constexpr char kHeldState[] = "held";

struct BallastdFlags {
  ServerOptions server;
  int64_t memory_limit_bytes = 0;
  bool memory_limit_is_default = false;
  int threads = 0;
  std::string log_level = "info";
  LogFormat log_format = LogFormat::kText;
  std::string checkpoint_directory;
  CheckpointPolicy checkpoint_policy;
  double forget_after_seconds = 0;  // 0: never.
  double drain_seconds = 5;
  std::string port_file;
  std::string state_directory;  // Empty: not used.
  bool has_holder = true;
  int most_deaths = 12;
  HttpOptions status;                           // Empty `listen`: no status page and no metrics.
  std::map<std::string, std::string> settings;  // Every flag's value, for bug reports.
  bool self_benchmark = false;
  bool startup_benchmark = true;
  bool check_config = false;  // The process ends after the check.
  std::string checked_as;     // The user; empty: this process's own.
  // The process id of a holder; empty: not requested. Then nothing else here is set. check_state
  // may also be kHeldState.
  std::string upgrade;
  std::string check_state;
};

// From the --config file, the environment and the command line; each overrides those before it.
// INVALID_ARGUMENT, in one line, for an unknown flag, a bad value, or an access file that is
// missing or wrong. --help prints and exits. --check-config may change the process's user
// (config_check.h).
absl::StatusOr<BallastdFlags> ParseBallastdFlags(int argc, char** argv);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_BALLASTD_FLAGS_H_
