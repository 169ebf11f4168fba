// The command line of ballastd.
#ifndef BALLAST_SERVER_BALLASTD_BALLASTD_FLAGS_H_
#define BALLAST_SERVER_BALLASTD_BALLASTD_FLAGS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "server/server.h"

namespace ballast::server {

struct BallastdFlags {
  ServerOptions server;
  int64_t memory_limit_bytes = 0;
  int threads = 0;
  std::string log_level;
  std::string checkpoint_directory;
  double drain_seconds = 0;
  std::string port_file;
  bool self_benchmark = false;
  bool startup_benchmark = true;
};

// INVALID_ARGUMENT, in one line, for an unknown flag or a bad value. --help prints and exits.
absl::StatusOr<BallastdFlags> ParseBallastdFlags(int argc, char** argv);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_BALLASTD_FLAGS_H_
