// The command line of `ballast-bench worker`.
#ifndef BALLAST_TESTS_BENCH_LOAD_LOAD_OPTIONS_H_
#define BALLAST_TESTS_BENCH_LOAD_LOAD_OPTIONS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/job_spec.h"

namespace ballast::bench {

enum class Way : uint8_t { kInProcess, kSharedMemory, kUnixSocket, kTcp };
enum class Clipping : uint8_t { kNone, kNotFiring, kFiring };

absl::string_view Name(Way way);
absl::string_view Name(Clipping clipping);
absl::string_view Name(UpdateMode mode);

struct LoadOptions {
  std::string service;  // As --service has it. Empty: services of our own, reached by `way`.
  Way way = Way::kSharedMemory;
  int64_t parameters = 10'000'000;  // Elements, of each job.
  int64_t tensors = 100;
  int64_t groups = 2;
  int64_t ranks = 1;
  int64_t jobs = 1;
  int64_t steps = 20;
  int64_t warmup = 3;  // Steps before those that are measured.
  int64_t micro_steps = 1;
  Rule rule = Rule::kAdam;                    // Or kMuon, of all groups.
  StateFormat state = StateFormat::kFloat32;  // Of all groups.
  UpdateMode update = UpdateMode::kWait;
  Clipping clipping = Clipping::kNone;
  double pace = 0;      // Parameters a second, of each job; 0: all gradients are there at once.
  int64_t members = 1;  // Services of our own that hold each job together.
  int64_t threads = 0;  // Of each of them.
  int64_t seed = 1;
  std::string json_path;
};

// INVALID_ARGUMENT, in one line, for an unknown flag, a missing or a bad value. --help prints and
// ends the process.
absl::StatusOr<LoadOptions> ParseLoadOptions(absl::Span<char* const> arguments);

}  // namespace ballast::bench

#endif  // BALLAST_TESTS_BENCH_LOAD_LOAD_OPTIONS_H_
