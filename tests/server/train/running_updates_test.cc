// Further gradients of chunks whose provisional updates run, after such as came with may_guess: they
// hold up their streams, and nothing else.
//
// gRPC brings callbacks on 16 threads at most, on small hosts on two. More streams than that wait
// here, so one that blocked its thread would stop the service.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/cpu_optimizer_service/job/heap_rank_memory.h"
#include "tests/cpu_optimizer_service/job/held_updates.h"
#include "tests/server/tiny_job.h"

namespace ballast::server::running_updates_test {
namespace {

constexpr int kRanks = 10;
constexpr int kRunning = 2 * kRanks;
constexpr int kStepsMeanwhile = 20;

v1::Job SpeculatingJob(const std::string& name) {
  v1::Job job = WideJob(name, kRanks);
  job.set_update_mode(v1::SPECULATE);
  return job;
}

float ValueOf(int chunk, uint32_t micro_step) { return 0.25f * (chunk + 1) + micro_step; }

// A rank of a speculating job, which never says which of its gradients is the last.
class SpeculatingWorker : public TestWorker {
 public:
  SpeculatingWorker(ServiceForTests& service, const std::string& job, int rank, bool shares_memory)
      : TestWorker(service, job, rank, Codec::kGenerated),
        job_(service.engine().FindJob(job).value()) {
    Speculate();
    EXPECT_TRUE(Attach().ok());
    if (shares_memory) {
      auto memory = std::make_shared<const HeapRankMemory>(job_->layout(), job_->spec(), rank);
      const RankHolder holder = {
          .rank = rank, .process_id = "p", .generation = job_->Status().generation};
      EXPECT_TRUE(job_->GiveRankMemory(holder, memory).ok());
      memory_ = std::move(memory);
    }
    OpenStream();
  }

  Job& job() { return *job_; }
  void GiveMicroStep(uint32_t micro_step) {
    for (const int chunk : chunks()) {
      const std::string payload = Payload(chunk, ValueOf(chunk, micro_step));
      v1::TrainRequest request;
      if (memory_ != nullptr) {
        memory_->WriteGradient(
            chunk, {reinterpret_cast<const std::byte*>(payload.data()), payload.size()});
        v1::SharedGradients& shared = *request.mutable_shared_gradients();
        shared.add_chunks(OnWire(chunk));
        Fill(shared, micro_step);
      } else {
        v1::GradientHeader& header = *request.mutable_gradient()->mutable_header();
        header.set_chunk(OnWire(chunk));
        Fill(header, micro_step);
        request.mutable_gradient()->set_payload(payload);
      }
      Send(request);
    }
    EndMicroStep(1, micro_step);
  }
  // Its stream breaks, and the same process opens another.
  void Reopen() {
    ASSERT_TRUE(Attach(attachment().generation()).ok());
    OpenStream();
  }

 private:
  template <typename Header>
  static void Fill(Header& header, uint32_t micro_step) {
    header.set_step(1);
    header.set_micro_step_begin(micro_step);
    header.set_micro_step_end(micro_step + 1);
    header.set_may_guess(true);
  }

  const std::shared_ptr<Job> job_;
  std::shared_ptr<const HeapRankMemory> memory_;
};

TEST(RunningUpdates, HoldUpTheStreamsWhoseFurtherGradientsMeetThemAndNothingElse) {
  HeldUpdates held;
  ServiceForTests service({.listen = {"127.0.0.1:0"}}, /*file_system=*/nullptr, kTestMemoryBytes,
                          /*threads=*/kRunning + 2);
  CreateTinyJob(service, "payloads", SpeculatingJob("payloads"));
  CreateTinyJob(service, "in-place", SpeculatingJob("in-place"));
  CreateTinyJob(service, "twin", WideJob("twin", kRanks));
  CreateTinyJob(service, "other");
  std::vector<std::unique_ptr<SpeculatingWorker>> workers;
  for (int rank = 0; rank < kRanks; ++rank) {
    workers.push_back(std::make_unique<SpeculatingWorker>(service, "payloads", rank, false));
    workers.push_back(std::make_unique<SpeculatingWorker>(service, "in-place", rank, true));
  }
  for (const auto& worker : workers) {
    worker->Begin(1);
    worker->GiveMicroStep(0);
    worker->ReadUntilAcknowledged();
  }
  held.AwaitHeld(kRunning);

  for (const auto& worker : workers) worker->GiveMicroStep(1);
  TestWorker first(service, "other", 0, Codec::kFrames);
  TestWorker second(service, "other", 1, Codec::kGenerated);
  for (TestWorker* worker : {&first, &second}) {
    ASSERT_TRUE(worker->Attach().ok());
    worker->OpenStream();
  }
  for (uint64_t step = 1; step <= kStepsMeanwhile; ++step) {
    SendStep(first, second, step);
    first.ReadUntilCommitted();
    second.ReadUntilCommitted();
    ASSERT_EQ(first.decision().step(), step);
  }
  // A stream may end meanwhile. The next one does not know what came with may_guess.
  workers[0]->Reopen();
  workers[0]->GiveMicroStep(1);
  ASSERT_TRUE(second.Attach().ok());
  for (const auto& worker : workers) {
    for (const RankProgress& rank : worker->job().Status().ranks) {
      EXPECT_EQ(rank.furthest_micro_step, 1u);
    }
  }

  held.Release();
  std::vector<std::unique_ptr<TestWorker>> twins;
  std::vector<TestWorker*> all;
  for (int rank = 0; rank < kRanks; ++rank) {
    twins.push_back(std::make_unique<TestWorker>(service, "twin", rank, Codec::kGenerated));
    all.push_back(twins.back().get());
    ASSERT_TRUE(twins.back()->Attach().ok());
    twins.back()->OpenStream();
  }
  SendStep(all, 1);
  for (const auto& worker : workers) {
    worker->Seal(1, 2);
    all.push_back(worker.get());
  }
  for (TestWorker* worker : all) worker->ReadUntilCommitted();
  for (const std::string job : {"payloads", "in-place"}) {
    EXPECT_EQ(service.StateHash(job), service.StateHash("twin")) << job;
    EXPECT_GE(service.engine().FindJob(job).value()->Status().speculation.redone, kRanks) << job;
  }
}

}  // namespace
}  // namespace ballast::server::running_updates_test
