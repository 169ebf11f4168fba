// A disk that hangs in one job's save or load holds up that job, and nothing else: no call that
// arrives on a gRPC thread waits there.
//
// gRPC brings callbacks on 16 threads at most, on small hosts on two. Each test lets more calls
// wait than that, so a single kind of call that blocked its thread would stop the service.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "proto/convert.h"
#include "tests/cpu_optimizer_service/job/slow_disk.h"
#include "tests/server/tiny_job.h"

namespace ballast::server {
namespace {

using testing::AnyOf;

constexpr int kRanks = 32;
constexpr int kStepsMeanwhile = 20;

// A call that is under way on a thread of its own.
using Call = std::future<grpc::Status>;
bool HasEnded(const Call& call) {
  return call.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

void ExpectAllOk(absl::Span<Call> calls) {
  for (Call& call : calls) {
    const grpc::Status status = call.get();
    EXPECT_TRUE(status.ok()) << status.error_code() << " " << status.error_message();
  }
}

// What the two jobs take, and room for the versions that summaries of "w" pin, but not for those
// that a save pins, so that the save holds back the decision.
int64_t LittleMemory() {
  constexpr int64_t kVersionBytes = 3 * 256 * sizeof(float);
  Engine engine({.memory_limit_bytes = kTestMemoryBytes, .threads = 1});
  for (const v1::Job& job : {WideJob("slow", kRanks), TinyJob("other")}) {
    EXPECT_TRUE(engine.CreateJob(proto::FromProto(job).value()).ok());
  }
  return engine.memory().used_bytes() + (kRanks - 1) * kVersionBytes;
}

class HangingDiskTest : public testing::Test {
 protected:
  explicit HangingDiskTest(int64_t memory_bytes = LittleMemory())
      : service_({.listen = {"127.0.0.1:0"}}, &disk_, memory_bytes) {}
  void SetUp() override {
    CreateTinyJob(service_, "slow", WideJob("slow", kRanks));
    CreateTinyJob(service_, "other");
    for (TestWorker* worker : {&first_, &second_}) {
      ASSERT_TRUE(worker->Attach().ok());
      worker->OpenStream();
    }
    slow_ = service_.engine().FindJob("slow").value();
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks_.push_back(std::make_unique<TestWorker>(service_, "slow", rank, Codec::kGenerated));
    }
  }
  ~HangingDiskTest() override { disk_.Release(); }

  Job& slow() { return *slow_; }

  // A call for each rank, on a thread of its own.
  std::vector<Call> ForEachRank(const std::function<grpc::Status(TestWorker&)>& call) {
    std::vector<Call> calls;
    for (const auto& rank : ranks_) {
      calls.push_back(std::async(std::launch::async, call, std::ref(*rank)));
    }
    return calls;
  }
  void AttachAndOpenAll() {
    for (const auto& rank : ranks_) {
      const grpc::Status attached = rank->Attach();
      ASSERT_TRUE(attached.ok()) << attached.error_message();
    }
    for (const auto& rank : ranks_) rank->OpenStream();
  }
  // A step of the slow job, by all its ranks at once.
  std::vector<Call> Train(uint64_t step) {
    return ForEachRank([step](TestWorker& worker) {
      SendStep({&worker}, step);
      worker.ReadUntilCommitted();
      return worker.decision().step() == step ? grpc::Status::OK : grpc::Status::CANCELLED;
    });
  }
  void AwaitPhase(JobPhase phase) {
    while (slow_->Status().phase != phase) std::this_thread::yield();
  }

  // Returns when the service has so many calls like SaveJob and AttachWorker in hand.
  void AwaitControlCalls(size_t count) {
    const auto in_hand = [&] {
      for (const CallUse& use : service_.server().calls()) {
        if (use.kind == "control") return use.in_progress;
      }
      ADD_FAILURE() << "it does not count them";
      return count;
    };
    while (in_hand() != count) std::this_thread::yield();
  }

  Call Save() {
    return std::async(std::launch::async, [this] {
      grpc::ClientContext context;
      v1::SaveJobRequest request;
      request.set_name("jobs/slow");
      request.set_directory("/checkpoint");
      v1::SaveJobResponse response;
      return service_.state().SaveJob(&context, request, &response);
    });
  }
  // Until the disk is released.
  Call SaveThatHangs() {
    disk_.HoldUp();
    Call save = Save();
    disk_.AwaitHeldUp();
    return save;
  }
  // The first step, which a hanging save leaves sealed, of all ranks; their streams to the end.
  std::vector<Call> SealAndReadToTheEnd() {
    std::vector<Call> streams = ForEachRank([](TestWorker& worker) {
      SendStep({&worker}, 1);
      return worker.ReadUntilEnd();
    });
    AwaitPhase(JobPhase::kSealed);
    return streams;
  }
  Call Load() {
    return std::async(std::launch::async, [this] {
      grpc::ClientContext context;
      v1::LoadJobRequest request;
      request.set_name("jobs/slow");
      request.set_directory("/checkpoint");
      v1::LoadJobResponse response;
      return service_.state().LoadJob(&context, request, &response);
    });
  }
  Call Close() {
    return std::async(std::launch::async, [this] {
      grpc::ClientContext context;
      v1::CloseJobRequest request;
      request.set_name("jobs/slow");
      v1::CloseJobResponse response;
      return service_.jobs().CloseJob(&context, request, &response);
    });
  }
  std::vector<Call> AttachEachAgain() {
    std::vector<Call> calls;
    for (int rank = 0; rank < kRanks; ++rank) {
      calls.push_back(std::async(std::launch::async, [this, rank] {
        return TestWorker(service_, "slow", rank, Codec::kGenerated).Attach();
      }));
    }
    return calls;
  }
  // A stream that is opened, and ended at once.
  grpc::Status OpenAndClose(const TestWorker& worker) {
    grpc::ClientContext context;
    const auto stream = service_.train().Train(&context);
    v1::TrainRequest request;
    *request.mutable_open() = worker.OpenMessage();
    stream->Write(request);
    stream->WritesDone();
    v1::TrainResponse response;
    while (stream->Read(&response)) continue;
    return stream->Finish();
  }
  grpc::Status Summarize() {
    grpc::ClientContext context;
    v1::SummarizeStateRequest request;
    request.set_name("jobs/slow/parameters/w");
    v1::StateSummary response;
    return service_.state().SummarizeState(&context, request, &response);
  }

  // The other job's steps, and calls about it.
  void TrainOther(int steps) {
    for (int i = 0; i < steps; ++i) {
      ++other_step_;
      SendStep(first_, second_, other_step_);
      first_.ReadUntilCommitted();
      second_.ReadUntilCommitted();
      ASSERT_EQ(first_.decision().step(), other_step_);
    }
    grpc::ClientContext context;
    v1::GetJobRequest request;
    request.set_name("jobs/other");
    v1::Job job;
    ASSERT_TRUE(service_.jobs().GetJob(&context, request, &job).ok());
    EXPECT_EQ(job.committed_step(), other_step_);
    ASSERT_TRUE(second_.Attach().ok());
    second_.OpenStream();
  }

  SlowDisk disk_;
  ServiceForTests service_;
  TestWorker first_{service_, "other", 0, Codec::kFrames};
  TestWorker second_{service_, "other", 1, Codec::kGenerated};
  uint64_t other_step_ = 0;
  std::vector<std::unique_ptr<TestWorker>> ranks_;
  std::shared_ptr<Job> slow_;
};

class HangingDiskWithMemoryTest : public HangingDiskTest {
 protected:
  HangingDiskWithMemoryTest() : HangingDiskTest(kTestMemoryBytes) {}
};

TEST_F(HangingDiskWithMemoryTest, ASaveThatHangsHoldsUpNothingAndIsShown) {
  AttachAndOpenAll();
  Call save = SaveThatHangs();
  for (const uint64_t step : {1, 2}) {
    std::vector<Call> steps = Train(step);
    ExpectAllOk(absl::MakeSpan(steps));
  }
  std::vector<Call> attaches = AttachEachAgain();
  ExpectAllOk(absl::MakeSpan(attaches));
  EXPECT_TRUE(Summarize().ok());
  grpc::ClientContext context;
  v1::GetJobRequest request;
  request.set_name("jobs/slow");
  v1::Job job;
  ASSERT_TRUE(service_.jobs().GetJob(&context, request, &job).ok());
  ASSERT_EQ(job.saves_size(), 1);
  EXPECT_EQ(job.saves(0).directory(), "/checkpoint");
  EXPECT_EQ(job.saves(0).step(), 0);
  EXPECT_GT(job.saves(0).seconds(), 0);
  EXPECT_FALSE(job.saves(0).holds_back_decisions());
  EXPECT_FALSE(HasEnded(save));
  disk_.Release();
  ExpectAllOk({&save, 1});
}

TEST_F(HangingDiskTest, CallsThatWaitForTheStepOfAHangingSaveAreAnsweredAfterIt) {
  AttachAndOpenAll();
  Call save = SaveThatHangs();
  std::vector<Call> streams = SealAndReadToTheEnd();
  const Generation generation = slow().Status().generation;
  // Attaching waits for the decision. Callers that give up meanwhile take no rank.
  std::vector<std::unique_ptr<grpc::ClientContext>> given_up;
  std::vector<Call> lost;
  for (int rank = 0; rank < kRanks; ++rank) {
    given_up.push_back(std::make_unique<grpc::ClientContext>());
    lost.push_back(std::async(std::launch::async, [this, rank, context = given_up.back().get()] {
      v1::AttachWorkerRequest request;
      request.set_name("jobs/slow");
      request.set_rank(rank);
      request.set_process_id("another");
      v1::AttachWorkerResponse response;
      return service_.jobs().AttachWorker(context, request, &response);
    }));
  }
  std::vector<Call> attaches = AttachEachAgain();
  std::vector<Call> opens =
      ForEachRank([this](TestWorker& worker) { return OpenAndClose(worker); });
  ASSERT_NO_FATAL_FAILURE(TrainOther(1));
  AwaitControlCalls(1 + 2 * kRanks);
  for (const Call& call : lost) EXPECT_FALSE(HasEnded(call));
  for (const auto& context : given_up) context->TryCancel();
  for (Call& call : lost) EXPECT_EQ(call.get().error_code(), grpc::StatusCode::CANCELLED);
  AwaitControlCalls(1 + kRanks);  // The service knows it, too.
  ASSERT_NO_FATAL_FAILURE(TrainOther(kStepsMeanwhile));
  EXPECT_FALSE(HasEnded(save));
  for (const Call& attach : attaches) EXPECT_FALSE(HasEnded(attach));
  for (const Call& open : opens) EXPECT_FALSE(HasEnded(open));
  for (const Call& stream : streams) EXPECT_FALSE(HasEnded(stream));

  disk_.Release();
  ExpectAllOk({&save, 1});
  ExpectAllOk(absl::MakeSpan(attaches));
  for (Call& open : opens) {  // An attachment after it ends the stream.
    EXPECT_THAT(open.get().error_code(), AnyOf(grpc::StatusCode::OK, grpc::StatusCode::ABORTED));
  }
  // The session of a process that attaches again replaces the older one's stream.
  for (Call& stream : streams) EXPECT_EQ(stream.get().error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(slow().Status().committed_step, 1);
  EXPECT_EQ(slow().Status().generation, generation);
  AttachAndOpenAll();
  std::vector<Call> steps = Train(2);
  ExpectAllOk(absl::MakeSpan(steps));
}

// What is used after its end is for a sanitizer to see.
TEST_F(HangingDiskTest, AStreamMayEndBeforeTheEngineHasReturnedFromOpeningIt) {
  AttachAndOpenAll();
  Call save = SaveThatHangs();
  std::vector<Call> streams = SealAndReadToTheEnd();
  std::vector<Call> opens =
      ForEachRank([this](TestWorker& worker) { return OpenAndClose(worker); });
  ASSERT_NO_FATAL_FAILURE(TrainOther(1));
  disk_.Release();
  ExpectAllOk({&save, 1});
  ExpectAllOk(absl::MakeSpan(opens));
  for (Call& stream : streams) EXPECT_EQ(stream.get().error_code(), grpc::StatusCode::ABORTED);
}

// Otherwise a service that is told to stop would wait for the disk.
TEST_F(HangingDiskTest, ALookForCheckpointsThatHangsEndsWithItsCaller) {
  ASSERT_TRUE(Save().get().ok());
  disk_.HoldUp();
  constexpr int kLooks = 4;  // So many at once.
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<Call> looks;
  for (int i = 0; i < kLooks; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    looks.push_back(std::async(std::launch::async, [this, i, context = contexts[i].get()] {
      v1::ListCheckpointsResponse response;
      if (i == 0) {
        v1::VerifyCheckpointsRequest request;
        request.set_directory("/checkpoint");
        return service_.state().VerifyCheckpoints(context, request, &response);
      }
      v1::ListCheckpointsRequest request;
      request.set_directory("/checkpoint");
      return service_.state().ListCheckpoints(context, request, &response);
    }));
  }
  disk_.AwaitHeldUp(kLooks);
  AwaitControlCalls(kLooks);
  for (const auto& context : contexts) context->TryCancel();
  AwaitControlCalls(0);
  for (Call& look : looks) EXPECT_EQ(look.get().error_code(), grpc::StatusCode::CANCELLED);

  const auto list = [this] {
    grpc::ClientContext context;
    v1::ListCheckpointsRequest request;
    request.set_directory("/checkpoint");
    v1::ListCheckpointsResponse response;
    return service_.state().ListCheckpoints(&context, request, &response).error_code();
  };
  // Their threads are still there.
  EXPECT_EQ(list(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  disk_.Release();
  while (list() != grpc::StatusCode::OK) std::this_thread::yield();
}

}  // namespace
}  // namespace ballast::server
