// The largest message of a job is never larger than said when it was created.
#include "server/jobs/job_message.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/sanitizers.h"

namespace ballast::server {
namespace {

constexpr int kRanks = Repeats(64);
constexpr int kBlocksPerRank = 2;

// Each rank owns a chunk of many parameters and a chunk of one; all names are long.
JobSpec LongNames() {
  std::vector<int64_t> sizes;
  for (int rank = 0; rank < kRanks; ++rank) {
    sizes.insert(sizes.end(), kMissingNames, kBlockElements / kMissingNames);
    sizes.push_back(kBlockElements);
  }
  JobSpec spec = MakeJobSpec({.group_sizes = {sizes},
                              .world_size = kRanks,
                              .bucket_elements = kRanks * kBlocksPerRank * kBlockElements,
                              .chunk_elements = kBlockElements},
                             std::string(128, 'j'));
  for (ParameterSpec& parameter : spec.layout.parameters) {
    parameter.name = std::string(300, 'p') + parameter.name;
  }
  spec.unused_policy = UnusedPolicy::kSkip;
  return spec;
}

void AttachAll(JobDriver& driver) {
  for (int rank = 0; rank < kRanks; ++rank) {
    std::string process_id = std::to_string(rank);
    process_id.resize(kMaxProcessIdBytes, 'q');
    driver.Attach(rank, process_id);
  }
}

// Skipped for a gradient that all workers have found; all parameters but the last are unused.
void SkipAStep(JobDriver& driver) {
  const uint64_t step = driver.next_step();
  const int chunks = static_cast<int>(driver.layout().chunks().size());
  const int last = static_cast<int>(driver.layout().spec().parameters.size()) - 1;
  const StepSettings settings = {.scale = {.loss_scale = 3, .divisors = {7}},
                                 .overrides = {{0, {.lr = 0.1, .weight_decay = 0.3}}},
                                 .trainer_state = std::string(kMaxTrainerStateBytes, '\xff')};
  for (int rank = 0; rank < kRanks; ++rank) {
    ASSERT_TRUE(driver.stream(rank).BeginStep(step, settings).ok());
  }
  for (int c = 0; c + 1 < chunks; ++c) {
    const int owner = driver.layout().chunks()[c].rank;
    ASSERT_TRUE(driver.stream(owner).Contribute({.step = step, .chunk = c, .empty = true}).ok());
  }
  ASSERT_TRUE(driver.Send(chunks - 1, std::vector<float>(kBlockElements, NAN), 0).ok());
  const UsedParameters used = {.all = false,
                               .parameters = {last},
                               .non_finite = {{.parameter = last, .element = 255, .value = NAN}}};
  for (int rank = 0; rank < kRanks; ++rank) {
    ASSERT_TRUE(driver.stream(rank).EndMicroStep(step, 0, used).ok());
  }
  driver.SealAll(1);
}

TEST(JobMessage, StaysWithinItsBoundWhateverTheRunRecords) {
  Engine engine({.memory_limit_bytes = int64_t{256} << 20, .threads = 2});
  const JobSpec spec = LongNames();
  JobDriver driver(engine, spec);
  driver.UploadWeights();
  for (size_t step = 1; step <= kRecentSteps + 1; ++step) {
    AttachAll(driver);  // With new listeners, which have recorded nothing.
    SkipAStep(driver);
  }
  // A part of a step, so that every rank is behind.
  driver.BeginAll();
  for (int rank = 0; rank < kRanks; ++rank) {
    const int c = driver.layout().chunks_of_rank(rank)[1];
    ASSERT_TRUE(driver.Send(c, driver.Values(c, 1), 0).ok());
  }

  const v1::Job message = ToMessage(engine, driver.job(), /*with_parameters=*/true);
  ASSERT_EQ(message.recent_steps_size(), static_cast<int>(kRecentSteps));
  for (const v1::StepRecord& record : message.recent_steps()) {
    ASSERT_EQ(record.unused_parameters_size(), static_cast<int>(kRecordedNames));
    ASSERT_NE(record.skip_reason().find("found on rank 0 in micro-step 0 before reducing"),
              std::string::npos)
        << record.skip_reason();
  }
  ASSERT_EQ(message.ranks_size(), kRanks);
  for (const v1::RankProgress& rank : message.ranks()) {
    EXPECT_EQ(rank.furthest_micro_step(), 1u);
    EXPECT_EQ(rank.chunks_complete(), 1);
    EXPECT_EQ(rank.missing_parameters_size(), static_cast<int>(kMissingNames));
    EXPECT_EQ(rank.process_id().size(), kMaxProcessIdBytes);
  }
  EXPECT_EQ(message.trainer_state().size(), kMaxTrainerStateBytes);
  EXPECT_EQ(message.coverage_complete_steps(), kRecentSteps + 1);
  const size_t bound = LargestMessageBytes(spec);
  EXPECT_LE(message.ByteSizeLong(), bound);
  // And it bounds, rather than being beyond all measure: a job is refused for it.
  EXPECT_GT(message.ByteSizeLong(), bound * 9 / 10);
}

}  // namespace
}  // namespace ballast::server
