// Everything at once: ranks train on threads of their own while others read, save, abort, change
// groups and replace streams. ThreadSanitizer watches; what must hold at the end is that the
// committed steps are those of an undisturbed run.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpu_optimizer_service/job/job_driver.h"

namespace ballast {
namespace {

constexpr int kRanks = 2;
constexpr uint64_t kSteps = 40;

constexpr int kDisturbers = 3;

JobSpec Spec() {
  return MakeJobSpec(
      {.group_sizes = {{3000, 24}, {1000}}, .world_size = kRanks, .chunk_elements = 512});
}

constexpr double kMaxNorm = 52.2;  // About the norm of a step: some are clipped.

// One attempt at the next step by one rank, over a stream of its own. Whatever goes wrong, it tries
// again.
void TryStep(JobDriver& driver, int rank) {
  Job& job = driver.job();
  const std::string process_id = "process" + std::to_string(rank);
  const auto attachment = job.Attach({.rank = rank, .process_id = process_id});
  if (!attachment.ok()) return;
  auto listener = std::make_shared<RecordingListener>();
  const auto stream = job.OpenStream({.uid = job.uid(),
                                      .rank = rank,
                                      .process_id = process_id,
                                      .generation = attachment->generation,
                                      .update_mode = job.spec().update_mode},
                                     listener);
  if (!stream.ok()) return;
  const uint64_t step = (*stream)->position().committed_step + 1;
  if (step > kSteps ||
      !(*stream)->BeginStep(step, {.expected_clipping = {.max_norm = kMaxNorm}}).ok()) {
    return;
  }
  for (uint32_t m = 0; m < 2; ++m) {
    for (const int chunk : driver.layout().chunks_of_rank(rank)) {
      const std::vector<std::byte> bytes =
          driver.Encode(chunk, driver.Values(chunk, 10 * step + m));
      const absl::Span<const std::byte> piece(bytes);
      const Contribution given = {.step = step,
                                  .chunk = chunk,
                                  .micro_step_begin = m,
                                  .micro_step_end = m + 1,
                                  .final = m == 1,
                                  .payload = {&piece, 1}};
      if (!(*stream)->Contribute(given).ok()) return;
    }
    if (!(*stream)->EndMicroStep(step, m, {}).ok()) return;
  }
  const auto sealed = (*stream)->Seal(step, 2, StepVote{.clipping = {.max_norm = kMaxNorm}});
  if (sealed.ok() && !sealed->has_value()) listener->WaitForCommitOrDetach(step);
}

TEST(JobConcurrency, EverybodyAtOnceChangesNoBit) {
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 2});
  JobDriver expected(engine, Spec());
  expected.SetMaxNorm(kMaxNorm);
  expected.UploadWeights();
  expected.AttachAll();
  for (uint64_t step = 1; step <= kSteps; ++step) expected.Step(10 * step, 2);

  JobSpec spec = Spec();
  spec.name = "disturbed";
  spec.update_mode = UpdateMode::kSpeculate;
  JobDriver driver(engine, spec);
  driver.UploadWeights();
  Job& job = driver.job();
  const std::string directory =
      testing::TempDir() + "/job_concurrency_test_" + std::to_string(getpid());
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  // The ranks begin when all who disturb them are at it.
  std::latch disturbed(kDisturbers);
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      disturbed.wait();
      while (job.Status().committed_step < kSteps) TryStep(driver, rank);
    });
  }
  std::atomic<int64_t> disturbances = 0;
  const auto disturb = [&](const auto& body) {
    threads.emplace_back([&, body] {
      for (int64_t i = 0; !done.load(); ++i, ++disturbances) {
        body(i);
        if (i == 0) disturbed.count_down();
      }
    });
  };
  disturb([&](int64_t i) {
    const Snapshot snapshot = job.TakeSnapshot({0, 2}).value();
    std::vector<float> plane(1000);
    snapshot.Read(2, Plane::kExpAvg, 0, absl::MakeSpan(plane));
    job.TellWaiting();
    (void)job.SecondsSinceFirstSeal();
  });
  uint64_t abort_after = 0;
  disturb([&](int64_t i) {
    const JobStatus status = job.Status();
    std::vector<std::byte> shard(1024);
    (void)job.ReadShard(status.generation, status.committed_step, 0, absl::MakeSpan(shard));
    // Not every step, or none would ever end: one, in whatever phase that falls into, after some
    // steps have been decided.
    if (status.committed_step >= abort_after) {
      abort_after = status.committed_step + (job.AbortStep().ok() ? 3 : 0);
    }
    if (i % 64 == 0) (void)job.UpdateGroup(0, {.lr = 1e-3});
  });
  disturb([&](int64_t i) {
    EXPECT_TRUE(job.Save(directory).ok());
    (void)job.StateHash();
  });
  for (int rank = 0; rank < kRanks; ++rank) threads[rank].join();
  done = true;
  for (size_t i = kRanks; i < threads.size(); ++i) threads[i].join();
  std::filesystem::remove_all(directory);
  EXPECT_GE(disturbances.load(), kDisturbers);
  EXPECT_EQ(job.Status().committed_step, kSteps);
  EXPECT_EQ(job.StateHash(), expected.job().StateHash());
  EXPECT_GT(job.Status().speculation.published, 0);
  EXPECT_GT(job.Status().speculation.redone, 0);
}

}  // namespace
}  // namespace ballast
