// histories --seed S --count N: plays the histories of seeds S to S + N - 1.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "tests/histories/generate.h"
#include "tests/histories/machine/machine_histories.h"
#include "tests/histories/run.h"

ABSL_FLAG(uint64_t, seed, 1, "Seed of the first history.");
ABSL_FLAG(int64_t, count, 1000, "How many histories.");
ABSL_FLAG(bool, shrink, true, "Make a failing history smaller before printing it.");
ABSL_FLAG(bool, engine_only, false, "Pass over those that go through client sessions.");
ABSL_FLAG(bool, members_only, false, "Only those over several members.");
ABSL_FLAG(bool, machine, false, "Short ones, of a step's machine alone.");
ABSL_FLAG(bool, describe, false, "Only print them.");

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "Plays random histories against the engine and compares it with a model.\n"
      "  histories --seed 1 --count 100000");
  absl::ParseCommandLine(argc, argv);
  const uint64_t seed = absl::GetFlag(FLAGS_seed);
  const int64_t count = absl::GetFlag(FLAGS_count);
  if (absl::GetFlag(FLAGS_describe)) {
    for (int64_t i = 0; i < count; ++i) {
      const auto history = ballast::histories::Generate(seed + static_cast<uint64_t>(i));
      std::printf("%s\n", ballast::histories::Describe(history).c_str());
    }
    return EXIT_SUCCESS;
  }
  if (absl::GetFlag(FLAGS_machine)) {
    ballast::histories::MachineTally tally;
    const std::string failure = ballast::histories::RunMachineHistories(seed, count, tally);
    std::printf("%s%lld events, %lld decided steps\n", failure.c_str(),
                static_cast<long long>(tally.events), static_cast<long long>(tally.decided));
    return failure.empty() ? EXIT_SUCCESS : EXIT_FAILURE;
  }
  ballast::histories::Engines engines;
  std::optional<ballast::histories::Layer> only;
  if (absl::GetFlag(FLAGS_engine_only)) only = ballast::histories::Layer::kEngine;
  if (absl::GetFlag(FLAGS_members_only)) only = ballast::histories::Layer::kMembers;
  const std::string failure = ballast::histories::RunHistories(
      engines, seed, count, {.shrink = absl::GetFlag(FLAGS_shrink), .only = only});
  std::printf("%s\n", ballast::histories::Describe(engines.tally()).c_str());
  if (failure.empty()) {
    std::printf("%lld histories passed\n", static_cast<long long>(count));
    return EXIT_SUCCESS;
  }
  std::fprintf(stderr, "%s\n", failure.c_str());
  return EXIT_FAILURE;
}
