#include "tests/server/tiny_job.h"

#include <grpcpp/generic/generic_stub.h>

#include <cstring>
#include <utility>

#include "cpu_optimizer_service/common/float_format.h"
#include "proto/convert.h"
#include "proto/frame.h"

namespace ballast::server {
namespace {

class GeneratedTransport final : public TrainTransport {
 public:
  explicit GeneratedTransport(v1::TrainService::Stub& stub) : stream_(stub.Train(&context_)) {}
  ~GeneratedTransport() override { context_.TryCancel(); }

  bool Write(const v1::TrainRequest& message) override { return stream_->Write(message); }
  bool Read(v1::TrainResponse& message) override { return stream_->Read(&message); }
  grpc::Status Finish() override {
    stream_->WritesDone();
    v1::TrainResponse message;
    while (stream_->Read(&message)) continue;
    return stream_->Finish();
  }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>> stream_;
};

// Bytes both ways through proto/frame.h, one operation at a time.
class FrameTransport final : public TrainTransport {
 public:
  explicit FrameTransport(const std::shared_ptr<grpc::Channel>& channel) : stub_(channel) {
    stream_ = stub_.PrepareCall(&context_, "/ballast.v1.TrainService/Train", &queue_);
    stream_->StartCall(this);
    Wait();
  }
  ~FrameTransport() override {
    context_.TryCancel();
    if (!finished_) {
      grpc::Status status;
      stream_->Finish(&status, this);
      Wait();
    }
    queue_.Shutdown();
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) continue;
  }

  bool Write(const v1::TrainRequest& message) override {
    if (!message.has_gradient()) {
      stream_->Write(proto::SerializeControl(message), this);
      return Wait();
    }
    const auto payload = std::make_shared<std::string>(message.gradient().payload());
    stream_->Write(
        proto::SerializeGradient(
            message.gradient().header(),
            {reinterpret_cast<const std::byte*>(payload->data()), payload->size()}, [payload] {}),
        this);
    return Wait();
  }

  bool Read(v1::TrainResponse& message) override {
    grpc::ByteBuffer bytes;
    stream_->Read(&bytes, this);
    if (!Wait()) return false;
    proto::Frame<v1::TrainResponse> frame = proto::ParseTrainResponse(bytes).value();
    message = std::move(frame.message);
    if (message.has_weights()) {
      std::string& payload = *message.mutable_weights()->mutable_payload();
      payload.resize(frame.payload.size_bytes());
      frame.payload.CopyTo(reinterpret_cast<std::byte*>(payload.data()));
    }
    return true;
  }

  grpc::Status Finish() override {
    stream_->WritesDone(this);
    Wait();
    v1::TrainResponse message;
    while (Read(message)) continue;
    grpc::Status status;
    stream_->Finish(&status, this);
    Wait();
    finished_ = true;
    return status;
  }

 private:
  bool Wait() {
    void* tag;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  bool finished_ = false;
};

void AddParameter(v1::Job& job, const std::string& name, int64_t elements, int group,
                  bool trainable) {
  v1::Parameter& parameter = *job.add_parameters();
  parameter.set_name(name);
  parameter.add_shape(elements);
  parameter.set_group(group);
  parameter.set_trainable(trainable);
}

void AddRange(v1::Job& job, int rank, int group, int64_t begin, int64_t end) {
  v1::PartitionRange& range = *job.add_partitions();
  range.set_rank(rank);
  range.set_group(group);
  range.set_begin(begin);
  range.set_end(end);
}

}  // namespace

v1::Job TinyJob(const std::string& name, int world_size) {
  v1::Job job;
  job.set_name("jobs/" + name);
  job.set_world_size(world_size);
  job.set_chunk_elements(256);
  for (const char* group : {"decay", "no_decay"}) {
    job.add_groups()->set_name(group);
    *job.mutable_groups()->rbegin()->mutable_hyper_parameters() =
        proto::ToProto(HyperParameters{.lr = 0.01, .weight_decay = 0.1});
  }
  AddParameter(job, "w", 300, 0, true);
  AddParameter(job, "b", 40, 0, true);
  AddParameter(job, "scale", 10, 1, true);
  AddParameter(job, "fixed", 5, 1, false);
  AddRange(job, 0, 0, 0, 256);
  AddRange(job, world_size - 1, 0, 256, 512);
  AddRange(job, world_size - 1, 1, 0, 256);
  return job;
}

v1::Job WideJob(const std::string& name, int world_size) {
  v1::Job job = TinyJob(name, world_size);
  job.clear_parameters();
  job.clear_partitions();
  AddParameter(job, "w", 256 * (world_size - 1), 0, true);
  AddParameter(job, "scale", 256, 1, true);
  for (int rank = 0; rank + 1 < world_size; ++rank) {
    AddRange(job, rank, 0, 256 * rank, 256 * (rank + 1));
  }
  AddRange(job, world_size - 1, 1, 0, 256);
  return job;
}

TestWorker::TestWorker(ServiceForTests& service, const std::string& job, int rank, Codec codec,
                       std::string process_id)
    : service_(service),
      job_(job),
      rank_(rank),
      codec_(codec),
      process_id_(std::move(process_id)) {}

TestWorker::~TestWorker() = default;

grpc::Status TestWorker::Attach(std::optional<v1::Generation> generation) {
  grpc::ClientContext context;
  v1::AttachWorkerRequest request;
  request.set_name("jobs/" + job_);
  request.set_rank(rank_);
  request.set_process_id(process_id_);
  if (generation.has_value()) *request.mutable_generation() = *generation;
  request.set_shared_memory(asks_for_shared_memory_);
  const grpc::Status status = service_.jobs().AttachWorker(&context, request, &attachment_);
  chunks_.clear();
  for (int chunk = 0; chunk < attachment_.job().partitions_size(); ++chunk) {
    if (attachment_.job().partitions(chunk).rank() == rank_) chunks_.push_back(chunk);
  }
  return status;
}

v1::OpenTrain TestWorker::OpenMessage() const {
  v1::OpenTrain open;
  open.set_name("jobs/" + job_);
  open.set_uid(attachment_.uid());
  open.set_rank(rank_);
  open.set_process_id(process_id_);
  *open.mutable_generation() = attachment_.generation();
  open.set_update_mode(update_mode_);
  open.set_weights_in_shared_memory(weights_in_shared_memory_);
  return open;
}

grpc::Status TestWorker::Upload() {
  grpc::ClientContext context;
  v1::UploadWeightsResponse response;
  const auto stream = service_.train().UploadWeights(&context, &response);
  v1::UploadWeightsRequest request;
  *request.mutable_open() = OpenMessage();
  stream->Write(request);
  for (const int chunk : chunks_) {
    std::vector<float> values(256);
    for (int i = 0; i < UsedElements(chunk); ++i) values[i] = 0.5f + chunk + i / 1024.0f;
    request.mutable_weights()->mutable_header()->set_chunk(OnWire(chunk));
    request.mutable_weights()->set_payload(values.data(), values.size() * sizeof(float));
    stream->Write(request);
  }
  stream->WritesDone();
  return stream->Finish();
}

void TestWorker::OpenStream() {
  if (codec_ == Codec::kGenerated) {
    transport_ = std::make_unique<GeneratedTransport>(service_.train());
  } else {
    transport_ = std::make_unique<FrameTransport>(service_.channel());
  }
  v1::TrainRequest request;
  *request.mutable_open() = OpenMessage();
  ASSERT_TRUE(Write(request));
  written_ = 1;
  acknowledged_ = 0;
  const v1::TrainResponse response = Next();
  ASSERT_TRUE(response.has_opened()) << response.DebugString();
}

void TestWorker::Send(const v1::TrainRequest& message) {
  ASSERT_TRUE(Write(message));
  written_ += message.has_shared_gradients() ? message.shared_gradients().chunks_size() : 1;
}

void TestWorker::Begin(uint64_t step) {
  v1::TrainRequest request;
  request.mutable_begin_step()->set_step(step);
  request.mutable_begin_step()->add_divisors(4);
  request.mutable_begin_step()->add_divisors(4);
  Send(request);
}

void TestWorker::Gradient(uint64_t step, int chunk, uint32_t micro_step, float value) {
  v1::TrainRequest request;
  v1::GradientHeader& header = *request.mutable_gradient()->mutable_header();
  header.set_step(step);
  header.set_chunk(OnWire(chunk));
  header.set_micro_step_begin(micro_step);
  header.set_micro_step_end(micro_step + 1);
  request.mutable_gradient()->set_payload(Payload(chunk, value));
  Send(request);
}

void TestWorker::EndMicroStep(uint64_t step, uint32_t micro_step) {
  v1::TrainRequest request;
  request.mutable_end_micro_step()->set_step(step);
  request.mutable_end_micro_step()->set_micro_step(micro_step);
  request.mutable_end_micro_step()->set_all_used(true);
  Send(request);
}

void TestWorker::Seal(uint64_t step, uint32_t micro_steps) {
  v1::TrainRequest request;
  request.mutable_seal()->set_step(step);
  request.mutable_seal()->set_micro_steps(micro_steps);
  request.mutable_seal()->mutable_vote();  // To apply it.
  Send(request);
}

v1::TrainResponse TestWorker::Next() {
  v1::TrainResponse message;
  while (transport_->Read(message)) {
    if (!message.has_acknowledged()) return message;
    EXPECT_GT(message.acknowledged().messages(), acknowledged_);
    acknowledged_ = message.acknowledged().messages();
  }
  const grpc::Status status = transport_->Finish();
  ADD_FAILURE() << "the stream ended: " << status.error_code() << " " << status.error_message();
  return {};
}

void TestWorker::ReadUntilAcknowledged() {
  v1::TrainResponse message;
  while (acknowledged_ < written_ && transport_->Read(message)) {
    ASSERT_TRUE(message.has_acknowledged()) << message.DebugString();
    acknowledged_ = message.acknowledged().messages();
  }
  ASSERT_EQ(acknowledged_, written_);
}

void TestWorker::ReadUntilCommitted() {
  weights_.clear();
  while (true) {
    v1::TrainResponse message = Next();
    const bool ended = message.kind_case() == v1::TrainResponse::KIND_NOT_SET;
    if (message.has_committed() || ended) return;
    if (message.has_decision()) decision_ = message.decision();
    if (message.has_weights()) {
      weights_[chunks_[message.weights().header().chunk()]] = message.weights().payload();
    }
  }
}

grpc::Status TestWorker::ReadUntilEnd() {
  v1::TrainResponse message;
  while (transport_->Read(message)) continue;
  return transport_->Finish();
}

int64_t TestWorker::UsedElements(int chunk) const {
  constexpr int64_t kUsed[] = {256, 84, 10};
  return chunk < 3 ? kUsed[chunk] : 256;
}

std::string TestWorker::Payload(int chunk, float value) const {
  std::string payload(256 * 2, '\0');
  for (int64_t i = 0; i < UsedElements(chunk); ++i) {
    const uint16_t bits = FloatToBFloat16(value);
    std::memcpy(payload.data() + 2 * i, &bits, 2);
  }
  return payload;
}

void CreateTinyJob(ServiceForTests& service, const std::string& name,
                   const std::optional<v1::Job>& given) {
  grpc::ClientContext context;
  v1::CreateJobRequest request;
  *request.mutable_job() = given.value_or(TinyJob(name));
  v1::Job job;
  const grpc::Status created = service.jobs().CreateJob(&context, request, &job);
  ASSERT_TRUE(created.ok()) << created.error_message();
  for (int rank = 0; rank < job.world_size(); ++rank) {
    TestWorker worker(service, name, rank, Codec::kGenerated);
    ASSERT_TRUE(worker.Attach().ok());
    const grpc::Status uploaded = worker.Upload();
    ASSERT_TRUE(uploaded.ok()) << uploaded.error_message();
  }
}

void SendStep(const std::vector<TestWorker*>& workers, uint64_t step) {
  for (TestWorker* worker : workers) {
    worker->Begin(step);
    for (const uint32_t micro_step : {0, 1}) {
      for (const int chunk : worker->chunks()) {
        worker->Gradient(step, chunk, micro_step, 0.25f * (chunk + 1) + micro_step);
      }
      worker->EndMicroStep(step, micro_step);
    }
    worker->Seal(step, 2);
  }
}

}  // namespace ballast::server
