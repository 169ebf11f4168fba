// Whole jobs through the wire: what the service promises of a step.
#include <gmock/gmock.h>

#include "tests/server/tiny_job.h"

namespace ballast::server {
namespace {

using ::testing::ElementsAre;

struct Trained {
  std::string state_hash;
  std::map<int, std::string> weights;  // By chunk, as streamed after the second step.
  std::map<int, std::string> read;     // By chunk, as ReadWeights gives them.

  bool operator==(const Trained&) const = default;
};

std::map<int, std::string> ReadWeights(ServiceForTests& service, const TestWorker& worker,
                                       uint64_t step) {
  grpc::ClientContext context;
  v1::ReadWeightsRequest request;
  request.set_name(worker.OpenMessage().name());
  request.set_uid(worker.OpenMessage().uid());
  request.set_rank(worker.OpenMessage().rank());
  request.set_step(step);
  const auto reader = service.train().ReadWeights(&context, request);
  std::map<int, std::string> weights;
  v1::ReadWeightsResponse response;
  EXPECT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.step(), step);
  while (reader->Read(&response)) {
    EXPECT_EQ(response.weights().header().step(), step);
    weights[worker.chunks()[response.weights().header().chunk()]] = response.weights().payload();
  }
  const grpc::Status status = reader->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  return weights;
}

Trained TrainTwoSteps(Way way, Codec codec) {
  ServiceForTests service(way);
  CreateTinyJob(service, "tiny");
  TestWorker first(service, "tiny", 0, codec), second(service, "tiny", 1, codec);
  for (TestWorker* worker : {&first, &second}) {
    EXPECT_TRUE(worker->Attach().ok());
    worker->OpenStream();
  }
  for (const uint64_t step : {1, 2}) {
    SendStep(first, second, step);
    for (TestWorker* worker : {&first, &second}) {
      worker->ReadUntilCommitted();
      EXPECT_TRUE(worker->decision().applied());
      EXPECT_EQ(worker->decision().step(), step);
      EXPECT_EQ(worker->weights().size(), worker->chunks().size());
    }
  }
  Trained trained;
  trained.weights = first.weights();
  trained.weights.insert(second.weights().begin(), second.weights().end());
  for (TestWorker* worker : {&first, &second}) {
    trained.read.merge(ReadWeights(service, *worker, 2));
  }
  EXPECT_TRUE(first.Finish().ok());
  EXPECT_TRUE(second.Finish().ok());
  trained.state_hash = service.StateHash("tiny");
  return trained;
}

TEST(TrainService, GivesTheSameAnswersToGeneratedClassesAndFramesOnEveryLink) {
  const Trained expected = TrainTwoSteps(Way::kTcp, Codec::kGenerated);
  EXPECT_EQ(expected.weights.size(), 3);
  EXPECT_EQ(expected.read, expected.weights);
  EXPECT_EQ(expected.weights.at(0).size(), 512);
  EXPECT_EQ(TrainTwoSteps(Way::kTcp, Codec::kFrames), expected);
  EXPECT_EQ(TrainTwoSteps(Way::kUnixSocket, Codec::kFrames), expected);
  EXPECT_EQ(TrainTwoSteps(Way::kInProcess, Codec::kFrames), expected);
  EXPECT_EQ(TrainTwoSteps(Way::kInProcess, Codec::kGenerated), expected);
}

using TrainServiceStep = TinyJobTest;

TEST_F(TrainServiceStep, TellsSealedRanksWhomTheyWaitFor) {
  ServiceForTests service(
      {.listen = {"127.0.0.1:0"}, .seal_deadline_seconds = 0.02, .seal_reminder_seconds = 0.01});
  CreateTinyJob(service, "tiny");
  TestWorker worker(service, "tiny", 0, Codec::kFrames);
  ASSERT_TRUE(worker.Attach().ok());
  worker.OpenStream();
  worker.Begin(1);
  worker.Gradient(1, 0, 0, 1);
  worker.EndMicroStep(1, 0);
  worker.Seal(1, 1);
  for (int i = 0; i < 3; ++i) {
    const v1::TrainResponse waiting = worker.Next();
    ASSERT_TRUE(waiting.has_waiting()) << waiting.DebugString();
    EXPECT_EQ(waiting.waiting().step(), 1);
    EXPECT_THAT(waiting.waiting().ranks(), ElementsAre(1));
  }
}

TEST_F(TrainServiceStep, AcknowledgesManyMessagesWithOne) {
  for (int i = 0; i < 2000; ++i) first_.Begin(1);  // A repeat each.
  first_.ReadUntilAcknowledged();
}

TEST_F(TrainServiceStep, CommitsForTheOthersWhileOneDoesNotRead) {
  for (uint64_t step = 1; step <= 3; ++step) {
    SendStep(first_, second_, step);  // first_ does not read.
    second_.ReadUntilCommitted();
  }
  for (uint64_t step = 1; step <= 3; ++step) {
    first_.ReadUntilCommitted();
    EXPECT_EQ(first_.decision().step(), step);
  }
}

}  // namespace
}  // namespace ballast::server
