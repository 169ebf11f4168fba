// Runs histories by seed: the binary's and the tests' common part.
#ifndef BALLAST_TESTS_HISTORIES_RUN_H_
#define BALLAST_TESTS_HISTORIES_RUN_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "tests/histories/engine/job_under_test.h"

namespace ballast::histories {

// OK, or what was expected and what came.
absl::Status Play(Engines& engines, const History& history);

struct RunOptions {
  bool shrink = true;  // Make a history that fails smaller before saying what it is.
  // Pass over those of other layers. ThreadSanitizer, which cannot see into gRPC's buffers, needs
  // kEngine.
  std::optional<Layer> only = std::nullopt;
};

// Plays the histories of seeds first, first + 1, ... (`count` of them). Empty if all passed; else,
// of the first that fails, the seed, the failure, and what it is. Prints what it plays and ends the
// process when a history hangs.
std::string RunHistories(Engines& engines, uint64_t first, int64_t count,
                         const RunOptions& options = {});

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_RUN_H_
