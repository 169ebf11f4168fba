// A small job, and workers of it that speak to a service in messages.
#ifndef BALLAST_TESTS_SERVER_TINY_JOB_H_
#define BALLAST_TESTS_SERVER_TINY_JOB_H_

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ballast/v1/jobs.pb.h"
#include "ballast/v1/train.pb.h"
#include "tests/support/service_for_tests.h"

namespace ballast::server {

// Two ranks, two groups, chunks of one block:
//   decay     w[300] b[40], 512 elements: chunk 0 of rank 0, chunk 1 of rank 1
//   no_decay  scale[10],    256 elements: chunk 2 of rank 1
// and a frozen parameter, "fixed". With a world size of 1, rank 0 has all three chunks.
v1::Job TinyJob(const std::string& name, int world_size = 2);
// A chunk of one block for each rank; the last one's is of the second group.
v1::Job WideJob(const std::string& name, int world_size);

// A Train stream as messages, whatever makes bytes of them.
class TrainTransport {
 public:
  virtual ~TrainTransport() = default;
  virtual bool Write(const v1::TrainRequest& message) = 0;
  virtual bool Read(v1::TrainResponse& message) = 0;
  virtual grpc::Status Finish() = 0;  // Closes this side first.
};
enum class Codec {
  kGenerated,  // The plain generated stub.
  kFrames,     // proto/frame.h over bytes.
};

// One rank of a job.
class TestWorker {
 public:
  TestWorker(ServiceForTests& service, const std::string& job, int rank, Codec codec,
             std::string process_id = "p");
  virtual ~TestWorker();

  // From now on Attach asks for shared memory (sharing_worker.h). Otherwise all goes as payloads.
  void AskForSharedMemory() { asks_for_shared_memory_ = true; }
  void Speculate() { update_mode_ = v1::SPECULATE; }  // Its stream, once it is opened.
  // With a generation: to open a broken stream again.
  grpc::Status Attach(std::optional<v1::Generation> generation = std::nullopt);
  // Attach must have come before. Weights of chunk c: element i is 0.5 + c + i / 1024, padding 0.
  grpc::Status Upload();
  void OpenStream();

  bool Write(const v1::TrainRequest& message) { return transport_->Write(message); }
  void Send(const v1::TrainRequest& message);  // Writes, and counts for ReadUntilAcknowledged.
  void Begin(uint64_t step);
  // All elements of the chunk, padding excepted, are `value`.
  void Gradient(uint64_t step, int chunk, uint32_t micro_step, float value);
  void EndMicroStep(uint64_t step, uint32_t micro_step);
  void Seal(uint64_t step, uint32_t micro_steps);

  // The next message that is no acknowledgement; fails the test if the stream ends instead.
  v1::TrainResponse Next();
  // Reads until StepCommitted; keeps decision() and weights().
  void ReadUntilCommitted();
  // Reads until all messages written are acknowledged.
  void ReadUntilAcknowledged();
  grpc::Status Finish() { return transport_->Finish(); }
  // Reads to the stream's end, without closing this side.
  grpc::Status ReadUntilEnd();

  // Of this rank, by their index in the job. Attach must have come before.
  const std::vector<int>& chunks() const { return chunks_; }
  // Such a chunk's number in messages.
  int OnWire(int chunk) const { return chunk - chunks_.front(); }
  const v1::StepDecision& decision() const { return decision_; }
  const std::map<int, std::string>& weights() const { return weights_; }  // By chunk.
  const v1::AttachWorkerResponse& attachment() const { return attachment_; }
  v1::OpenTrain OpenMessage() const;
  std::string Payload(int chunk, float value) const;
  uint64_t written() const { return written_; }

 protected:
  ServiceForTests& service() { return service_; }
  int rank() const { return rank_; }
  void ExpectWeightsInSharedMemory() { weights_in_shared_memory_ = true; }
  int64_t UsedElements(int chunk) const;  // The others are padding.

 private:
  ServiceForTests& service_;
  const std::string job_;
  const int rank_;
  const Codec codec_;
  const std::string process_id_;
  bool asks_for_shared_memory_ = false;
  bool weights_in_shared_memory_ = false;
  v1::UpdateMode update_mode_ = v1::UPDATE_MODE_UNSPECIFIED;
  std::vector<int> chunks_;
  v1::AttachWorkerResponse attachment_;
  std::unique_ptr<TrainTransport> transport_;
  uint64_t written_ = 0;
  uint64_t acknowledged_ = 0;
  v1::StepDecision decision_;
  std::map<int, std::string> weights_;
};

// Creates the job and gives it weights, from all its ranks. The job may differ from TinyJob, but
// each partition range must be one chunk of 256 elements.
void CreateTinyJob(ServiceForTests& service, const std::string& name,
                   const std::optional<v1::Job>& job = std::nullopt);
// All workers' whole step of two micro-steps, seals included.
void SendStep(const std::vector<TestWorker*>& workers, uint64_t step);
inline void SendStep(TestWorker& first, TestWorker& second, uint64_t step) {
  SendStep({&first, &second}, step);
}

// Both ranks of a job with weights, streams open.
class TinyJobTest : public testing::Test {
 protected:
  explicit TinyJobTest(Codec codec_of_second = Codec::kFrames)
      : second_(service_, "tiny", 1, codec_of_second) {}
  void SetUp() override {
    CreateTinyJob(service_, "tiny");
    for (TestWorker* worker : {&first_, &second_}) {
      ASSERT_TRUE(worker->Attach().ok());
      worker->OpenStream();
    }
  }
  void Step(uint64_t step) {
    SendStep(first_, second_, step);
    first_.ReadUntilCommitted();
    second_.ReadUntilCommitted();
  }

  ServiceForTests service_;
  TestWorker first_{service_, "tiny", 0, Codec::kFrames};
  TestWorker second_;
};

}  // namespace ballast::server

#endif  // BALLAST_TESTS_SERVER_TINY_JOB_H_
