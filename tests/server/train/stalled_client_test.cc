// The service's memory while clients do not read.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>

#include "ballast/v1/jobs.grpc.pb.h"
#include "ballast/v1/train.grpc.pb.h"
#include "proto/convert.h"
#include "tests/support/processes.h"

namespace ballast::server {
namespace {

constexpr int kRanks = 2;
constexpr int kChunksOfRank = 8;
constexpr int64_t kChunkElements = 1 << 18;
constexpr int64_t kMessageBytes = 2 * kChunkElements;
// What the service may take beyond what it had when all jobs were there: messages on their way in
// the transport's buffers, and free heap. What goes through in a test is many times as much.
constexpr int64_t kGrowthBytes = int64_t{64} << 20;

JobSpec Spec(const std::string& name) {
  JobSpec spec;
  spec.name = name;
  spec.groups = {{.name = "g", .hyper_parameters = {}}};
  spec.layout.world_size = kRanks;
  spec.layout.parameters = {{.name = "w", .shape = {kRanks * kChunksOfRank * kChunkElements}}};
  constexpr int64_t kElements = kChunksOfRank * kChunkElements;
  for (int rank = 0; rank < kRanks; ++rank) {
    spec.layout.partitions.push_back(
        {.rank = rank, .group = 0, .begin = rank * kElements, .end = (rank + 1) * kElements});
  }
  return spec;
}

// A field of /proc/PID/status that is given in kB.
int64_t StatusBytes(pid_t pid, const std::string& field) {
  const std::string text = ReadFile("/proc/" + std::to_string(pid) + "/status");
  const size_t at = text.find(field + ":");
  return at == std::string::npos ? -1 : 1024 * std::stoll(text.substr(at + field.size() + 1));
}

// One rank's stream, as a client that does only what the test calls.
class Rank {
 public:
  Rank(std::shared_ptr<grpc::Channel> channel, const std::string& job, int rank)
      : train_(v1::TrainService::NewStub(channel)) {
    v1::AttachWorkerRequest attach;
    attach.set_name("jobs/" + job);
    attach.set_rank(rank);
    attach.set_process_id("p");
    v1::AttachWorkerResponse attached;
    grpc::ClientContext context;
    EXPECT_TRUE(v1::JobService::NewStub(channel)->AttachWorker(&context, attach, &attached).ok());
    open_.set_name("jobs/" + job);
    open_.set_uid(attached.uid());
    open_.set_rank(rank);
    open_.set_process_id("p");
    *open_.mutable_generation() = attached.generation();
  }

  void Upload() {
    grpc::ClientContext context;
    v1::UploadWeightsResponse response;
    const auto stream = train_->UploadWeights(&context, &response);
    v1::UploadWeightsRequest request;
    *request.mutable_open() = open_;
    stream->Write(request);
    for (int chunk = 0; chunk < kChunksOfRank; ++chunk) {
      request.mutable_weights()->mutable_header()->set_chunk(chunk);
      request.mutable_weights()->set_payload(std::string(4 * kChunkElements, '\0'));
      stream->Write(request);
    }
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
  }

  void Open() {
    stream_ = train_->Train(&context_);
    v1::TrainRequest request;
    *request.mutable_open() = open_;
    EXPECT_TRUE(stream_->Write(request));
    gradient_.mutable_gradient()->set_payload(std::string(kMessageBytes, '\1'));
  }
  // The other calls may follow Cancel, and then return false.
  void Cancel() { context_.TryCancel(); }

  bool Begin(uint64_t step) {
    v1::TrainRequest request;
    request.mutable_begin_step()->set_step(step);
    return stream_->Write(request);
  }
  bool Gradient(uint64_t step, int chunk) {
    v1::GradientHeader& header = *gradient_.mutable_gradient()->mutable_header();
    header.set_step(step);
    header.set_chunk(chunk);
    header.set_micro_step_end(1);
    return stream_->Write(gradient_);
  }
  bool SendStep(uint64_t step) {
    bool sent = Begin(step);
    for (int chunk = 0; chunk < kChunksOfRank; ++chunk) sent = sent && Gradient(step, chunk);
    v1::TrainRequest end, seal;
    end.mutable_end_micro_step()->set_step(step);
    end.mutable_end_micro_step()->set_all_used(true);
    seal.mutable_seal()->set_step(step);
    seal.mutable_seal()->set_micro_steps(1);
    seal.mutable_seal()->mutable_vote();  // To apply it.
    return sent && stream_->Write(end) && stream_->Write(seal);
  }
  bool ReadUntilCommitted(uint64_t step) {
    v1::TrainResponse response;
    while (stream_->Read(&response)) {
      if (response.has_committed()) return response.committed().step() == step;
    }
    return false;
  }
  bool ReadUntilAcknowledged(uint64_t messages) {
    v1::TrainResponse response;
    while (stream_->Read(&response)) {
      if (response.acknowledged().messages() >= messages) return true;
    }
    return false;
  }

 private:
  const std::unique_ptr<v1::TrainService::Stub> train_;
  v1::OpenTrain open_;
  v1::TrainRequest gradient_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>> stream_;
};

// AddressSanitizer keeps a quarter of a gigabyte of what is freed, so that late reads of it show.
// In the service of this test it keeps little: that is no growth.
struct SmallQuarantine {
  SmallQuarantine() {
    const char* options = std::getenv("ASAN_OPTIONS");
    setenv(
        "ASAN_OPTIONS",
        ((options != nullptr ? std::string(options) + ":" : "") + "quarantine_size_mb=4").c_str(),
        1);
  }
};

class StalledClient : public testing::Test {
 protected:
  StalledClient()
      : daemon_(BALLASTD_PATH, {"--holder=none",
                                "--listen=unix:" + testing::TempDir() + "ballast_stalled_" +
                                    std::to_string(getpid()),
                                "--log-level=warning"}) {}

  void SetUp() override { address_ = daemon_.Address(); }

  // With streams open and a step done, so that all that is allocated once is there.
  std::vector<std::unique_ptr<Rank>> OpenJob(const std::string& name) {
    const auto jobs = v1::JobService::NewStub(NewChannel());
    v1::CreateJobRequest create;
    *create.mutable_job() = proto::ToProto(Spec(name));
    v1::Job job;
    grpc::ClientContext context;
    EXPECT_TRUE(jobs->CreateJob(&context, create, &job).ok());
    std::vector<std::unique_ptr<Rank>> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.push_back(std::make_unique<Rank>(NewChannel(), name, rank));
      ranks.back()->Upload();
    }
    for (const auto& rank : ranks) rank->Open();
    EXPECT_TRUE(TrainStep(ranks, 1));
    return ranks;
  }
  static bool TrainStep(const std::vector<std::unique_ptr<Rank>>& ranks, uint64_t step) {
    bool done = true;
    for (const auto& rank : ranks) done = done && rank->SendStep(step);
    for (const auto& rank : ranks) done = done && rank->ReadUntilCommitted(step);
    return done;
  }

  void StartWatching() {
    // Sets the highest mark back to what is resident now.
    std::FILE* file =
        std::fopen(("/proc/" + std::to_string(daemon_.pid()) + "/clear_refs").c_str(), "w");
    ASSERT_NE(file, nullptr);
    std::fputs("5", file);
    std::fclose(file);
    resident_bytes_ = StatusBytes(daemon_.pid(), "VmRSS");
    ASSERT_GT(resident_bytes_, 0);
  }
  // The most that was resident at any time since.
  int64_t GrowthBytes() const { return StatusBytes(daemon_.pid(), "VmHWM") - resident_bytes_; }

  // One of its own for each, so that they do not share a connection.
  std::shared_ptr<grpc::Channel> NewChannel() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), arguments);
  }

  const SmallQuarantine small_quarantine_;  // Before the service is there.
  Ballastd daemon_;
  std::string address_;
  int64_t resident_bytes_ = 0;
};

TEST_F(StalledClient, ThatNeverReadsItsAcknowledgementsMakesNothingGrow) {
  const auto ranks = OpenJob("flood");
  StartWatching();
  ASSERT_TRUE(ranks[0]->Begin(2));
  constexpr int kMessages = 1500;
  for (int i = 0; i < kMessages; ++i) ASSERT_TRUE(ranks[0]->Gradient(2, 0)) << i;  // Repeats.
  EXPECT_LE(GrowthBytes(), kGrowthBytes);
  static_assert(kMessages * kMessageBytes > 10 * kGrowthBytes);
  // All of them were accepted: the stream's first step took one for opening, the step's and two
  // more.
  EXPECT_TRUE(ranks[0]->ReadUntilAcknowledged(1 + (1 + kChunksOfRank + 2) + 1 + kMessages));
}

TEST_F(StalledClient, ThatReadsNoWeightsMakesNothingGrowWhileOthersGoOn) {
  const auto stalled = OpenJob("stalled"), other = OpenJob("other");
  StartWatching();
  // Rank 0 learns that steps are committed from rank 1, and reads nothing itself.
  std::atomic<uint64_t> steps_meanwhile = 0;
  std::thread stalled_job([&] {
    for (uint64_t step = 2;; ++step) {
      if (!stalled[0]->SendStep(step) || !stalled[1]->SendStep(step) ||
          !stalled[1]->ReadUntilCommitted(step)) {
        return;
      }
      ++steps_meanwhile;
    }
  });
  constexpr uint64_t kSteps = 50;
  uint64_t done = 1;
  while (done < kSteps && TrainStep(other, done + 1)) ++done;
  EXPECT_EQ(done, kSteps);
  static_assert(kSteps * kRanks * kChunksOfRank * kMessageBytes > 5 * kGrowthBytes);
  EXPECT_LE(GrowthBytes(), kGrowthBytes);
  for (const auto& rank : stalled) rank->Cancel();
  stalled_job.join();
  EXPECT_GE(steps_meanwhile, 1);
  EXPECT_TRUE(TrainStep(other, done + 1));
}

}  // namespace
}  // namespace ballast::server
