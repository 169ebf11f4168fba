// Whole jobs through the wire: what the service promises of a step.
#include <gmock/gmock.h>

#include <cmath>
#include <filesystem>
#include <limits>

#include "tests/server/tiny_job.h"

namespace ballast::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

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
  request.set_step(step);
  const auto reader = service.train().ReadWeights(&context, request);
  std::map<int, std::string> weights;
  v1::ReadWeightsResponse response;
  EXPECT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.step(), step);
  while (reader->Read(&response)) {
    EXPECT_EQ(response.weights().header().step(), step);
    weights[response.weights().header().chunk()] = response.weights().payload();
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
  trained.read = ReadWeights(service, first, 2);
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

class TrainServiceStep : public TinyJobTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(TinyJobTest::SetUp());
    hash_ = service_.StateHash("tiny");
  }

  std::string hash_;
};

TEST_F(TrainServiceStep, WithAChunkWithheldIsNotSealedUntilItComes) {
  first_.Begin(1);
  first_.Gradient(1, 0, 0, 1);
  first_.EndMicroStep(1, 0);
  first_.Seal(1, 1);
  second_.Begin(1);
  second_.Gradient(1, 2, 0, 1);  // Chunk 1 is withheld.
  second_.EndMicroStep(1, 0);
  second_.Seal(1, 1);

  const v1::TrainResponse refused = second_.Next();
  ASSERT_TRUE(refused.has_seal_refused()) << refused.DebugString();
  EXPECT_EQ(refused.seal_refused().step(), 1);
  EXPECT_THAT(refused.seal_refused().message(), HasSubstr("rank 1"));
  EXPECT_THAT(refused.seal_refused().message(), HasSubstr("micro-step 0"));
  ASSERT_GE(refused.seal_refused().missing_size(), 1);
  EXPECT_EQ(refused.seal_refused().missing(0).rank(), 1);
  EXPECT_EQ(refused.seal_refused().missing(0).micro_step(), 0);
  EXPECT_THAT(refused.seal_refused().missing(0).parameters(), ElementsAre("w", "b"));
  EXPECT_EQ(service_.StateHash("tiny"), hash_);

  second_.Gradient(1, 1, 0, 1);
  second_.Seal(1, 1);
  second_.ReadUntilCommitted();
  first_.ReadUntilCommitted();
  EXPECT_TRUE(first_.decision().applied());
  EXPECT_NE(service_.StateHash("tiny"), hash_);
}

TEST_F(TrainServiceStep, CountsARepeatedContributionOnce) {
  SendStep(first_, second_, 1);
  first_.ReadUntilCommitted();
  second_.ReadUntilCommitted();
  const std::string once = service_.StateHash("tiny");

  ServiceForTests other;
  CreateTinyJob(other, "tiny");
  TestWorker first(other, "tiny", 0, Codec::kFrames), second(other, "tiny", 1, Codec::kFrames);
  for (TestWorker* worker : {&first, &second}) {
    ASSERT_TRUE(worker->Attach().ok());
    worker->OpenStream();
  }
  first.Begin(1);
  first.Gradient(1, 0, 0, 0.25f);
  first.Gradient(1, 0, 0, 99);  // The same micro-step again: dropped, whatever its values are.
  first.Begin(1);
  first.ReadUntilAcknowledged();
  SendStep(first, second, 1);
  first.ReadUntilCommitted();
  second.ReadUntilCommitted();
  EXPECT_EQ(other.StateHash("tiny"), once);
}

TEST_F(TrainServiceStep, WithANaNIsSkippedNamesTheParameterAndMovesNoElement) {
  SendStep(first_, second_, 1);
  first_.ReadUntilCommitted();
  second_.ReadUntilCommitted();
  const std::map<int, std::string> weights = ReadWeights(service_, first_, 1);
  const std::string hash = service_.StateHash("tiny");

  for (TestWorker* worker : {&first_, &second_}) {
    worker->Begin(2);
    for (const int chunk : worker->chunks()) {
      worker->Gradient(2, chunk, 0, chunk == 2 ? std::numeric_limits<float>::quiet_NaN() : 1);
    }
    worker->EndMicroStep(2, 0);
    worker->Seal(2, 1);
  }
  first_.ReadUntilCommitted();
  second_.ReadUntilCommitted();
  EXPECT_FALSE(first_.decision().applied());
  EXPECT_THAT(first_.decision().skip_reason(), HasSubstr("scale"));
  EXPECT_TRUE(first_.weights().empty());
  EXPECT_TRUE(second_.weights().empty());
  EXPECT_EQ(ReadWeights(service_, first_, 2), weights);
  EXPECT_EQ(service_.StateHash("tiny"), hash);
}

// Steps FIRST to LAST, applied; the weights that the last one streamed, by chunk.
std::map<int, std::string> Train(const std::vector<TestWorker*>& workers, uint64_t first,
                                 uint64_t last) {
  std::map<int, std::string> weights;
  for (uint64_t step = first; step <= last; ++step) {
    SendStep(workers, step);
    for (TestWorker* worker : workers) {
      worker->ReadUntilCommitted();
      EXPECT_EQ(worker->decision().step(), step);
      EXPECT_TRUE(worker->decision().applied());
      for (const auto& [chunk, bytes] : worker->weights()) weights[chunk] = bytes;
    }
  }
  return weights;
}

TEST_F(TrainServiceStep, GoesOnOnAnotherWorldSizeFromACheckpointWithTheSameBits) {
  const std::string directory =
      testing::TempDir() + "ballast_resume_" + std::to_string(getpid()) + "/tiny";
  std::filesystem::create_directories(std::filesystem::path(directory).parent_path());
  Train({&first_, &second_}, 1, 2);
  grpc::ClientContext save_context;
  v1::SaveJobRequest save;
  save.set_name("jobs/tiny");
  save.set_directory(directory);
  v1::SaveJobResponse saved;
  ASSERT_TRUE(service_.state().SaveJob(&save_context, save, &saved).ok());
  EXPECT_EQ(saved.step(), 2);
  const std::map<int, std::string> never_stopped = Train({&first_, &second_}, 3, 4);

  ServiceForTests other;
  grpc::ClientContext create_context;
  v1::CreateJobRequest create;
  *create.mutable_job() = TinyJob("tiny", /*world_size=*/1);
  v1::Job job;
  ASSERT_TRUE(other.jobs().CreateJob(&create_context, create, &job).ok());
  grpc::ClientContext load_context;
  v1::LoadJobRequest load;
  load.set_name("jobs/tiny");
  load.set_directory(directory);
  v1::LoadJobResponse loaded;
  const grpc::Status status = other.state().LoadJob(&load_context, load, &loaded);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(loaded.step(), 2);
  TestWorker all(other, "tiny", 0, Codec::kFrames);
  ASSERT_TRUE(all.Attach().ok());
  EXPECT_EQ(all.attachment().committed_step(), 2);
  EXPECT_EQ(all.chunks().size(), 3);
  all.OpenStream();
  EXPECT_EQ(Train({&all}, 3, 4), never_stopped);
  EXPECT_EQ(other.StateHash("tiny"), service_.StateHash("tiny"));
  std::filesystem::remove_all(std::filesystem::path(directory).parent_path());
}

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

TEST_F(TrainServiceStep, EndsTheFirstStreamWhenASecondOneOfTheRankOpens) {
  first_.Begin(1);
  first_.Gradient(1, 0, 0, 1);
  first_.ReadUntilAcknowledged();
  TestWorker again(service_, "tiny", 0, Codec::kGenerated);
  ASSERT_TRUE(again.Attach(first_.attachment().generation()).ok());
  again.OpenStream();
  const grpc::Status status = first_.ReadUntilEnd();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED) << status.error_message();

  // What the first stream delivered counts.
  again.EndMicroStep(1, 0);
  again.Seal(1, 1);
  second_.Begin(1);
  for (const int chunk : second_.chunks()) second_.Gradient(1, chunk, 0, 1);
  second_.EndMicroStep(1, 0);
  second_.Seal(1, 1);
  again.ReadUntilCommitted();
  EXPECT_TRUE(again.decision().applied());
}

TEST_F(TrainServiceStep, EndsAllStreamsOfAnOlderGeneration) {
  TestWorker newcomer(service_, "tiny", 1, Codec::kFrames, "another process");
  ASSERT_TRUE(newcomer.Attach().ok());
  EXPECT_EQ(first_.ReadUntilEnd().error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(second_.ReadUntilEnd().error_code(), grpc::StatusCode::ABORTED);

  // The old generation cannot come back in.
  grpc::ClientContext context;
  const auto stream = service_.train().Train(&context);
  v1::TrainRequest request;
  *request.mutable_open() = first_.OpenMessage();
  stream->Write(request);
  v1::TrainResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::ABORTED);
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
