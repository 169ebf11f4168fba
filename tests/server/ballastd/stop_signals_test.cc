#include "server/ballastd/stop_signals.h"

#include <gtest/gtest.h>

#include <vector>

namespace ballast::server {
namespace {

using Meaning = StopSignals::Meaning;

std::vector<Meaning> MeaningsOf(const std::vector<double>& seconds, bool has_terminal) {
  StopSignals signals(has_terminal, /*now=*/1000);
  std::vector<Meaning> meanings;
  for (const double after : seconds) meanings.push_back(signals.Another(1000 + after));
  return meanings;
}

TEST(StopSignals, OfOneBurstAreOne) {
  // Of Slurm, of the holder, of the job's script.
  EXPECT_EQ(MeaningsOf({0, 0.01, 0.9}, false),
            (std::vector{Meaning::kSame, Meaning::kSame, Meaning::kSame}));
  // Each counts from the last one that counted, so a key that is held down counts, too.
  EXPECT_EQ(MeaningsOf({0.5, 1, 1.5, 2}, true),
            (std::vector{Meaning::kSame, Meaning::kWait, Meaning::kSame, Meaning::kEnd}));
}

TEST(StopSignals, OfASupervisorTheThirdEndsAndTheSecondNever) {
  EXPECT_EQ(MeaningsOf({2, 3600}, false), (std::vector{Meaning::kWait, Meaning::kEnd}));
  EXPECT_EQ(MeaningsOf({3600}, false), std::vector{Meaning::kWait});
}

TEST(StopSignals, OfAPersonTheSecondEndsAfterTenSeconds) {
  EXPECT_EQ(MeaningsOf({9.9}, true), std::vector{Meaning::kWait});
  EXPECT_EQ(MeaningsOf({10}, true), std::vector{Meaning::kEnd});
}

}  // namespace
}  // namespace ballast::server
